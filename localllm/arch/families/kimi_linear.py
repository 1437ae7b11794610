"""Kimi Linear (Moonshot AI 2025, arXiv 2510.26692).

Unlike DeepSeek-V3: three layers of four have Kimi Delta Attention: a state matrix for each head, updated by the delta
rule, whose rows decay at their own rates; the others have attention without RoPE.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.arch.attention import RMS_EPSILON
from localllm.arch.families.deepseek2 import DeepSeek2Hyperparameters, attend_to_latents
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    LatentState,
    RecurrentLayerState,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import (
    SIGMOID,
    SOFTMAX,
    apply_feed_forward_or_experts,
    apply_shared_expert,
    read_routing,
)
from localllm.arch.rope import read_rope


@frozen
class KimiLinearHyperparameters(DeepSeek2Hyperparameters):
    """The hyperparameters of Kimi Linear.

    Attributes:
        attends: by layer, whether it has attention instead of Kimi Delta Attention with heads of `delta_dim`.
        taps: kernel size of the convolutions before the delta rule.
    """

    attends: tuple[bool, ...]
    delta_dim: int
    taps: int

    def list_states(self) -> Sequence[LatentState | RecurrentLayerState]:  # type: ignore[override]
        """Return the state of each layer: latent rows, or the convolutions' last inputs and the heads' matrices."""
        columns, dim = self.heads * self.delta_dim, self.delta_dim
        shapes = (*[(self.taps - 1, columns)] * 3, (self.heads, dim, dim))
        rows = super().list_states()
        return [rows[n] if self.attends[n] else RecurrentLayerState(n, shapes) for n in range(self.layers)]  # type: ignore[misc]


def read(fields: HyperparameterReader) -> KimiLinearHyperparameters:
    common, function = read_kimi_hyperparameters(fields), fields.read_count("expert_gating_func")
    if function not in (SOFTMAX, SIGMOID):
        raise fields.make_value_error("expert_gating_func", f"{SOFTMAX} or {SIGMOID}")
    rope = replace(common["rope"], unrotated=tuple(range(common["rope"].dims // 2)))
    scale = fields.read_number("expert_weights_scale", 0.0) or 1.0
    return KimiLinearHyperparameters(**common | {"rope": rope}, routing=read_routing(fields, function, scale=scale))


def read_kimi_hyperparameters(fields: HyperparameterReader) -> dict[str, Any]:
    """Read the hyperparameters that Kimi models share. Raises ModelError."""
    common, heads, dims = (
        fields.read_common_fields(),
        fields.read_count("attention.head_count"),
        fields.read_count("rope.dimension_count"),
    )
    key_dim, value_dim = (fields.read_count(f"attention.{side}_length_mla") for side in ("key", "value"))
    latent = fields.read_count("attention.kv_lora_rank")
    kv_heads = fields.read_counts("attention.head_count_kv", fields.read_layer_count(), 0)
    if key_dim <= dims or not {*kv_heads} <= {0, 1} or dims % 2:
        raise fields.make_error(
            f"rope.dimension_count {dims} must be even and below the key dimension {key_dim}, and "
            f"attention.head_count_kv 0 or 1 (found {max(kv_heads)})"
        )
    if fields.read_count("attention.key_length", latent + dims) != latent + dims:
        raise fields.make_error(f"{fields.format_key('attention.key_length')} must be {latent + dims}")
    fields.read_count("attention.value_length", latent)  # not used: in files of the 48B it is for another kind of heads
    return {
        **common,
        "epsilon": fields.read_epsilon(RMS_EPSILON),
        "heads": heads,
        "key_dim": key_dim - dims,
        "value_dim": value_dim,
        "latent": latent,
        "keeps_latent": True,
        "rope": read_rope(fields, dims, True),
        "scale": key_dim**-0.5,
        "attends": tuple(map(bool, kv_heads)),
        "delta_dim": fields.read_count("kda.head_dim"),
        "taps": fields.read_count("ssm.conv_kernel"),
    }


def block(
    b: Builder, w: Weights, h: KimiLinearHyperparameters, state: LatentState | RecurrentLayerState, x: Activation
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    y = (
        attend_to_latents(b, w, h, state, y)
        if isinstance(state, LatentState)
        else apply_delta_attention(b, w, h, state, y)
    )
    x = b.add(x, b.linear(y, w.attn_output))
    if w.get("ffn_gate_inp", by_layer=True):
        w.require_biases("exp_probs_b")
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_shared_expert))


def apply_delta_attention(
    b: Builder, w: Weights, h: KimiLinearHyperparameters, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Compute the heads' outputs, normalized and gated."""
    w.require_biases("ssm_dt")
    steps = b.softplus(b.linear(b.linear(x, w.ssm_f_a), w.ssm_f_b), w.get_bias("ssm_dt"))
    decays = b.exponential(b.scale_columns(steps, repeat_rates(w, h)))
    return apply_delta_heads(b, w, h, state, x, decays, b.linear(b.linear(x, w.ssm_g_a), w.ssm_g_b))


