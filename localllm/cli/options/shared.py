"""Arguments and options that several commands share, and the GenerationOptions built from them.

Sampling options have llama.cpp's names; docs/sampling.md explains the rarely needed ones.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from localllm.cli.options.offers import make_offer, offer_known_models, offer_models, offer_templates
from localllm.cli.parameters import (
    DeclaredGroup,
    GroupField,
    argument,
    find_explicit_options,
    make_integer_parser,
    option,
    option_group,
    parse_size,
)
from localllm.cli.terminal.output import say
from localllm.errors import CutError, UsageError
from localllm.generation.options import OPTIONS, GenerationOptions
from localllm.generation.sampling.options import (
    LETTERS,
    ORDER,
    OptionDeclaration,
    SamplingOptions,
    parse_sampler_letters,
)
from localllm.generation.sampling.options import OPTIONS as SAMPLING
from localllm.values import parse_layer_range, parse_scaled_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from localllm.arch.rope_scaling import RopeScaling
    from localllm.engine.options import EngineOptions
    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.options import GenerationOptions
    from localllm.kernels.build.objects import Progress
    from localllm.services.remote.dialect import OutputFormat

DRAFT, NAMED = "draft:", ("-m", "--model")
SHORTENING_METHODS = (
    "head",
    "tail",
    "middle",
    "relevant",
    "chunks",
)  # values of --on-overflow that `run` implements itself
KV_TYPES = ("f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
A_MODEL = "GGUF file or model name (see `localllm list`)."
ModelName = Annotated[str, argument("MODEL", A_MODEL, offer_models, also=NAMED)]
KnownModelOrNone = Annotated[str | None, argument("[MODEL]", A_MODEL, offer_known_models, also=NAMED)]
OptionalModelName = Annotated[
    str | None, argument("[MODEL]", f"{A_MODEL}  [default: the built-in model]", offer_models, also=NAMED)
]
System = Annotated[str | None, option("-sys --system --system-prompt", "System message.", "TEXT")]
SystemFile = Annotated[str | None, option("-sysf --system-prompt-file", "File with the system message.", "FILE")]


def read_template(choice: str) -> str:
    """Return a chat template's name or text, see read_template_choice. Raises UsageError if it cannot be read."""
    from localllm.files.text_file import read_template_choice

    return read_template_choice(choice)


ChatTemplate = Annotated[
    str | None,
    option(
        "--chat-template --chat-template-file",
        "Chat template: a llama.cpp name, a Jinja file, or Jinja text.  [default: the model's]",
        "NAME|FILE",
        autocompletion=offer_templates,
        parser=read_template,
    ),
]
AsJson = Annotated[bool, option("--json", "Print JSON.")]
Threads = Annotated[
    int | None,
    option(
        "-t --threads",
        "Number of CPU threads.  [default: the physical cores that this process may use]",
        "N",
        parser=make_integer_parser("-1"),
    ),
]
NoCache = Annotated[bool, option("--no-cache", "Neither use nor update the prefix cache (see `localllm cache`).")]
Plain = Annotated[bool, option("--plain", "Print for screen readers: no cursor movement, no colours, states in words.")]
Force = Annotated[bool, option("--force", "Overwrite the output even if it is a file of another type.")]
Memory = Annotated[
    int | None,
    option(
        "--memory",
        "Memory for the model on the CPU, in serve for all models, e.g. 8G; the rest is read from the disk as it is "
        "needed.  [default: what is free]",
        "SIZE",
        parser=parse_size,
    ),
]
Device = Annotated[
    str,
    option(
        "-dev --device",
        "Where to compute: cpu, cuda, cuda:N, or auto (a GPU if one is usable).  [default: auto]",
        "NAME",
        autocompletion=make_offer(("auto", "cpu", "cuda", "cuda:0", "cuda:1")),
    ),
]


def parse_layers(text: str) -> str:
    """Validate a layer count: a number, all (or -1, which becomes all) or auto. Raises ValueError."""
    if text in ("all", "auto", "-1") or (text.isdecimal() and len(text) < 8):
        return "all" if text == "-1" else text
    raise ValueError(f"{text!r} must be a number, all or auto")


def convert_layer_count(text: str) -> int | str:
    """Convert a parsed layer count to an int, unless it is "all" or "auto"."""
    return int(text) if text.isdecimal() else text


GpuLayers = Annotated[
    str,
    option(
        "-ngl --gpu-layers --n-gpu-layers",
        "Layers to run on the GPU: a number, all, or auto (as many as fit).  [default: auto]",
        "N",
        parser=parse_layers,
    ),
]


@option_group
class CacheGroup:
    """KV cache."""

    kv_type: str = option(
        "--kv-type",
        "Type of the KV cache: f16, f32, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl, or one each: "
        "k=q8_0,v=q4_0.  [default: f16]",
        "TYPE",
        autocompletion=make_offer(KV_TYPES),
        default="f16",
    )
    keys: str | None = option(
        "-ctk --cache-type-k",
        "Type of the keys only.  [default: --kv-type]",
        "TYPE",
        autocompletion=make_offer(KV_TYPES),
    )
    values: str | None = option(
        "-ctv --cache-type-v",
        "Type of the values only.  [default: --kv-type]",
        "TYPE",
        autocompletion=make_offer(KV_TYPES),
    )

    def format_types(self) -> str:
        """Return the types of keys and values in the notation of --kv-type. Raises UsageError."""
        if self.keys is None and self.values is None:
            return self.kv_type
        if "=" in self.kv_type:
            raise UsageError("--kv-type already sets both types: leave out -ctk and -ctv")
        return f"k={self.keys or self.kv_type},v={self.values or self.kv_type}"


@option_group
class RopeGroup:
    """Rotary positions (RoPE)."""

    rope_scaling: Literal["none", "linear", "yarn"] | None = option(
        "--rope-scaling",
        "Scaling for contexts beyond the trained one: none, linear or yarn.  [default: the model's]",
        "TYPE",
    )
    rope_scale: float | None = option(
        "--rope-scale", "Make the context N times as long.  [default: the model's factor]", "N"
    )
    rope_freq_base: float | None = option("--rope-freq-base", "Base of the frequencies.  [default: the model's]", "N")
    rope_freq_scale: float | None = option("--rope-freq-scale", "Alias of --rope-scale 1/N.", "N")
    yarn_orig_ctx: int | None = option(
        "--yarn-orig-ctx", "YaRN: trained context before the scaling, in tokens.  [default: the model's]", "N"
    )

    def make_scaling(self) -> "RopeScaling | None":
        """Return the RopeScaling, or None if no option is given. Raises UsageError.

        A value of 0 means the model's own, as in llama.cpp.
        """
        if not any(vars(self).values()):
            return None
        from localllm.arch.rope_scaling import RopeScaling

        factor = self.rope_scale or None
        if self.rope_freq_scale:
            if factor:
                raise UsageError("give either --rope-scale or --rope-freq-scale, not both")
            if self.rope_freq_scale < 0:
                raise UsageError(f"rope_freq_scale must be above 0, not {self.rope_freq_scale:g}")
            factor = 1 / self.rope_freq_scale
        return RopeScaling(self.rope_scaling, factor, self.rope_freq_base or None, self.yarn_orig_ctx or None)


def resolve_files(lists: Any) -> list[tuple[str, float]]:
    """Return paths and scales; names of files in the models folder become their paths. Raises ModelError, UsageError.

    lists: as parse_scaled_files returns them.
    """
    pairs = [pair for each in lists for pair in each]
    if all(os.path.lexists(path) for path, _ in pairs):
        return pairs
    from localllm.services.hub.catalogue import resolve_adapter  # seldom needed

    return [(resolve_adapter(path), scale) for path, scale in pairs]


