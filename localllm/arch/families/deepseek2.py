"""DeepSeek-V2, V2-Lite, V3 and R1 (DeepSeek-AI 2024, arXiv 2405.04434, 2412.19437), Kimi K2, GLM-4.7-Flash.

Unlike llama: multi-head latent attention (MLA): keys and values of all heads are computed from one latent row, and a
token has one rotated key for all heads. Newer files have the keys' and values' matrices head by head; they are applied
to queries and results instead, so that only latent rows are cached. Older files have them fused, and each head's keys
and values are cached. The first layers have no experts.
"""

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from localllm.arch.attention import RMS_EPSILON
from localllm.arch.decoder import MtpOutput, apply_mtp_layer
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    HyperparameterReader,
    Hyperparameters,
    LatentState,
    PagedState,
    RopeParameters,
    Weight,
    Weights,
)
from localllm.arch.feed_forward import (
    SIGMOID,
    SOFTMAX,
    apply_feed_forward_or_experts,
    apply_shared_expert,
    read_file_routing,
)
from localllm.arch.rope import compute_yarn_magnitude, read_rope
from localllm.arch.verbs import Routing
from localllm.frozen import frozen

VOCABULARY_OF_GLM = 154880  # the first files of GLM-4.7-Flash do not say that scores are sigmoids


@frozen
class DeepSeek2Hyperparameters(Hyperparameters):
    """The hyperparameters of models with latent attention.

    Attributes:
        key_dim: dimension of a head's key without the rotated part.  value_dim: dimension of a head's value.
        latent: dimension of a latent row.  keeps_latent: whether latent rows are cached instead of keys and values.
        scale: of the scores.  temperature: slope of scale_by_position for queries, 0 for none.
    """

    epsilon: float
    heads: int
    key_dim: int
    value_dim: int
    latent: int
    keeps_latent: bool
    rope: RopeParameters
    scale: float
    routing: Routing | None
    temperature: float = field(default=0.0, kw_only=True)
    temperature_length: int = field(default=1, kw_only=True)

    def list_states(self) -> Sequence[LatentState | PagedState]:
        key_dim = self.key_dim + self.rope.dims
        if self.keeps_latent:
            return [LatentState(layer, self.latent + self.rope.dims, self.latent) for layer in range(self.layers)]
        return [PagedState(layer, self.heads, key_dim, self.value_dim) for layer in range(self.layers)]


def read(fields: HyperparameterReader) -> DeepSeek2Hyperparameters:
    temperature = fields.read_number("attention.temperature_scale", 0.0)
    return DeepSeek2Hyperparameters(
        **read_latent_attention(fields),
        temperature=temperature,
        temperature_length=fields.read_count("attention.temperature_length", None if temperature else 1),
        routing=read_file_routing(fields, SIGMOID if fields.vocab_size == VOCABULARY_OF_GLM else SOFTMAX),
    )


def read_latent_attention(fields: HyperparameterReader) -> dict[str, Any]:
    """Read the hyperparameters shared by models with latent attention. Raises ModelError."""
    keeps_latent = fields.read_raw("attention.key_length_mla") is not None
    suffix, dims = "_mla" if keeps_latent else "", fields.read_count("rope.dimension_count")
    key_dim, value_dim = (fields.read_count(f"attention.{side}_length{suffix}") for side in ("key", "value"))
    heads, latent = fields.read_count("attention.head_count"), fields.read_count("attention.kv_lora_rank")
    kv_heads = fields.read_count("attention.head_count_kv", heads)
    if key_dim <= dims or kv_heads != (1 if keeps_latent else heads):
        raise fields.make_error(
            f"the key dimension {key_dim} must exceed rope.dimension_count {dims}, and attention.head_count_kv be "
            f"{1 if keeps_latent else heads} (found {kv_heads})"
        )
    for side, length in (("key", latent + dims), ("value", latent)) if keeps_latent else ():
        if fields.read_count(f"attention.{side}_length", length) != length:
            raise fields.make_error(f"{fields.format_key(f'attention.{side}_length')} must be {length}")
    rope, sharpness = read_scaled_rope(fields, dims)
    return {
        **fields.read_common_fields(),
        "epsilon": fields.read_epsilon(RMS_EPSILON),
        "heads": heads,
        "key_dim": key_dim - dims,
        "value_dim": value_dim,
        "latent": latent,
        "keeps_latent": keeps_latent,
        "rope": rope,
        "scale": sharpness / math.sqrt(key_dim),
    }


def read_scaled_rope(fields: HyperparameterReader, dims: int) -> tuple[RopeParameters, float]:
    """Read RoPE, and the factor of the scores in a stretched context. Raises ModelError.

    Files have a tenth of the model's multiplier. With a multiplier, YaRN has no attention factor for the rotated
    dimensions; without one, and with linear scaling, scores get YaRN's usual factor, as in llama.cpp.
    """
    rope, multiplier = read_rope(fields, dims, True), fields.read_number("rope.scaling.yarn_log_multiplier", 0.0)
    if rope.by_factors:
        raise fields.make_unsupported_error("rope scaling longrope is not supported")
    length = fields.read_factor("rope.scaling.attn_factor", 1.0)
    if rope.yarn and multiplier:
        rope = replace(rope, magnitude=length)
    else:
        length *= compute_yarn_magnitude(rope.factor)
    return rope, (length * compute_yarn_magnitude(rope.factor, 10 * multiplier)) ** 2


