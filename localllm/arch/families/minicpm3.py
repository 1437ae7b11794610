"""MiniCPM 3 (OpenBMB 2024).

Attention is that of the oldest files of DeepSeek-V2, with LongRoPE's frequency factors. There are factors for
embeddings, sublayers' outputs and logits, as in MiniCPM, but files do not contain them.
"""

from localllm.arch.decoder import apply_decoder
from localllm.arch.families.deepseek2 import DeepSeek2Hyperparameters, attend_to_keys
from localllm.arch.families.plm import read as read_latent
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward

EMBEDDING_SCALE, DEPTH_SCALE, WIDTH = 12.0, 1.4, 256  # logits are scaled by WIDTH to the model's width


def read(fields: HyperparameterReader) -> DeepSeek2Hyperparameters:
    return read_latent(fields, interleaved=False)


def forward(b: Builder, w: Weights, h: DeepSeek2Hyperparameters) -> Activation:
    x, factors = b.scale(b.embed(w.token_embd, b.ids), EMBEDDING_SCALE), None
    if w.get("rope_factors_short") or w.get("rope_factors_long"):
        short, long = w.rope_factors_short, w.rope_factors_long
        factors = b.select_by_context(short, long.require_shape(*short.shape), h.rope.original_context)
    return b.scale(apply_decoder(b, w, h, block, x, factors=factors), WIDTH / h.width)


def block(
    b: Builder, w: Weights, h: DeepSeek2Hyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    scale = DEPTH_SCALE / h.layers**0.5
    y = attend_to_keys(b, w, h, state, b.rms_norm(x, w.attn_norm, h.epsilon), factors)
    x = b.add(x, b.scale(b.linear(y, w.attn_output), scale))
    return b.add(x, b.scale(apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu), scale))


CHECKPOINTS = {
    "MiniCPM3ForCausalLM": {
        "layer": "norms gated",
        "tensors": {
            "attn_q_a": "narrow width", "attn_q_a_norm": "narrow", "attn_q_b": "queries narrow",
            "attn_kv_a_mqa": "latent_and_key width", "attn_kv_a_norm": "latent", "attn_kv_b": "both_rows latent",
            "attn_output": "width values",
        },
        "scalings": "longrope",
        "only": {
            "attention_bias": False, "mlp_bias": False, "scale_emb": EMBEDDING_SCALE, "scale_depth": DEPTH_SCALE,
            "dim_model_base": WIDTH,
        },
        "amounts": {"vocab_size": "vocab"}, "read": "@llama.read_minicpm3",
        "defaults": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    },
}  # fmt: skip