@option_group
class AdapterGroup:
    """Adapters."""

    lora: list[str] = option(
        "--lora --lora-scaled",
        "Low-rank adapters (LoRA), GGUF files or PEFT folders, each with its scale; repeatable.  [default scale: 1]",
        "FILE[:SCALE],...",
        parser=parse_scaled_files,
    )
    lora_init_without_apply: bool = option(
        "--lora-init-without-apply", "Begin with all adapters at scale 0; requests and /lora switch them on."
    )
    control_vector: list[str] = option(
        "--control-vector --control-vector-scaled",
        "Control vectors (GGUF), each with its scale; they are added up; repeatable.  [default scale: 1]",
        "FILE[:SCALE],...",
        parser=parse_scaled_files,
    )
    control_vector_layer_range: str | None = option(
        "--control-vector-layer-range",
        "First and last layer that control vectors change.  [default: all]",
        "FIRST LAST",
        parser=parse_layer_range,
    )

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of EngineOptions."""
        lora, control = resolve_files(self.lora or ()), resolve_files(self.control_vector or ())
        if self.lora_init_without_apply:
            lora = [(path, 0.0) for path, _ in lora]
        layers: Any = self.control_vector_layer_range
        return {"lora": tuple(lora), "control_vectors": tuple(control), "control_layers": layers}

    def absolute_fields(self) -> dict[str, Any]:
        """Return the fields with absolute paths, for other processes."""
        found = self.to_fields()
        for name in ("lora", "control_vectors"):
            found[name] = tuple((os.path.abspath(path), scale) for path, scale in found[name])
        return found


@option_group
class EngineGroup:
    """Model and hardware."""

    context: int | None = option(
        "-c --context --ctx-size",
        "Context length, in tokens.  [default: the model's training context]",
        "N",
        parser=make_integer_parser("0"),
    )
    threads: Threads = None
    device: Device = "auto"
    gpu_layers: GpuLayers = "auto"
    cache: CacheGroup
    rope: RopeGroup
    adapters: AdapterGroup
    memory: Memory = None

    def to_options(self, progress: "Progress", on_upload: "Progress") -> "EngineOptions":
        from localllm.engine.options import EngineOptions, parse_gpu_layers  # not needed for --help

        layers = parse_gpu_layers(convert_layer_count(self.gpu_layers))
        types, context = self.cache.format_types(), self.context or None
        scaling = self.rope.make_scaling()
        return EngineOptions(
            self.threads, context, types, self.device, layers, progress, on_upload, rope=scaling,
            memory=self.memory, **self.adapters.to_fields(),
        )  # fmt: skip


# ---- options of answers


def declare_option(
    declared: OptionDeclaration, parser: Callable[[str], object] | None = None,
    offers: Callable[..., list[str]] | None = None, default: object = None,
) -> Any:  # fmt: skip
    """Return the command line's declaration of a generation option."""
    metavar = None if declared.kind is bool else declared.metavar
    return option(declared.flags, declared.full_help, metavar, default=default, parser=parser, autocompletion=offers)


def parse_token_bias(text: str) -> tuple[int, float]:
    """Parse a token id and its bias, as in 15043+1.5 or 15043-inf. Raises ValueError."""
    token, sign, bias = text.partition("+") if "+" in text else text.partition("-")
    try:
        if not token.isdecimal() or not bias[:1].isalnum() or math.isnan(amount := float(bias)):
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} must be a token id and a bias such as 15043+1.5 or 15043-inf") from None
    return int(token), -amount if sign == "-" else amount


PARSERS = {"seed": make_integer_parser("-1"), "logit_bias": parse_token_bias}


def iter_declared(is_usual: bool) -> Iterator[GroupField]:
    """Yield the common sampling options, or the others."""
    for name, each in SAMPLING.items():
        if each.is_usual == is_usual:
            hint: Any = list[str] if each.is_repeatable else each.kind
            flags = declare_option(each, PARSERS.get(name))
            is_switch = hint is bool
            yield GroupField(name, Annotated[hint if is_switch else hint | None, flags], False if is_switch else None)


class SamplingGroup(DeclaredGroup):
    """Sampling."""

    options = tuple(iter_declared(is_usual=True))


Letters = Annotated[
    str | None,
    option(
        "--sampling-seq --sampler-seq",
        f"Like --samplers, with one letter for each sampler.  [default: {''.join(map(LETTERS.get, ORDER))}]",
        "LETTERS",
    ),
]


