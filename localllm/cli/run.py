"""localllm run: one answer on stdout, then the end."""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from localllm.cli import options
from localllm.cli.terminal import ProgressLine, is_terminal, say, write
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.generate import Generation, GenerationOptions


@click.command()
@options.model
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option("-f", "--file", metavar="FILE", help="A file with (the rest of) the prompt.")
@options.system
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@options.as_json
@click.option("--stats", is_flag=True, help="Tell on stderr how long it took.")
@options.engine
@options.generation
def run(
    model: str,
    prompt: str | None,
    file: str | None,
    system: str | None,
    raw: bool,
    as_json: bool,
    stats: bool,
    context: int | None,
    threads: int | None,
    kv_type: str,
    **choices: Any,
) -> None:
    """Answer one prompt.

    Text that is piped to stdin is added to the prompt after a blank line. The answer goes to stdout, nothing else does.
    """
    started = perf_counter()
    text = whole_prompt(prompt, file)
    line = ProgressLine()
    chosen = options.generation_options(options.reading(line), **choices)
    if raw and system is not None:
        raise UsageError("-sys needs a chat template, which --raw switches off")
    with options.open_model(model, context, threads, kv_type) as opened:
        load_s = perf_counter() - started
        answer = begin(opened, text, system, raw, chosen)
        interrupted = stream(answer, line, silent=as_json)
        result = report(opened, answer, load_s, perf_counter() - started)
    if as_json:
        write(json.dumps(result, ensure_ascii=False) + "\n")
    if stats:
        tell(result)
    if interrupted:
        raise KeyboardInterrupt


def whole_prompt(prompt: str | None, file: str | None) -> str:
    """The text of -p, the file of -f and what is piped to stdin, with blank lines between. Raises UsageError."""
    parts = [] if prompt is None else [prompt.encode(errors="surrogateescape").decode(errors="replace")]
    if file is not None:
        try:
            parts.append(text_of(Path(file).read_bytes()))
        except OSError as error:
            raise UsageError(f"cannot read the prompt from {file}: {error.strerror}") from None
    if sys.stdin is not None and not is_terminal(sys.stdin):
        parts.append(text_of(sys.stdin.buffer.read()))
    text = "\n\n".join(part for part in parts if part)
    if not text:
        raise UsageError("there is no prompt: give one with -p TEXT, -f FILE or through a pipe")
    return text


def text_of(data: bytes) -> str:
    """A text file's text: UTF-8, with or without a byte order mark, less the line break at its end."""
    text = data.decode("utf-8-sig", errors="replace")
    return text.removesuffix("\n").removesuffix("\r")


def begin(model: "Model", text: str, system: str | None, raw: bool, chosen: "GenerationOptions") -> "Generation":
    """The answer to the prompt, by the file's chat template if it has one and `raw` does not forbid it."""
    if raw or (model.tokenizer.chat_template is None and system is None):
        return model.session.complete(text, chosen)
    if model.tokenizer.chat_template is None:
        raise UsageError("-sys needs a chat template, which this model does not have")
    instruction = [] if system is None else [{"role": "system", "content": system}]
    return model.session.chat([*instruction, {"role": "user", "content": text}], chosen)


def stream(answer: "Generation", line: ProgressLine, silent: bool = False) -> bool:
    """Write the answer as it comes and a line break; True if Ctrl-C cut it short. What was said stays."""
    interrupted = False
    try:
        for piece in answer:
            line.clear()
            if not silent:
                write(piece)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        line.clear()
    if not silent and (answer.text or not interrupted):
        write("\n")
    return interrupted


def report(model: "Model", answer: "Generation", load_s: float, total_s: float) -> dict[str, Any]:
    """What --json prints. Seconds; ttft_s counts from when the model was loaded to the first token."""
    read, said = len(answer.prompt) - answer.cached_tokens, len(answer.tokens)
    times = {
        "load_s": load_s,
        "prefill_s": answer.prefill_s,
        "ttft_s": answer.ttft_s,
        "decode_s": answer.decode_s,
        "total_s": total_s,
        "prefill_tps": read / answer.prefill_s if answer.prefill_s else 0.0,
        "decode_tps": (said - 1) / answer.decode_s if answer.decode_s else 0.0,
    }
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(answer.prompt),
        "completion_tokens": said,
        "seed": answer.seed,
        "model": {"path": model.path, "arch": model.arch, "format": model.format},
        "timings": {name: round(value, 6) for name, value in times.items()},
    }


def tell(result: dict[str, Any]) -> None:
    """The lines of --stats."""
    times = result["timings"]
    prefill = f"{times['prefill_s']:.2f} s ({times['prefill_tps']:.1f} per second)"
    decode = f"{times['decode_s']:.2f} s ({times['decode_tps']:.1f} per second)"
    say(f"prompt: {result['prompt_tokens']} tokens in {prefill}, model loaded in {times['load_s']:.2f} s")
    say(
        f"answer: {result['completion_tokens']} tokens in {decode}, first after {times['ttft_s']:.2f} s, "
        f"finish: {result['finish_reason']}, seed: {result['seed']}"
    )
