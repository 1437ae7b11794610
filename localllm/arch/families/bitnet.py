"""BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764).

Unlike llama: norms within attention and feed-forward network, before their last matrices; rotated pairs are half a head
apart; matrices may have a scale; the output matrix is the embedding matrix.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.metadata import format_value


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    for name in ("hidden_act", "hidden_activation"):
        if (activation := fields.read_raw(name, "silu")) != "silu":
            raise fields.make_unsupported_error(
                f"{fields.format_key(name)} must be silu (found {format_value(activation)})"
            )
    return TransformerHyperparameters(**TransformerHyperparameters.read_shared_fields(fields, interleaved=False))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    y = b.rms_norm(attend(b, h, state, q, k, v), w.attn_sub_norm, h.epsilon)
    x = b.add(x, b.linear(y, w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    y = b.rms_norm(b.swiglu(b.linear(y, w.ffn_gate), b.linear(y, w.ffn_up)), w.ffn_sub_norm, h.epsilon)
    return b.add(x, b.linear(y, w.ffn_down))


CHECKPOINTS = {
    "BitNetForCausalLM BitnetForCausalLM": {
        "layer": "norms",
        "tensors": {
            "attn_q": "@llama.round_to_ternary self_attn.q_proj.weight: queries width",
            "attn_k": "@llama.round_to_ternary self_attn.k_proj.weight: keys width",
            "attn_v": "@llama.round_to_ternary self_attn.v_proj.weight: keys width",
            "attn_output": "@llama.round_to_ternary self_attn.o_proj.weight: width queries",
            "ffn_gate": "@llama.round_to_ternary mlp.gate_proj.weight: hidden width",
            "ffn_up": "@llama.round_to_ternary mlp.up_proj.weight: hidden width",
            "ffn_down": "@llama.round_to_ternary mlp.down_proj.weight: width hidden", "attn_sub_norm": "width",
            "ffn_sub_norm": "hidden",
        },
        "only": {"attention_bias": False}, "metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        "defaults": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "relu2"},
    },
}  # fmt: skip
