"""Options of quantize, in groups."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.parameters import group
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.quant.formats import Recipe
    from localllm.quant.recipes import Options


def several(name: str, metavar: str, help: str) -> object:
    """Declare a repeatable option."""
    return typer.Option(name, metavar=metavar, help=f"{help}  [repeatable]")


@group
class FormatGroup:
    """Tensor formats."""

    pure: Annotated[bool, typer.Option("--pure", help="Use the same format for all tensors, without a mixture.")] = (
        False
    )
    tensor_type: Annotated[
        list[str] | None,
        several("--tensor-type", "REGEX=FORMAT", "Format for tensors whose name matches REGEX."),
    ] = None
    tensor_type_file: Annotated[
        str | None,
        typer.Option(
            "--tensor-type-file", metavar="FILE", help="File of REGEX=FORMAT pairs, separated by white space."
        ),
    ] = None
    output: Annotated[
        str | None, typer.Option("--output-tensor-type", metavar="FORMAT", help="Format of the output tensor.")
    ] = None
    embedding: Annotated[
        str | None,
        typer.Option("--token-embedding-type", metavar="FORMAT", help="Format of the token embedding tensor."),
    ] = None
    leave_output_tensor: Annotated[
        bool, typer.Option("--leave-output-tensor", help="Do not quantize the output tensor.")
    ] = False
    prune_layers: Annotated[
        str | None,
        typer.Option("--prune-layers", metavar="N,N,...", help="Leave out these layers; the others are renumbered."),
    ] = None

    def to_options(self) -> "Options":
        """Return the formats that the user chose. Raises UsageError."""
        from localllm.files.text_file import read_text
        from localllm.quant.recipes import Options
        from localllm.quantizing.quantize import parse_format, parse_patterns

        patterns = parse_patterns(self.tensor_type or ())
        if name := self.tensor_type_file:
            patterns += parse_patterns(read_text(name).split(), f"{name}:")
        return Options(
            pure=self.pure,
            output=parse_format(self.output) if self.output else "",
            embedding=parse_format(self.embedding) if self.embedding else "",
            keep_output=self.leave_output_tensor,
            patterns=patterns,
        )


@group
class ImportanceGroup:
    """Importance matrix."""

    imatrix: Annotated[
        str | None,
        typer.Option(
            "--imatrix", metavar="FILE", help="Importance matrix, as `localllm imatrix` or llama-imatrix writes it."
        ),
    ] = None
    include_weights: Annotated[
        list[str] | None,
        several("--include-weights", "TEXT", "Use the importance matrix only for tensors whose name contains TEXT."),
    ] = None
    exclude_weights: Annotated[
        list[str] | None,
        several("--exclude-weights", "TEXT", "Do not use the importance matrix for tensors whose name contains TEXT."),
    ] = None


@group
class CalibrationGroup:
    """Calibration."""

    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Run the model on the TEXT files, or on a built-in mixture, and minimize its matrices' output error.",
        ),
    ] = False
    file_size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="With --calibrate: choose formats by measured sensitivity for this size, as 3.5GB; own: TYPE's size.",
        ),
    ] = None
    bits: Annotated[
        float | None, typer.Option("--bpw", metavar="BITS", help="Like --size, but in bits per weight.")
    ] = None
    formats_file: Annotated[
        str | None,
        typer.Option(
            "--plan", metavar="FILE", help="File of tensor formats to use; with --size or --bpw, file to write them to."
        ),
    ] = None

    @property
    def has_size(self) -> bool:
        return self.file_size is not None or self.bits is not None


@group
class LadderGroup:
    """Several types."""

    types: Annotated[
        str | None,
        typer.Option("--types", metavar="TYPE,...", help="Make files of these types, reading the input once."),
    ] = None
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Make the usual types, from Q8_0 to Q2_K; with --imatrix down to IQ2_M.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the table of files as JSON.")] = False
    as_markdown: Annotated[bool, typer.Option("--md", help="Print the table in Markdown, for a model card.")] = False
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            "--kl-divergence-base",
            metavar="FILE",
            help="Measure each file's KL divergence from the logits that `perplexity --save-logits` saved.",
        ),
    ] = None

    @property
    def are_several(self) -> bool:
        """Return whether several types are asked for. Raises UsageError for options that need several types."""
        are_several = self.types is not None or self.ladder
        if self.types is not None and self.ladder:
            raise UsageError("give either --types or --ladder, not both")
        if self.as_json and self.as_markdown:
            raise UsageError("give either --md or --json, not both")
        if not are_several and (self.as_json or self.as_markdown):
            raise UsageError("--json and --md need --types or --ladder")
        if not are_several and self.base is not None:
            raise UsageError("--base needs --types or --ladder; for one file: localllm perplexity --kl-divergence")
        return are_several

    def recipes(self, has_importance: bool) -> "list[Recipe]":
        """Return the types, each once. Raises UsageError."""
        from localllm.quantizing.ladder import parse_types

        return parse_types(self.types, has_importance)

    def arguments(
        self, words: tuple[str, ...], calibration: CalibrationGroup
    ) -> tuple[tuple[str, str | None], tuple[str, ...] | None]:
        """Return IN and OUT, which may be left out, and texts to calibrate on. Raises UsageError."""
        from localllm.quantizing.ladder import NAME
        from localllm.quantizing.quantize import find_type

        if calibration.has_size or calibration.formats_file is not None:
            raise UsageError("--size, --bpw and --plan choose the formats of one file: give one TYPE")
        source, *after_source = words
        out = (
            after_source.pop(0)
            if after_source and (NAME in after_source[0] or os.path.isdir(after_source[0]) or not calibration.calibrate)
            else None
        )
        if out is not None and find_type(out):
            raise UsageError(f"{out}: give either TYPE or several types with --types or --ladder")
        if after_source and not calibration.calibrate:
            raise UsageError("expected IN [OUT], with --types or --ladder")
        return (source, out), tuple(after_source) if calibration.calibrate else None
