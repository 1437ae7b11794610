"""Arguments and options that several commands have."""

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from localllm.cli.groups import Also, group
from localllm.cli.options.constraint import Shape, Thoughts
from localllm.cli.options.offers import offer_known_models, offer_models, offer_templates, one_of
from localllm.cli.options.sampling import ExactSampling
from localllm.cli.parameters import number_or_default
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.engine.options import EngineOptions
    from localllm.kernels.build.library import Progress

DRAFT, NAMED = "draft:", ("-m", "--model")
KV_TYPES = ("f16", "f32", "q8_0", "q4_0", "q4_1")
A_MODEL = "A GGUF file, or a name: see `localllm list`."
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=A_MODEL, autocompletion=offer_models), Also(*NAMED)]
KnownModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help=A_MODEL, autocompletion=offer_known_models), Also(*NAMED)
]
OptionalModelName = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help=f"{A_MODEL}  [default: the built-in model]", autocompletion=offer_models),
    Also(*NAMED),
]
System = Annotated[
    str | None,
    typer.Option(
        "-sys", "--system", "--system-prompt", metavar="TEXT", help="The system message: how the model should answer."
    ),
]
SystemFile = Annotated[
    str | None, typer.Option("-sysf", "--system-prompt-file", metavar="FILE", help="A file with the system message.")
]


def template_text(choice: str) -> str:
    """A chat template's name or text; of a file, whose path has a folder or ends in .jinja, what it says.

    Raises UsageError if it cannot be read.
    """
    if "{" in choice or not (os.path.dirname(choice) or choice.endswith(".jinja")):
        return choice
    from localllm.files.text_file import read_text

    return read_text(choice)


ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        "--chat-template-file",
        metavar="NAME|FILE",
        autocompletion=offer_templates,
        parser=template_text,
        help="How messages are written: llama.cpp's name, a file in Jinja, or Jinja itself.  [default: the model's]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        metavar="N",
        parser=number_or_default("-1"),
        help="Threads.  [default: one per physical core that is free to use]",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache", help="Read the prompt anew, and keep nothing of it and the answer; see `localllm cache`."
    ),
]


Force = Annotated[bool, typer.Option("--force", help="Replace a file of another kind, too.")]
Device = Annotated[
    str,
    typer.Option(
        "-dev",
        "--device",
        metavar="NAME",
        autocompletion=one_of(("auto", "cpu", "cuda", "cuda:0", "cuda:1")),
        help="What computes: cpu, cuda, cuda:N, or auto: a graphics card if there is one that works.  [default: auto]",
    ),
]


def layers(text: str) -> str:
    """A number, all (or -1) or auto. Raises ValueError."""
    if text in ("all", "auto", "-1") or (text.isdecimal() and len(text) < 8):
        return "all" if text == "-1" else text
    raise ValueError(f"{text!r} is not a number, all or auto")


def layer_count(text: str) -> int | str:
    """Return a number if it is one."""
    return int(text) if text.isdecimal() else text


GpuLayers = Annotated[
    str,
    typer.Option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        metavar="N",
        parser=layers,
        help="Layers that the card computes: a number, all, or auto: as many as it has room for.  [default: auto]",
    ),
]


def how_to_guess(text: str) -> str:
    """auto, mtp, ngram, off or draft:MODEL. Raises ValueError."""
    if text in ("auto", "mtp", "ngram", "off") or (text.startswith("draft:") and text != "draft:"):
        return text
    raise ValueError(f"{text!r} is not auto, mtp, ngram, off or draft:MODEL")


@group
class Cache:
    """What numbers are stored in the cache."""

    kv_type: Annotated[
        str,
        typer.Option(
            "--kv-type",
            metavar="TYPE",
            autocompletion=one_of(KV_TYPES),
            help="Numbers in the cache: f16, f32, q8_0, q4_0, q4_1, or two as in k=q8_0,v=q4_0.  [default: f16]",
        ),
    ] = "f16"
    keys: Annotated[
        str | None,
        typer.Option(
            "-ctk",
            "--cache-type-k",
            metavar="TYPE",
            autocompletion=one_of(KV_TYPES),
            help="Those of keys.  [default: as --kv-type]",
        ),
    ] = None
    values: Annotated[
        str | None,
        typer.Option(
            "-ctv",
            "--cache-type-v",
            metavar="TYPE",
            autocompletion=one_of(KV_TYPES),
            help="Those of values.  [default: as --kv-type]",
        ),
    ] = None

    def types(self) -> str:
        """Of both, as --kv-type would say it. Raises UsageError."""
        if self.keys is None and self.values is None:
            return self.kv_type
        if "=" in self.kv_type:
            raise UsageError("--kv-type has types for keys and values already: leave out -ctk and -ctv")
        return f"k={self.keys or self.kv_type},v={self.values or self.kv_type}"


