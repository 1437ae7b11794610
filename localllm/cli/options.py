"""Arguments that several commands have, and what they become."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from localllm.cli import terminal
from localllm.cli.terminal import ProgressLine, say

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.generate import GenerationOptions

Function = Callable[..., Any]


def together(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Several options as one decorator; the help lists them in this order."""

    def decorate(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def number(*names: str, kind: type = float, metavar: str = "N", help: str) -> Callable[[Function], Function]:
    """An option with a number; None means the default, which `help` names."""
    return click.option(*names, type=kind, metavar=metavar, help=help)


class Speculate(click.ParamType):
    """ngram, off or draft:MODEL."""

    name = "how"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in ("ngram", "off") or (value.startswith("draft:") and value != "draft:"):
            return value
        self.fail(f"{value!r} is not ngram, off or draft:MODEL", param, ctx)


model = click.argument("model", metavar="MODEL")
optional_model = click.argument("model", metavar="[MODEL]", required=False)
system = click.option("-sys", "--system", metavar="TEXT", help="The system message: how the model should answer.")
chat_template = click.option(
    "--chat-template",
    metavar="NAME",
    help="How messages are written, by llama.cpp's name or in Jinja.  [default: the file's]",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
kv_type = click.option(
    "--kv-type",
    metavar="TYPE",
    default="f16",
    help="Numbers in the cache: f16, f32, q8_0, q4_0, q4_1, or two as in k=q8_0,v=q4_0.  [default: f16]",
)

engine = together(
    number("-c", "--context", kind=int, help="Tokens to hold.  [default: what the model was trained for]"),
    number("-t", "--threads", kind=int, help="Threads.  [default: one per physical core that is free to use]"),
    kv_type,
)

no_cache = click.option(
    "--no-cache", is_flag=True, help="Read the prompt anew, and keep nothing of it; see `localllm cache`."
)

# The names of the parameters are the fields of GenerationOptions and SamplingOptions, whose defaults the help repeats:
# to ask them would import NumPy. A test compares.
answers = together(
    number("-n", "--max-tokens", kind=int, help="The most tokens of an answer.  [default: -1, until it ends]"),
    click.option("-r", "--stop", metavar="TEXT", multiple=True, help="End the answer before this text.  [repeatable]"),
    number("-s", "--seed", kind=int, help="The same seed, the same answer.  [default: random]"),
    number("--temp", "temperature", help="Lower is soberer; 0: always the likeliest token.  [default: 0.8]"),
    number("--top-k", kind=int, help="Choose among the N likeliest; 0: all.  [default: 40]"),
    number("--typical", help="Choose among the most typical that together have probability N.  [default: 1.0]"),
    number("--top-p", help="Choose among the likeliest that together have probability N.  [default: 0.95]"),
    number("--min-p", help="Drop what is less than N times as likely as the likeliest.  [default: 0.05]"),
    number("--repeat-penalty", help="Divide the logits of recent tokens by N.  [default: 1.0]"),
    number("--presence-penalty", help="Subtract N from the logits of recent tokens.  [default: 0.0]"),
    number("--frequency-penalty", help="Subtract N for each recent occurrence.  [default: 0.0]"),
)
generation = together(
    answers,
    click.option(
        "--speculate",
        metavar="HOW",
        type=Speculate(),
        default="ngram",
        help="Guess tokens: where the text repeats itself (ngram), by a smaller model too (draft:MODEL), or not (off). "
        "The same answer in fewer steps.  [default: ngram]",
    ),
    click.option(
        "--on-overflow",
        type=click.Choice(["error", "drop-turns", "shift"]),
        help="When the context is full: stop, drop the oldest turns, or shift: drop what is in the middle."
        "  [default: error in run, drop-turns in chat]",
    ),
    number(
        "--keep", kind=int, help="With shift, tokens that stay in front.  [default: the system message, 4 at least]"
    ),
)


def generation_options(
    on_progress: Callable[[int, int], None] | None,
    max_tokens: int | None,
    stop: tuple[str, ...],
    speculate: str,
    on_overflow: str | None,
    keep: int | None,
    **sampling: Any,
) -> "GenerationOptions":
    """What the options of `generation` say, checked; `on_progress` hears of the prefill. Raises UsageError.

    Of a draft model they know nothing until `with_draft_model`.
    """
    from localllm.generation.generate import GenerationOptions
    from localllm.generation.sampling import SamplingOptions

    given = {name: value for name, value in sampling.items() if value is not None}
    limit = None if max_tokens == -1 else max_tokens
    kind = "ngram" if is_draft_model(speculate) else speculate
    return GenerationOptions(limit, stop, SamplingOptions(**given), on_progress, kind, on_overflow, keep)


def is_draft_model(speculate: str) -> bool:
    return speculate.startswith("draft:")


def with_draft_model(model: "Model", chosen: "GenerationOptions", speculate: str) -> "GenerationOptions":
    """The same with the draft model that --speculate names, if it does, opened. Raises as Model.drafter."""
    if not is_draft_model(speculate):
        return chosen
    from dataclasses import replace

    line = ProgressLine()
    try:
        return replace(chosen, speculate=model.drafter(speculate, compiling(line)))
    finally:
        line.clear()


def open_model(
    path: str,
    context: int | None,
    threads: int | None,
    kv_type: str,
    chat_template: str | None = None,
    no_cache: bool = False,
) -> "Model":
    """Open a model as the options of `engine` say; progress and warnings go to stderr."""
    from localllm import api

    line = ProgressLine()
    try:
        opened = api.open_model(
            path, threads, context, kv_type, progress=compiling(line), chat_template=chat_template, cache=not no_cache
        )
    finally:
        line.clear()
    from localllm.kernels.faults import end_on_bus_error  # when llvmlite is there already

    end_on_bus_error(path)
    warn(opened.warnings)
    if opened.context > opened.trained_context:
        say(
            f"localllm: warning: a context of {opened.context} is more than the {opened.trained_context} tokens "
            "that the model was trained for; answers may get worse beyond"
        )
    return opened


def settle(model: "Model") -> None:
    """The answer is said: who reads it can go on, while what was read of the prompt is written. Ctrl-C ends that."""
    if model.prefixes is None:
        return
    try:
        if model.prefixes.is_writing:
            terminal.end_output()
        model.prefixes.close()
    except KeyboardInterrupt:
        model.prefixes.close(wait=False)
    if model.prefixes.warning:
        warn([model.prefixes.warning])


def warn(warnings: Iterable[str]) -> None:
    """Lines that the user should see."""
    for warning in warnings:
        say(f"localllm: warning: {warning}")


def compiling(line: ProgressLine) -> Callable[[int, int], None]:
    """A callback for api.open_model that shows its progress on the line."""

    def show(done: int, total: int) -> None:
        line.show(f"compiling kernels for this computer, once: {done} of {total}")

    return show


def reading(line: ProgressLine) -> Callable[[int, int], None]:
    """A callback for the prefill that shows its progress on the line; a short prompt needs none."""

    def show(done: int, total: int) -> None:
        if done:
            line.show(f"reading the prompt: {done} of {total} tokens")

    return show
