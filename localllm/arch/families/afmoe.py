"""Trinity (Arcee AI 2025).

Unlike dots.llm1: embeddings are multiplied by the root of the width; three of four layers have RoPE and a sliding
window; attention's output is gated; norms also after attention and feed-forward network.
"""

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    read_local_rope,
    read_windows,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, apply_shared_expert, read_file_routing

PERIOD = 4  # of layers, the last of which has no RoPE, whether or not it has a window


@frozen
class AFMoEHyperparameters(LocalRopeTransformerHyperparameters):
    has_shared: bool  # whether there is a shared expert

    def get_rope(self, layer: int) -> RopeParameters | None:
        return None if (layer + 1) % PERIOD == 0 else super().get_rope(layer)


def read(fields: HyperparameterReader) -> AFMoEHyperparameters:
    common = AFMoEHyperparameters.read_shared_fields(fields, interleaved=False)
    return AFMoEHyperparameters(
        **common,
        windows=read_windows(fields, PERIOD),
        local_rope=read_local_rope(fields, common["attention"].rope),
        routing=read_file_routing(fields, SIGMOID),
        has_shared=fields.read_count("expert_shared_count", 0) > 0,
    )


def forward(b: Builder, w: Weights, h: AFMoEHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, b.scale(b.embed(w.token_embd, b.ids), h.width**0.5))


def block(b: Builder, w: Weights, h: AFMoEHyperparameters, state: PagedState, x: Activation) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    attended = attend(b, h, state, *normalize_heads(b, w, h, q, k), v)
    y = b.linear(b.multiply(attended, b.sigmoid(b.linear(y, w.attn_gate))), w.attn_output)
    x = b.add(x, b.rms_norm(y, w.post_attention_norm, h.epsilon))
    if w.get("ffn_gate_inp", by_layer=True):
        w.require_biases("exp_probs_b")
    y, beside = b.rms_norm(x, w.ffn_norm, h.epsilon), apply_shared_expert if h.has_shared else None
    y = apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, beside)
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, h.epsilon))


CHECKPOINTS = {
    "AfmoeForCausalLM": {
        "layer": "attention head_norms norms norms_behind",
        "parts": {"< leading_dense": ("gated", "experts shared_expert exp_probs_b.bias")},
        "tensors": {"attn_gate": "queries width", "exp_probs_b.bias": "mlp.expert_bias: experts"}, "scalings": "yarn",
        "windows": 4, "only": {"route_norm": True, "score_func": "sigmoid", "global_attn_every_n_layers": 4},
        "experts": "moe_intermediate_size",
        "sizes": {"leading_dense": "num_dense_layers", "shared_hidden": "num_shared_experts * expert_hidden"},
        "amounts": {
            "vocab_size": "vocab", "rope.dimension_count": "head_dim", "leading_dense_block_count": "leading_dense",
            "expert_shared_count": "num_shared_experts", "expert_feed_forward_length": "expert_hidden",
        },
        "keys": {"sliding_window": "attention.sliding_window", "route_scale": ("expert_weights_scale", 1.0)},
        "metadata": {"expert_gating_func": 2, "expert_weights_norm": True}, "read": "@llama.read_afmoe",
        "defaults": {
            "rms_norm_eps": 1e-5, "num_dense_layers": 1, "sliding_window": 1024, "head_dim": 128,
            "max_position_embeddings": 16384, "num_shared_experts": 2,
        },
    },
}  # fmt: skip
