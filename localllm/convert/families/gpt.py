"""Read checkpoints of GPT-2, of models with its key names, and of gpt-oss.

The others are StarCoder 1, CodeShell, Refact, BLOOM, MPT and Falcon.
"""

from collections.abc import Sequence
from functools import partial

from localllm.arch.metadata import MAX_LAYERS
from localllm.convert.config import CheckpointConfig
from localllm.convert.hyperparameters import (
    APPROXIMATED,
    GELU,
    CheckpointHyperparameters,
    Reader,
    refuse_other_activations,
)
from localllm.convert.transforms import (
    Shape,
    Sizes,
    TensorSource,
    take_every_second,
    take_strided,
    to_mxfp4_blocks,
    transpose,
)


def read_gpt2(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read GPT-2, which has a position table. Raises ModelError."""
    refuse_other_activations(config, GELU)
    config.require_value("scale_attn_weights", True)
    config.require_value("scale_attn_by_inverse_layer_idx", False)
    config.require_value("add_cross_attention", False)
    width, heads, context = config.read_count("n_embd"), config.read_count("n_head"), config.read_count("n_positions")
    if width % heads:
        raise config.make_error(f"n_embd {width} must be divisible by n_head {heads}")
    sizes = {
        "vocab": config.read_count("vocab_size"),
        "layers": config.read_count("n_layer", maximum=MAX_LAYERS),
        "width": width,
        "fused_rows": 3 * width,
        "queries": width,
        "hidden": config.read_count("n_inner", 4 * width),
        "context": context,
    }
    metadata: dict[str, object] = {
        "block_count": sizes["layers"],
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": sizes["hidden"],
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": config.read_number("layer_norm_epsilon", 1e-5),
    }
    return CheckpointHyperparameters(sizes, metadata, {}, config.read_flag("tie_word_embeddings"))


def read_starcoder(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read StarCoder 1: GPT-2 with a single key head."""
    config.require_value("multi_query", True)
    h = read_gpt2(config, declared)
    width, head_dim = h.sizes["width"], h.sizes["width"] // h.metadata["attention.head_count"]
    config.require_value("n_inner", 4 * width)
    return h.update({"fused_rows": width + 2 * head_dim}, attention__head_count_kv=1)


def read_codeshell(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read CodeShell: GPT-2's keys, RoPE, grouped queries."""
    width = config.read_count("n_embd")
    config.require_value("n_inner", 4 * width)
    return declared(rename_keys(config, 4 * width, config.read_count("num_query_groups")))


def read_refact(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Refact: GPT-2's keys, ALiBi, a single key head."""
    hidden = -(-int(8 * config.read_count("n_embd") / 3) // 256) * 256  # as in its code, whatever n_inner is
    return declared(rename_keys(config.update(rms_norm_eps=config.read_number("layer_norm_epsilon", 1e-5)), hidden, 1))


def rename_keys(config: CheckpointConfig, hidden: int, groups: int) -> CheckpointConfig:
    """Rename GPT-2's keys to Llama's.

    hidden: feed-forward size. groups: key heads.
    """
    renamed = {
        "hidden_size": config.read_count("n_embd"),
        "num_attention_heads": config.read_count("n_head"),
        "head_dim": None,
    }
    renamed |= {"num_hidden_layers": config.read_count("n_layer", maximum=MAX_LAYERS), "num_key_value_heads": groups}
    renamed |= {"max_position_embeddings": config.read_count("n_positions"), "intermediate_size": hidden}
    return config.update(**renamed)


def read_bloom(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read BLOOM, with the keys of old checkpoints or of new ones."""
    width, heads = (
        config.read_count("hidden_size", config.get("n_embed")),
        config.read_count("n_head", config.get("num_heads")),
    )
    renamed: dict[str, object] = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads}
    renamed |= {"num_hidden_layers": config.get("n_layer", config.get("num_hidden_layers"))}
    return declared(config.update(**renamed, intermediate_size=4 * width, head_dim=None))


def read_mpt(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read MPT. Its exact GELU is approximated; queries, keys and values may be clamped."""
    config.warnings.append(APPROXIMATED)
    attention = config.get_section("attn_config")
    limit = attention.read_number("clip_qkv") if attention.get("clip_qkv") else None
    return declared(config).update(attention__clamp_kqv=limit)


def read_falcon(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Falcon: a key head per group, or one for all; newer models may have two norms per layer."""
    newer, heads = (
        config.read_flag("new_decoder_architecture"),
        config.read_count("num_attention_heads", config.get("n_head")),
    )
    groups = 1 if config.read_flag("multi_query", True) and not newer else config.read_count("num_kv_heads", heads)
    renamed = {"num_attention_heads": heads, "num_key_value_heads": groups}
    renamed |= {"num_hidden_layers": config.get("num_hidden_layers", config.get("n_layer"))}
    renamed |= {"intermediate_size": config.read_count("ffn_hidden_size", 4 * config.read_count("hidden_size"))}
    h = declared(config.update(**renamed))
    return h.update({"two_norms": newer and config.get("num_ln_in_parallel_attn", 2) == 2})


def read_gpt_oss(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read gpt-oss, whose every second layer has a sliding window and whose experts may be MXFP4. Raises ModelError."""
    h = declared(config)
    width, hidden = h.sizes["width"], h.sizes["expert_hidden"]
    if width % 32 or hidden % 32:
        raise config.make_error(f"the sizes of experts, {hidden} and {width}, must be multiples of the block size 32")
    blocks = {"both_hidden": 2 * hidden, "block_bytes": 16, "width_blocks": width // 32, "hidden_blocks": hidden // 32}
    return h.update(blocks)


def take_alternate_blocks(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take every second row of MXFP4 matrices, in which gate and up projections alternate."""
    return take_strided(to_mxfp4_blocks(*sources), shape, 2 * shape[-2], start, 2)


def take_alternate_columns(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take every second column of matrices, in which gate and up projections alternate, transposed."""
    return take_strided(transpose(sources[0]), shape, 2 * shape[-2], start, 2)


def take_alternate_biases(start: int, sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return take_every_second(sources[0], start)


def repack_mxfp4(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return to_mxfp4_blocks(*sources)


even_mxfp4, odd_mxfp4 = (partial(take_alternate_blocks, start) for start in (0, 1))
even_columns, odd_columns = (partial(take_alternate_columns, start) for start in (0, 1))
even_biases, odd_biases = (partial(take_alternate_biases, start) for start in (0, 1))