@group
class EngineGroup:
    """How the model is held and computed."""

    context: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--context",
            "--ctx-size",
            metavar="N",
            parser=number_or_default("0"),
            help="Tokens to hold.  [default: what the model was trained for]",
        ),
    ] = None
    threads: Threads = None
    device: Device = "auto"
    gpu_layers: GpuLayers = "auto"
    cache: Cache

    def options(self, progress: "Progress", uploading: "Progress") -> "EngineOptions":
        """Return them as the engine takes them. Raises UsageError."""
        from localllm.engine.options import EngineOptions, layers_of  # not needed for --help

        layers = layers_of(layer_count(self.gpu_layers))
        types, context = self.cache.types(), self.context or None
        return EngineOptions(self.threads, context, types, self.device, layers, progress, uploading)


def number(*names: str, help: str, **more: Any) -> Any:
    """An option with a number; None means the default, which `help` names."""
    return typer.Option(*names, metavar="N", help=help, **more)


@group
class Sampling:
    """How tokens are drawn. The fields are those of SamplingOptions, whose defaults the help repeats: to ask them would
    import NumPy. A test compares.
    """

    seed: Annotated[
        int | None,
        number(
            "-s",
            "--seed",
            parser=number_or_default("-1"),
            help="The same seed, the same answer.  [default: -1, random]",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        number("--temp", "--temperature", help="Lower is soberer; 0: always the likeliest token.  [default: 0.8]"),
    ] = None
    top_k: Annotated[int | None, number("--top-k", help="Choose among the N likeliest; 0: all.  [default: 40]")] = None
    typical: Annotated[
        float | None,
        number(
            "--typical",
            "--typical-p",
            help="Choose among the most typical that together have probability N.  [default: 1.0]",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        number("--top-p", help="Choose among the likeliest that together have probability N.  [default: 0.95]"),
    ] = None
    min_p: Annotated[
        float | None,
        number("--min-p", help="Drop what is less than N times as likely as the likeliest.  [default: 0.05]"),
    ] = None
    repeat_penalty: Annotated[
        float | None, number("--repeat-penalty", help="Divide the logits of recent tokens by N.  [default: 1.0]")
    ] = None
    presence_penalty: Annotated[
        float | None,
        number("--presence-penalty", help="Subtract N from the logits of recent tokens.  [default: 0.0]"),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        number("--frequency-penalty", help="Subtract N for each recent occurrence.  [default: 0.0]"),
    ] = None

    def given(self) -> dict[str, Any]:
        """What the user has chosen, by field."""
        return {name: value for name, value in vars(self).items() if value is not None}


@group
class Answers:
    """What answers are like."""

    max_tokens: Annotated[
        int | None,
        number(
            "-n",
            "--max-tokens",
            "--n-predict",
            "--predict",
            help="The most tokens of an answer.  [default: -1, until it ends]",
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "-r", "--stop", "--reverse-prompt", metavar="TEXT", help="End the answer before this text.  [repeatable]"
        ),
    ] = None
    escape: Annotated[
        bool, typer.Option("-e/--no-escape", "--escape", help=r"\n, \t, \xNN and the like in TEXT mean one character.")
    ] = False
    sampling: Sampling
    steps: ExactSampling
    shape: Shape
    thoughts: Thoughts

    def drawing(self) -> dict[str, Any]:
        """What the user has chosen of how tokens are drawn, by field of SamplingOptions. Raises UsageError."""
        return self.sampling.given() | self.steps.given()


@group
class GenerationGroup(Answers):
    """What one answer is like, and how it is found."""

    speculate: Annotated[
        str,
        typer.Option(
            "--speculate",
            metavar="HOW",
            autocompletion=one_of(("auto", "mtp", "ngram", "off", "draft:")),
            parser=how_to_guess,
            help="Guess tokens: where the text repeats itself (ngram), by the model's own layer for it too (mtp), by a "
            "smaller model or an EAGLE-3 head too (draft:MODEL), or not (off). The same answer in fewer steps.  "
            "[default: auto, mtp where there is such a layer]",
        ),
    ] = "auto"
    on_overflow: Annotated[
        Literal["error", "drop-turns", "shift"] | None,
        typer.Option(
            "--on-overflow",
            help="When the context is full: stop, drop the oldest turns, or shift: drop what is in the middle."
            "  [default: error in run, drop-turns in chat]",
        ),
    ] = None
    keep: Annotated[
        int | None,
        number("--keep", help="With shift, tokens that stay in front.  [default: the system message, 4 at least]"),
    ] = None
