"""Override a file's RoPE scaling at run time, as model cards describe for long contexts."""

from collections.abc import MutableMapping

from localllm.errors import UnsupportedError, UsageError
from localllm.frozen import frozen

KINDS = ("none", "linear", "yarn")


@frozen
class RopeScaling:
    """Values that replace the file's rope.* metadata, as llama.cpp's --rope-* options do; None keeps the file's.

    Attributes:
        kind: none, linear or yarn.
        factor: ratio of the new context to the original one.
        base: base of the frequencies.
        original_context: the context that the model was trained for before YaRN, in tokens.
    """

    kind: str | None = None
    factor: float | None = None
    base: float | None = None
    original_context: int | None = None

    def require_valid(self) -> None:
        """Raise UsageError for values out of range."""
        if self.kind is not None and self.kind not in KINDS:
            raise UsageError(f"rope_scaling must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {self.kind!r}")
        if self.factor is not None and not 1e-3 <= self.factor <= 1e6:
            raise UsageError(f"rope_scale must be from 0.001 to 1000000, not {self.factor:g}")
        if self.base is not None and not 1 < self.base <= 1e12:
            raise UsageError(f"rope_freq_base must be above 1 and at most 1e12, not {self.base:g}")
        if self.original_context is not None and self.original_context < 1:
            raise UsageError(f"yarn_orig_ctx must be at least 1 token, not {self.original_context}")

    def apply(self, metadata: MutableMapping[str, object], path: str) -> None:
        """Change a file's metadata in memory. Raises UnsupportedError for a model with attention windows.

        A YaRN factor other than the file's also sets the context, to the original one times the factor. In a model with
        attention windows, llama.cpp does not rescale some layers, and the metadata does not specify them.
        """
        prefix = f"{metadata.get('general.architecture')}."
        if metadata.get(f"{prefix}attention.sliding_window"):
            raise UnsupportedError(f"{path}: the RoPE scaling of models with attention windows cannot be changed")
        scaling, file_factor = f"{prefix}rope.scaling.", self._get_file_factor(metadata, prefix)
        kind = self.kind or metadata.get(f"{scaling}type", "linear")
        factor = 1.0 if kind == "none" else self.factor or file_factor
        metadata[f"{scaling}type"], metadata[f"{scaling}factor"] = kind, factor
        if self.base is not None:
            metadata[f"{prefix}rope.freq_base"] = self.base
        trained = metadata.get(f"{prefix}context_length")
        original = self.original_context or metadata.get(f"{scaling}original_context_length", trained)
        if kind == "yarn" and isinstance(original, int):
            metadata[f"{scaling}original_context_length"] = original
            if factor != file_factor:
                metadata[f"{prefix}context_length"] = int(original * factor)

    @staticmethod
    def _get_file_factor(metadata: MutableMapping[str, object], prefix: str) -> float:
        """Return the file's factor, 1 by default."""
        value = metadata.get(f"{prefix}rope.scaling.factor", metadata.get(f"{prefix}rope.scale_linear", 1.0))
        return float(value) if isinstance(value, int | float) and value else 1.0
