"""DeepSeek-V4 (DeepSeek-AI 2026).

Unlike DeepSeek-V3.2: a token has one row that is the key and the value of all heads, and attends to those in a sliding
window. In most layers it also attends, in the same softmax, to compressed rows of the past: gated means of blocks of
128 tokens, or of 4 tokens and the 4 before, of which an indexer selects some. RoPE on a row's end is undone in the
heads' outputs. Four residual streams as in GLM 5.3; the first layers route tokens to experts by their ids.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from localllm.arch.attention import RMS_EPSILON, read_attention
from localllm.arch.decoder import ignore_mtp_layers
from localllm.arch.families.deepseek2 import project_low_rank_queries
from localllm.arch.families.deepseek32 import rotate_tail
from localllm.arch.families.glm5_next import MixedStreamHyperparameters, enter_sublayer, read_mixed_streams
from localllm.arch.families.maple import make_limited_swiglu
from localllm.arch.families.step35 import read_activation_limits
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    HyperparameterReader,
    Hyperparameters,
    LatentState,
    RecurrentLayerState,
    RopeParameters,
    State,
    Weights,
)
from localllm.arch.feed_forward import (
    ROOT_OF_SOFTPLUS,
    apply_experts,
    apply_shared_expert,
    collect_expert_matrices,
    read_routing,
)
from localllm.arch.hyper_connections import compute_mixing_logits, concat_streams
from localllm.arch.rope import read_base
from localllm.arch.verbs import Routing
from localllm.frozen import frozen

CHOSEN, RATIOS = 4, (0, 4, 128)  # tokens of a block in layers with an indexer; of a block in any layer


class LayerStates(NamedTuple):
    """The states of a layer.

    Attributes:
        near: the tokens' rows.  far: the blocks' rows.
        last: the inputs of the layer and of the indexer for the last tokens, which may become part of the next block.
        choosing: the blocks' rows of the indexer.
    """

    near: LatentState
    far: LatentState | None = None
    last: RecurrentLayerState | None = None
    choosing: LatentState | None = None


@frozen
class DeepSeek4Hyperparameters(Hyperparameters):
    """The hyperparameters of DeepSeek-V4.

    Attributes:
        ratios: block sizes in tokens by layer, 0 for none.
        limits: by layer, limits of gates and up projections, of experts and dense networks.
        hashed: number of first layers that route tokens by their ids.  far: RoPE of layers with blocks.
    """

    epsilon: float
    heads: int
    dim: int
    window: int
    ratios: tuple[int, ...]
    near: RopeParameters
    far: RopeParameters
    index_heads: int
    index_dim: int
    count: int  # of blocks that an indexer selects
    groups: int  # of heads; a group's outputs share a low-rank projection
    narrow: int
    streams: MixedStreamHyperparameters
    routing: Routing
    hashed: int
    limits: tuple[tuple[float, ...], tuple[float, ...]]

    def list_states(self) -> Sequence[State]:
        return [state for layer in range(self.layers) for state in self.get_layer_states(layer) if state]

    def get_layer_states(self, layer: int) -> LayerStates:
        """Return a layer's states."""
        near, ratio = LatentState(layer, self.dim, self.dim, self.window), self.ratios[layer]
        if not ratio:
            return LayerStates(near)
        chooses, dims = ratio == CHOSEN, (self.dim, self.index_dim)
        shapes = tuple((2 * ratio - 1, 4 * dim) for dim in dims) if chooses else ((ratio - 1, 2 * self.dim),)
        index = LatentState(layer, self.index_dim, self.index_dim, is_index=True) if chooses else None
        return LayerStates(
            near, LatentState(layer, self.dim, self.dim, period=ratio), RecurrentLayerState(layer, shapes), index
        )