class MoreSamplingGroup(DeclaredGroup):
    """More sampling options."""

    options = (*iter_declared(is_usual=False), GroupField("letters", Letters, None))

    def to_fields(self) -> dict[str, Any]:
        """Return the given options by field of SamplingOptions. Raises UsageError."""
        fields = find_explicit_options(self)
        if breakers := fields.get("dry_sequence_breakers"):
            fields["dry_sequence_breakers"] = tuple(text for text in breakers if text != "none")
        if biases := fields.get("logit_bias"):
            fields["logit_bias"] = dict(biases)
        if "letters" in fields:
            if "samplers" in fields:
                raise UsageError("give either --samplers or --sampling-seq, not both")
            fields["samplers"] = parse_sampler_letters(fields.pop("letters"))
        return fields


HideThinking = Annotated[
    bool, option("--hide-thinking --hidethinking", "Do not show the model's thinking on the terminal.")
]


@option_group
class ConstraintGroup:
    """Constrained output. Thinking is not constrained."""

    json_schema: str | None = option(
        "-j --json-schema -jf --json-schema-file", "Constrain the answer to JSON that matches this schema.", "FILE|TEXT"
    )
    grammar: str | None = option("--grammar --grammar-file", "Constrain the answer to this GBNF grammar.", "FILE|TEXT")
    regex: str | None = option("--regex", "Constrain the answer to this regular expression.", "TEXT")

    json_whitespace: bool = option("--json-whitespace", "Allow spaces and line breaks in JSON.")
    additional_properties: bool = option(
        "--additional-properties", "Allow properties that the schema does not list, unless it forbids them."
    )

    @property
    def forms(self) -> list[str]:
        """The names of the given constraints; an answer can have only one."""
        return [name for name in ("json_schema", "grammar", "regex") if getattr(self, name) is not None]

    def create_constraint(self) -> "Constraint | None":
        if not self.forms:
            return None
        from localllm.generation.constraints.constraint import make_constraint

        if len(self.forms) > 1:
            names = (f"--{name.replace('_', '-')}" for name in self.forms)
            raise UsageError(f"{' and '.join(names)} cannot be combined")
        schema, grammar = read_value("json_schema", self.json_schema, "{"), read_value("grammar", self.grammar, "::=")
        return make_constraint(schema, grammar, self.regex, self.json_whitespace, self.additional_properties)

    def create_output_format(self) -> "OutputFormat":
        """Return the output format for a server. Raises UsageError."""
        from localllm.services.remote.dialect import OutputFormat

        schema = read_value("json_schema", self.json_schema, "{")
        grammar = read_value("grammar", self.grammar, "::=")
        parsed = None if schema is None else json.loads(schema)
        return OutputFormat(parsed, grammar, self.regex, self.additional_properties)


def read_value(name: str, argument: str | None, sign: str) -> str | None:
    """Return an option's value if it contains the sign, else the content of the file that it names.

    Raises UsageError.
    """
    if argument is None or sign in argument:
        return argument
    if not argument.strip():
        raise UsageError(f"{name} must not be empty: give its text or a file name")
    try:
        return Path(argument).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the file is not UTF-8"
        raise UsageError(f"cannot read {argument}: {reason}") from None


@option_group
class ThinkingGroup:
    """Thinking and chat template variables."""

    think: Literal["auto", "on", "off", "low", "medium", "high"] = declare_option(OPTIONS["think"], default="auto")
    think_budget: int | None = declare_option(OPTIONS["think_budget"], make_integer_parser("-1"))
    template_var: list[str] | None = option(
        "--template-var --chat-template-kwargs",
        "Set a chat template variable; VALUE may be JSON. A JSON object sets several.  [repeatable]",
        "NAME=VALUE",
    )

    def to_fields(self) -> dict[str, Any]:
        variables = dict[str, object]()
        if self.template_var:
            from localllm.services.hub.name_values import parse_variables  # seldom needed

            for text in self.template_var:
                variables |= parse_variables(text)
        return {"think": self.think, "think_budget": self.think_budget, "template_variables": variables}


def parse_speculate(text: str) -> str:
    """Parse auto, mtp, ngram, off or draft:MODEL. Raises ValueError."""
    if text in ("auto", "mtp", "ngram", "off") or (text.startswith("draft:") and text != "draft:"):
        return text
    raise ValueError(f"{text!r} must be auto, mtp, ngram, off or draft:MODEL")


