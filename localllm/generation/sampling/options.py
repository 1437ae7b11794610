"""Declare the options of sampling, each once, as a field of SamplingDeclarations.

Command line, Python, server, other programs' requests, metadata of files, chat's /set and docs/sampling.md take name,
default, range, flags, help and keys from this module. It does not import NumPy: the command line starts with it.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Generic, NamedTuple, Never, TypedDict, TypeVar

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.values import to_python_number

ABOVE_0 = math.nextafter(0, 1)


class ValueRange(NamedTuple):
    """The valid values of a numeric option.

    Attributes:
        text: description for messages.  least, most: inclusive bounds.  whole: whether values are integers.
    """

    text: str
    least: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def parse_number(self, name: str, value: object) -> float:
        """Return a value as a Python number. Raises UsageError, with the option's name, for an invalid value."""
        number = to_number(value)
        if number is None or not abs(number) <= sys.float_info.max:
            raise UsageError(f"{name} must be a number, not {value!r}")
        if not self.least <= number <= self.most or (self.whole and number != int(number)):
            raise UsageError(f"{name} must be {self.text}, not {value}")
        return int(number) if self.whole else float(number)


def to_number(number: object) -> float | None:
    """Convert a Python or NumPy number to int or float.

    Returns None for other values, also for arrays of one number.
    """
    number = number if hasattr(number, "__len__") else to_python_number(number)
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


@frozen
class OptionDeclaration:
    """The declaration of an option.

    Attributes:
        flags: on the command line; of those with the same meaning, the longest is last.
        help: help text without the default, which is appended.
        shown: how the help shows the default, if that differs from its value.
        key: key in the metadata of a file, after "general.sampling.".
        users: programs and APIs that also have the option, with ":" and their name for it if that differs.
        step: the only sampling step that uses it.  is_usual: whether it is among the first in the help.
        is_clamped: whether servers clamp it to its range, as llama-server does.
        is_repeatable: whether the command line accepts it several times.
        source: link to the publication.
    """

    default: Any = None
    range: ValueRange | None = None
    flags: str = ""
    help: str = ""
    users: str = ""
    key: str = ""
    step: str = ""
    shown: str = ""
    metavar: str = "N"
    is_usual: bool = False
    is_clamped: bool = False
    is_repeatable: bool = False
    source: str = ""

    @property
    def kind(self) -> type:
        """The type of its value, or of one value if it is repeatable."""
        if self.range is not None:
            return int if self.range.whole else float
        return bool if isinstance(self.default, bool) else str

    @property
    def names(self) -> list[str]:
        """The names of its flags with "_" in place of "-": top_k for --top-k."""
        return [flag.lstrip("-").replace("-", "_") for flag in self.flags.split()]

    @property
    def long_name(self) -> str:
        """Its key in config.toml: top-k for --top-k."""
        return next(flag for flag in self.flags.split() if flag.startswith("--")).removeprefix("--")

    @property
    def default_text(self) -> str:
        """The default as the help shows it; "" without one."""
        return self.shown or (str(self.default) if self.range else "")

    @property
    def full_help(self) -> str:
        """The help text with the default."""
        notes = "  [repeatable]" * self.is_repeatable + f"  [default: {self.default_text}]" * bool(self.default_text)
        return self.help + notes

    def clamp(self, value: Any) -> Any:
        """Return a number clamped to the range; other values unchanged."""
        if self.range is None or not isinstance(value, int | float):
            return value
        return min(max(value, self.range.least), self.range.most)


def declare_optional(default: object, *declared: Any, **further: Any) -> Any:
    """Return a dataclass field that is None unless set; the arguments are those of OptionDeclaration."""
    return field(default=None, metadata={"option": OptionDeclaration(default, *declared, **further)})


def declare_setting(default: object, *declared: Any, **further: Any) -> Any:
    """Return a dataclass field that has its default unless set; the arguments are those of OptionDeclaration."""
    return field(default=default, metadata={"option": OptionDeclaration(default, *declared, **further)})


def collect_options(kind: type) -> dict[str, OptionDeclaration]:
    """Return the declarations of the options of a dataclass, by field name."""
    return {each.name: each.metadata["option"] for each in fields(kind) if "option" in each.metadata}


