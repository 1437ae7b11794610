"""MiMo-V2 (Xiaomi 2025).

Unlike llama: layers with a window have heads and RoPE of their own, and sinks; values are shorter than keys, and are
multiplied by a factor; RoPE rotates only the beginning of a head, in pairs half the rotated dimensions apart; some
layers have experts, whose scores are sigmoids.
"""

from collections.abc import Sequence

from localllm.arch.attention import LocalRopeTransformerHyperparameters, attend, read_windows
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, read_routing
from localllm.arch.rope import read_base


@frozen
class MiMo2Hyperparameters(LocalRopeTransformerHyperparameters):
    value_dim: int
    value_scale: float

    def list_states(self) -> Sequence[PagedState]:
        a = self.attention
        return [
            PagedState(layer, a.kv_heads[layer], a.head_dim, self.value_dim, self.windows[layer])
            for layer in range(self.layers)
        ]


def read(fields: HyperparameterReader) -> MiMo2Hyperparameters:
    shared = MiMo2Hyperparameters.read_shared_fields(fields, interleaved=False, own_values=True)
    rope = shared["attention"].rope
    if rope.yarn or rope.by_factors:
        raise fields.make_unsupported_error(f"{fields.format_key('rope.scaling.type')} must be linear or none")
    return MiMo2Hyperparameters(
        **shared,
        windows=read_windows(fields, period=None)[: shared["layers"]],
        local_rope=rope.remove_scaling(read_base(fields, "rope.freq_base_swa", 10000.0)),
        routing=read_routing(fields, SIGMOID),
        value_dim=fields.read_count("attention.value_length", shared["attention"].head_dim),
        value_scale=fields.read_number("attention.value_scale", 0.0) or 1.0,
    )


def forward(b: Builder, w: Weights, h: MiMo2Hyperparameters) -> Activation:
    w.require("output")
    return apply_decoder(b, w, h, block)


def block(b: Builder, w: Weights, h: MiMo2Hyperparameters, state: PagedState, x: Activation) -> Activation:
    y, kv_heads = b.rms_norm(x, w.attn_norm, h.epsilon), state.kv_heads
    if fused := w.get("attn_qkv"):
        rows = h.attention.heads[state.layer] * state.key_dim
        parts = fused.split(rows, kv_heads * state.key_dim, kv_heads * state.value_dim)
    else:
        parts = [w.attn_q, w.attn_k, w.attn_v]
    q, k, v = (b.linear(y, part) for part in parts)
    sinks = w.get("attn_sinks", by_layer=state.window is None)
    y = attend(b, h, state, q, k, v, sinks=sinks)
    x = b.add(x, b.scale(b.linear(y, w.attn_output), h.value_scale))
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "MiMoV2ForCausalLM MiMoV2FlashForCausalLM": {
        "layer": "norms @mimo2.list_layer_tensors", "parts": {"mixes": ("experts router_bias", "gated")},
        "unread": r"model\.mtp\..*", "partial_rope": True,
        "only": {
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
            "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": 0,
            "routed_scaling_factor": 1.0,
        },
        "reads": {"rms_norm_eps": ("layernorm_epsilon", 1e-5)}, "experts": "moe_intermediate_size n_routed_experts",
        "amounts": {"expert_feed_forward_length": "expert_hidden"},
        "keys": {"sliding_window": "attention.sliding_window", "swa_rope_theta": ("rope.freq_base_swa", 10000.0)},
        "metadata": {"expert_gating_func": 2}, "read": "@mimo2.read",
    },
}  # fmt: skip
