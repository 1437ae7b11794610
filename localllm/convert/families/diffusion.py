"""Diffusion models: LLaDA, with experts and without, and Dream."""

from collections.abc import Mapping
from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import ATTENTION, EXPERTS, HEAD_NORMS, NORMS_BEFORE
from localllm.convert.families.llama import LLAMA
from localllm.convert.families.qwen import QWEN2
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.weights import Stored

USUAL = 156895  # mask token of LLaDA with experts, missing in its config.json
IN_PLACE = {"diffusion.shift_logits": False}  # logits belong to their own position, not to the next one


def add_mask_token(config: Config, h: CheckpointFacts, usual: int = 0) -> CheckpointFacts:
    """Add the mask token's id; usual: the default."""
    mask = config.count("mask_token_id", usual) if config.get("mask_token_id") is not None else usual
    return h.updated({"mask": mask}, attention__causal=False)


def of_mask(stored: Mapping[str, Stored], h: CheckpointFacts) -> dict[str, object]:
    return {"tokenizer.ggml.mask_token_id": h.sizes["mask"]} if h.sizes["mask"] else {}


def dream(config: Config) -> CheckpointFacts:
    return add_mask_token(config, decoder(config))


def llada(config: Config) -> CheckpointFacts:
    """Read LLaDA, which has its own names for all sizes."""
    for name, value in (("block_type", "llama"), ("layer_norm_type", "rms"), ("activation_type", "silu")):
        config.only(name, value)
    for name in ("include_bias", "include_qkv_bias", "attention_layer_norm", "scale_logits", "alibi"):
        config.only(name, False)
    names = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
    }
    h = decoder(config.updated(**{name: config.get(key) for name, key in names.items()}))
    return add_mask_token(config, h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"]))


def llada_moe(config: Config) -> CheckpointFacts:
    """Read LLaDA with experts in every layer."""
    config.only("norm_topk_prob", False)
    config.only("qk_layernorm", True)
    h = with_experts(config, decoder(config), "expert_intermediate_size")
    return add_mask_token(config, h.updated(expert_feed_forward_length=h.sizes["expert_hidden"]), USUAL)


DREAM = replace(QWEN2, arch="dream", read=dream, of_tensors=of_mask)
LLADA = replace(LLAMA, arch="llada", read=llada, of_tensors=of_mask, more=IN_PLACE)
LLADA_MOE = Family(
    "llada-moe",
    {**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **EXPERTS},
    llada_moe,
    more=IN_PLACE,
    of_tensors=of_mask,
)
