"""Qwen 4 (experimental): the delta rule, block-sparse attention, residual streams, n-gram embeddings."""

from collections.abc import Callable, Mapping, Sequence
from math import isqrt

import numpy as np

from localllm.convert.config import Config
from localllm.convert.families import qwen35
from localllm.convert.family import DerivedTensor, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.layers import as_stored
from localllm.convert.tensor_functions import FUNCTIONS
from localllm.convert.tensors import Shape, TensorSource, map_values, pick_rows, reshape, stack
from localllm.convert.weights import Stored
from localllm.errors import ModelError

CONSTANTS = {"layer_multipliers": "layer_multipliers", "head_offsets": "ngram_heads_offsets",
             "head_vocab_sizes": "ngram_heads_vocab_sizes"}  # fmt: skip


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Qwen 4, starting from Qwen 3.5. Multi-token prediction is left out."""
    if config.get("output_gate_type") != "sigmoid":
        raise config.refusal("only sigmoid is supported as output_gate_type")
    kinds, hidden = config.get("layer_types"), config.count("moe_intermediate_size")
    if isinstance(kinds, list):  # the publisher's keys, not those that transformers saves
        kinds = ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]
    renamed = qwen35.with_sections(config).updated(
        layer_types=kinds, intermediate_size=config.count("intermediate_size", hidden)
    )
    h = qwen35.with_qwen_experts(renamed, qwen35.read(renamed, declared))
    if config.get("intermediate_size") is None:
        h = h.updated(feed_forward_length=None)
    heads, dim, size = (config.count(f"indexer_{name}") for name in ("n_heads", "head_dim", "compress_ratio"))
    streams, rank, attends = config.count("hc_count", 4), config.count("hc_lowrank", 320), "attends_{}"
    sizes = {
        "streams": streams,
        "all_streams": streams * h.sizes["width"],
        "rank": rank,
        "mtp_layers": 0,
        "index_dim": dim,
    }
    sizes |= {"index_queries": heads * dim, "queries_and_key": (heads + 1) * dim}
    return with_ngrams(config, h).updated(
        sizes,
        hyper_connection__count=streams,
        hyper_connection__low_rank=rank,
        attention__indexer__head_count=heads,
        attention__indexer__key_length=dim,
        attention__indexer__top_k=config.count("indexer_budget"),
        attention__compress_ratios=[size * h.sizes[attends.format(number)] for number in range(h.sizes["layers"])],
    )


def with_ngrams(config: Config, h: CheckpointFacts) -> CheckpointFacts:
    """Add n-gram embeddings, if there are any."""
    layers, end = config.get("ple_layer_ids", []), config.get("eos_token_id")
    if not layers:
        return h.updated({"hashes": 0})
    if not isinstance(layers, list) or len(layers) != 1 or not isinstance(layers[0], int):
        raise config.refusal("ple_layer_ids: sequences of tokens are supported in one layer only")
    end = end[0] if isinstance(end, list) and len(end) == 1 else end
    if not isinstance(end, int):
        raise config.refusal("eos_token_id should be a single token, which separates sequences")
    length, each = config.count("ngram_size", 3), config.count("heads_per_ngram", 8)
    hashes, parts = (length - 1) * each, config.count("split_ngram_parts", 512)
    width = config.count("ple_embed_dim", h.sizes["width"])
    multiple = config.count("make_ngram_vocab_size_divisible_by", 128)
    rows = sum(primes_from(config.count("ngram_vocab_size_base", 20_000_000, 1 << 31), hashes))
    rows = -(-rows // multiple) * multiple
    if not hashes or width % hashes or rows % parts:
        raise config.refusal(f"{rows} rows of {width} numbers for {hashes} hashes, in {parts} parts: inconsistent")
    sizes = {"hashes": hashes, "ngram_layer": layers[0] - 1, "parts": parts, "part": rows // parts, "rows": rows}
    sizes |= {"of_hash": width // hashes, "of_hashes": width, "near": config.count("ple_conv_kernel_size", 4)}
    return h.updated(
        sizes,
        ple__layers=[layers[0] - 1],
        ple__ngram_size=length,
        ple__heads_per_ngram=each,
        ple__conv_kernel=sizes["near"],
        ple__eos_token_id=end,
        ple__image_token_id=config.get("image_token_id"),
        embedding_length_per_layer_input=sizes["of_hash"],
    )


def primes_from(least: int, count: int) -> list[int]:
    """Return the first `count` primes from `least` on: the number of rows of each hash."""
    primes, number = list[int](), max(least, 2)
    while len(primes) < count:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return primes


def constants(stored: Mapping[str, Stored], h: CheckpointFacts) -> dict[str, object]:
    """Read the hashes' constants from stored tensors. Raises ModelError."""
    tensors = {}
    for key, name in CONSTANTS.items() if h.sizes["hashes"] else ():
        tensor = next(
            (stored[stored_name] for stored_name in stored if stored_name.endswith(f".ple_embedding.{name}")), None
        )
        if tensor is None or tensor.dtype != "I64" or len(tensor.shape) != 1:
            raise ModelError(f"there is no {name} of the n-gram embeddings")
        tensors[f"qwen4exp.ple.{key}"] = tensor.rows(0, 1).view("<i8")[0].astype(np.uint64)
    return tensors


