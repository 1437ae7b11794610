"""GLM 4 0414 (GLM Team 2024, arXiv 2406.12793; 2025).

Unlike llama: norms after attention and feed-forward network, too; gate and up are fused; RoPE rotates only the
beginning of a head; queries, keys and values may have biases. Vision models (GLM 4.1V, GLM-OCR) have M-RoPE, with pairs
half the rotated dimensions apart.
"""

from dataclasses import replace

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import MtpOutput, apply_mtp_layer
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward
from localllm.arch.rope import add_sections, read_sections


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    common = TransformerHyperparameters.read_shared_fields(fields, interleaved=read_sections(fields) is None)
    attention = common.pop("attention")
    return TransformerHyperparameters(**common, attention=replace(attention, rope=add_sections(fields, attention.rope)))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    y = b.linear(attend(b, h, state, q, k, v), w.attn_output)
    x = b.add(x, b.rms_norm(y, w.post_attention_norm, h.epsilon))
    y = apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu)
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, h.epsilon))


def draft(b: Builder, w: Weights, h: TransformerHyperparameters, hidden: Activation) -> MtpOutput:
    """Apply the MTP layer of GLM-OCR."""
    return apply_mtp_layer(b, w, h, hidden, block)


CHECKPOINTS = {
    "Glm4ForCausalLM": {
        "layer": "attention fused_gated norms norms_behind", "partial_rope": True,
        "sizes": {"both_hidden": "2 * hidden"},
        "defaults": {"rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128},
    },
    # GLM-OCR's multi-token prediction layer is counted even where the checkpoint lacks it.
    "Glm4vForConditionalGeneration GlmOcrForConditionalGeneration": {
        "layer": "attention fused_gated norms norms_behind mtp", "parted": True, "sees": True, "partial_rope": True,
        "scalings": "mrope",
        "sizes": {
            "both_hidden": "2 * hidden", "rotated_dims": "rotary_dims", "mtp_layers": "num_nextn_predict_layers=0",
            "both_inputs": "2 * width",
        },
        "amounts": {"block_count": "layers + mtp_layers", "nextn_predict_layers": "?mtp_layers"},
        "defaults": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip
