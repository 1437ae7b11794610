"""Diffusion models: LLaDA (Nie et al. 2025, arXiv 2502.09992), Dream (Ye et al. 2025, arXiv 2508.15487), RND1.

They fill masked positions instead of continuing a text. LLaDA-MoE and RND1 (Radical Numerics 2025) have experts.

Unlike llama and Qwen 2 and 3, whose layers they have: attention is bidirectional.
"""

from typing import ClassVar

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.families import llama, qwen3
from localllm.arch.family import Activation, Builder, HyperparameterReader, Weights, frozen
from localllm.arch.feed_forward import read_routing
from localllm.arch.verbs import FULL_ATTENTION

MIXTURES = {"llada-moe": False, "rnd1": True}  # whether experts' weights are normalized


@frozen
class MaskedDiffusionHyperparameters(TransformerHyperparameters):
    bidirectional: ClassVar[bool] = True
    is_diffusion: ClassVar[bool] = True

    def get_lookahead(self, layer: int) -> int:
        return FULL_ATTENTION


def read(fields: HyperparameterReader) -> MaskedDiffusionHyperparameters:
    fields.read_flag("attention.causal", False)
    shared = MaskedDiffusionHyperparameters.read_shared_fields(
        fields, interleaved=fields.arch == "llada", rotates_all=True
    )
    routing = read_routing(fields, normalized=MIXTURES.get(fields.arch, True))
    if (routing is None) != (fields.arch not in MIXTURES):
        must = "be above 0" if fields.arch in MIXTURES else "be 0"
        raise fields.make_error(f"{fields.format_key('expert_count')} must {must} in {fields.arch} models")
    return MaskedDiffusionHyperparameters(**shared, routing=routing)


def forward(b: Builder, w: Weights, h: MaskedDiffusionHyperparameters) -> Activation:
    return (qwen3 if h.routing else llama).forward(b, w, h)


CHECKPOINTS = {
    "DreamModel": {
        "arch": "dream", "layer": "attention gated norms", "biased": "attn_q attn_k attn_v",
        "read": "@llama.read_diffusion", "of_tensors": "@llama.mask_token",
    },
    "LLaDAModelLM": {
        "arch": "llada", "layer": "attention gated norms", "rotated": True,
        "only": {
            "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "include_bias": False,
            "include_qkv_bias": False, "attention_layer_norm": False, "scale_logits": False, "alibi": False,
        },
        "reads": {
            "hidden_size": "d_model", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
            "num_hidden_layers": "n_layers", "intermediate_size": "mlp_hidden_size",
            "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying",
        },
        "amounts": {"vocab_size": "vocab", "rope.dimension_count": "head_dim"}, "read": "@llama.read_diffusion",
        "of_tensors": "@llama.mask_token",
        "more": {"diffusion.shift_logits": False},  # they belong to their own position, not to the next one
    },
    "LLaDAMoEModel LLaDAMoEModelLM": {
        "arch": "llada-moe", "layer": "attention head_norms norms experts",
        "only": {"norm_topk_prob": False, "qk_layernorm": True}, "experts": "expert_intermediate_size",
        "amounts": {"expert_feed_forward_length": "expert_hidden"}, "read": "@llama.read_diffusion_moe",
        "of_tensors": "@llama.mask_token", "more": {"diffusion.shift_logits": False},
    },
}  # fmt: skip
