"""Options of the steps of sampling that few people need, under llama.cpp's names. docs/sampling.md explains them."""

import math
from typing import Annotated, Any

import typer

from localllm.cli.groups import group
from localllm.errors import UsageError


def number(*names: str, help: str) -> Any:
    """An option with a number; None means the default, which `help` names."""
    return typer.Option(*names, metavar="N", help=help)


def token_bias(text: str) -> tuple[int, float]:
    """A token and its bias, as in 15043+1.5 or 15043-inf. Raises ValueError."""
    token, sign, bias = text.partition("+") if "+" in text else text.partition("-")
    try:
        if not token.isdecimal() or not bias[:1].isalnum() or math.isnan(amount := float(bias)):
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} is not a token's number with what to add, as 15043+1.5 or 15043-inf") from None
    return int(token), -amount if sign == "-" else amount


@group
class ExactSampling:
    """How tokens are drawn, more exactly. As in Sampling, a test compares the defaults in the help."""

    repeat_last_n: Annotated[
        int | None, number("--repeat-last-n", help="Recent tokens are the last N; -1: all.  [default: 64]")
    ] = None
    top_n_sigma: Annotated[
        float | None,
        number(
            "--top-n-sigma",
            "--top-nsigma",
            help="Drop logits more than N deviations below the largest; 0: none.  [default: -1.0]",
        ),
    ] = None
    xtc_probability: Annotated[
        float | None, number("--xtc-probability", help="How often to exclude top choices (XTC).  [default: 0.0]")
    ] = None
    xtc_threshold: Annotated[
        float | None,
        number(
            "--xtc-threshold",
            help="Top choices have at least this probability; the last of them stays.  [default: 0.1]",
        ),
    ] = None
    dynatemp_range: Annotated[
        float | None,
        number("--dynatemp-range", help="The temperature is so much lower or higher, as sure or not.  [default: 0.0]"),
    ] = None
    dynatemp_exponent: Annotated[
        float | None, number("--dynatemp-exp", help="How the temperature follows the entropy.  [default: 1.0]")
    ] = None
    dry_multiplier: Annotated[
        float | None,
        number("--dry-multiplier", help="How strongly to keep from repeating sequences (DRY).  [default: 0.0]"),
    ] = None
    dry_base: Annotated[
        float | None, number("--dry-base", help="Each token more of a sequence costs N times as much.  [default: 1.75]")
    ] = None
    dry_allowed_length: Annotated[
        int | None, number("--dry-allowed-length", help="Sequences up to N tokens may be repeated.  [default: 2]")
    ] = None
    dry_penalty_last_n: Annotated[
        int | None, number("--dry-penalty-last-n", help="Look for them in the last N tokens; -1: all.  [default: 64]")
    ] = None
    dry_sequence_breakers: Annotated[
        list[str] | None,
        typer.Option(
            "--dry-sequence-breaker",
            metavar="TEXT",
            help='A text that ends a sequence; none: nothing does.  [repeatable]  [default: a line break, :, ", *]',
        ),
    ] = None
    mirostat: Annotated[
        int | None,
        number("--mirostat", help="Keep the surprise steady, instead of other steps: version 1 or 2.  [default: 0]"),
    ] = None
    mirostat_tau: Annotated[
        float | None, number("--mirostat-ent", help="The surprise to aim at, in bits.  [default: 5.0]")
    ] = None
    mirostat_eta: Annotated[float | None, number("--mirostat-lr", help="How fast mirostat learns.  [default: 0.1]")] = (
        None
    )
    adaptive_target: Annotated[
        float | None,
        number("--adaptive-target", help="Choose tokens that have about this probability.  [default: -1.0, off]"),
    ] = None
    adaptive_decay: Annotated[
        float | None, number("--adaptive-decay", help="How much older tokens count for that.  [default: 0.9]")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "-l",
            "--logit-bias",
            metavar="TOKEN+N",
            parser=token_bias,
            help="Add N to a token's logit, as in 15043+1.5; 15043-inf: it never comes.  [repeatable]",
        ),
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Never end by itself.")] = False
    samplers: Annotated[
        str | None,
        typer.Option(
            "--samplers",
            metavar="NAMES",
            help="The steps in their order.  "
            "[default: penalties;dry;top_n_sigma;top_k;typical;top_p;min_p;xtc;temperature;adaptive_p]",
        ),
    ] = None
    letters: Annotated[
        str | None,
        typer.Option(
            "--sampling-seq",
            "--sampler-seq",
            metavar="LETTERS",
            help="The same, with a letter for each.  [default: edskypmxta]",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """What the user has chosen, by field of SamplingOptions. Raises UsageError."""
        chosen = ((name, value) for name, value in vars(self).items() if value is not None and value != ())
        given: dict[str, Any] = {name: value for name, value in chosen if value is not False}
        if self.dry_sequence_breakers:
            given["dry_sequence_breakers"] = tuple(text for text in self.dry_sequence_breakers if text != "none")
        if self.logit_bias:
            given["logit_bias"] = dict(given["logit_bias"])
        if self.letters is not None:
            if self.samplers is not None:
                raise UsageError("--samplers and --sampling-seq say the same: leave one out")
            from localllm.generation.sampling.options import steps_lettered

            given["samplers"] = steps_lettered(given.pop("letters"))
        return given
