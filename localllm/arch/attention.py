"""Compute grouped-query attention, as most families have it, from the layer's input to the heads' outputs."""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import PagedState
from localllm.arch.metadata import HyperparameterReader, format_value
from localllm.arch.rope import RopeParameters, read_base, read_rope
from localllm.arch.verbs import Activation, AttentionScores, Builder, Routing
from localllm.arch.weights import Weight, Weights
from localllm.errors import ModelError
from localllm.frozen import frozen

RMS_EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"  # RMSNorm, LayerNorm


@frozen
class AttentionHyperparameters:
    """Head counts by layer, head dimensions and RoPE of grouped-query attention."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int  # of queries and keys
    rope: RopeParameters
    value_dim: int


def read_attention(
    fields: HyperparameterReader, interleaved: bool, every_layer: bool = True, own_values: bool = False
) -> AttentionHyperparameters:
    """Read the attention.* and rope.* keys. Raises ModelError.

    every_layer: every layer has key-value heads.  own_values: values may be shorter than keys.
    """
    layers, width = fields.read_layer_count(), fields.read_count("embedding_length")
    heads = fields.read_counts("attention.head_count", layers)
    is_given = fields.read_raw("attention.head_count_kv") is not None
    kv_heads = fields.read_counts("attention.head_count_kv", layers, None if every_layer else 0) if is_given else heads
    for count, kv_count in zip(heads, kv_heads, strict=True):
        if kv_count and count % kv_count:
            raise fields.make_error(
                f"attention.head_count {count} is not divisible by attention.head_count_kv {kv_count}"
            )
    if fields.read_raw("attention.key_length") is None and width % heads[0]:
        raise fields.make_error(f"embedding_length {width} is not divisible by attention.head_count {heads[0]}")
    head_dim = fields.read_count("attention.key_length", width // heads[0])
    value_dim = fields.read_count("attention.value_length", head_dim)
    if not own_values and value_dim != head_dim:
        raise fields.make_unsupported_error("attention.value_length must equal attention.key_length")
    return AttentionHyperparameters(heads, kv_heads, head_dim, read_rope(fields, head_dim, interleaved), value_dim)


@frozen
class TransformerHyperparameters(Hyperparameters):
    """Hyperparameters of a model that has attention in every layer."""

    attention: AttentionHyperparameters
    epsilon: float  # of its norms
    routing: Routing | None = field(default=None, kw_only=True)  # of tokens to experts

    @classmethod
    def read_shared_fields(
        cls,
        fields: HyperparameterReader,
        interleaved: bool,
        epsilon: str = RMS_EPSILON,
        rotates_all: bool = False,
        own_values: bool = False,
    ) -> dict[str, Any]:
        """Read the arguments that all subclasses share, by their names. Raises ModelError.

        rotates_all: refuse a file whose RoPE does not rotate whole heads.
        """
        attention = read_attention(fields, interleaved, own_values=own_values)
        if rotates_all and attention.rope.dims != attention.head_dim:
            problem = f"must be {attention.head_dim}, the head dimension (found {attention.rope.dims})"
            raise fields.make_error(f"{fields.format_key('rope.dimension_count')} {problem}")
        return {**fields.read_common_fields(), "attention": attention, "epsilon": fields.read_epsilon(epsilon)}

    @property
    def scale(self) -> float:
        """The scale of the scores."""
        return self.attention.head_dim**-0.5

    def get_window(self, layer: int) -> int | None:
        """Return the size of a layer's attention window in tokens, None for none."""
        return None

    def get_lookahead(self, layer: int) -> int:
        """Return the number of later tokens that a token attends to, 0 in a causal layer."""
        return 0

    def get_rope(self, layer: int) -> RopeParameters | None:
        """Return the RoPE of a layer's queries and keys, None for none."""
        return self.attention.rope

    def list_states(self) -> Sequence[PagedState]:
        """Return the KV states of all layers."""
        a = self.attention
        return [
            PagedState(layer, kv_heads, a.head_dim, a.value_dim, self.get_window(layer))
            for layer, kv_heads in enumerate(a.kv_heads[: self.layers])
        ]


