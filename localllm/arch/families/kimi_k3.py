"""Kimi K3 (Moonshot AI 2026).

Unlike Kimi Linear: the input of the first of every few layers is kept, and the residual stream restarts after its
attention; each sublayer reads a mixture of the kept inputs and the stream, weighted by the softmax of their scores.
Experts work on narrower rows; gates and up projections are bounded by a tanh; attention's output is gated, too.
"""

from collections.abc import Sequence
from dataclasses import replace

from localllm.arch.decoder import compute_logits
from localllm.arch.families.deepseek2 import attend_to_latents
from localllm.arch.families.kimi_linear import (
    KimiLinearHyperparameters,
    apply_delta_heads,
    compute_log_decays,
    read_kimi_hyperparameters,
)
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
    Gate,
    apply_experts,
    apply_gated_feed_forward,
    apply_shared_expert,
    collect_expert_matrices,
    read_file_routing,
)
from localllm.arch.hyper_connections import concat_streams

LOWEST = 1e3  # magnitude of a lower bound; e^-1000 is 0


@frozen
class KimiK3Hyperparameters(KimiLinearHyperparameters):
    """The hyperparameters of Kimi K3.

    Attributes:
        period: distance between layers whose inputs are kept, 0 for none.
        bounds: bounds of gates and of up projections, 0 for none.
        lowest: lower bound of the decays' logarithms, 0 for none.
        narrow: width of the experts' rows, 0 for the model's width.
    """

    period: int
    bounds: tuple[float, float]
    lowest: float
    narrow: int


def read(fields: HyperparameterReader) -> KimiK3Hyperparameters:
    common, lowest = read_kimi_hyperparameters(fields), fields.read_raw("kda.gate_lower_bound", 0.0)
    if not isinstance(lowest, float) or not -LOWEST <= lowest <= 0:
        raise fields.make_value_error("kda.gate_lower_bound", f"a number from {-LOWEST:g} to 0")
    rope = replace(common["rope"], unrotated=tuple(range(common["rope"].dims // 2)))
    linear = fields.read_raw("activation.situ_linear_beta")
    if not isinstance(linear, float) or not -1e6 <= linear <= 1e6:
        raise fields.make_value_error("activation.situ_linear_beta", "a number")
    return KimiK3Hyperparameters(
        **common | {"rope": rope},
        routing=read_file_routing(fields),
        period=fields.read_count("attn_res.block_size", 0),
        bounds=(fields.read_factor("activation.situ_beta"), linear),
        lowest=lowest,
        narrow=fields.read_count("expert_latent_length", 0),
    )


def forward(b: Builder, w: Weights, h: KimiK3Hyperparameters) -> Activation:
    x, earlier = b.embed(w.token_embd, b.ids), list[Activation]()
    for state in h.list_states():
        layer = w.get_layer(state.layer)
        y = mix_kept_inputs(b, h, earlier, x, layer, "attn_res_score")
        is_kept = h.period > 0 and state.layer % h.period == 0
        earlier += [x] if is_kept else []
        y = apply_attention(b, layer, h, state, b.rms_norm(y, layer.attn_norm, h.epsilon))
        x = y if is_kept else b.add(x, y)
        y = mix_kept_inputs(b, h, earlier, x, layer, "ffn_res_score")
        x = b.add(x, apply_feed_forward(b, layer, h, b.rms_norm(y, layer.ffn_norm, h.epsilon)))
    return compute_logits(b, w, h, mix_kept_inputs(b, h, earlier, x, w, "output_res_score"))


def mix_kept_inputs(
    b: Builder, h: KimiK3Hyperparameters, earlier: Sequence[Activation], x: Activation, w: Weights, name: str
) -> Activation:
    """Mix the kept inputs and the stream, weighted by the softmax of their scores."""
    if not h.period:
        return x
    by = w.require(name).require_shape(h.width)
    if not earlier:
        b.ignore(by)
        return x
    all_ = [*earlier, x]
    scores = concat_streams(b, [b.linear(b.rms_norm(stream, None, h.epsilon), by.to_row()) for stream in all_])
    return b.mix_streams(concat_streams(b, all_), b.softmax(scores), len(all_))


def apply_attention(
    b: Builder, w: Weights, h: KimiK3Hyperparameters, state: LatentState | RecurrentLayerState, x: Activation
) -> Activation:
    """Apply latent attention or the delta rule, depending on the type of the layer's state."""
    if isinstance(state, LatentState):
        y, gate = attend_to_latents(b, w, h, state, x), w.get("attn_gate")
        return b.linear(b.multiply(y, b.sigmoid(b.linear(x, gate))) if gate else y, w.attn_output)
    y = apply_delta_heads(b, w, h, state, x, b.exponential(compute_log_decays(b, w, h, x)), b.linear(x, w.ssm_g))
    return b.linear(y, w.attn_output)


def apply_feed_forward(b: Builder, w: Weights, h: KimiK3Hyperparameters, x: Activation) -> Activation:
    """Apply a dense network, or experts on narrower rows and a shared one."""
    gate = make_bounded_swiglu(b, h)
    if h.routing is None or not any(w.get(name, by_layer=True) for name in ("ffn_gate_inp", "ffn_down_exps")):
        return apply_gated_feed_forward(b, w, x, gate)
    w.require_biases("exp_probs_b")
    narrow = b.linear(x, w.ffn_routed_down.require_shape(h.narrow, h.width)) if h.narrow else x
    choice = b.route(b.linear(x, w.ffn_gate_inp), h.routing, w.get_bias("exp_probs_b"))
    y = apply_experts(b, collect_expert_matrices(b, w, h.routing.experts), choice, narrow, gate)
    y = b.rms_norm(y, norm, h.epsilon) if (norm := w.get("ffn_routed_norm")) else y
    y = b.linear(y, w.ffn_routed_up) if h.narrow else y
    has_shared = any(w.get(f"ffn_{part}_shexp") for part in ("gate", "up", "down"))
    return b.add(y, apply_shared_expert(b, w, x, gate)) if has_shared else y


def make_bounded_swiglu(b: Builder, h: KimiK3Hyperparameters) -> Gate:
    """Return a gate that applies SwiGLU to bounded inputs."""
    of_gate, of_others = h.bounds

    def gate(gate: Activation, up: Activation) -> Activation:
        y = b.multiply(b.softcap(gate, of_gate), b.sigmoid(gate))
        return b.multiply(y, b.softcap(up, of_others) if of_others > 0 else up)

    return gate