def map_names(user: str, options: Mapping[str, OptionDeclaration]) -> dict[str, str]:
    """Return the field names of the options that a program or API also has, by its names for them."""
    pairs = ((name, each.partition(":")) for name, option in options.items() for each in option.users.split())
    return {theirs or name: name for name, (other, _, theirs) in pairs if other == user}


# The steps for --samplers, by name, with llama.cpp's letters for --sampling-seq.
LETTERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typical": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "adaptive_p": "a",
    "infill": "i",
}
OTHER_NAMES = {"typ_p": "typical", "typical_p": "typical", "typ": "typical", "temp": "temperature", "nucleus": "top_p"}
ORDER = tuple(name for name in LETTERS if name != "infill")  # llama.cpp's default

NUMBER = ValueRange("a number")
COUNT = ValueRange("an integer, 0 or greater", 0, whole=True)
WINDOW = ValueRange("an integer, -1 or greater", -1, whole=True)
AMOUNT = ValueRange("0 or greater", 0)
POSITIVE = ValueRange("above 0", ABOVE_0)
SHARE = ValueRange("from 0 to 1", 0, 1)
SOME = ValueRange("above 0 and at most 1", ABOVE_0, 1)
FACTOR = ValueRange("1 or greater", 1)
VERSION = ValueRange("0, 1 or 2", 0, 2, whole=True)
TARGET = ValueRange("at most 1", most=1)
DECAY = ValueRange("from 0 to 0.99", 0, 0.99)

# Programs and APIs that also have an option.
OF_ALL = "openai llamacpp vllm ollama"
OF_MOST = "llamacpp vllm ollama llm"
Missing = TypeVar("Missing", None, Never)


