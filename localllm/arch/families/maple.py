"""Maple (2026).

Unlike Qwen 3 with experts: only layers with a window have RoPE; gates and up projections of experts are clamped.
"""

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    read_local_rope_dims,
    read_windows,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.families.step35 import read_activation_limits
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import Gate, apply_feed_forward_or_experts, read_routing


@frozen
class MapleHyperparameters(LocalRopeTransformerHyperparameters):
    limits: tuple[float, ...]  # by layer, of gates and of up projections' magnitudes, 0 for none

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.local_rope if self.windows[layer] else None


def read(fields: HyperparameterReader) -> MapleHyperparameters:
    shared = MapleHyperparameters.read_shared_fields(fields, interleaved=False)
    return MapleHyperparameters(
        **shared,
        windows=read_windows(fields, period=None),
        local_rope=read_local_rope_dims(fields, shared["attention"].rope),
        routing=read_routing(fields),
        limits=read_activation_limits(fields, "swiglu_clamp_exp", fields.read_layer_count()),
    )


def forward(b: Builder, w: Weights, h: MapleHyperparameters) -> Activation:
    w.require("output")
    return apply_decoder(b, w, h, block)


def block(b: Builder, w: Weights, h: MapleHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    q, k = normalize_heads(b, w, h, q, k)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, make_limited_swiglu(b, h.limits[state.layer])))


def make_limited_swiglu(b: Builder, limit: float) -> Gate:
    """Return a gate that applies SwiGLU to inputs clamped to the limit, if there is one."""
    if not limit:
        return b.swiglu

    def gated(gate: Activation, up: Activation) -> Activation:
        zeros = b.clamp(up, 0.0)
        return b.multiply(b.swiglu_limited(gate, zeros, 1.0, limit), b.clamp(up, limit))

    return gated
