"""Read checkpoints of T5, Flan-T5, mT5 and UMT5."""

from collections.abc import Sequence

from localllm.arch.families.t5 import REACH
from localllm.arch.metadata import MAX_LAYERS
from localllm.convert.config import CheckpointConfig
from localllm.convert.family import DerivedTensor, Layer
from localllm.convert.hyperparameters import CheckpointHyperparameters, Reader
from localllm.convert.transforms import Shape, Sizes, TensorSource, map_values

NETWORKS = {"relu": False, "gated-gelu": True}  # activations, and whether they are gated
HEADS = {"attn_q": ("queries", "width"), "attn_k": ("queries", "width"), "attn_v": ("queries", "width"),
         "attn_o": ("width", "queries")}  # fmt: skip
NORMS = {"attn_norm": ("width",), "ffn_norm": ("width",)}
LAST = "dec.output_norm.weight"


def read(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read an encoder and a decoder. Raises ModelError."""
    config.require_value("relative_attention_max_distance", REACH)
    network = config.get("feed_forward_proj", "relu")
    if not isinstance(network, str) or network not in NETWORKS:
        raise config.make_error(f"feed_forward_proj must be {' or '.join(NETWORKS)}")
    width, heads, head_dim = (config.read_count(name) for name in ("d_model", "num_heads", "d_kv"))
    encoder = config.read_count("num_layers", maximum=MAX_LAYERS)
    decoder = config.read_count("num_decoder_layers", encoder, maximum=MAX_LAYERS)
    buckets, tied = config.read_count("relative_attention_num_buckets", 32), config.read_flag("tie_word_embeddings")
    start, epsilon = config.get("decoder_start_token_id", 0), config.read_number("layer_norm_epsilon", 1e-6)
    sizes = {
        "vocab": config.read_count("vocab_size"),
        "width": width,
        "hidden": config.read_count("d_ff"),
        "heads": heads,
    }
    sizes |= {"queries": heads * head_dim, "buckets": buckets, "encoder": encoder, "decoder": decoder}
    sizes |= {"layers": max(encoder, decoder), "gate": int(NETWORKS[network]), "scaled": int(is_scaled(config, tied))}
    sizes |= {"own_biases": int(config.get("model_type") == "umt5")}
    metadata = {
        "context_length": config.read_count("n_positions", 512),
        "embedding_length": width,
        "feed_forward_length": sizes["hidden"],
        "block_count": encoder,
        "decoder_block_count": decoder,
        "attention.head_count": heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon": epsilon,
        "attention.relative_buckets_count": buckets,
        "attention.layer_norm_rms_epsilon": epsilon,
        "decoder_start_token_id": start,
    }
    return CheckpointHyperparameters(sizes, metadata, {}, tied)


def is_scaled(config: CheckpointConfig, tied: bool) -> bool:
    """Return whether the input of the output matrix is scaled, which GGUF's readers do not support.

    By default tied embeddings mean that it is; mT5 never scales.
    """
    kind = config.get("model_type", "t5")
    return kind != "mt5" and config.read_flag("scale_decoder_outputs", tied)


def list_all_tensors(sizes: Sizes) -> Layer:
    """List the tensors of encoder and decoder."""
    network = {"ffn_up": ("hidden", "width"), "ffn_down": ("width", "hidden")}
    network |= {"ffn_gate": ("hidden", "width")} if sizes["gate"] else {}
    crossing = {f"cross_{name}": shape for name, shape in HEADS.items()} | {"cross_attn_norm": ("width",)}
    tensors: dict[str, tuple[str, ...] | DerivedTensor] = {"enc.output_norm.weight": ("width",)}
    for part, count, crossing_parts in (("enc", sizes["encoder"], {}), ("dec", sizes["decoder"], crossing)):
        for number in range(count):
            biases = {"attn_rel_b": ("buckets", "heads")} if sizes["own_biases"] or not number else {}
            layer = {**HEADS, **NORMS, **network, **crossing_parts, **biases}
            tensors |= {f"{part}.blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return tensors | {
        LAST: DerivedTensor(("width",), {LAST: ("width",)}, scale_rows) if sizes["scaled"] else ("width",)
    }


def scale_rows(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return map_values(sources[0], lambda numbers: numbers * sizes["width"] ** -0.5)


def read_encoder(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read an encoder without a decoder, which is an embedding model."""
    h = read(config.update(num_decoder_layers=None), declared)
    return h.update({"decoder": 0}, decoder_block_count=None, decoder_start_token_id=None)


def list_encoder_tensors(sizes: Sizes) -> Layer:
    return {name: its for name, its in list_all_tensors(sizes).items() if name.startswith("enc.")}
