"""LFM2 (Liquid AI 2025, arXiv 2511.23404), with experts or without.

Unlike Qwen 3: most layers have a short convolution over the last tokens, between two gates, instead of attention. Those
have no key-value heads in the metadata.
"""

from collections.abc import Sequence

from localllm.arch.attention import (
    RMS_EPSILON,
    TransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    read_attention,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RecurrentLayerState,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, read_routing


@frozen
class Lfm2Hyperparameters(TransformerHyperparameters):
    """The hyperparameters of LFM2.

    Attributes:
        taps: kernel size of the convolutions.
    """

    taps: int
    attention_window: int | None

    def get_window(self, layer: int) -> int | None:
        return self.attention_window

    def list_states(self) -> Sequence[PagedState | RecurrentLayerState]:  # type: ignore[override]
        """Return the state of each layer: keys and values, or a convolution's last inputs."""
        states, window = super().list_states(), ((self.taps - 1, self.width),)
        return [state if state.kv_heads else RecurrentLayerState(state.layer, window) for state in states]


def read(fields: HyperparameterReader) -> Lfm2Hyperparameters:
    scale = fields.read_number("expert_weights_scale", 0.0) or 1.0
    return Lfm2Hyperparameters(
        **fields.read_common_fields(),
        attention=read_attention(fields, interleaved=False, every_layer=False),
        epsilon=fields.read_epsilon(RMS_EPSILON),
        routing=read_routing(fields, fields.read_count("expert_gating_func", SIGMOID), scale=scale),
        taps=fields.read_count("shortconv.l_cache"),
        attention_window=fields.read_count("attention.sliding_window", 0) or None,
    )


def forward(b: Builder, w: Weights, h: Lfm2Hyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, norm=lambda x: b.rms_norm(x, w.token_embd_norm, h.epsilon))


def block(
    b: Builder, w: Weights, h: Lfm2Hyperparameters, state: PagedState | RecurrentLayerState, x: Activation
) -> Activation:
    normed = b.rms_norm(x, w.attn_norm, h.epsilon)
    if isinstance(state, RecurrentLayerState):
        y = apply_short_convolution(b, w, h, state, normed)
    else:
        q, k, v = project_qkv(b, w, h, state.layer, normed)
        y = b.linear(attend(b, h, state, *normalize_heads(b, w, h, q, k), v), w.attn_output)
    x = b.add(x, y)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


def apply_short_convolution(
    b: Builder, w: Weights, h: Lfm2Hyperparameters, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Apply the short convolution between two gates."""
    into, taps, out = (getattr(w, f"shortconv.{name}") for name in ("in_proj", "conv", "out_proj"))
    gate_in, gate_out, inner = (b.linear(x, part) for part in into.split(h.width, h.width, h.width))
    y = b.convolve(b.multiply(gate_in, inner), taps, state, silu=False)
    return b.linear(b.multiply(gate_out, y), out)


CONVOLUTION = {
    "shortconv.in_proj.weight": "into_gates width",
    "shortconv.conv.weight": "reshape conv.conv.weight[width one taps]: width taps",
    "shortconv.out_proj.weight": "width width",
}
EXPERTS = {
    "ffn_gate_exps": "feed_forward.experts.w1.weight: experts expert_hidden width",
    "ffn_up_exps": "feed_forward.experts.w3.weight: experts expert_hidden width",
    "ffn_down_exps": "feed_forward.experts.w2.weight: experts width expert_hidden",
    "exp_probs_b.bias": "feed_forward.expert_bias: experts",
}
CHECKPOINTS = {
    "Lfm2ForCausalLM LFM2ForCausalLM": {
        "layer": "norms gated", "parts": {"attends": ("attention head_norms", " ".join(CONVOLUTION))},
        "tensors": CONVOLUTION, "last_norm": "token_embd_norm.weight",
        "renamed": {"model.embedding_norm": "token_embd_norm"}, "only": {"conv_bias": False},
        "amounts": {"vocab_size": "vocab"}, "read": "@mamba.read_lfm2",
        "defaults": {"tie_word_embeddings": True, "rope_theta": 1e6},
    },
    "Lfm2MoeForCausalLM": {
        "arch": "lfm2moe", "like": "Lfm2ForCausalLM", "layer": "norms",
        "parts": {
            "attends": ("attention head_norms", " ".join(CONVOLUTION)),
            "< leading_dense": ("gated", f"experts {' '.join(EXPERTS)}"),
        },
        "tensors": {**CONVOLUTION, **EXPERTS},
        "only": {"conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        "experts": "moe_intermediate_size",
        "amounts": {"vocab_size": "vocab", "expert_feed_forward_length": "expert_hidden"},
        "metadata": {"expert_gating_func": 2}, "read": "@mamba.read_lfm2_moe",
    },
    "Lfm2VlForConditionalGeneration": {"like": "Lfm2ForCausalLM", "select": "@llama.select_vision"},
    "vision+lfm2": {"like": "Lfm2ForCausalLM", "sees": True, "unread": r"(model\.)?image_newline"},
}  # fmt: skip