def read(fields: HyperparameterReader) -> DeepSeek4Hyperparameters:
    common, layers, attention = fields.read_common_fields(), fields.read_layer_count(), read_attention(fields, True)
    rope, ratios = attention.rope, fields.read_array("attention.compress_ratios", "biu", f"{layers} numbers").tolist()
    if len(ratios) < layers or not {*ratios} <= {*RATIOS}:
        raise fields.make_value_error("attention.compress_ratios", f"{layers} integers, each one of {RATIOS}")
    index_heads, index_dim, count = (
        fields.read_count(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k")
    )
    if {*attention.kv_heads} != {1} or len({*attention.heads}) > 1 or rope.dims >= min(attention.head_dim, index_dim):
        raise fields.make_error(
            f"rope.dimension_count {rope.dims} must be below the head dimensions {attention.head_dim} and {index_dim}, "
            "and attention.head_count_kv be 1"
        )
    if rope.by_factors:
        raise fields.make_unsupported_error("rope scaling longrope is not supported")
    base = read_base(fields, "attention.compress_rope_freq_base", None)
    rope = replace(rope, head_dim=rope.dims, magnitude=1.0)
    normalized, scale = fields.read_flag("expert_weights_norm"), fields.read_number("expert_weights_scale")
    routing = read_routing(fields, ROOT_OF_SOFTPLUS, normalized, scale or 1.0)
    fields.read_count("expert_gating_func")  # raises if it is missing
    if routing is None:
        raise fields.make_error(f"{fields.format_key('expert_count')} is missing")
    of_experts = read_activation_limits(fields, "swiglu_clamp_exp", layers)
    of_others = (
        read_activation_limits(fields, "swiglu_clamp_shexp", layers) if fields.has("swiglu_clamp_shexp") else of_experts
    )
    return DeepSeek4Hyperparameters(
        **common,
        epsilon=fields.read_epsilon(RMS_EPSILON),
        heads=attention.heads[0],
        dim=attention.head_dim,
        window=fields.read_count("attention.sliding_window"),
        ratios=tuple(ratios),
        near=rope.remove_scaling(rope.base),
        far=replace(rope, base=base),
        index_heads=index_heads,
        index_dim=index_dim,
        count=count,
        groups=fields.read_count("attention.output_group_count"),
        narrow=fields.read_count("attention.output_lora_rank"),
        streams=read_mixed_streams(fields),
        routing=routing,
        hashed=fields.read_integer("hash_layer_count", None, 0, layers),
        limits=(of_experts, of_others),
    )


def forward(b: Builder, w: Weights, h: DeepSeek4Hyperparameters) -> Activation:
    ignore_mtp_layers(b, w, h)
    x = concat_streams(b, [b.embed(w.token_embd, b.ids)] * h.streams.count)
    for layer in range(h.layers):
        block = w.get_layer(layer)
        y, add = enter_sublayer(b, block, h, x, "attn")
        x = add(compute_attention(b, block, h, layer, b.rms_norm(y, block.attn_norm, h.epsilon)))
        y, add = enter_sublayer(b, block, h, x, "ffn")
        x = add(apply_feed_forward(b, block, h, layer, b.rms_norm(y, block.ffn_norm, h.epsilon)))
    x = b.select(x, b.wanted)
    scales = w.output_hc_scale.require_shape(1)
    (gates,) = compute_mixing_logits(b, h.epsilon, h.streams.count, x, w.output_hc_fn, scales, w.output_hc_base)
    x = b.mix_streams(x, b.add_scalar(b.sigmoid(gates), h.streams.epsilon), h.streams.count)
    return b.linear(b.rms_norm(x, w.output_norm, h.epsilon), w.output)


def compute_attention(b: Builder, w: Weights, h: DeepSeek4Hyperparameters, layer: int, x: Activation) -> Activation:
    """Compute the heads' outputs, undo RoPE in them, and project them group by group."""
    rope, narrow = h.far if h.ratios[layer] else h.near, project_low_rank_queries(b, w, h.epsilon, x)
    q = b.rms_norm(b.linear(narrow, w.attn_q_b), None, h.epsilon, h.dim)
    k = b.rms_norm(b.linear(x, w.attn_kv), w.attn_kv_a_norm, h.epsilon)
    q, k = rotate_tail(b, rope, q, h.heads, h.dim), rotate_tail(b, rope, k, 1, h.dim)
    y = rotate_tail(
        b, replace(rope, is_inverse=True), attend_near_and_far(b, w, h, layer, q, k, narrow, x), h.heads, h.dim
    )
    matrix = w.attn_output_a.require_shape(h.groups * h.narrow, h.heads * h.dim // h.groups)
    return b.linear(b.head_linear(y, matrix.split_stacks(h.groups)), w.attn_output_b)


def attend_near_and_far(
    b: Builder,
    w: Weights,
    h: DeepSeek4Hyperparameters,
    layer: int,
    q: Activation,
    k: Activation,
    narrow: Activation,
    x: Activation,
) -> Activation:
    """Combine each head's outputs from the window and from blocks.

    Each is weighted by the sum of its exponentiated scores.
    """
    states, scores = h.get_layer_states(layer), AttentionScores(h.heads, h.dim**-0.5, sinks=w.attn_sinks)
    if not states.far:
        return b.attend(q, k, None, states.near, scores)
    near = b.attend(q, k, None, states.near, replace(scores, sinks=None, logs=True))
    k, picked = (
        compute_block_rows(b, w, h, states, "attn", x),
        select_blocks(b, w, h, states, narrow, x) if states.choosing else None,
    )
    far = b.attend(q, k, None, states.far, replace(scores, chosen=picked, logs=True))
    wide = h.heads * h.dim
    (near, of_near), (far, of_far) = (
        (b.slice_columns(y, 0, wide), b.slice_columns(y, wide, wide + h.heads)) for y in (near, far)
    )
    share = b.sigmoid(b.add(of_near, b.scale(of_far, -1.0)))
    return b.add(far, b.multiply_heads(b.add(near, b.scale(far, -1.0)), share))


def compute_block_rows(
    b: Builder, w: Weights, h: DeepSeek4Hyperparameters, states: LayerStates, name: str, x: Activation
) -> Activation:
    """Compute a block's row at its last token, with RoPE at the position of its first token."""
    assert states.far and states.last
    ratio, is_index = states.far.period, name == "indexer"
    rows, gates, places, norm = (w.require(f"{name}_compressor_{part}") for part in ("kv", "gate", "ape", "norm"))
    rows = b.concat_heads(b.linear(x, rows), b.linear(x, gates), 1)
    y = b.gated_mean(rows, places, states.last, int(is_index), 2 if states.choosing else 1)
    y = b.rms_norm(y, norm, h.epsilon)
    return rotate_tail(b, replace(h.far, position_offset=ratio - 1), y, 1, h.index_dim if is_index else h.dim)


def select_blocks(
    b: Builder, w: Weights, h: DeepSeek4Hyperparameters, states: LayerStates, narrow: Activation, x: Activation
) -> Activation:
    """Select the blocks that tokens attend to."""
    assert states.choosing
    q = rotate_tail(b, h.far, b.linear(narrow, w.require("indexer.attn_q_b")), h.index_heads, h.index_dim)
    k = compute_block_rows(b, w, h, states, "indexer", x)
    return b.select_keys(q, k, b.linear(x, w.require("indexer.proj")), states.choosing, h.count, CHOSEN)


def apply_feed_forward(b: Builder, w: Weights, h: DeepSeek4Hyperparameters, layer: int, x: Activation) -> Activation:
    """Apply the experts and a shared one, with clamped gates."""
    of_experts, of_others = (make_limited_swiglu(b, limits[layer]) for limits in h.limits)
    b.ignore(w.get_bias("exp_probs_b_vl"))  # the selection bias for images
    table = w.ffn_gate_tid2eid if layer < h.hashed else None
    bias = None if layer < h.hashed else w.require_exact("exp_probs_b.bias")
    choice = b.route(b.linear(x, w.ffn_gate_inp), h.routing, bias, table)
    return b.add(
        apply_experts(b, collect_expert_matrices(b, w, h.routing.experts), choice, x, of_experts),
        apply_shared_expert(b, w, x, of_others),
    )
