"""localllm run: one answer on stdout, then the end."""

import json
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from localllm.cli import options
from localllm.cli.prompt import begin, request, whole_prompt
from localllm.cli.render import stream
from localllm.cli.terminal import ProgressLine, say, write
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.answers import Answer
    from localllm.generation.generate import Generation, GenerationOptions
    from localllm.text.plain import Message


@click.command()
@options.model
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option("-f", "--file", metavar="FILE", help="A file with (the rest of) the prompt.")
@options.system
@options.chat_template
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@options.as_json
@click.option("--stats", is_flag=True, help="Tell on stderr how long it took.")
@click.option("--n", type=int, default=1, metavar="N", help="Answers to give, best first.  [default: 1]")
@click.option(
    "--beams", type=int, default=0, metavar="N", help="Find the likeliest answers among N.  [default: 0, off]"
)
@options.engine
@options.generation
def run(
    model: str,
    prompt: str | None,
    file: str | None,
    system: str | None,
    chat_template: str | None,
    raw: bool,
    as_json: bool,
    stats: bool,
    n: int,
    beams: int,
    context: int | None,
    threads: int | None,
    kv_type: str,
    **choices: Any,
) -> None:
    """Answer one prompt.

    Text that is piped to stdin is added to the prompt after a blank line. The answer goes to stdout, nothing else does.
    Several answers have an empty line between them.
    """
    started = perf_counter()
    text = whole_prompt(prompt, file)
    line = ProgressLine()
    chosen = options.generation_options(options.reading(line), **choices)
    if raw and system is not None:
        raise UsageError("-sys needs a chat template, which --raw switches off")
    if raw and chat_template is not None:
        raise UsageError("--raw switches off what --chat-template chooses")
    if n != 1 or beams:
        require_sense(n, beams, choices)
    with options.open_model(model, context, threads, kv_type, chat_template) as opened:
        load_s = perf_counter() - started
        if n > 1 or beams:
            asked, interrupted = request(opened, text, system, raw), False
            answers = several(opened, asked, chosen, n, beams, line)
            if not as_json:
                write("\n\n".join(answer.text for answer in answers) + "\n")
            result = report_several(opened, answers, load_s, perf_counter() - started)
        else:
            answer = begin(opened, text, system, raw, chosen)
            interrupted = stream(answer, line, silent=as_json)
            result = report(opened, answer, load_s, perf_counter() - started)
    if as_json:
        write(json.dumps(result, ensure_ascii=False) + "\n")
    if stats:
        (tell if "text" in result else tell_several)(result)
    if interrupted:
        raise KeyboardInterrupt


def require_sense(n: int, beams: int, choices: dict[str, Any]) -> None:
    """Raises UsageError for numbers of answers that make no sense, and for beams with options for drawing."""
    from localllm.generation.answers import require_counts

    require_counts(n, beams)
    others = "max_tokens", "stop", "speculate", "on_overflow", "keep"
    drawing = [name for name, value in choices.items() if value is not None and name not in others]
    if beams and drawing:
        raise UsageError(f"--beams draws nothing, so {drawing[0]} makes no sense with it")


def several(
    model: "Model", asked: "str | list[Message]", chosen: "GenerationOptions", n: int, beams: int, line: ProgressLine
) -> "list[Answer]":
    """The answers, best first, when all are finished."""
    try:
        return model.session.candidates(asked, chosen, n, beams)
    finally:
        line.clear()


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
        "dropped_tokens": answer.dropped,
        "seed": answer.seed,
        "speculation": {"drafted": answer.drafted, "accepted": answer.accepted},
        **circumstances(model, times),
    }


def report_several(model: "Model", answers: "list[Answer]", load_s: float, total_s: float) -> dict[str, Any]:
    """What --json prints of several answers, best first. Beam search has no seeds."""
    told = [
        {
            "text": answer.text,
            "logprob": answer.logprob,
            "tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
            **({} if answer.seed is None else {"seed": answer.seed}),
        }
        for answer in answers
    ]
    return {"answers": told, **circumstances(model, {"load_s": load_s, "total_s": total_s})}


def circumstances(model: "Model", times: dict[str, float]) -> dict[str, Any]:
    """Which model it was, and how long it took."""
    return {
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
    if guessed := result["speculation"]["drafted"]:
        say(f"guessed: {guessed} tokens, {result['speculation']['accepted']} of them right: a step less for each")


def tell_several(result: dict[str, Any]) -> None:
    """The line of --stats for several answers."""
    times, tokens = result["timings"], sum(len(answer["tokens"]) for answer in result["answers"])
    seconds = times["total_s"] - times["load_s"]
    say(
        f"answers: {len(result['answers'])} with {tokens} tokens in {seconds:.2f} s, "
        f"model loaded in {times['load_s']:.2f} s"
    )
