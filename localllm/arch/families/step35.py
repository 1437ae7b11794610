"""Step 3.5 (StepFun 2026).

Unlike llama: layers with a window have heads and RoPE of their own, the others rotate half a head; a gate for each
head; heads of queries and keys are normalized; some layers have experts and a shared one, with gates that may be
clamped; rotated pairs are half the rotated dimensions apart.
"""

from dataclasses import replace

import numpy as np

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    gate_heads,
    normalize_heads,
    project_qkv,
    read_windows,
    select_rope_factors,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights, frozen
from localllm.arch.feed_forward import (
    SIGMOID,
    Gate,
    apply_feed_forward_or_experts,
    apply_shared_expert,
    read_file_routing,
)
from localllm.arch.rope import read_base

LEAST_LIMIT = 0.3  # above the magnitude of SiLU's negative values


@frozen
class Step35Hyperparameters(LocalRopeTransformerHyperparameters):
    """The hyperparameters of Step 3.5.

    Attributes:
        expert_limits: by layer, limits of gates and up projections of experts, 0 for none.
        limits: such limits of the other feed-forward networks.
    """

    expert_limits: tuple[float, ...]
    limits: tuple[float, ...]


def read(fields: HyperparameterReader) -> Step35Hyperparameters:
    common = Step35Hyperparameters.read_shared_fields(fields, interleaved=False)
    attention, layers = common["attention"], fields.read_layer_count()
    rope = attention.rope
    if rope.yarn or rope.by_factors or rope.dims % 4:
        raise fields.make_unsupported_error(
            f"{fields.prefix}rope.*: this RoPE is not supported in {fields.arch} models"
        )
    if fields.read_count("rope.dimension_count_swa", rope.dims) != rope.dims:
        raise fields.make_unsupported_error(
            f"{fields.format_key('rope.dimension_count_swa')} is not supported in {fields.arch} models"
        )
    common["attention"] = replace(attention, rope=replace(rope, dims=rope.dims // 2))
    return Step35Hyperparameters(
        **common,
        windows=read_windows(fields, period=None),
        local_rope=rope.remove_scaling(read_base(fields, "rope.freq_base_swa", 10000.0)),
        routing=read_file_routing(fields, SIGMOID),
        expert_limits=read_activation_limits(fields, "swiglu_clamp_exp", layers),
        limits=read_activation_limits(fields, "swiglu_clamp_shexp", layers),
    )


def read_activation_limits(fields: HyperparameterReader, name: str, layers: int) -> tuple[float, ...]:
    """Read one limit per layer, or one for all. Raises ModelError."""
    if isinstance(fields.read_raw(name), np.ndarray):
        limits = fields.read_array(name, "f", f"{layers} numbers").tolist()
    else:
        limits = [fields.read_number(name, 0.0)] * layers
    if len(limits) != layers or not all(limit == 0 or limit >= LEAST_LIMIT for limit in limits):
        raise fields.make_value_error(name, f"{layers} numbers, each 0 or at least {LEAST_LIMIT}")
    return tuple(limits)


def forward(b: Builder, w: Weights, h: Step35Hyperparameters) -> Activation:
    w.require("output")
    factors, pairs = select_rope_factors(b, w, h), h.attention.rope.dims // 2
    if factors and factors.shape != (pairs,):  # some files have factors for whole heads
        factors = factors.split(pairs, h.local_rope.dims // 2 - pairs)[0]
    return apply_decoder(b, w, h, block, factors=factors)


def block(
    b: Builder, w: Weights, h: Step35Hyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    if w.get("attn_q_norm") or w.get("attn_k_norm"):
        q, k = normalize_heads(b, w, h, q, k)
    attended = attend(b, h, state, q, k, v, None if h.windows[state.layer] else factors)
    if gate := w.get("attn_gate"):
        attended = gate_heads(b, h, state, attended, b.sigmoid(b.linear(y, gate)))
    x = b.add(x, b.linear(attended, w.attn_output))
    of_experts, of_others = (make_limited_swiglu(b, limits[state.layer]) for limits in (h.expert_limits, h.limits))
    y, is_mixture = b.rms_norm(x, w.ffn_norm, h.epsilon), w.get("ffn_gate_inp", by_layer=True) is not None

    def beside(b: Builder, w: Weights, x: Activation, gate: Gate) -> Activation:
        return apply_shared_expert(b, w, x, of_others)

    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, of_experts if is_mixture else of_others, beside))


def make_limited_swiglu(b: Builder, limit: float) -> Gate:
    """Return a gate that applies SwiGLU and clamps to the limit, if there is one."""
    if not limit:
        return b.swiglu
    return lambda gate, up: b.multiply(b.clamp(b.multiply(gate, b.sigmoid(gate)), limit), b.clamp(up, limit))