@frozen
class WindowedTransformerHyperparameters(TransformerHyperparameters):
    """Hyperparameters of a model with sliding attention windows in some layers.

    Attributes:
        windows: each layer's window in tokens; None attends to all earlier tokens.
    """

    windows: tuple[int | None, ...]

    def get_window(self, layer: int) -> int | None:
        return self.windows[layer]


@frozen
class LocalRopeTransformerHyperparameters(WindowedTransformerHyperparameters):
    """Hyperparameters of a model whose windowed layers rotate by `local_rope`, the others by `attention.rope`."""

    local_rope: RopeParameters

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.local_rope if self.windows[layer] else self.attention.rope


def read_local_rope(fields: HyperparameterReader, rope: RopeParameters) -> RopeParameters:
    """Return the RoPE of windowed layers: `rope`, with the base of rope.freq_base_swa if the file has it.

    Raises ModelError.
    """
    return replace(rope, base=read_base(fields, "rope.freq_base_swa", rope.base))


def read_local_rope_dims(fields: HyperparameterReader, rope: RopeParameters) -> RopeParameters:
    """Read the RoPE of windowed layers like read_local_rope, and rope.dimension_count_swa.

    Raises ModelError.
    """
    dims = fields.read_count("rope.dimension_count_swa", rope.dims)
    if dims > rope.head_dim or dims % 2:
        expected = f"even and at most {rope.head_dim}, the head dimension (found {dims})"
        raise fields.make_error(f"{fields.format_key('rope.dimension_count_swa')} must be {expected}")
    for name in ("attention.key_length_swa", "attention.value_length_swa"):
        if fields.read_count(name, rope.head_dim) != rope.head_dim:
            raise fields.make_unsupported_error(f"{fields.format_key(name)} is not supported in {fields.arch} models")
    return replace(read_local_rope(fields, rope), dims=dims)


def read_windows(
    fields: HyperparameterReader, period: int | None, default: int | None = None, all_first: bool = False
) -> tuple[int | None, ...]:
    """Read each layer's window in tokens, None for all tokens. Raises ModelError.

    In every group of `period` layers the last one attends to all tokens, or the first one if `all_first`. A file may
    have its own period, 0 for windows everywhere, or a list of the layers with a window (and must, if `period` is
    None). default: the window of a file without one, 0 for none.
    """
    layers, name = fields.read_layer_count(), "attention.sliding_window_pattern"
    window = fields.read_count("attention.sliding_window", default) or None
    pattern = fields.read_raw(name)
    if isinstance(pattern, np.ndarray):
        return tuple(window if has_window else None for has_window in pattern)
    if period is None:
        raise fields.make_error(f"{fields.format_key(name)} must be a list of layers (found {format_value(pattern)})")
    period = fields.read_count(name, 0 if pattern == 0 else period)
    seeing = 0 if all_first else period - 1
    return tuple(None if period and layer % period == seeing else window for layer in range(layers))


def project_qkv(b: Builder, w: Weights, h: TransformerHyperparameters, layer: int, x: Activation) -> list[Activation]:
    """Compute queries, keys and values, from three matrices or a fused one."""
    a, fused = h.attention, w.get("attn_qkv")
    rows = a.heads[layer] * a.head_dim, a.kv_heads[layer] * a.head_dim, a.kv_heads[layer] * a.value_dim
    parts = fused.split(*rows) if fused else (w.attn_q, w.attn_k, w.attn_v)
    return [b.linear(x, part) for part in parts]