def compute_log_decays(b: Builder, w: Weights, h: Any, x: Activation) -> Activation:
    """Compute the decays' logarithms, bounded from below by h.lowest if the model has a bound."""
    w.require_biases("ssm_dt")
    steps = b.add_vector(b.linear(b.linear(x, w.ssm_f_a), w.ssm_f_b), w.require_exact("ssm_dt.bias"))
    rates = w.require_exact("ssm_a").require_shape(h.heads).repeat(h.delta_dim)
    if h.lowest:
        return b.scale(b.sigmoid(b.scale(b.scale_columns(steps, rates), -1.0)), h.lowest)
    return b.scale_columns(b.softplus(steps), rates)


def repeat_rates(w: Weights, h: KimiLinearHyperparameters) -> Weight:
    """Repeat each head's decay rate for every row of its matrix."""
    rates = w.require_exact("ssm_a")
    return rates.require_shape(*rates.shape[:-2], h.heads, 1).repeat(h.delta_dim)


def apply_delta_heads(
    b: Builder, w: Weights, h: Any, state: RecurrentLayerState, x: Activation, decays: Activation, gate: Activation,
    epsilon: float | None = None,
) -> Activation:  # fmt: skip
    """Compute the heads' outputs from decays and a gate, [tokens, heads * delta_dim].

    epsilon: epsilon of the heads' L2 norm, if it differs from the model's.
    """
    columns, dim = h.heads * h.delta_dim, h.delta_dim
    apart = any(w.get(f"attn_{name}", by_layer=True) for name in "qkv")
    parts = (w.attn_q, w.attn_k, w.attn_v) if apart else w.attn_qkv.split(columns, columns, columns)
    taps = [w.require(f"ssm_conv1d_{name}") for name in "qkv"]
    taps = [tap.require_shape(*tap.shape[:-1], h.taps) for tap in taps]
    of_state = enumerate(zip(parts, taps, strict=True))
    q, k, v = (b.convolve(b.linear(x, part), tap, state, number) for number, (part, tap) in of_state)
    q, k = (b.scale(b.rms_norm(z, None, (epsilon or h.epsilon) / dim, dim), dim**-0.5) for z in (q, k))
    strength = b.sigmoid(b.linear(x, w.ssm_beta.require_shape(h.heads, h.width)))
    y = apply_kimi_delta(b, (b.scale(q, dim**-0.5), k, v), decays, strength, state, 3)
    y = b.rms_norm(y, w.ssm_norm.require_shape(dim), h.epsilon, dim)
    return b.multiply(y, b.sigmoid(gate))


def apply_kimi_delta(
    b: Builder, qkv: Sequence[Activation], w: Activation, strength: Activation, state: RecurrentLayerState, number: int
) -> Activation:
    """Apply Kimi Delta Attention, h = diag(w) h, then h = h + k (strength * (v - k h))^T, y = q h.

    This is computed for each head. w [tokens, heads * key_dim]; strength [tokens, heads].
    """
    q, k, v = qkv
    scaled_k = b.multiply_heads(k, strength)
    return b.wkv7(q, w, scaled_k, v, b.scale(b.multiply(k, w), -1.0), scaled_k, state, number)


CHECKPOINTS = {
    "KimiLinearForCausalLM KimiLinearModel": {
        "layer": "@deepseek.list_kimi_linear_tensors",
        "only": {
            "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1, "mla_use_nope": True, "q_lora_rank": (),
            "moe_layer_freq": 1,
        },
        "amounts": {"vocab_size": "vocab"}, "read": "@deepseek.read_kimi_linear", "defaults": {"rms_norm_eps": 1e-5},
    },
}  # fmt: skip