def offset(name: str, *dimensions: str) -> DerivedTensor:
    """Declare a norm that multiplies by 1 + weight."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return map_values(sources[0], lambda numbers: numbers + 1)

    return DerivedTensor(dimensions, {f"{name}.weight": dimensions}, build)


def of_index(rows: str, start: str = "") -> DerivedTensor:
    """Take the query rows of an indexer's matrix, or the key rows after them."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return pick_rows(sources[0], shape, lambda numbers: numbers + (sizes[start] if start else 0))

    stored = {"self_attn.indexer.index_qk_proj.weight": ("queries_and_key", "width")}
    return DerivedTensor((rows, "width"), stored, build)


def streams_of(name: str, stored: str) -> Layer:
    """List the tensors that mix residual streams; stored: their name in the checkpoint."""
    return {
        f"{name}_norm": offset(f"{stored}.hc_norm", "all_streams"),
        f"{name}_down": as_stored(f"{stored}.input_mix_weight_down", "rank", "all_streams"),
        f"{name}_up": as_stored(f"{stored}.input_mix_weight_up", "all_streams", "rank"),
    }


INDEXER: Layer = {
    "indexer.q_proj.weight": of_index("index_queries"),
    "indexer.k_proj.weight": of_index("index_dim", "index_queries"),
    "indexer.q_norm.weight": offset("self_attn.indexer.q_layernorm", "index_dim"),
    "indexer.k_norm.weight": offset("self_attn.indexer.k_layernorm", "index_dim"),
}
HALVES = {"hc_attn": "attn_hyper_connection", "hc_ffn": "mlp_hyper_connection"}
STREAMS: Layer = {
    part: its
    for name, stored in HALVES.items()
    for part, its in {
        **streams_of(name, stored),
        f"{name}_inject": as_stored(f"{stored}.block_inject_weight", "streams", "all_streams"),
    }.items()
}
SEQUENCES: Layer = {
    "ple_key": as_stored("ple.key_proj", "all_streams", "of_hashes"),
    "ple_value": as_stored("ple.value_proj", "width", "of_hashes"),
    **{f"ple_norm_{kind}": offset(f"ple.norm_{kind}", "all_streams") for kind in ("key", "query", "conv")},
    "ple_conv1d": DerivedTensor(
        ("all_streams", "near"), {"ple.conv1d.weight": ("all_streams", "one", "near")}, FUNCTIONS["reshape"]
    ),
}


def layer(sizes: Sizes, number: int) -> Layer:
    mixer = {**qwen35.ATTENDING, **INDEXER} if sizes[f"attends_{number}"] else qwen35.RULE
    ngrams = SEQUENCES if sizes["hashes"] and sizes["ngram_layer"] == number else {}
    return {**STREAMS, **mixer, **qwen35.mixture(sizes), **ngrams}


def whole(sizes: Sizes) -> Layer:
    streams = streams_of("output_hc", "model.hyper_connection_mixer")
    if not sizes["hashes"]:
        return streams

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return reshape(stack(sources), shape)

    place = f"blk.{sizes['ngram_layer']}.ple.ple_embedding.ngram_embedding.shard_{{}}.weight"
    parts = {place.format(number): ("part", "of_hash") for number in range(sizes["parts"])}
    return {**streams, "per_layer_token_embd": DerivedTensor(("rows", "of_hash"), parts, build)}
