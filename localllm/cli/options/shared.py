"""Arguments and options that several commands share, and the GenerationOptions that are built from them."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from localllm.cli.options.constraint import Shape, Thoughts
from localllm.cli.options.offers import offer_known_models, offer_models, offer_templates, one_of
from localllm.cli.options.sampling import ExactSampling, Sampling, flags_of
from localllm.cli.parameters import Also, explicit_options, group, number_or_default
from localllm.cli.terminal.output import say
from localllm.errors import UsageError
from localllm.generation.options import OPTIONS, GenerationOptions
from localllm.generation.sampling.options import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from localllm.arch.rope_scaling import RopeScaling
    from localllm.engine.options import EngineOptions
    from localllm.kernels.build.objects import Progress

DRAFT, NAMED = "draft:", ("-m", "--model")
CUTS = "head", "tail", "middle", "relevant", "chunks"  # of --on-overflow: what `run` does itself
KV_TYPES = ("f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
A_MODEL = "GGUF file or model name (see `localllm list`)."
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=A_MODEL, autocompletion=offer_models), Also(*NAMED)]
KnownModelOrNone = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help=A_MODEL, autocompletion=offer_known_models), Also(*NAMED)
]
OptionalModelName = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help=f"{A_MODEL}  [default: the built-in model]", autocompletion=offer_models),
    Also(*NAMED),
]
System = Annotated[
    str | None,
    typer.Option("-sys", "--system", "--system-prompt", metavar="TEXT", help="System message."),
]
SystemFile = Annotated[
    str | None, typer.Option("-sysf", "--system-prompt-file", metavar="FILE", help="File with the system message.")
]


def template_text(choice: str) -> str:
    """Return a chat template's name or text, see read_template_choice. Raises UsageError if it cannot be read."""
    from localllm.files.text_file import read_template_choice

    return read_template_choice(choice)


ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        "--chat-template-file",
        metavar="NAME|FILE",
        autocompletion=offer_templates,
        parser=template_text,
        help="Chat template: a llama.cpp name, a Jinja file, or Jinja text.  [default: the model's]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        metavar="N",
        parser=number_or_default("-1"),
        help="Number of CPU threads.  [default: the physical cores that this process may use]",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Neither use nor update the prefix cache (see `localllm cache`)."),
]


Force = Annotated[bool, typer.Option("--force", help="Overwrite the output even if it is a file of another kind.")]
Device = Annotated[
    str,
    typer.Option(
        "-dev",
        "--device",
        metavar="NAME",
        autocompletion=one_of(("auto", "cpu", "cuda", "cuda:0", "cuda:1")),
        help="Where to compute: cpu, cuda, cuda:N, or auto (a GPU if one is usable).  [default: auto]",
    ),
]


def parse_layers(text: str) -> str:
    """Check a number, all (or -1) or auto. Raises ValueError."""
    if text in ("all", "auto", "-1") or (text.isdecimal() and len(text) < 8):
        return "all" if text == "-1" else text
    raise ValueError(f"{text!r} is not a number, all or auto")


def layer_count(text: str) -> int | str:
    """Convert a parsed number of layers to an int, unless it is "all" or "auto"."""
    return int(text) if text.isdecimal() else text


GpuLayers = Annotated[
    str,
    typer.Option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        metavar="N",
        parser=parse_layers,
        help="Layers to run on the GPU: a number, all, or auto (as many as fit).  [default: auto]",
    ),
]


def parse_speculate(text: str) -> str:
    """Parse auto, mtp, ngram, off or draft:MODEL. Raises ValueError."""
    if text in ("auto", "mtp", "ngram", "off") or (text.startswith("draft:") and text != "draft:"):
        return text
    raise ValueError(f"{text!r} is not auto, mtp, ngram, off or draft:MODEL")


def is_draft_model(speculate: str) -> bool:
    """Return whether --speculate names a draft model."""
    return speculate.startswith(DRAFT)


@group
class Cache:
    """KV cache."""

    kv_type: Annotated[
        str,
        typer.Option(
            "--kv-type",
            metavar="TYPE",
            autocompletion=one_of(KV_TYPES),
            help="Type of the KV cache: f16, f32, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl, or one each: "
            "k=q8_0,v=q4_0.  [default: f16]",
        ),
    ] = "f16"
    keys: Annotated[
        str | None,
        typer.Option(
            "-ctk",
            "--cache-type-k",
            metavar="TYPE",
            autocompletion=one_of(KV_TYPES),
            help="Type of the keys only.  [default: as --kv-type]",
        ),
    ] = None
    values: Annotated[
        str | None,
        typer.Option(
            "-ctv",
            "--cache-type-v",
            metavar="TYPE",
            autocompletion=one_of(KV_TYPES),
            help="Type of the values only.  [default: as --kv-type]",
        ),
    ] = None

    def types(self) -> str:
        """Return the types of keys and values in the notation of --kv-type. Raises UsageError."""
        if self.keys is None and self.values is None:
            return self.kv_type
        if "=" in self.kv_type:
            raise UsageError("--kv-type already sets both types: leave out -ctk and -ctv")
        return f"k={self.keys or self.kv_type},v={self.values or self.kv_type}"