def select_rope_factors(b: Builder, w: Weights, h: TransformerHyperparameters) -> Weight | None:
    """Return the tensor that divides RoPE's frequencies.

    LongRoPE has two, chosen by the context (Ding et al. 2024).
    """
    if factors := w.get("rope_freqs"):
        return factors
    if w.get("rope_factors_short") or w.get("rope_factors_long"):
        short, long = w.rope_factors_short, w.rope_factors_long
        return b.select_by_context(short, long.require_shape(*short.shape), h.attention.rope.original_context)
    return None


def attend(
    b: Builder,
    h: TransformerHyperparameters,
    state: PagedState,
    q: Activation,
    k: Activation,
    v: Activation,
    factors: Weight | None = None,
    **scores: Any,
) -> Activation:
    """Rotate queries and keys, and compute the heads' outputs, [tokens, heads * value_dim].

    scores: fields of AttentionScores that the hyperparameters do not have.
    """
    q, k = rotate_heads(b, h, state.layer, q, k, factors)
    heads, lookahead = h.attention.heads[state.layer], h.get_lookahead(state.layer)
    return b.attend(q, k, v, state, AttentionScores(heads, h.scale, lookahead=lookahead, **scores))


def rotate_heads(
    b: Builder, h: TransformerHyperparameters, layer: int, q: Activation, k: Activation, factors: Weight | None = None
) -> tuple[Activation, Activation]:
    """Apply the layer's RoPE to queries and keys, if it has one. Raises ModelError if factors are missing."""
    rope = h.get_rope(layer)
    if rope is None:
        return q, k
    if rope.by_factors and not factors:
        raise ModelError("the tensors rope_factors_long and rope_factors_short of longrope scaling are missing")
    return b.rope(q, rope, b.positions, factors), b.rope(k, rope, b.positions, factors)


def gate_heads(
    b: Builder, h: TransformerHyperparameters, state: PagedState, x: Activation, gates: Activation
) -> Activation:
    """Multiply each head's output by its gate, [tokens, heads]."""
    return scale_heads(b, x, gates, h.attention.heads[state.layer], state.value_dim)


def scale_heads(b: Builder, x: Activation, factors: Activation, heads: int, dim: int) -> Activation:
    """Scale each head of `dim` columns by its factor, [tokens, heads]."""
    every, repeats = factors, 1
    while 2 * repeats <= dim:
        every, repeats = b.concat_heads(every, every, heads), 2 * repeats
    if remainder := dim - repeats:
        every = b.concat_heads(every, b.slice_columns(every, 0, remainder, repeats), heads)
    return b.multiply(x, every)


def normalize_heads(
    b: Builder, w: Weights, h: TransformerHyperparameters, q: Activation, k: Activation
) -> tuple[Activation, Activation]:
    """Normalize each head of queries and keys by its root mean square (Henry et al. 2020)."""
    head_dim = h.attention.head_dim
    of_q, of_k = w.attn_q_norm.require_shape(head_dim), w.attn_k_norm.require_shape(head_dim)
    return b.rms_norm(q, of_q, h.epsilon, head_dim), b.rms_norm(k, of_k, h.epsilon, head_dim)


def normalize_queries_and_keys(
    b: Builder, w: Weights, h: TransformerHyperparameters, q: Activation, k: Activation
) -> list[Activation]:
    """Normalize the rows of queries and keys, all heads together, by a layer norm if the file has one."""
    norms = [w.get("attn_q_norm"), w.get("attn_k_norm")]
    return [b.layer_norm(x, norm, h.epsilon) if norm else x for x, norm in zip((q, k), norms, strict=True)]


def normalize_heads_by_layer_norm(
    b: Builder, w: Weights, h: TransformerHyperparameters, q: Activation, k: Activation
) -> list[Activation]:
    """Normalize each head of queries and keys by its own layer norm if the file has such norms."""
    norms, head_dim = [w.get("attn_q_norm"), w.get("attn_k_norm")], h.attention.head_dim
    return [
        b.layer_norm(x, norm.require_shape(norm.shape[0], head_dim).flatten(), h.epsilon, head_dim) if norm else x
        for x, norm in zip((q, k), norms, strict=True)
    ]
