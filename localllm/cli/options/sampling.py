"""Options of sampling, under llama.cpp's names. docs/sampling.md explains those that few people need."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import typer

from localllm.cli.parameters import explicit_options, group, number_or_default
from localllm.errors import UsageError


def number(*names: str, help: str, parser: Callable[[str], object] | None = None) -> object:
    """Declare an option with a number; None means the default, which `help` names."""
    return typer.Option(*names, metavar="N", help=help, parser=parser)


def token_bias(text: str) -> tuple[int, float]:
    """Parse a token id and its bias, as in 15043+1.5 or 15043-inf. Raises ValueError."""
    token, sign, bias = text.partition("+") if "+" in text else text.partition("-")
    try:
        if not token.isdecimal() or not bias[:1].isalnum() or math.isnan(amount := float(bias)):
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} is not a token id and a bias such as 15043+1.5 or 15043-inf") from None
    return int(token), -amount if sign == "-" else amount


@group
class ExactSampling:
    """More sampling options. A test compares the defaults in the help with those of SamplingOptions."""

    repeat_last_n: Annotated[
        int | None, number("--repeat-last-n", help="Apply the penalties to the last N tokens; -1: all.  [default: 64]")
    ] = None
    top_n_sigma: Annotated[
        float | None,
        number(
            "--top-n-sigma",
            "--top-nsigma",
            help="Top-n-sigma: drop logits over N standard deviations below the largest; 0: off.  [default: -1.0]",
        ),
    ] = None
    xtc_probability: Annotated[
        float | None,
        number("--xtc-probability", help="XTC: probability of excluding the top choices; 0: off.  [default: 0.0]"),
    ] = None
    xtc_threshold: Annotated[
        float | None,
        number(
            "--xtc-threshold",
            help="XTC: minimum probability of a top choice; the least likely top choice is kept.  [default: 0.1]",
        ),
    ] = None
    dynatemp_range: Annotated[
        float | None,
        number(
            "--dynatemp-range",
            help="Dynamic temperature: vary --temp by up to N, by the entropy; 0: off.  [default: 0.0]",
        ),
    ] = None
    dynatemp_exponent: Annotated[
        float | None, number("--dynatemp-exp", help="Dynamic temperature: exponent of the entropy.  [default: 1.0]")
    ] = None
    dry_multiplier: Annotated[
        float | None,
        number("--dry-multiplier", help="DRY: strength of the penalty on repeated sequences; 0: off.  [default: 0.0]"),
    ] = None
    dry_base: Annotated[
        float | None,
        number(
            "--dry-base", help="DRY: factor by which each further repeated token raises the penalty.  [default: 1.75]"
        ),
    ] = None
    dry_allowed_length: Annotated[
        int | None,
        number("--dry-allowed-length", help="DRY: do not penalize repeated sequences of up to N tokens.  [default: 2]"),
    ] = None
    dry_penalty_last_n: Annotated[
        int | None,
        number("--dry-penalty-last-n", help="DRY: look for repetitions in the last N tokens; -1: all.  [default: 64]"),
    ] = None
    dry_sequence_breakers: Annotated[
        list[str] | None,
        typer.Option(
            "--dry-sequence-breaker",
            metavar="TEXT",
            help='DRY: text that ends a sequence; none: no text does.  [repeatable]  [default: a line break, :, ", *]',
        ),
    ] = None
    mirostat: Annotated[
        int | None,
        number(
            "--mirostat",
            help="Mirostat 1 or 2, in place of top-k, top-p and the like; 0: off.  [default: 0]",
        ),
    ] = None
    mirostat_tau: Annotated[
        float | None, number("--mirostat-ent", help="Mirostat: target surprise (tau), in bits.  [default: 5.0]")
    ] = None
    mirostat_eta: Annotated[
        float | None, number("--mirostat-lr", help="Mirostat: learning rate (eta).  [default: 0.1]")
    ] = None
    adaptive_target: Annotated[
        float | None,
        number("--adaptive-target", help="Adaptive-p: prefer tokens of about this probability.  [default: -1.0, off]"),
    ] = None
    adaptive_decay: Annotated[
        float | None,
        number("--adaptive-decay", help="Adaptive-p: decay of the running average of probabilities.  [default: 0.9]"),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "-l",
            "--logit-bias",
            metavar="TOKEN+N",
            parser=token_bias,
            help="Add N to the logit of a token id, as in 15043+1.5; 15043-inf bans the token.  [repeatable]",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ignore the end-of-text token and keep generating.")
    ] = False
    samplers: Annotated[
        str | None,
        typer.Option(
            "--samplers",
            metavar="NAMES",
            help="Samplers to apply, in this order; infill is also available.  "
            "[default: penalties;dry;top_n_sigma;top_k;typical;top_p;min_p;xtc;temperature;adaptive_p]",
        ),
    ] = None
    letters: Annotated[
        str | None,
        typer.Option(
            "--sampling-seq",
            "--sampler-seq",
            metavar="LETTERS",
            help="Like --samplers, with one letter for each sampler.  [default: edskypmxta]",
        ),
    ] = None

    def as_fields(self) -> dict[str, Any]:
        """Return the given options by field of SamplingOptions. Raises UsageError."""
        fields = explicit_options(self)
        if self.dry_sequence_breakers:
            fields["dry_sequence_breakers"] = tuple(text for text in self.dry_sequence_breakers if text != "none")
        if self.logit_bias:
            fields["logit_bias"] = dict(fields["logit_bias"])
        if self.letters is not None:
            if self.samplers is not None:
                raise UsageError("give either --samplers or --sampling-seq, not both")
            from localllm.generation.sampling.options import steps_lettered

            fields["samplers"] = steps_lettered(fields.pop("letters"))
        return fields


@group
class Sampling:
    """Sampling.

    The fields are those of SamplingOptions, whose defaults the help repeats, because importing them would import NumPy.
    A test compares them.
    """

    seed: Annotated[
        int | None,
        number(
            "-s",
            "--seed",
            parser=number_or_default("-1"),
            help="Random seed; the same seed gives the same answer.  [default: -1, random]",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        number("--temp", "--temperature", help="Sampling temperature; 0 is greedy.  [default: 0.8]"),
    ] = None
    top_k: Annotated[
        int | None, number("--top-k", help="Top-k sampling: keep the N most likely tokens; 0: all.  [default: 40]")
    ] = None
    typical: Annotated[
        float | None,
        number(
            "--typical",
            "--typical-p",
            help="Locally typical sampling with total probability N; 1: off.  [default: 1.0]",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        number(
            "--top-p",
            help="Top-p sampling: keep the most likely tokens up to total probability N; 1: off.  [default: 0.95]",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        number(
            "--min-p",
            help="Min-p sampling: drop tokens less than N times as likely as the top token; 0: off.  [default: 0.05]",
        ),
    ] = None
    repeat_penalty: Annotated[
        float | None, number("--repeat-penalty", help="Repetition penalty on recent tokens; 1: off.  [default: 1.0]")
    ] = None
    presence_penalty: Annotated[
        float | None,
        number(
            "--presence-penalty", help="Presence penalty: subtract N from the logits of recent tokens.  [default: 0.0]"
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        number("--frequency-penalty", help="Frequency penalty: subtract N for each recent occurrence.  [default: 0.0]"),
    ] = None
