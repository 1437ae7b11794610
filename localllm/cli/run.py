"""localllm run: one answer on stdout, then the end."""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import options
from localllm.cli.terminal import ProgressLine, is_terminal, say, write
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generate import Generation


def run(
    model: options.ModelPath,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="A file with (the rest of) the prompt.")] = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = -1,
    context: options.ContextSize = 0,
    threads: options.ThreadCount = None,
    temp: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    typical: options.Typical = None,
    repeat_penalty: options.RepeatPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is: no chat template.")] = False,
    as_json: options.AsJson = False,
    stats: options.Stats = False,
    kv_type: options.KVType = "f16",
) -> None:
    """Answer one prompt. Text piped to stdin is added to the prompt after a blank line."""
    started = perf_counter()
    text = whole_prompt(prompt, file)
    line = ProgressLine()
    chosen = options.generation_options(
        max_tokens,
        stop,
        reading(line),
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical=typical,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    if raw and system is not None:
        raise UsageError("-sys needs a chat template, which --raw switches off")
    with options.open_model(model, threads, context, kv_type) as opened:
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


def whole_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of -p, the file of -f and what is piped to stdin, with blank lines between. Raises UsageError."""
    parts = [] if prompt is None else [prompt.encode(errors="surrogateescape").decode(errors="replace")]
    if file is not None:
        try:
            parts.append(text_of(file.read_bytes()))
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


def begin(model: "Model", text: str, system: str | None, raw: bool, chosen: Any) -> "Generation":
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


def reading(line: ProgressLine) -> Any:
    """A callback for the prefill that shows its progress on the line; a short prompt needs none."""

    def show(done: int, total: int) -> None:
        if done:
            line.show(f"reading the prompt: {done} of {total} tokens")

    return show


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
