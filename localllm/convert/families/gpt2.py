"""GPT-2 and StarCoder 1."""

from collections.abc import Callable

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.hyperparameters import GELU, CheckpointFacts, refuse_other_activations


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read GPT-2: its own names, a position table."""
    refuse_other_activations(config, GELU)
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    width, heads, context = config.count("n_embd"), config.count("n_head"), config.count("n_positions")
    if width % heads:
        raise config.refusal(f"{heads} heads of {width} numbers are inconsistent")
    sizes = {
        "vocab": config.count("vocab_size"),
        "layers": config.count("n_layer", maximum=MOST_LAYERS),
        "width": width,
        "fused_rows": 3 * width,
        "queries": width,
        "hidden": config.count("n_inner", 4 * width),
        "context": context,
    }
    metadata: dict[str, object] = {
        "block_count": sizes["layers"],
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": sizes["hidden"],
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
    }
    return CheckpointFacts(sizes, metadata, {}, config.flag("tie_word_embeddings"))


def starcoder(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read StarCoder 1: like GPT-2 with a single key head, and untransposed matrices."""
    config.only("multi_query", True)
    h = read(config, declared)
    width, head_dim = h.sizes["width"], h.sizes["width"] // h.metadata["attention.head_count"]
    config.only("n_inner", 4 * width)
    return h.updated({"fused_rows": width + 2 * head_dim}, attention__head_count_kv=1)
