"""Options of quantize, in groups."""

import os
from typing import TYPE_CHECKING

from localllm.cli.parameters import option, option_group
from localllm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from localllm.quant.formats import Recipe
    from localllm.quant.recipes import RecipeOptions
    from localllm.quantizing.metadata_edits import MetadataEdits
    from localllm.quantizing.splitting import SplitLimits


@option_group("Tensor formats")
class TensorFormatFlags:
    """Options of `quantize` that choose the format of each tensor."""

    pure: bool = option("--pure", "Use the same format for all tensors, without a mixture.")
    tensor_type: list[str] | None = option(
        "--tensor-type", "Use FORMAT for tensors whose name matches REGEX.  [repeatable]", "REGEX=FORMAT"
    )
    tensor_type_file: str | None = option(
        "--tensor-type-file", "Read REGEX=FORMAT pairs, separated by white space, from FILE.", "FILE"
    )
    output: str | None = option("--output-tensor-type", "Use this format for the output tensor.", "FORMAT")
    embedding: str | None = option(
        "--token-embedding-type", "Use this format for the token embedding tensor.", "FORMAT"
    )
    leave_output_tensor: bool = option("--leave-output-tensor", "Do not quantize the output tensor.")
    prune_layers: str | None = option("--prune-layers", "Remove these layers, and renumber the others.", "N,N,...")

    def to_options(self) -> "RecipeOptions":
        from localllm.files.text_file import read_text
        from localllm.quant.recipes import RecipeOptions
        from localllm.quantizing.quantize import parse_format, parse_patterns

        patterns = parse_patterns(self.tensor_type or ())
        if name := self.tensor_type_file:
            patterns += parse_patterns(read_text(name).split(), f"{name}:")
        return RecipeOptions(
            pure=self.pure,
            output=parse_format(self.output) if self.output else "",
            embedding=parse_format(self.embedding) if self.embedding else "",
            keep_output=self.leave_output_tensor,
            patterns=patterns,
        )


@option_group("Importance matrix")
class ImportanceFlags:
    """Options of `quantize` for an importance matrix."""

    imatrix: str | None = option(
        "--imatrix", "Use this importance matrix of `localllm imatrix` or llama-imatrix.", "FILE"
    )
    include_weights: list[str] | None = option(
        "--include-weights",
        "Use the importance matrix only for tensors whose name contains TEXT.  [repeatable]",
        "TEXT",
    )
    exclude_weights: list[str] | None = option(
        "--exclude-weights",
        "Do not use the importance matrix for tensors whose name contains TEXT.  [repeatable]",
        "TEXT",
    )


@option_group("Calibration")
class CalibrationFlags:
    """Options of `quantize` that calibrate, or choose formats by measured sensitivity."""

    calibrate: bool = option(
        "--calibrate",
        "Run the model on the TEXT files, or on a built-in mixture, and minimize its matrices' output error.",
    )
    file_size: str | None = option(
        "--size",
        "With --calibrate: choose formats by measured sensitivity for this size, e.g. 3.5GB; own: TYPE's size.",
        "SIZE",
    )
    bits: float | None = option("--bpw", "Like --size, but in bits per weight.", "BITS")
    formats_file: str | None = option(
        "--plan", "Use the tensor formats of FILE; with --size or --bpw, write them to FILE.", "FILE"
    )

    @property
    def has_size(self) -> bool:
        return self.file_size is not None or self.bits is not None


