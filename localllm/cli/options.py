"""Arguments that several commands have, and what they become."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from localllm.api import Model
    from localllm.generate import GenerationOptions

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file.", show_default=False)]
OptionalModelPath = Annotated[
    Path | None, typer.Argument(metavar="[MODEL]", help="A GGUF file; without it, the built-in model.")
]
System = Annotated[str | None, typer.Option("-sys", "--system", metavar="TEXT", help="The system message.")]
MaxTokens = Annotated[
    int, typer.Option("-n", "--max-tokens", metavar="N", help="The most tokens of an answer; -1: until it ends.")
]
ContextSize = Annotated[
    int,
    typer.Option(
        "-c", "--context", metavar="N", help="Tokens of conversation to hold; 0: as many as the model was trained for."
    ),
]
ThreadCount = Annotated[
    int | None,
    typer.Option("-t", "--threads", metavar="N", help="Threads; normally one per physical core.", show_default=False),
]
KVType = Annotated[str, typer.Option("--kv-type", metavar="TYPE", help="How the cache is stored: f16 or f32.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temp", metavar="T", help="Lower is soberer; 0: always the most likely token. [default: 0.8]"),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="K", help="Choose among the K likeliest; 0: all. [default: 40]")
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Choose among the likeliest that together have P. [default: 0.95]"),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Drop what is less than P times as likely as the best. [default: 0.05]"),
]
Typical = Annotated[
    float | None,
    typer.Option("--typical", metavar="P", help="Choose among the most typical that have P; 1: all. [default: 1.0]"),
]
RepeatPenalty = Annotated[
    float | None, typer.Option("--repeat-penalty", metavar="X", help="Divide logits of recent tokens. [default: 1.0]")
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", metavar="X", help="Subtract from logits of recent tokens. [default: 0.0]"),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", metavar="X", help="Subtract for each recent occurrence. [default: 0.0]"),
]
Seed = Annotated[
    int | None, typer.Option("-s", "--seed", metavar="N", help="The same seed, the same answer; normally random.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option("-r", "--stop", metavar="TEXT", help="End the answer before this text; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Stats = Annotated[bool, typer.Option("--stats", help="Tell on stderr how long it took.")]


def generation_options(
    max_tokens: int, stop: list[str] | None, on_progress: "Callable[[int, int], None]", **sampling: Any
) -> "GenerationOptions":
    """Checked options; of `sampling` (fields of SamplingOptions), None means the default. Raises UsageError."""
    from localllm.generate import GenerationOptions
    from localllm.sampling import SamplingOptions

    given = {name: value for name, value in sampling.items() if value is not None}
    limit = None if max_tokens == -1 else max_tokens
    return GenerationOptions(limit, tuple(stop or ()), SamplingOptions(**given), on_progress)


def open_model(path: Path, threads: int | None, context: int, kv_type: str) -> "Model":
    """Open a model for a command: progress and warnings go to stderr."""
    from localllm.api import open_model
    from localllm.cli.terminal import ProgressLine, say

    line = ProgressLine()
    try:
        model = open_model(path, threads, context, kv_type, progress=compiling(line))
    finally:
        line.clear()
    if model.tokenizer.warning:
        say(f"localllm: warning: {model.tokenizer.warning}")
    if model.context > model.trained_context:
        say(
            f"localllm: warning: a context of {model.context} is more than the {model.trained_context} tokens "
            "that the model was trained for; answers may get worse beyond"
        )
    return model


def compiling(line: Any) -> "Callable[[int, int], None]":
    """A callback for api.open_model that shows its progress on the line."""

    def show(done: int, total: int) -> None:
        line.show(f"compiling kernels for this computer, once: {done} of {total}")

    return show
