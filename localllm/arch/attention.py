"""Hyperparameters of attention that most families share."""

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.arch.fields import Fields
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.rope import Rope, read_rope
from localllm.arch.states import Paged


@dataclass(frozen=True)
class Attention:
    """Heads of one length, groups of which share keys and values; numbers of heads by layer."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    rope: Rope


def read_attention(fields: Fields, interleaved: bool) -> Attention:
    """The attention.* and rope.* keys. Raises ModelError."""
    layers, width = fields.layers(), fields.count("embedding_length")
    heads = fields.counts("attention.head_count", layers)
    given = fields.raw("attention.head_count_kv") is not None
    kv_heads = fields.counts("attention.head_count_kv", layers) if given else heads
    for count, kv_count in zip(heads, kv_heads, strict=True):
        if count % kv_count:
            raise fields.error(f"{count} attention heads cannot share {kv_count} key-value heads")
    head_dim = fields.count("attention.key_length", width // heads[0] or None)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.error("keys and values of different lengths are not supported")
    return Attention(heads, kv_heads, head_dim, read_rope(fields, head_dim, interleaved))


@dataclass(frozen=True)
class Transformer(Hyperparameters):
    """A model whose every layer attends, and normalizes by root mean squares."""

    attention: Attention
    epsilon: float

    @classmethod
    def shared_fields(cls, fields: Fields, interleaved: bool) -> dict:
        """The arguments that are read alike in all families. Raises ModelError."""
        epsilon = fields.number("attention.layer_norm_rms_epsilon")
        return {**fields.common(), "attention": read_attention(fields, interleaved), "epsilon": epsilon}

    def window(self, layer: int) -> int | None:
        """How many tokens a layer sees, None for all."""
        return None

    def states(self) -> Sequence[Paged]:
        """Keys and values of every layer."""
        a = self.attention
        return [
            Paged(layer, kv_heads, a.head_dim, a.head_dim, self.window(layer))
            for layer, kv_heads in enumerate(a.kv_heads)
        ]
