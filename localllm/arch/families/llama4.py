"""Llama 4 (Meta 2025).

Unlike llama: every fourth layer has full attention without RoPE, and scales queries by position. The others attend
within chunks, and normalize queries and keys after RoPE, without weights. Some layers have experts and a shared
one; the sigmoids of their scores multiply the experts' inputs.
"""

from collections.abc import Sequence

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    project_qkv,
    read_local_rope,
    read_windows,
    select_rope_factors,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    HyperparameterReader,
    PagedState,
    RopeParameters,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, apply_shared_expert, read_routing

CHUNK = 8192  # tokens
TEMPERATURE, TEMPERATURE_LENGTH = 0.1, 8192  # slope and length of scale_by_position
EXPERTS_OF_MAVERICK = 128  # Maverick normalizes neither queries nor keys


@frozen
class Llama4Hyperparameters(LocalRopeTransformerHyperparameters):
    """The hyperparameters of Llama 4; attention windows are chunks."""

    normed: bool

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.local_rope if self.windows[layer] or not any(self.windows) else None

    def list_states(self) -> Sequence[PagedState]:
        return [
            PagedState(
                layer, kv_heads, self.attention.head_dim, self.attention.head_dim, self.windows[layer], chunked=True
            )
            for layer, kv_heads in enumerate(self.attention.kv_heads)
        ]


def read(fields: HyperparameterReader) -> Llama4Hyperparameters:
    """Read the hyperparameters. A sliding window of 0 means no chunks, and RoPE in all layers.

    Raises ModelError.
    """
    key, common = "attention.sliding_window", Llama4Hyperparameters.read_shared_fields(fields, interleaved=True)
    chunk = CHUNK if fields.read_raw(key) is None else fields.read_count(key, 0)
    if chunk not in (0, CHUNK):
        raise fields.make_error(f"{fields.format_key(key)} must be {CHUNK} or 0 (found {chunk})")
    return Llama4Hyperparameters(
        **common,
        windows=read_windows(fields, period=4, default=chunk),
        local_rope=read_local_rope(fields, common["attention"].rope),
        routing=read_routing(fields, SIGMOID, normalized=False, weighs_inputs=True),
        normed=fields.read_count("expert_count", 0) != EXPERTS_OF_MAVERICK,
    )


def forward(b: Builder, w: Weights, h: Llama4Hyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: Llama4Hyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(compute_attention(b, h, state, q, k, v, factors), w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_shared_expert))


def compute_attention(
    b: Builder,
    h: Llama4Hyperparameters,
    state: PagedState,
    q: Activation,
    k: Activation,
    v: Activation,
    factors: Weight | None,
) -> Activation:
    """Compute the heads' outputs, with scaled queries in layers without RoPE."""
    if rope := h.get_rope(state.layer):
        q, k = b.rope(q, rope, b.positions, factors), b.rope(k, rope, b.positions, factors)
        if h.normed:
            head_dim = h.attention.head_dim
            q, k = b.rms_norm(q, None, h.epsilon, head_dim), b.rms_norm(k, None, h.epsilon, head_dim)
    else:
        q = b.scale_by_position(q, b.positions, TEMPERATURE, TEMPERATURE_LENGTH, offset=1)
    return b.attend(q, k, v, state, AttentionScores(h.attention.heads[state.layer], h.scale))


CHECKPOINTS = {
    "Llama4ForCausalLM Llama4ForConditionalGeneration": {
        "layer": "attention norms", "parts": {"dense": ("gated", "experts:feed_forward.experts shared_expert")},
        "sees": True, "scalings": "linear yarn llama3",
        "only": {
            "num_experts_per_tok": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        "reads": {"intermediate_size": "1 * intermediate_size_mlp"}, "sizes": {"step": "interleave_moe_layer_step=1"},
        "amounts": {"vocab_size": "vocab", "rope.dimension_count": "head_dim", "interleave_moe_layer_step": "step"},
        "read": "@llama.read_llama4", "defaults": {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    },
}  # fmt: skip