@frozen
class SamplingDeclarations(Generic[Missing]):
    """The declarations of all sampling options, from which docs/sampling.md is generated."""

    # fmt: off
    seed: int | None = declare_optional(
        None, COUNT, "-s --seed", "Random seed; the same seed gives the same answer.", f"{OF_ALL} llm diffusion",
        shown="-1, random", is_usual=True,
    )
    temperature: float | Missing = declare_optional(
        0.8, NUMBER, "--temp --temperature", "Sampling temperature; 0 is greedy.",
        f"{OF_ALL} llm diffusion transformers", "temp", "temperature", is_usual=True,
    )
    top_k: int | Missing = declare_optional(
        40, COUNT, "--top-k", "Top-k sampling: keep the N most likely tokens; 0: all.",
        f"{OF_MOST} diffusion transformers", "top_k", "top_k", is_usual=True, is_clamped=True,
        source="[Fan et al. 2018](https://arxiv.org/abs/1805.04833)",
    )
    typical: float | Missing = declare_optional(
        1.0, SOME, "--typical --typical-p", "Locally typical sampling with total probability N; 1: off.",
        "llamacpp:typical_p ollama:typical_p", "", "typical", is_usual=True, is_clamped=True,
        source="[Meister et al. 2022](https://arxiv.org/abs/2202.00666)",
    )
    top_p: float | Missing = declare_optional(
        0.95, SOME, "--top-p", "Top-p sampling: keep the most likely tokens up to total probability N; 1: off.",
        f"{OF_ALL} llm diffusion transformers", "top_p", "top_p", is_usual=True, is_clamped=True,
        source="[Holtzman et al. 2019](https://arxiv.org/abs/1904.09751)",
    )
    min_p: float | Missing = declare_optional(
        0.05, SHARE, "--min-p", "Min-p sampling: drop tokens less than N times as likely as the top token; 0: off.",
        f"{OF_MOST} transformers", "min_p", "min_p", is_usual=True, is_clamped=True,
        source="[Nguyen et al. 2024](https://arxiv.org/abs/2407.01082)",
    )
    repeat_penalty: float | Missing = declare_optional(
        1.0, POSITIVE, "--repeat-penalty", "Repetition penalty on recent tokens; 1: off.",
        "llamacpp vllm:repetition_penalty ollama llm transformers:repetition_penalty transformers:penalty_repeat",
        "penalty_repeat", "penalties", is_usual=True, source="[Keskar et al. 2019](https://arxiv.org/abs/1909.05858)",
    )
    presence_penalty: float | Missing = declare_optional(
        0.0, NUMBER, "--presence-penalty", "Presence penalty: subtract N from the logits of recent tokens.", OF_ALL,
        step="penalties", is_usual=True, source="OpenAI",
    )
    frequency_penalty: float | Missing = declare_optional(
        0.0, NUMBER, "--frequency-penalty", "Frequency penalty: subtract N for each recent occurrence.", OF_ALL,
        step="penalties", is_usual=True, source="OpenAI",
    )
    repeat_last_n: int | Missing = declare_optional(
        64, WINDOW, "--repeat-last-n", "Apply the penalties to the last N tokens; -1: all.",
        "llamacpp ollama transformers:penalty_last_n", "penalty_last_n",
    )
    top_n_sigma: float | Missing = declare_optional(
        -1.0, NUMBER, "--top-n-sigma --top-nsigma",
        "Top-n-sigma: drop logits over N standard deviations below the largest; 0: off.", "llamacpp",
        step="top_n_sigma", source="[Tang et al. 2024](https://arxiv.org/abs/2411.07641)",
    )
    xtc_probability: float | Missing = declare_optional(
        0.0, SHARE, "--xtc-probability", "XTC: probability of excluding the top choices; 0: off.",
        "llamacpp transformers", "xtc_probability", "xtc", is_clamped=True,
        source="[p-e-w 2024](https://github.com/oobabooga/text-generation-webui/pull/6335)",
    )
    xtc_threshold: float | Missing = declare_optional(
        0.1, SHARE, "--xtc-threshold", "XTC: minimum probability of a top choice; the least likely top choice is kept.",
        "llamacpp transformers", "xtc_threshold", is_clamped=True,
    )
    dynatemp_range: float | Missing = declare_optional(
        0.0, AMOUNT, "--dynatemp-range", "Dynamic temperature: vary --temp by up to N, by the entropy; 0: off.",
        "llamacpp", step="temperature", source="[Zhu et al. 2023](https://arxiv.org/abs/2309.02772)",
    )
    dynatemp_exponent: float | Missing = declare_optional(
        1.0, AMOUNT, "--dynatemp-exp", "Dynamic temperature: exponent of the entropy.", "llamacpp",
    )
    dry_multiplier: float | Missing = declare_optional(
        0.0, AMOUNT, "--dry-multiplier", "DRY: strength of the penalty on repeated sequences; 0: off.", "llamacpp",
        step="dry", is_clamped=True, source="[p-e-w 2024](https://github.com/oobabooga/text-generation-webui/pull/5677)",
    )
    dry_base: float | Missing = declare_optional(
        1.75, FACTOR, "--dry-base", "DRY: factor by which each further repeated token raises the penalty.", "llamacpp",
    )
    dry_allowed_length: int | Missing = declare_optional(
        2, COUNT, "--dry-allowed-length", "DRY: do not penalize repeated sequences of fewer than N tokens.", "llamacpp",
    )
    dry_penalty_last_n: int | Missing = declare_optional(
        64, WINDOW, "--dry-penalty-last-n", "DRY: look for repetitions in the last N tokens; -1: all.", "llamacpp",
    )
    dry_sequence_breakers: Sequence[str] | Missing = declare_optional(
        ("\n", ":", '"', "*"), None, "--dry-sequence-breaker",
        "DRY: text that ends a sequence; none: no text does.", "llamacpp",
        shown='a line break, :, ", *', metavar="TEXT", is_repeatable=True,
    )
    mirostat: int | Missing = declare_optional(
        0, VERSION, "--mirostat", "Mirostat 1 or 2, in place of top-k, top-p and the like; 0: off.",
        "llamacpp ollama transformers", "mirostat", source="[Basu et al. 2021](https://arxiv.org/abs/2007.14966)",
    )
    mirostat_tau: float | Missing = declare_optional(
        5.0, AMOUNT, "--mirostat-ent", "Mirostat: target surprise (tau), in bits.", "llamacpp ollama transformers",
        "mirostat_tau",
    )
    mirostat_eta: float | Missing = declare_optional(
        0.1, AMOUNT, "--mirostat-lr", "Mirostat: learning rate (eta).", "llamacpp ollama transformers", "mirostat_eta",
    )
    adaptive_target: float | Missing = declare_optional(
        -1.0, TARGET, "--adaptive-target", "Adaptive-p: prefer tokens of about this probability.", shown="-1.0, off",
        source="[llama.cpp 17927](https://github.com/ggml-org/llama.cpp/pull/17927)",
    )
    adaptive_decay: float | Missing = declare_optional(
        0.9, DECAY, "--adaptive-decay", "Adaptive-p: decay of the running average of probabilities.",
    )
    logit_bias: Mapping[int, float] | Missing = declare_optional(
        {}, None, "-l --logit-bias",
        "Add N to the logit of a token id, as in 15043+1.5; 15043-inf bans the token.",
        "openai llamacpp vllm", metavar="TOKEN+N", is_repeatable=True, source="OpenAI",
    )
    ignore_eos: bool | Missing = declare_optional(
        False, None, "--ignore-eos", "Ignore the end-of-text token and keep generating.", "llamacpp",
    )
    samplers: Sequence[str] | Missing = declare_optional(
        ORDER, None, "--samplers", "Samplers to apply, in this order; infill is also available.", key="sequence",
        shown=";".join(ORDER), metavar="NAMES",
    )
    # fmt: on

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, convert_value(name, declared.range, value))

    @property
    def explicit(self) -> dict[str, Any]:
        """The options that are not None, by name."""
        return {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}