def block(
    b: Builder, w: Weights, h: DeepSeek2Hyperparameters, state: LatentState | PagedState, x: Activation
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    y = attend_to_latents(b, w, h, state, y) if isinstance(state, LatentState) else attend_to_keys(b, w, h, state, y)
    x = b.add(x, b.linear(y, w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_shared_expert))


def draft(b: Builder, w: Weights, h: DeepSeek2Hyperparameters, hidden: Activation) -> MtpOutput:
    return apply_mtp_layer(b, w, h, hidden, block)


def project_latent(
    b: Builder, w: Weights, h: DeepSeek2Hyperparameters, x: Activation, factors: Weight | None = None
) -> list[Activation]:
    """Project queries (unrotated and rotated), the latent row, and the rotated key."""
    if w.get("attn_q_a"):
        return project_from_low_rank(
            b, w, h, b.linear(project_low_rank_queries(b, w, h.epsilon, x), w.attn_q_b), x, factors
        )
    return project_from_low_rank(b, w, h, b.linear(x, w.attn_q), x, factors)


def project_low_rank_queries(b: Builder, w: Weights, epsilon: float, x: Activation) -> Activation:
    """Compute the low-rank rows from which queries are projected."""
    return b.rms_norm(b.linear(x, w.attn_q_a), w.attn_q_a_norm, epsilon)


def project_from_low_rank(
    b: Builder, w: Weights, h: DeepSeek2Hyperparameters, q: Activation, x: Activation, factors: Weight | None = None,
    key_norm: Weight | None = None,
) -> list[Activation]:  # fmt: skip
    """Project from low-rank queries.

    key_norm: the norm of the rotated key, if any.
    """
    if h.temperature:
        q = b.scale_by_position(q, b.positions, h.temperature, h.temperature_length)
    both, period = b.linear(x, w.attn_kv_a_mqa), h.key_dim + h.rope.dims
    latent = b.rms_norm(b.slice_columns(both, 0, h.latent), w.attn_kv_a_norm, h.epsilon)
    key = b.slice_columns(both, h.latent, h.latent + h.rope.dims)
    key = b.rope(b.rms_norm(key, key_norm, h.epsilon) if key_norm else key, h.rope, b.positions, factors)
    rotated = b.rope(b.slice_columns(q, h.key_dim, period, period), h.rope, b.positions, factors)
    return [b.slice_columns(q, 0, h.key_dim, period), rotated, latent, key]


def attend_to_latents(
    b: Builder, w: Weights, h: DeepSeek2Hyperparameters, state: LatentState, x: Activation
) -> Activation:
    """Compute the heads' outputs from latent rows.

    Queries are multiplied by the keys' matrices, and results by the values' matrices.
    """
    plain, rotated, latent, key = project_latent(b, w, h, x)
    q = b.concat_heads(b.head_linear(plain, w.attn_k_b), rotated, h.heads)
    y = b.attend(q, b.concat_heads(latent, key, 1), None, state, AttentionScores(h.heads, h.scale))
    return b.head_linear(y, w.attn_v_b)


def attend_to_keys(
    b: Builder, w: Weights, h: DeepSeek2Hyperparameters, state: PagedState, x: Activation, factors: Weight | None = None
) -> Activation:
    """Compute the heads' outputs from keys and values."""
    plain, rotated, latent, key = project_latent(b, w, h, x, factors)
    both, period = b.linear(latent, w.attn_kv_b), h.key_dim + h.value_dim
    k = b.concat_heads(b.slice_columns(both, 0, h.key_dim, period), key, h.heads, shared=True)
    v = b.slice_columns(both, h.key_dim, period, period)
    return b.attend(b.concat_heads(plain, rotated, h.heads), k, v, state, AttentionScores(h.heads, h.scale))


V3 = {
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
}  # fmt: skip
CHECKPOINTS = {
    "DeepseekV2ForCausalLM": {
        "layer": "@deepseek.list_deepseek2_tensors", "scalings": "yarn",
        "only": {"rope_interleave": True, "moe_layer_freq": 1}, "amounts": {"vocab_size": "vocab"},
        "read": "@deepseek.read_deepseek2", "defaults": {"topk_method": "greedy", "n_shared_experts": 2},
    },
    "DeepseekV3ForCausalLM": {
        "like": "DeepseekV2ForCausalLM",
        "defaults": {**V3, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    },
    "Glm4MoeLiteForCausalLM": {
        "like": "DeepseekV2ForCausalLM", "defaults": {**V3, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5},
    },
    "YoutuForCausalLM": {  # without experts
        "like": "DeepseekV2ForCausalLM", "read": "@deepseek.read_youtu", "defaults": {"tie_word_embeddings": True},
    },
}  # fmt: skip