@option_group("Several types")
class TypeSetFlags:
    """Options of `quantize` that make files of several types at once."""

    types: str | None = option("--types", "Make files of these types, reading the input once.", "TYPE,...")
    ladder: bool = option("--ladder", "Make the usual types, from Q8_0 to Q2_K; with --imatrix down to IQ2_M.")
    as_json: bool = option("--json", "Print the table of files as JSON.")
    as_markdown: bool = option("--md", "Print the table in Markdown, for a model card.")
    base: str | None = option(
        "--base --kl-divergence-base",
        "Measure each file's KL divergence from the logits that `perplexity --save-logits` saved. With --adapter: the "
        "model that the adapter is for.",
        "FILE",
    )

    @property
    def has_several(self) -> bool:
        """Return whether several types are requested. Raises UsageError for options that need several types."""
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

    def parse_recipes(self, has_importance: bool) -> "list[Recipe]":
        from localllm.quantizing.quantize_set import parse_types

        return parse_types(self.types, has_importance)

    def arguments(
        self, words: tuple[str, ...], calibration: CalibrationFlags
    ) -> tuple[tuple[str, str | None], tuple[str, ...] | None]:
        """Return IN, OUT (optional), and the calibration files. Raises UsageError."""
        from localllm.quantizing.quantize import find_type
        from localllm.quantizing.quantize_set import TYPE_PLACEHOLDER

        if calibration.has_size or calibration.formats_file is not None:
            raise UsageError("--size, --bpw and --plan choose the formats of a single file: give one TYPE")
        source, *after_source = words
        second = after_source[0] if after_source else ""
        is_out = bool(after_source) and (
            TYPE_PLACEHOLDER in second or os.path.isdir(second) or not calibration.calibrate
        )
        out = after_source.pop(0) if is_out else None
        if out is not None and find_type(out):
            raise UsageError(f"{out}: give either TYPE or several types with --types or --ladder")
        if after_source and not calibration.calibrate:
            raise UsageError("expected IN [OUT], with --types or --ladder")
        return (source, out), tuple(after_source) if calibration.calibrate else None


@option_group("Metadata")
class MetadataFlags:
    """Options that change a file's metadata."""

    set_metadata: list[str] | None = option(
        "--set-metadata",
        'Set a key to a string, number, bool or array: general.tags=\'["chat", "code"]\'. KEY=TYPE:VALUE sets '
        "the type: u32, f32, bool, str, ..., str[].  [repeatable]",
        "KEY=VALUE",
    )
    remove_metadata: list[str] | None = option(
        "--remove-metadata", "Remove a key, or all keys that match a pattern with *.  [repeatable]", "KEY"
    )
    chat_template_file: str | None = option(
        "--chat-template-file", "Write this chat template (Jinja) to the model.", "FILE"
    )

    def edits(self, packed: "Mapping[str, object]") -> "MetadataEdits":
        """Return the changes to this metadata. Raises UsageError, LocalllmError."""
        from localllm.quantizing.metadata_edits import resolve_edits

        return resolve_edits(self.set_metadata or (), self.remove_metadata or (), self.chat_template_file, packed)

    @property
    def is_empty(self) -> bool:
        return not (self.set_metadata or self.remove_metadata or self.chat_template_file)


@option_group("Split files")
class SplitFlags:
    """Options that split the output into several files."""

    split_max_size: str | None = option(
        "--split-max-size", "Limit the size of a file's tensors, e.g. 45G or 800M.", "SIZE"
    )
    split_max_tensors: int | None = option("--split-max-tensors", "Write at most N tensors to a file.", "N")
    no_tensor_first_split: bool = option("--no-tensor-first-split", "Write only metadata to the first file.")

    def limits(self) -> "SplitLimits | None":
        """Return the limits, or None. Raises UsageError."""
        from localllm.quantizing.splitting import DEFAULT_MAX_TENSORS, SplitLimits, parse_bytes

        tensors, nbytes = self.split_max_tensors, self.split_max_size
        if tensors is not None and nbytes is not None:
            raise UsageError("give either --split-max-size or --split-max-tensors, not both")
        if tensors is not None and tensors < 1:
            raise UsageError(f"--split-max-tensors must be 1 or greater, not {tensors}")
        if nbytes is not None:
            return SplitLimits(0, parse_bytes(nbytes, "--split-max-size"), self.no_tensor_first_split)
        if tensors is None and not self.no_tensor_first_split:
            return None
        return SplitLimits(DEFAULT_MAX_TENSORS if tensors is None else tensors, 0, self.no_tensor_first_split)