OPTIONS = collect_options(SamplingDeclarations)
DEFAULTS: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}


class SamplingOptions(SamplingDeclarations[None]):
    """Options of sampling.

    An option that is None has the value that the file recommends, or else the default, which is llama.cpp's.
    docs/sampling.md explains each option.
    """

    def fill_unset(self, defaults: "SamplingOptions") -> "SamplingOptions":
        """Return these options, with those of `defaults` in place of None."""
        return SamplingOptions(**{**defaults.explicit, **self.explicit})

    @property
    def complete(self) -> "CompleteOptions":
        """The options with defaults in place of None; only the seed may stay None."""
        return CompleteOptions(**{**DEFAULTS, **self.explicit})


class CompleteOptions(SamplingDeclarations[Never]):
    """Options of sampling without None, except for the seed."""


class SamplingArguments(TypedDict, total=False):
    """Options of sampling as keyword arguments: docs/sampling.md describes them, SamplingOptions has the defaults."""

    temperature: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    top_k: int | None
    top_n_sigma: float | None
    typical: float | None
    top_p: float | None
    min_p: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    repeat_last_n: int | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    adaptive_target: float | None
    adaptive_decay: float | None
    logit_bias: Mapping[int, float] | None
    ignore_eos: bool | None
    samplers: Sequence[str] | str | None
    seed: int | None


def convert_value(name: str, range: ValueRange | None, value: object) -> object:
    """Return the value of an option in Python's own types. Raises UsageError for an invalid value."""
    if range is not None:
        return range.parse_number(name, value)
    if name == "samplers":
        return parse_sampler_names(value)
    if name == "logit_bias":
        return parse_biases(value)
    if name == "ignore_eos":
        if not isinstance(truth := to_python_number(value), bool):
            raise UsageError(f"ignore_eos must be true or false, not {value!r}")
        return truth
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{name} must be a list of strings, not {value!r}")
    return tuple(texts)


def parse_sampler_names(value: object) -> tuple[str, ...]:
    """Parse --samplers: a list of names, or one string with semicolons between them.

    Raises UsageError for an unknown name.
    """
    names = [name for name in value.split(";") if name.strip()] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"samplers must be names of steps, not {value!r}")
    steps = tuple(OTHER_NAMES.get(name, name) for name in (name.strip().replace("-", "_") for name in names))
    for step, name in zip(steps, names, strict=True):
        if step not in LETTERS:
            raise UsageError(f"samplers: unknown sampler {name[:100]!r}; available: {';'.join(LETTERS)}")
    return steps


def parse_sampler_letters(letters: str) -> tuple[str, ...]:
    """Parse --sampling-seq, one letter per step. Raises UsageError for an unknown letter."""
    steps = {letter: step for step, letter in LETTERS.items()}
    for letter in letters:
        if letter not in steps:
            available = ", ".join(f"{letter} ({step})" for letter, step in steps.items())
            raise UsageError(f"letters: unknown letter {letter!r}; available: {available}")
    return tuple(steps[letter] for letter in letters)


def parse_biases(value: object) -> dict[int, float]:
    """Return the biases of logits by token id. Raises UsageError for other values."""
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, not {value!r}")
    return {int(COUNT.parse_number("a token of logit_bias", token)): parse_bias(bias) for token, bias in value.items()}


def parse_bias(bias: object) -> float:
    """Return the bias of a logit, a number or -inf. Raises UsageError for other values."""
    return -math.inf if to_number(bias) == -math.inf else NUMBER.parse_number("logit_bias", bias)
