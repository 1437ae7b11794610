"""BLOOM (BigScience 2022, arXiv 2211.05100).

Unlike llama: scores decrease with distance (ALiBi), and there is no RoPE; layer norms, the first of them for the
embeddings; GELU without a gate; biases everywhere; queries, keys and values from one matrix.
"""

from localllm.arch.attention import LAYER_EPSILON
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.families.baichuan import ALIBI_BIAS
from localllm.arch.families.mpt import MPTHyperparameters, block
from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights


def read(fields: HyperparameterReader) -> MPTHyperparameters:
    shared = MPTHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    return MPTHyperparameters(**shared, limit=0.0, alibi_bias=ALIBI_BIAS)


def forward(b: Builder, w: Weights, h: MPTHyperparameters) -> Activation:
    w.require_biases("token_embd_norm")
    x = b.layer_norm(b.embed(w.token_embd, b.ids), w.token_embd_norm, h.epsilon)
    return apply_decoder(b, w, h, block, x, make_final_layer_norm(b, w, h))


CHECKPOINTS = {
    "BloomForCausalLM BloomModel": {
        "layer": "feed_forward norms",
        "tensors": {
            "attn_qkv": "grouped self_attention.query_key_value.weight: fused_rows width",
            "attn_qkv.bias": "grouped self_attention.query_key_value.bias: fused_rows", "attn_output": "width queries",
        },
        "whole": {"token_embd_norm": "width"}, "biased": "attn_output feed_forward norms output_norm token_embd_norm",
        "prefixes": "transformer.", "layer_norm": "layer_norm_epsilon",
        "only": {"apply_residual_connection_post_layernorm": False}, "sizes": {"fused_rows": "3 * width"},
        "amounts": {"context_length": "seq_length=2048"}, "metadata": {"rope.freq_base": None},
        "read": "@gpt.read_bloom",
        "defaults": {"tie_word_embeddings": True},
    },
}  # fmt: skip
