"""Options of sampling, under llama.cpp's names. docs/sampling.md explains those that few people need."""

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from localllm.cli.parameters import DeclaredGroup, GroupField, explicit_options, number_or_default
from localllm.errors import UsageError
from localllm.generation.sampling.declaration import Option
from localllm.generation.sampling.options import LETTERS, OPTIONS, ORDER, steps_lettered


def number(*names: str, help: str) -> object:
    """Declare an option with a number; None means the default, which `help` names."""
    return typer.Option(*names, metavar="N", help=help)


def flags_of(
    option: Option, parser: Callable[[str], object] | None = None, offers: Callable[..., list[str]] | None = None
) -> Any:
    """Return Typer's declaration of an option."""
    flags, metavar = option.flags.split(), None if option.kind is bool else option.metavar
    return typer.Option(*flags, metavar=metavar, help=option.full_help, parser=parser, autocompletion=offers)


def token_bias(text: str) -> tuple[int, float]:
    """Parse a token id and its bias, as in 15043+1.5 or 15043-inf. Raises ValueError."""
    token, sign, bias = text.partition("+") if "+" in text else text.partition("-")
    try:
        if not token.isdecimal() or not bias[:1].isalnum() or math.isnan(amount := float(bias)):
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} is not a token id and a bias such as 15043+1.5 or 15043-inf") from None
    return int(token), -amount if sign == "-" else amount


PARSERS = {"seed": number_or_default("-1"), "logit_bias": token_bias}


def declared(is_usual: bool) -> Iterator[GroupField]:
    """Yield the usual options of sampling, or the others."""
    for name, option in OPTIONS.items():
        if option.is_usual == is_usual:
            hint: Any = list[str] if option.is_repeatable else option.kind
            flags = flags_of(option, PARSERS.get(name))
            is_switch = hint is bool
            yield GroupField(name, Annotated[hint if is_switch else hint | None, flags], False if is_switch else None)


class Sampling(DeclaredGroup):
    """Sampling."""

    options = tuple(declared(is_usual=True))


Letters = Annotated[
    str | None,
    typer.Option(
        "--sampling-seq",
        "--sampler-seq",
        metavar="LETTERS",
        help=f"Like --samplers, with one letter for each sampler.  [default: {''.join(map(LETTERS.get, ORDER))}]",
    ),
]


class ExactSampling(DeclaredGroup):
    """More sampling options."""

    options = (*declared(is_usual=False), GroupField("letters", Letters, None))

    def as_fields(self) -> dict[str, Any]:
        """Return the given options by field of SamplingOptions. Raises UsageError."""
        fields = explicit_options(self)
        if breakers := fields.get("dry_sequence_breakers"):
            fields["dry_sequence_breakers"] = tuple(text for text in breakers if text != "none")
        if biases := fields.get("logit_bias"):
            fields["logit_bias"] = dict(biases)
        if "letters" in fields:
            if "samplers" in fields:
                raise UsageError("give either --samplers or --sampling-seq, not both")
            fields["samplers"] = steps_lettered(fields.pop("letters"))
        return fields
