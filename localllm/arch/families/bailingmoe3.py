"""Ling 3 (Ant 2026).

Unlike Kimi Linear: attention layers rotate only the beginning of each head, by M-RoPE in the model for images, and have
a gate for each head; the logarithms of the other layers' decays are sigmoids, scaled to a lower
bound; gates and up projections of feed-forward networks are clamped, by layer.
"""

from dataclasses import replace

from localllm.arch.attention import scale_heads
from localllm.arch.families.deepseek2 import attend_to_latents
from localllm.arch.families.kimi_linear import (
    KimiLinearHyperparameters,
    apply_delta_heads,
    read_kimi_hyperparameters,
    repeat_rates,
)
from localllm.arch.families.step35 import make_limited_swiglu, read_activation_limits
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    LatentState,
    RecurrentLayerState,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import (
    SIGMOID,
    SOFTMAX,
    Gate,
    apply_feed_forward_or_experts,
    apply_shared_expert,
    read_file_routing,
)
from localllm.arch.rope import add_sections, read_sections

LOWEST = 1e3  # magnitude of a lower bound; e^-1000 is 0


@frozen
class Ling3Hyperparameters(KimiLinearHyperparameters):
    """The hyperparameters of Ling 3.

    Attributes:
        lowest: lower bound of the decays' logarithms.
        expert_limits, limits: limits of gates and up projections, as in step35.
    """

    lowest: float
    expert_limits: tuple[float, ...]
    limits: tuple[float, ...]


def read(fields: HyperparameterReader) -> Ling3Hyperparameters:
    common, layers = read_kimi_hyperparameters(fields), fields.read_layer_count()
    lowest = fields.read_raw("kda.gate_lower_bound")
    if not isinstance(lowest, float) or not -LOWEST <= lowest < 0:
        raise fields.make_value_error("kda.gate_lower_bound", f"a number from {-LOWEST:g} up to 0")
    if not fields.read_flag("kda.safe_gate", True):
        raise fields.make_unsupported_error(f"{fields.format_key('kda.safe_gate')} must be true")
    function = fields.read_count("expert_gating_func")
    if function not in (SOFTMAX, SIGMOID):
        raise fields.make_value_error("expert_gating_func", f"{SOFTMAX} or {SIGMOID}")
    rope = add_sections(fields, replace(common["rope"], interleaved=read_sections(fields) is None))
    return Ling3Hyperparameters(
        **common | {"rope": rope},
        routing=read_file_routing(fields),
        lowest=lowest,
        expert_limits=read_activation_limits(fields, "swiglu_clamp_exp", layers),
        limits=read_activation_limits(fields, "swiglu_clamp_shexp", layers),
    )


def block(
    b: Builder, w: Weights, h: Ling3Hyperparameters, state: LatentState | RecurrentLayerState, x: Activation
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    if isinstance(state, LatentState):
        attended = attend_to_latents(b, w, h, state, y)
        attended = scale_heads(b, attended, b.sigmoid(b.linear(y, w.attn_gate)), h.heads, h.value_dim)
    else:
        steps = b.add_vector(b.linear(y, w.ssm_f_a), w.require_exact("ssm_dt.bias"))
        decays = b.exponential(b.scale(b.sigmoid(b.scale_columns(steps, repeat_rates(w, h))), h.lowest))
        attended = apply_delta_heads(b, w, h, state, y, decays, b.linear(y, w.ssm_g_a))
    x = b.add(x, b.linear(attended, w.attn_output))
    of_experts, of_others = (make_limited_swiglu(b, limits[state.layer]) for limits in (h.expert_limits, h.limits))
    y, is_mixture = b.rms_norm(x, w.ffn_norm, h.epsilon), w.get("ffn_gate_inp", by_layer=True) is not None
    if is_mixture:
        w.require_biases("exp_probs_b")

    def beside(b: Builder, w: Weights, x: Activation, gate: Gate) -> Activation:
        return apply_shared_expert(b, w, x, of_others)

    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, of_experts if is_mixture else of_others, beside))