@group
class Rope:
    """Rotary positions (RoPE)."""

    rope_scaling: Annotated[
        Literal["none", "linear", "yarn"] | None,
        typer.Option(
            "--rope-scaling",
            metavar="TYPE",
            help="Scaling for contexts beyond the trained one: none, linear or yarn.  [default: the model's]",
        ),
    ] = None
    rope_scale: Annotated[
        float | None,
        typer.Option(
            "--rope-scale", metavar="N", help="Make the context N times as long.  [default: the model's factor]"
        ),
    ] = None
    rope_freq_base: Annotated[
        float | None,
        typer.Option("--rope-freq-base", metavar="N", help="Base of the frequencies.  [default: the model's]"),
    ] = None
    rope_freq_scale: Annotated[
        float | None,
        typer.Option("--rope-freq-scale", metavar="N", help="The same as --rope-scale 1/N."),
    ] = None
    yarn_orig_ctx: Annotated[
        int | None,
        typer.Option(
            "--yarn-orig-ctx",
            metavar="N",
            help="YaRN: trained context before the scaling, in tokens.  [default: the model's]",
        ),
    ] = None

    def scaling(self) -> "RopeScaling | None":
        """Return the RopeScaling, None if no option is given. Raises UsageError.

        A value of 0 is the model's own, as in llama.cpp.
        """
        if not any(vars(self).values()):
            return None
        from localllm.arch.rope_scaling import RopeScaling

        factor = self.rope_scale or None
        if self.rope_freq_scale:
            if factor:
                raise UsageError("give either --rope-scale or --rope-freq-scale, not both")
            if self.rope_freq_scale < 0:
                raise UsageError(f"rope_freq_scale should be above 0, not {self.rope_freq_scale:g}")
            factor = 1 / self.rope_freq_scale
        return RopeScaling(self.rope_scaling, factor, self.rope_freq_base or None, self.yarn_orig_ctx or None)


@group
class EngineGroup:
    """Model and hardware."""

    context: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--context",
            "--ctx-size",
            metavar="N",
            parser=number_or_default("0"),
            help="Context length, in tokens.  [default: the model's training context]",
        ),
    ] = None
    threads: Threads = None
    device: Device = "auto"
    gpu_layers: GpuLayers = "auto"
    cache: Cache
    rope: Rope

    def options(self, progress: "Progress", on_upload: "Progress") -> "EngineOptions":
        """Return the EngineOptions. Raises UsageError."""
        from localllm.engine.options import EngineOptions, layers_of  # not needed for --help

        layers = layers_of(layer_count(self.gpu_layers))
        types, context = self.cache.types(), self.context or None
        scaling = self.rope.scaling()
        return EngineOptions(self.threads, context, types, self.device, layers, progress, on_upload, rope=scaling)


@group
class Answers:
    """Generation."""

    max_tokens: Annotated[int | None, flags_of(OPTIONS["max_tokens"])] = None
    stop: Annotated[list[str] | None, flags_of(OPTIONS["stop"])] = None
    ban: Annotated[list[str] | None, flags_of(OPTIONS["ban"])] = None
    escape: Annotated[
        bool, typer.Option("-e/--no-escape", "--escape", help=r"Process escape sequences in TEXT: \n, \t, \xNN, ...")
    ] = False
    sampling: Sampling
    steps: ExactSampling
    shape: Shape
    thoughts: Thoughts

    def drawing(self) -> dict[str, Any]:
        """Return the given sampling options by field of SamplingOptions. Raises UsageError."""
        return explicit_options(self.sampling) | self.steps.as_fields()


@group
class GenerationGroup(Answers):
    """Generation."""

    speculate: Annotated[
        str,
        flags_of(
            OPTIONS["speculate"], parser=parse_speculate, offers=one_of(("auto", "mtp", "ngram", "off", "draft:"))
        ),
    ] = "auto"
    on_overflow: Annotated[
        Literal["error", "drop-turns", "shift", "head", "tail", "middle", "relevant", "chunks"] | None,
        flags_of(OPTIONS["on_overflow"]),
    ] = None
    keep: Annotated[int | None, flags_of(OPTIONS["keep"])] = None


def generation_options(on_progress: "Callable[[int, int], None] | None", choices: Answers) -> GenerationOptions:
    """Build and check GenerationOptions; `on_progress` is called during the prefill. Raises UsageError.

    They have no draft model until `with_draft_model`.
    """
    drawing = choices.drawing()
    sampling = SamplingOptions(**drawing)
    if "samplers" in drawing or drawing.get("mirostat"):
        tell_unused(sampling, drawing)
    limit, stop = None if choices.max_tokens == -1 else choices.max_tokens, tuple(choices.stop or ())
    further = {
        **choices.thoughts.as_fields(),
        "constraint": choices.shape.constraint(),
        "ban": tuple(choices.ban or ()),
    }
    if not isinstance(choices, GenerationGroup):
        return GenerationOptions(limit, stop, sampling, on_progress, "auto", **further)
    keep = choices.keep
    if keep is not None and choices.on_overflow != "shift":
        say("localllm: --keep has no effect without --on-overflow shift")
        keep = None
    kind = "auto" if is_draft_model(choices.speculate) else choices.speculate
    overflow = None if choices.on_overflow in CUTS else choices.on_overflow
    return GenerationOptions(limit, stop, sampling, on_progress, kind, overflow, keep, **further)


def tell_unused(sampling: SamplingOptions, names: "Iterable[str]") -> None:
    """Say which of the given options have no effect, because their step is not in the chain."""
    from localllm.generation.sampling.sampler import unused_options

    if unused := unused_options(sampling, names):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        reason = "mirostat replaces all steps but temperature" if sampling.mirostat else "not among the samplers"
        say(f"localllm: no effect: {options} ({reason})")


def system_message(text: str | None, file: str | None) -> str | None:
    """Return the system message of -sys or of -sysf's file. Raises UsageError."""
    if file is None:
        return text
    if text is not None:
        raise UsageError("give either -sys or -sysf, not both")
    from localllm.files.text_file import read_text

    return read_text(file)