def is_draft_model(speculate: str) -> bool:
    """Return whether --speculate names a draft model."""
    return speculate.startswith(DRAFT)


@option_group
class AnswerGroup:
    """Generation."""

    max_tokens: int | None = declare_option(OPTIONS["max_tokens"])
    stop: list[str] | None = declare_option(OPTIONS["stop"])
    ban: list[str] | None = declare_option(OPTIONS["ban"])
    escape: bool = option("-e/--no-escape --escape", r"Process escape sequences in TEXT: \n, \t, \xNN, ...")
    sampling: SamplingGroup
    steps: MoreSamplingGroup
    shape: ConstraintGroup
    thoughts: ThinkingGroup

    def get_sampling(self) -> dict[str, Any]:
        """Return the given sampling options by field of SamplingOptions. Raises UsageError."""
        return find_explicit_options(self.sampling) | self.steps.to_fields()


@option_group
class GenerationGroup(AnswerGroup):
    """Generation."""

    speculate: str = declare_option(
        OPTIONS["speculate"], parse_speculate, make_offer(("auto", "mtp", "ngram", "off", "draft:")), default="auto"
    )
    on_overflow: Literal["error", "drop-turns", "shift", "head", "tail", "middle", "relevant", "chunks"] | None = (
        declare_option(OPTIONS["on_overflow"])
    )
    keep: int | None = declare_option(OPTIONS["keep"])


def build_generation_options(
    on_progress: "Callable[[int, int], None] | None", choices: AnswerGroup
) -> GenerationOptions:
    """Build and check GenerationOptions, without a draft model. Raises UsageError.

    on_progress: called during the prefill.
    """
    drawing = choices.get_sampling()
    sampling = SamplingOptions(**drawing)
    if "samplers" in drawing or drawing.get("mirostat"):
        warn_unused(sampling, drawing)
    limit, stop = None if choices.max_tokens == -1 else choices.max_tokens, tuple(choices.stop or ())
    further = {
        **choices.thoughts.to_fields(),
        "constraint": choices.shape.create_constraint(),
        "ban": tuple(choices.ban or ()),
    }
    if not isinstance(choices, GenerationGroup):
        return GenerationOptions(limit, stop, sampling, on_progress, "auto", **further)
    keep = choices.keep
    if keep is not None and choices.on_overflow != "shift":
        say("localllm: --keep is ignored: it needs --on-overflow shift")
        keep = None
    kind = "auto" if is_draft_model(choices.speculate) else choices.speculate
    overflow = None if choices.on_overflow in SHORTENING_METHODS else choices.on_overflow
    return GenerationOptions(limit, stop, sampling, on_progress, kind, overflow, keep, **further)


def warn_unused(sampling: SamplingOptions, names: "Iterable[str]") -> None:
    """Warn of the given options whose step is not in the sampler chain."""
    from localllm.generation.sampling.sampler import list_unused_options

    if unused := list_unused_options(sampling, names):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        reason = "mirostat replaces all steps except temperature" if sampling.mirostat else "not in --samplers"
        say(f"localllm: ignored (no effect): {options} ({reason})")


def read_system_message(text: str | None, file: str | None) -> str | None:
    """Return the system message of -sys, or the content of -sysf's file. Raises UsageError."""
    if file is None:
        return text
    if text is not None:
        raise UsageError("give either -sys or -sysf, not both")
    from localllm.files.text_file import read_text

    return read_text(file)


def require_complete(options: "GenerationOptions", finish_reasons: Iterable[str]) -> None:
    """Raise CutError if an answer was cut off before it matched its constraint."""
    if options.constraint and "length" in finish_reasons:
        raise CutError(f"the answer was cut off before it {options.constraint.promise}; raise -n or the context")


def warn_cut(options: "GenerationOptions", finish_reasons: Iterable[str]) -> None:
    """Warn if an answer was cut off before it matched its constraint."""
    try:
        require_complete(options, finish_reasons)
    except CutError as error:
        say(f"localllm: warning: {error}")
