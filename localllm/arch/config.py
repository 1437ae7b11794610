"""A model's hyperparameters, read from the file's metadata and checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf_header import shown

MOST, MOST_LAYERS = 1 << 24, 4096  # no dimension of a real model is larger


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: which dimensions turn, and how fast."""

    dims: int  # dimensions of a head that are rotated, in pairs
    base: float
    factor: float  # how much the context is stretched beyond the original one
    yarn: bool
    original_context: int
    magnitude: float  # multiplies cosine and sine

    def frequencies(self, factors: np.ndarray | None = None) -> np.ndarray:
        """Radians per position, float64 [dims / 2]; `factors` (same shape) divide them.

        YaRN (Peng et al. 2023) stretches slow pairs, keeps fast ones, and blends between.
        """
        pairs = np.arange(self.dims // 2)
        plain = self.base ** (-2.0 * pairs / self.dims)
        if factors is not None:
            plain = plain / factors
        stretched = plain / self.factor
        if not self.yarn:
            return stretched
        low, high = self._pair_turning(32.0), self._pair_turning(1.0)
        low, high = max(math.floor(low), 0), min(math.ceil(high), self.dims - 1)
        keep = 1 - np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
        return stretched * (1 - keep) + plain * keep

    def _pair_turning(self, turns: float) -> float:
        """The pair (a fraction) that turns so often within the original context."""
        return self.dims * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.base))


@dataclass(frozen=True)
class Config:
    """Hyperparameters; lengths count floats, context counts tokens."""

    arch: str
    context: int  # trained for
    layers: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    rope: Rope
    experts: int

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], path: str = "model") -> "Config":
        """Read the keys that begin with the architecture's name. Raises ModelError."""
        fields = Fields(metadata, path)
        width, heads = fields.count("embedding_length"), fields.count("attention.head_count")
        kv_heads = fields.count("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise ModelError(f"{path}: {heads} attention heads cannot share {kv_heads} key-value heads")
        head_dim = fields.count("attention.key_length", width // heads or None)
        if fields.count("attention.value_length", head_dim) != head_dim:
            raise ModelError(f"{path}: keys and values of different lengths are not supported")
        tokens = metadata.get("tokenizer.ggml.tokens")
        layers = fields.count("block_count")
        if layers > MOST_LAYERS:
            raise ModelError(f"{path}: {layers} layers are more than any model has")
        context = fields.count("context_length")
        return cls(
            arch=fields.arch,
            context=context,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=len(tokens) if isinstance(tokens, list) and tokens else fields.count("vocab_size"),
            epsilon=fields.number("attention.layer_norm_rms_epsilon", fields.raw("attention.layer_norm_epsilon")),
            rope=read_rope(fields, head_dim, context),
            experts=fields.count("expert_count", 0),
        )


def show(value: Any) -> str:
    """A metadata value fit for a message: one line, not long."""
    return shown(str(value))


class Fields:
    """Access to the architecture's metadata keys, with checks."""

    def __init__(self, metadata: Mapping[str, Any], path: str):
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelError(f"{path}: no text general.architecture in the metadata; not a language model?")
        self.metadata, self.path, self.arch = metadata, path, arch
        self.prefix = shown(arch)

    def raw(self, name: str, default: Any = None) -> Any:
        """The value of <architecture>.<name>."""
        return self.metadata.get(f"{self.arch}.{name}", default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of sensible size, above 0 unless the default is 0."""
        value = self.raw(name, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()  # one value per layer, all the same
        least = 0 if default == 0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
            raise ModelError(
                f"{self.path}: {self.prefix}.{name} should be a number from {least} to {MOST}, is {show(value)}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        value = self.raw(name, default)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ModelError(f"{self.path}: {self.prefix}.{name} should be a positive number, is {show(value)}")
        return float(value)


def read_rope(fields: Fields, head_dim: int, context: int) -> Rope:
    """The rope.* keys as llama.cpp understands them: a factor without a type is linear scaling."""
    dims = fields.count("rope.dimension_count", head_dim)
    if dims > head_dim or dims % 2:
        raise ModelError(f"{fields.path}: cannot rotate {dims} dimensions of a head of {head_dim}")
    factor = fields.number("rope.scaling.factor", 0.0) or fields.number("rope.scale_linear", 0.0) or 1.0
    kind = fields.raw("rope.scaling.type", "linear")
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelError(f"{fields.path}: rope scaling {show(kind)} is not supported")
    yarn = kind == "yarn"
    base = fields.number("rope.freq_base", 10000.0)
    if base <= 1:
        raise ModelError(f"{fields.path}: {fields.prefix}.rope.freq_base should be above 1, is {base}")
    magnitude = fields.number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor) if yarn else 1)
    original = fields.count("rope.scaling.original_context_length", context)
    return Rope(dims, base, 1.0 if kind == "none" else factor, yarn, original, magnitude)
