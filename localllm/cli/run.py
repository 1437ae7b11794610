"""localllm run: one answer on stdout, then the end."""

import json
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from localllm.cli import options
from localllm.cli.command import option
from localllm.cli.prompt import Encoding, begin, request, whole_prompt
from localllm.cli.receipt import keep, prepared
from localllm.cli.render import stream
from localllm.cli.shape import HideThinking, tell_cut
from localllm.cli.terminal import ProgressLine, say, write
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.answers import Answer
    from localllm.generation.generate import Generation, GenerationOptions
    from localllm.text.plain import Message


def run(
    model: options.ModelName,
    *,
    prompt: Annotated[str | None, option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    file: Annotated[
        str | None, option("-f", "--file", metavar="FILE", help="A file with (the rest of) the prompt; - is stdin.")
    ] = None,
    binary_file: Annotated[
        str | None, option("-bf", "--binary-file", metavar="FILE", help="The same, with the line break at its end.")
    ] = None,
    system: options.System = None,
    system_file: options.SystemFile = None,
    chat_template: options.ChatTemplate = None,
    encoding: Encoding = None,
    no_stdin: Annotated[bool, option("--no-stdin", help="Leave stdin to others.")] = False,
    raw: Annotated[bool, option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    as_json: options.AsJson = False,
    stats: Annotated[bool, option("--stats", help="Tell on stderr how long it took.")] = False,
    receipt: Annotated[
        str | None, option("--receipt", metavar="FILE", help="Write what the answer came from, for `localllm replay`.")
    ] = None,
    hide_thinking: HideThinking = False,
    n: Annotated[int, option("--n", metavar="N", help="Answers to give, best first.  [default: 1]")] = 1,
    beams: Annotated[
        int, option("--beams", metavar="N", help="Find the likeliest answers among N.  [default: 0, off]")
    ] = 0,
    engine: options.Engine,
    no_cache: options.NoCache = False,
    choices: options.Generation,
) -> None:
    """Answer one prompt.

    Text that is piped to stdin is added to the prompt after a blank line. The answer goes to stdout, nothing else does:
    what a model thinks before it is shown dim on stderr, if that is a terminal. Several answers have an empty line
    between them.

    Examples:
      localllm run model.gguf -p "Why is the sky blue?"
      cat notes.txt | localllm run model.gguf -p "Summarize this:" -n 100
      localllm run model.gguf -f letter.txt -sys "Translate into French." --temp 0
      localllm run model.gguf -p "Once upon a time" --raw --stats
      localllm run model.gguf -p "A name for a cat?" --n 3 --json | jq -r ".answers[].text"
      localllm run model.gguf -p "Invent a person." --json-schema person.json | jq .name
      localllm run model.gguf -p "Is water wet?" --grammar 'root ::= "yes" | "no"'
    """
    started = perf_counter()
    most_bytes = partial(options.most_bytes, model, engine, choices.on_overflow)
    text = whole_prompt(prompt, file, not no_stdin, encoding, most_bytes, binary_file)
    system = options.system_message(system, system_file)
    line = ProgressLine()
    chosen = options.generation_options(options.reading(line), choices)
    if raw and system is not None:
        raise UsageError("-sys needs a chat template, which --raw switches off")
    if raw and chat_template is not None:
        raise UsageError("--raw switches off what --chat-template chooses")
    if raw and not choices.thoughts.are_usual:
        raise UsageError("--raw switches off the chat template, which thoughts and variables are for")
    if n != 1 or beams:
        require_sense(n, beams, choices)
    with options.open_model(model, engine, chat_template, no_cache) as opened:
        chosen = options.with_draft_model(opened, chosen, choices.speculate)
        if receipt is not None:
            chosen = prepared(receipt, chosen, opened, (file, binary_file))
        load_s = perf_counter() - started
        asked, interrupted = request(opened, text, system, raw), False
        if n > 1 or beams:
            answers = several(opened, asked, chosen, n, beams, line)
            if not as_json:
                write("\n\n".join(answer.text for answer in answers) + "\n")
            result = report_several(opened, answers, load_s, perf_counter() - started)
            tell_cut(chosen, [answer.finish_reason for answer in answers])
        else:
            answer = begin(opened, asked, chosen)
            interrupted = stream(answer, line, silent=as_json, thoughts=not hide_thinking)
            tell_cut(chosen, [answer.finish_reason])
            result = report(opened, answer, load_s, perf_counter() - started)
        if as_json:
            write(json.dumps(result, ensure_ascii=False) + "\n")
        if stats:
            (tell if "text" in result else tell_several)(result)
        if receipt is not None:
            kinds = {"n": n, "beams": beams, "speculate": choices.speculate, "chat_template": chat_template}
            keep(receipt, opened, asked, chosen, kinds, result)
        if interrupted:
            raise KeyboardInterrupt
        options.settle(opened)


def require_sense(n: int, beams: int, choices: options.Generation) -> None:
    """Raises UsageError for numbers of answers that make no sense, and for beams with options for drawing."""
    from localllm.generation.answers import require_counts

    require_counts(n, beams)
    if options.is_draft_model(choices.speculate):
        raise UsageError("a draft model guesses for one answer only: leave out --n, --beams or --speculate")
    drawing = choices.drawing()
    if beams and drawing:
        raise UsageError(f"{next(iter(drawing))} makes no sense with --beams, which draws nothing")


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
        "thinking": answer.thinking,
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(answer.prompt),
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": said,
        "dropped_tokens": answer.dropped,
        "seed": answer.seed,
        "speculation": {"drafted": answer.drafted, "accepted": answer.accepted, "steps_saved": answer.accepted},
        **circumstances(model, times),
    }


def report_several(model: "Model", answers: "list[Answer]", load_s: float, total_s: float) -> dict[str, Any]:
    """What --json prints of several answers, best first. Beam search has no seeds."""
    told = [
        {
            "text": answer.text,
            "thinking": answer.thinking,
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
        "model": {"path": model.path, "arch": model.arch, "format": model.format, "device": model.engine.device},
        "timings": {name: round(value, 6) for name, value in times.items()},
    }


def tell(result: dict[str, Any]) -> None:
    """The lines of --stats."""
    times = result["timings"]
    speed = f" ({times['prefill_tps']:.1f} per second)" if times["prefill_tps"] else ""
    prefill = f"{times['prefill_s']:.2f} s{speed}"
    decode = f"{times['decode_s']:.2f} s ({times['decode_tps']:.1f} per second)"
    known = f", {result['cached_tokens']} of them known," if result["cached_tokens"] else ""
    device = "" if result["model"]["device"] == "CPU" else f" on {result['model']['device']}"
    loaded = f"model loaded in {times['load_s']:.2f} s{device}"
    say(f"prompt: {result['prompt_tokens']} tokens{known} in {prefill}, {loaded}")
    say(
        f"answer: {result['completion_tokens']} tokens in {decode}, first after {times['ttft_s']:.2f} s, "
        f"finish: {result['finish_reason']}, seed: {result['seed']}"
    )
    guesses = result["speculation"]
    if guesses["drafted"]:
        say(f"guessed: {guesses['drafted']} tokens, {guesses['accepted']} of them right: a step less for each")


def tell_several(result: dict[str, Any]) -> None:
    """The line of --stats for several answers."""
    times, tokens = result["timings"], sum(len(answer["tokens"]) for answer in result["answers"])
    seconds = times["total_s"] - times["load_s"]
    say(
        f"answers: {len(result['answers'])} with {tokens} tokens in {seconds:.2f} s, "
        f"model loaded in {times['load_s']:.2f} s"
    )
