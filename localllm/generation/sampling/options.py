"""Sampling options, with defaults and valid ranges.

A model's file may recommend others in the metadata `general.sampling.*`, as llama.cpp defines them.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from localllm.errors import UsageError
from localllm.files.gguf.metadata_reader import Checked, show
from localllm.frozen import frozen
from localllm.generation.sampling.candidates import LARGEST

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
ABOVE_0 = math.nextafter(0, 1)


class Range(NamedTuple):
    """The valid numbers of an option: a description for messages, and inclusive bounds."""

    text: str
    least: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def number(self, name: str, value: object) -> float:
        """Return the value as a Python number. Raises UsageError, which names the option."""
        number = value_of(value)
        if number is None or not abs(number) <= sys.float_info.max:
            raise UsageError(f"{name} should be a number, not {value!r}")
        if not self.least <= number <= self.most or (self.whole and number != int(number)):
            raise UsageError(f"{name} should be {self.text}, not {value}")
        return int(number) if self.whole else float(number)


def value_of(number: object) -> float | None:
    """Convert a number of Python or NumPy to int or float; None for other values."""
    if isinstance(number, float | np.floating):
        return float(number)
    return int(number) if isinstance(number, int | np.integer) and not isinstance(number, bool) else None


NUMBER = Range("a number")
COUNT = Range("a whole number, 0 or above", 0, whole=True)
WINDOW = Range("a whole number, -1 or above", -1, whole=True)
AMOUNT = Range("0 or above", 0)
POSITIVE = Range("above 0", ABOVE_0)
SHARE = Range("from 0 to 1", 0, 1)
SOME = Range("above 0 and at most 1", ABOVE_0, 1)
FACTOR = Range("1 or above", 1)
VERSION = Range("0, 1 or 2", 0, 2, whole=True)
TARGET = Range("at most 1", most=1)
DECAY = Range("from 0 to 0.99", 0, 0.99)


def option(default: object, range: Range | None = None, key: str = "") -> Any:
    """Declare a field of SamplingOptions; key: the metadata key after "general.sampling."."""
    return field(default=None, metadata={"default": default, "range": range, "key": key})


@frozen
class SamplingOptions:
    """Sampling options.

    For an option that is None the file's recommendation applies, or else the default, which is llama.cpp's. The values
    in brackets turn a step off. docs/sampling.md explains each option.
    """

    temperature: float | None = option(0.8, NUMBER, "temp")  # 0 or below: greedy
    dynatemp_range: float | None = option(0.0, AMOUNT)  # most by which the entropy lowers or raises it [0]
    dynatemp_exponent: float | None = option(1.0, AMOUNT)  # exponent of the normalized entropy
    top_k: int | None = option(40, COUNT, "top_k")  # keep the k most likely [0]
    top_n_sigma: float | None = option(-1.0, NUMBER)  # keep logits within n deviations of the best [0 or below]
    typical: float | None = option(1.0, SOME)  # total probability of the most typical tokens to keep [1]
    top_p: float | None = option(0.95, SOME, "top_p")  # total probability of the most likely tokens to keep [1]
    min_p: float | None = option(0.05, SHARE, "min_p")  # least probability, relative to the most likely token [0]
    xtc_probability: float | None = option(0.0, SHARE, "xtc_probability")  # probability of removing top tokens [0]
    xtc_threshold: float | None = option(0.1, SHARE, "xtc_threshold")  # least probability of a top token [above 0.5]
    repeat_last_n: int | None = option(64, WINDOW, "penalty_last_n")  # latest tokens with penalties; -1: all [0]
    repeat_penalty: float | None = option(1.0, POSITIVE, "penalty_repeat")  # divide recent tokens' logits [1]
    presence_penalty: float | None = option(0.0, NUMBER)  # subtract from the logits of recent tokens [0]
    frequency_penalty: float | None = option(0.0, NUMBER)  # subtract for each recent occurrence [0]
    dry_multiplier: float | None = option(0.0, AMOUNT)  # strength of the penalty for repeated sequences [0]
    dry_base: float | None = option(1.75, FACTOR)  # factor of the penalty for each further token
    dry_allowed_length: int | None = option(2, COUNT)  # tokens of a sequence without penalty
    dry_penalty_last_n: int | None = option(64, WINDOW)  # latest tokens to search; -1: all [0]
    dry_sequence_breakers: Sequence[str] | None = option(("\n", ":", '"', "*"))  # end a sequence
    mirostat: int | None = option(0, VERSION, "mirostat")  # 1 or 2: replaces all steps but temperature [0]
    mirostat_tau: float | None = option(5.0, AMOUNT, "mirostat_tau")  # target surprise, in bits
    mirostat_eta: float | None = option(0.1, AMOUNT, "mirostat_eta")  # learning rate
    adaptive_target: float | None = option(-1.0, TARGET)  # target probability of tokens [below 0]
    adaptive_decay: float | None = option(0.9, DECAY)  # decay of older tokens' weight
    logit_bias: Mapping[int, float] | None = option({})  # added to logits, by token id; -inf bans a token
    ignore_eos: bool | None = option(False)  # ban end tokens
    samplers: Sequence[str] | None = option(ORDER, key="sequence")  # the steps in their order
    seed: int | None = option(None, COUNT)  # None: a random one

    def __post_init__(self) -> None:
        """Raise UsageError for invalid values."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                object.__setattr__(self, each.name, convert_value(each.name, each.metadata["range"], value))

    def over(self, defaults: "SamplingOptions") -> "SamplingOptions":
        """Return these options, with those of `defaults` in place of None."""
        return SamplingOptions(**{**defaults.explicit, **self.explicit})

    @property
    def explicit(self) -> dict[str, Any]:
        """The options that are not None."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    @property
    def complete(self) -> "CompleteOptions":
        """The options, with the default of each that is not chosen; only a seed may stay None."""
        return CompleteOptions(**{**DEFAULTS, **self.explicit})


class CompleteOptions(SamplingOptions):
    """Sampling options that are all chosen; only a seed may be None."""

    if TYPE_CHECKING:
        temperature: float
        dynatemp_range: float
        dynatemp_exponent: float
        top_k: int
        top_n_sigma: float
        typical: float
        top_p: float
        min_p: float
        xtc_probability: float
        xtc_threshold: float
        repeat_last_n: int
        repeat_penalty: float
        presence_penalty: float
        frequency_penalty: float
        dry_multiplier: float
        dry_base: float
        dry_allowed_length: int
        dry_penalty_last_n: int
        dry_sequence_breakers: Sequence[str]
        mirostat: int
        mirostat_tau: float
        mirostat_eta: float
        adaptive_target: float
        adaptive_decay: float
        logit_bias: Mapping[int, float]
        ignore_eos: bool
        samplers: Sequence[str]


DEFAULTS: dict[str, Any] = {each.name: each.metadata["default"] for each in fields(SamplingOptions)}


def convert_value(name: str, range: Range | None, value: object) -> object:
    """Convert an option's value to Python's own types. Raises UsageError."""
    if range is not None:
        return range.number(name, value)
    if name == "samplers":
        return steps_named(value)
    if name == "logit_bias":
        return biases(value)
    if name == "ignore_eos":
        if not isinstance(value, bool | np.bool_):
            raise UsageError(f"ignore_eos should be true or false, not {value!r}")
        return bool(value)
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise UsageError(f"{name} should be texts, not {value!r}")
    return tuple(texts)


def steps_named(value: object) -> tuple[str, ...]:
    """Parse --samplers: a list of names, or one string with semicolons between them. Raises UsageError."""
    names = [name for name in value.split(";") if name.strip()] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"samplers should be names of steps, not {value!r}")
    steps = tuple(OTHER_NAMES.get(name, name) for name in (name.strip().replace("-", "_") for name in names))
    for step, name in zip(steps, names, strict=True):
        if step not in LETTERS:
            raise UsageError(f"samplers: unknown sampler {show(name)!r}; available: {';'.join(LETTERS)}")
    return steps


def steps_lettered(letters: str) -> tuple[str, ...]:
    """Parse --sampling-seq, a letter for each step. Raises UsageError."""
    steps = {letter: step for step, letter in LETTERS.items()}
    for letter in letters:
        if letter not in steps:
            available = ", ".join(f"{letter} ({step})" for letter, step in steps.items())
            raise UsageError(f"letters: unknown letter {letter!r}; available: {available}")
    return tuple(steps[letter] for letter in letters)


def biases(value: object) -> dict[int, float]:
    """Return the values to add to logits, by token id. Raises UsageError."""
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias should be a number by token id, not {value!r}")
    return {int(COUNT.number("a token of logit_bias", token)): bias_of(bias) for token, bias in value.items()}


def bias_of(bias: object) -> float:
    return -math.inf if value_of(bias) == -math.inf else NUMBER.number("logit_bias", bias)


OPTIONS = {each.name: each.metadata for each in fields(SamplingOptions) if each.metadata["key"]}


def read_recommended(metadata: Mapping[str, object], path: str = "") -> tuple[SamplingOptions, list[str]]:
    """Read the sampling options that a file recommends, with a warning for each invalid value.

    The default replaces an invalid value, so that the model still runs.
    """
    checked, values, warnings = Checked(metadata, "general.sampling.", path), dict[str, Any](), list[str]()
    for name, option in OPTIONS.items():
        key = option["key"]
        if not checked.has(key):
            continue
        option_value: dict[str, Any] = {name: normalized_value(key, checked.raw(key))}
        try:
            SamplingOptions(**option_value)
        except UsageError:
            warnings.append(f"{checked.wrong(key, describe_valid_values(name))}; using the default")
        else:
            values |= option_value
    return SamplingOptions(**values), warnings


def describe_valid_values(name: str) -> str:
    """Describe an option's valid values, for a message."""
    if name == "samplers":
        return f"names of steps with semicolons between them, as in {';'.join(LETTERS)}"
    result: str = OPTIONS[name]["range"].text
    return result


def normalized_value(key: str, value: object) -> object:
    """Return a metadata value as its author wrote it: 0.6 for its float32, 0 (off) for a top_k below 0."""
    if isinstance(value, float) and abs(value) <= LARGEST:
        return float(str(np.float32(value)))
    if key == "top_k" and isinstance(value, int):
        return max(value, 0)
    return value
