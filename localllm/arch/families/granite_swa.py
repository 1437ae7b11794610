"""Granite 4 with windows (IBM 2026).

Unlike Granite 3: some layers have a sliding window, and some have no RoPE, as the file says; each head has a sink;
the shared expert's gate and up matrices are fused.
"""

from dataclasses import field

import numpy as np

from localllm.arch.attention import attend, project_qkv, read_windows, select_rope_factors
from localllm.arch.decoder import apply_decoder
from localllm.arch.families.granite import GraniteHyperparameters
from localllm.arch.families.granite import read as read_granite
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RopeParameters,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import Gate, apply_feed_forward_or_experts


@frozen
class GraniteSWAHyperparameters(GraniteHyperparameters):
    windows: tuple[int | None, ...] = field(kw_only=True)
    rotates: tuple[bool, ...] = field(kw_only=True)  # by layer

    def get_window(self, layer: int) -> int | None:
        return self.windows[layer]

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.attention.rope if self.rotates[layer] else None


def read(fields: HyperparameterReader) -> GraniteSWAHyperparameters:
    h, name = read_granite(fields), "attention.rope_pattern"
    rotates = fields.read_array(name, "biu", "a list of layers") if fields.has(name) else np.ones(h.layers)
    if len(rotates) != h.layers or not ((rotates == 0) | (rotates == 1)).all():
        raise fields.make_value_error(name, f"yes or no for each of {h.layers} layers")
    if fields.has("deepstack_mapping") and (fields.read_array("deepstack_mapping", "i", "a list of layers") >= 0).any():
        raise fields.make_unsupported_error(f"{fields.format_key('deepstack_mapping')} must name no layer")
    windows = read_windows(fields, period=None)
    return GraniteSWAHyperparameters(**vars(h), windows=windows, rotates=tuple(bool(flag) for flag in rotates))


def forward(b: Builder, w: Weights, h: GraniteSWAHyperparameters) -> Activation:
    x = b.scale(b.embed(w.token_embd, b.ids), h.embedding_scale)
    return b.scale(apply_decoder(b, w, h, block, x, factors=select_rope_factors(b, w, h)), 1 / h.logit_scale)


def block(
    b: Builder, w: Weights, h: GraniteSWAHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    sinks = w.attn_sinks.require_shape(h.attention.heads[state.layer])
    y = b.linear(attend(b, h, state, q, k, v, factors, sinks=sinks), w.attn_output)
    x = b.add(x, b.scale(y, h.residual_scale))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    y = apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_fused_shared_expert if h.has_shared else None)
    return b.add(x, b.scale(y, h.residual_scale))


def apply_fused_shared_expert(b: Builder, w: Weights, x: Activation, gate: Gate) -> Activation:
    """Apply the shared expert, whose gate and up matrices are halves of one tensor."""
    of_gate, up = w.ffn_up_shexp.split_halves()
    return b.linear(gate(b.linear(x, of_gate), b.linear(x, up)), w.ffn_down_shexp)


CHECKPOINTS = {
    "GraniteSWAForCausalLM": {
        "like": "GraniteForCausalLM", "layer": "attention gated norms",
        "tensors": {"attn_sinks.weight": "self_attn.sinks: heads"}, "named_as": "granite",
        "only": {"attention_bias": False, "mlp_bias": False}, "read": "@llama.read_granite_swa",
        "defaults": {"rms_norm_eps": 1e-5, "sliding_window": 128},
    },
    "GraniteMoeSWAForCausalLM": {  # gate and up projections are fused
        "like": "GraniteSWAForCausalLM", "layer": "attention norms",
        "tensors": {
            "attn_sinks.weight": "self_attn.sinks: heads",
            "ffn_gate_inp": "block_sparse_moe.router.weight: experts width",
            "ffn_gate_up_exps": "block_sparse_moe.experts.gate_up_proj: experts both_hidden width",
            "ffn_down_exps": "block_sparse_moe.experts.down_proj: experts width expert_hidden",
            "ffn_up_shexp": "shared_mlp.input_linear.weight: both_shared width",
            "ffn_down_shexp": "shared_mlp.output_linear.weight: width shared_hidden",
        },
        "experts": "intermediate_size num_local_experts",
        "sizes": {
            "both_hidden": "2 * expert_hidden", "shared_hidden": "shared_intermediate_size=0",
            "both_shared": "2 * shared_hidden",
        },
        "amounts": {
            "vocab_size": "vocab", "rope.dimension_count": "head_dim",
            "expert_shared_feed_forward_length": "?shared_hidden",
        },
        "defaults": {"sliding_window": 128},
    },
}  # fmt: skip
