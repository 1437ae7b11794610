"""Read checkpoints of Qwen: rerankers of Qwen3, Qwen3-VL, and models with the gated delta rule.

The last are Qwen3-Next, Qwen 3.5 and Qwen 4 (experimental), which adds block-sparse attention, residual streams and
n-gram embeddings.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt

import numpy as np

from localllm.convert.config import CheckpointConfig
from localllm.convert.families.bert import RANK, read_labels
from localllm.convert.family import (
    ATTENTION,
    HEAD_NORMS,
    SHARED_EXPERT,
    DerivedTensor,
    Dimensions,
    Layer,
    list_expert_tensors,
    list_mtp_tensors,
    rename_tensor,
)
from localllm.convert.files import read_json, read_text, report_as_model_error
from localllm.convert.hyperparameters import (
    CheckpointHyperparameters,
    Reader,
    add_experts,
    name_layer_sizes,
    read_layer_types,
)
from localllm.convert.safetensors_files import StoredTensor
from localllm.convert.transforms import (
    FUNCTIONS,
    Shape,
    Sizes,
    TensorSource,
    as_float32,
    from_array,
    permute_columns,
    pick_rows,
    reshape,
    stack,
    to_column,
    to_vector,
)
from localllm.errors import ModelError

ANSWERS = "yes", "no"


def is_reranker(config: CheckpointConfig) -> bool:
    """Return whether a Qwen3 checkpoint is a yes-no reranker, judging by its model card and names."""
    names = (config.path.parent.name, str(config.get("_name_or_path")))
    card = read_text(config.path.parent / "README.md") or ""
    return "# qwen3-reranker" in card.lower() or any("qwen3-reranker" in name.lower() for name in names)


def read_ranker(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read a reranker whose scores are two rows of the output matrix: those of "yes" and "no". Raises ModelError."""
    path = config.path.parent / "tokenizer.json"
    with report_as_model_error(path):
        vocabulary = (read_json(path) or {})["model"]["vocab"]
        answers = {name: int(vocabulary[name]) for name in ANSWERS}
    h = declared(config)
    if max(answers.values()) >= h.sizes["vocab"]:
        raise config.make_error("the vocabulary must have the tokens yes and no")
    return h.update({**answers, "labels": 2}, pooling_type=RANK, classifier__output_labels=[*ANSWERS])


def read_classifier(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read a reranker with a separate classification head."""
    named = read_labels(config)
    h = declared(config).update({"labels": len(named)}, pooling_type=RANK)
    return h.update(classifier__output_labels=named) if len(named) > 1 else h


def take_answer_rows(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the rows of "yes" and "no" from the output matrix."""
    return pick_rows(sources[0], shape, lambda rows: np.array([sizes[name] for name in ANSWERS])[np.asarray(rows)])


def select(config: CheckpointConfig) -> str:
    """Return the name of the record for a chat model, a reranker, or a reranker with tied embeddings."""
    if not is_reranker(config):
        return "Qwen3ForCausalLM"
    return "Qwen3ForCausalLM+tied_ranker" if config.read_flag("tie_word_embeddings") else "Qwen3ForCausalLM+ranker"


def read_qwen3vl(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Qwen3-VL and count its DeepStack layers."""
    h = declared(config)
    deep = config.get_section("vision_config").get("deepstack_visual_indexes", [])
    return h.update(n_deepstack_layers=len(deep) if isinstance(deep, list) else 0)


KINDS = {"linear_attention": False, "full_attention": True}


def read_delta_rule(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Return the settings of layers with a gated delta rule or gated attention. Raises ModelError."""
    h = declared(config)
    keys, values = config.read_count("linear_num_key_heads"), config.read_count("linear_num_value_heads")
    key_dim, value_dim = config.read_count("linear_key_head_dim"), config.read_count("linear_value_head_dim")
    kernel = config.read_count("linear_conv_kernel_dim", 4)
    if values % keys:
        raise config.make_error(f"the {values} value heads must be a multiple of the {keys} key heads")
    attends, interval = mark_attention_layers(config, h.sizes["layers"])
    sizes = {
        "both_queries": 2 * h.sizes["queries"],
        "key_heads": keys,
        "value_heads": values,
        "rule_values": values * value_dim,
        "value_dim": value_dim,
        "key_dim": key_dim,
        "convolved": 2 * keys * key_dim + values * value_dim,
        "all_four": 2 * (keys * key_dim + values * value_dim),
        "both_strengths": 2 * values,
        "kernel": kernel,
        "one": 1,
        "mtp_layers": int(config.get("mtp_num_hidden_layers", 1) != 0),
        "both_inputs": 2 * h.sizes["width"],
        **name_layer_sizes("attends", [*attends, True]),
    }
    return h.update(
        sizes,
        attention__key_length=h.sizes["head_dim"],
        attention__value_length=h.sizes["head_dim"],
        attention__recurrent_layers=None if config.get("layer_types") is None else [not does for does in attends],
        full_attention_interval=interval,
        ssm__conv_kernel=kernel,
        ssm__state_size=key_dim,
        ssm__group_count=keys,
        ssm__time_step_rank=values,
        ssm__inner_size=values * value_dim,
    )


def mark_attention_layers(config: CheckpointConfig, layers: int) -> tuple[list[bool], int]:
    """Mark the layers with attention.

    Returns also their period, which GGUF's readers use if a file does not list the layers.
    """
    interval = config.read_count("full_attention_interval", 4)
    if config.get("layer_types") is None:
        return [(number + 1) % interval == 0 for number in range(layers)], interval
    return [KINDS[kind] for kind in read_layer_types(config, "layer_types", layers, KINDS)], interval


def read_qwen3next(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Qwen3-Next: experts and a shared expert in every layer."""
    return add_qwen_experts(config, read_delta_rule(config, declared))


def read_qwen35(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Qwen 3.5: the gated delta rule, with M-RoPE."""
    return read_delta_rule(add_sections(config), declared)


def read_qwen35moe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    return add_qwen_experts(config, read_qwen35(config, declared))


def add_sections(config: CheckpointConfig) -> CheckpointConfig:
    """Add Qwen 3.5's M-RoPE sections unless config.json has its own."""
    rope = config.get_section("rope_parameters").content
    return config.update(rope_parameters={"mrope_section": [11, 11, 10], **rope})


def add_qwen_experts(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    for name, value in (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        config.require_value(name, value)
    shared = config.read_count("shared_expert_intermediate_size")
    h = add_experts(config, h, "moe_intermediate_size")
    return h.update(
        {"shared_hidden": shared, "both_hidden": 2 * h.sizes["expert_hidden"]},
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_feed_forward_length=shared,
    )


def declare_rule_tensor(
    name: str, *dimensions: str, order: Callable[[Sizes], np.ndarray], stored: Dimensions = ()
) -> DerivedTensor:
    """Declare a tensor of the delta rule whose rows are reordered.

    order: computes the stored row of each row. stored: shape in the checkpoint, if it differs.
    """

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = order(sizes)
        matrix = sources[0] if len(shape) > 1 else to_column(sources[0])
        sorted_rows = pick_rows(matrix, shape, lambda rows: numbers[rows])
        return sorted_rows if len(shape) > 1 else to_vector(replace(sorted_rows, shape=(*shape, 1)))

    return DerivedTensor(dimensions, {f"linear_attn.{name}": stored or dimensions}, build)


def interleave_heads(sizes: Sizes, length: int, start: int = 0) -> np.ndarray:
    """Return the stored row of each row of value heads, int [rows].

    Stored heads are grouped by the key head that they share; GGUF's come by their index within the group. length: rows
    of a head. start: stored row of the first head.
    """
    groups = np.arange(sizes["value_heads"] * length).reshape(sizes["key_heads"], -1, length)
    return start + groups.transpose(1, 0, 2).ravel()


def interleave_values(sizes: Sizes) -> np.ndarray:
    """Return the stored row of each row of queries, keys and values, of which only values are reordered."""
    keys = 2 * sizes["key_heads"] * sizes["key_dim"]
    return np.concatenate([np.arange(keys), interleave_heads(sizes, sizes["value_dim"], keys)])


def order_group_part(number: slice) -> Callable[[Sizes], np.ndarray]:
    """Return a function that selects rows of groups, each of a query, a key, values and their gates.

    number: which of the four to select.
    """

    def order(sizes: Sizes) -> np.ndarray:
        groups = np.arange(sizes["all_four"]).reshape(sizes["key_heads"], -1)
        values = (groups.shape[1] - 2 * sizes["key_dim"]) // 2
        ends = np.cumsum([sizes["key_dim"], sizes["key_dim"], values])
        return np.concatenate([part.ravel() for part in np.split(groups, ends, axis=1)[number]])

    return order


def interleave_columns(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return permute_columns(sources[0], interleave_heads(sizes, sizes["value_dim"]))


def interleave_rates(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    numbers = as_float32(FUNCTIONS["decay"](sources, shape, sizes).read_rows(0, 1), "F32").reshape(-1)
    return from_array(numbers[interleave_heads(sizes, 1)])


HEADS, TAPS = ("value_heads",), ("convolved", "one", "kernel")
NORM: Layer = {
    "ssm_norm": DerivedTensor(("value_dim",), {"linear_attn.norm.weight": ("value_dim",)}, FUNCTIONS["same"])
}
WIDE = ("all_four", "width")
RULE_OF_NEXT: Layer = {
    **NORM,
    "attn_qkv": declare_rule_tensor(
        "in_proj_qkvz.weight", "convolved", "width", order=order_group_part(slice(0, 3)), stored=WIDE
    ),
    "attn_gate": declare_rule_tensor(
        "in_proj_qkvz.weight", "rule_values", "width", order=order_group_part(slice(3, 4)), stored=WIDE
    ),
    "ssm_ba": ("both_strengths", "width"),
    "ssm_conv1d": DerivedTensor(("convolved", "kernel"), {"linear_attn.conv1d.weight": TAPS}, FUNCTIONS["reshape"]),
    "ssm_dt.bias": DerivedTensor(HEADS, {"linear_attn.dt_bias": HEADS}, FUNCTIONS["same"]),
    "ssm_a": DerivedTensor(HEADS, {"linear_attn.A_log": HEADS}, FUNCTIONS["decay"]),
    "ssm_out": ("width", "rule_values"),
}
BY_ONE = partial(interleave_heads, length=1)
RULE: Layer = {
    **NORM,
    "attn_qkv": declare_rule_tensor("in_proj_qkv.weight", "convolved", "width", order=interleave_values),
    "attn_gate": declare_rule_tensor(
        "in_proj_z.weight", "rule_values", "width", order=lambda sizes: interleave_heads(sizes, sizes["value_dim"])
    ),
    "ssm_alpha": declare_rule_tensor("in_proj_a.weight", "value_heads", "width", order=BY_ONE),
    "ssm_beta": declare_rule_tensor("in_proj_b.weight", "value_heads", "width", order=BY_ONE),
    "ssm_conv1d": declare_rule_tensor("conv1d.weight", "convolved", "kernel", order=interleave_values, stored=TAPS),
    "ssm_dt.bias": declare_rule_tensor("dt_bias", "value_heads", order=BY_ONE),
    "ssm_a": DerivedTensor(HEADS, {"linear_attn.A_log": HEADS}, interleave_rates),
    "ssm_out": DerivedTensor(
        ("width", "rule_values"), {"linear_attn.out_proj.weight": ("width", "rule_values")}, interleave_columns
    ),
}
BESIDE: Layer = {**SHARED_EXPERT, "ffn_gate_inp_shexp": ("one", "width")}
ATTENDING: Layer = {**ATTENTION, **HEAD_NORMS, "attn_q": ("both_queries", "width")}
NORMS: Layer = {"attn_norm": ("width",), "post_attention_norm": ("width",)}


def list_experts(sizes: Sizes, number: int) -> Layer:
    return {**list_expert_tensors(sizes, "mlp.experts"), **BESIDE}


def add_norm_offsets(layer: Layer) -> Layer:
    """Declare the norms of a multi-token prediction layer as multiplying by 1 + weight."""
    offset = FUNCTIONS["offset"]
    return {name: replace(its, build=offset) if "norm" in name else its for name, its in layer.items()}  # type: ignore[type-var]


IN_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
MTP = re.compile(r"(?:model\.)?mtp\.(?:layers\.0\.)?(.+)")


def rename_mtp(name: str, layers: int) -> str:
    """Rename the tensors of multi-token prediction as if it were one more layer."""
    match = MTP.fullmatch(name)
    if not match:
        return name
    module, _, kind = match[1].rpartition(".")
    return f"model.layers.{layers}.{IN_MTP.get(module, module)}.{kind}"


def list_layer_tensors(rule: Layer, sizes: Sizes, number: int) -> Layer:
    """List the tensors of a layer except its feed-forward network.

    rule: tensors of a delta-rule layer.
    """
    mixer = ATTENDING if sizes[f"attends_{number}"] else rule
    return {**NORMS, **mixer, **add_norm_offsets(list_mtp_tensors(sizes, number))}


qwen35_layer, qwen3next_layer = partial(list_layer_tensors, RULE), partial(list_layer_tensors, RULE_OF_NEXT)


CONSTANTS = {"layer_multipliers": "layer_multipliers", "head_offsets": "ngram_heads_offsets",
             "head_vocab_sizes": "ngram_heads_vocab_sizes"}  # fmt: skip


def read_qwen4exp(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Qwen 4 as an extension of Qwen 3.5, without multi-token prediction. Raises ModelError."""
    if config.get("output_gate_type") != "sigmoid":
        raise config.make_error("output_gate_type must be sigmoid")
    kinds, hidden = config.get("layer_types"), config.read_count("moe_intermediate_size")
    if isinstance(kinds, list):  # the publisher's keys, not those that transformers saves
        kinds = ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]
    renamed = add_sections(config).update(
        layer_types=kinds, intermediate_size=config.read_count("intermediate_size", hidden)
    )
    h = add_qwen_experts(renamed, read_delta_rule(renamed, declared))
    if config.get("intermediate_size") is None:
        h = h.update(feed_forward_length=None)
    heads, dim, size = (config.read_count(f"indexer_{name}") for name in ("n_heads", "head_dim", "compress_ratio"))
    streams, rank = config.read_count("hc_count", 4), config.read_count("hc_lowrank", 320)
    sizes = {"streams": streams, "all_streams": streams * h.sizes["width"], "rank": rank, "mtp_layers": 0}
    sizes |= {"index_dim": dim, "index_queries": heads * dim, "queries_and_key": (heads + 1) * dim}
    return add_ngrams(config, h).update(
        sizes,
        hyper_connection__count=streams,
        hyper_connection__low_rank=rank,
        attention__indexer__head_count=heads,
        attention__indexer__key_length=dim,
        attention__indexer__top_k=config.read_count("indexer_budget"),
        attention__compress_ratios=[size * h.sizes[f"attends_{number}"] for number in range(h.sizes["layers"])],
    )


def add_ngrams(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    """Add the sizes and metadata of n-gram embeddings, if the model has them. Raises ModelError."""
    layers, end = config.get("ple_layer_ids", []), config.get("eos_token_id")
    if not layers:
        return h.update({"hashes": 0})
    if not isinstance(layers, list) or len(layers) != 1 or not isinstance(layers[0], int):
        raise config.make_error("ple_layer_ids must name one layer only for n-grams of tokens")
    end = end[0] if isinstance(end, list) and len(end) == 1 else end
    if not isinstance(end, int):
        raise config.make_error("eos_token_id must be a single token, which separates sequences")
    length, each = config.read_count("ngram_size", 3), config.read_count("heads_per_ngram", 8)
    hashes, parts = (length - 1) * each, config.read_count("split_ngram_parts", 512)
    width = config.read_count("ple_embed_dim", h.sizes["width"])
    multiple = config.read_count("make_ngram_vocab_size_divisible_by", 128)
    rows = sum(find_primes(config.read_count("ngram_vocab_size_base", 20_000_000, 1 << 31), hashes))
    rows = -(-rows // multiple) * multiple
    if not hashes or width % hashes or rows % parts:
        raise config.make_error(
            f"inconsistent n-gram embeddings: {rows} rows of width {width} for {hashes} hashes in {parts} shards"
        )
    sizes = {"hashes": hashes, "ngram_layer": layers[0] - 1, "parts": parts, "part": rows // parts, "rows": rows}
    sizes |= {"of_hash": width // hashes, "of_hashes": width, "near": config.read_count("ple_conv_kernel_size", 4)}
    return h.update(
        sizes,
        ple__layers=[layers[0] - 1],
        ple__ngram_size=length,
        ple__heads_per_ngram=each,
        ple__conv_kernel=sizes["near"],
        ple__eos_token_id=end,
        ple__image_token_id=config.get("image_token_id"),
        embedding_length_per_layer_input=sizes["of_hash"],
    )


def find_primes(least: int, count: int) -> list[int]:
    """Return the first `count` primes not below `least`, which are the sizes of the hash tables."""
    primes, number = list[int](), max(least, 2)
    while len(primes) < count:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return primes


def read_constants(stored: Mapping[str, StoredTensor], h: CheckpointHyperparameters) -> dict[str, object]:
    """Load the constants of the n-gram hashes from stored tensors, as metadata. Raises ModelError."""
    tensors = {}
    for key, name in CONSTANTS.items() if h.sizes["hashes"] else ():
        tensor = next(
            (its for stored_name, its in stored.items() if stored_name.endswith(f".ple_embedding.{name}")), None
        )
        if tensor is None or tensor.dtype != "I64" or len(tensor.shape) != 1:
            raise ModelError(f"the tensor {name} of the n-gram embeddings is missing")
        tensors[f"qwen4exp.ple.{key}"] = tensor.read_rows(0, 1).view("<i8")[0].astype(np.uint64)
    return tensors


def declare_offset_norm(name: str, *dimensions: str) -> DerivedTensor:
    """Declare a norm that multiplies by 1 + weight."""
    return DerivedTensor(dimensions, {f"{name}.weight": dimensions}, FUNCTIONS["offset"])


def take_indexer_rows(rows: str, start: str = "") -> DerivedTensor:
    """Declare the query rows of an indexer's fused matrix, or the key rows after them.

    rows, start: names of the sizes that count the rows and the rows before them.
    """

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return pick_rows(sources[0], shape, lambda numbers: numbers + (sizes[start] if start else 0))

    stored = {"self_attn.indexer.index_qk_proj.weight": ("queries_and_key", "width")}
    return DerivedTensor((rows, "width"), stored, build)


def list_stream_tensors(name: str, stored: str) -> Layer:
    """List the tensors that mix residual streams.

    name, stored: prefixes in GGUF and in the checkpoint.
    """
    return {
        f"{name}_norm": declare_offset_norm(f"{stored}.hc_norm", "all_streams"),
        f"{name}_down": rename_tensor(f"{stored}.input_mix_weight_down", "rank", "all_streams"),
        f"{name}_up": rename_tensor(f"{stored}.input_mix_weight_up", "all_streams", "rank"),
    }


INDEXER: Layer = {
    "indexer.q_proj.weight": take_indexer_rows("index_queries"),
    "indexer.k_proj.weight": take_indexer_rows("index_dim", "index_queries"),
    "indexer.q_norm.weight": declare_offset_norm("self_attn.indexer.q_layernorm", "index_dim"),
    "indexer.k_norm.weight": declare_offset_norm("self_attn.indexer.k_layernorm", "index_dim"),
}
HALVES = {"hc_attn": "attn_hyper_connection", "hc_ffn": "mlp_hyper_connection"}
STREAMS: Layer = {
    part: its
    for name, stored in HALVES.items()
    for part, its in {
        **list_stream_tensors(name, stored),
        f"{name}_inject": rename_tensor(f"{stored}.block_inject_weight", "streams", "all_streams"),
    }.items()
}
SEQUENCES: Layer = {
    "ple_key": rename_tensor("ple.key_proj", "all_streams", "of_hashes"),
    "ple_value": rename_tensor("ple.value_proj", "width", "of_hashes"),
    **{f"ple_norm_{kind}": declare_offset_norm(f"ple.norm_{kind}", "all_streams") for kind in ("key", "query", "conv")},
    "ple_conv1d": DerivedTensor(
        ("all_streams", "near"), {"ple.conv1d.weight": ("all_streams", "one", "near")}, FUNCTIONS["reshape"]
    ),
}


def list_qwen4exp_tensors(sizes: Sizes, number: int) -> Layer:
    mixer = {**ATTENDING, **INDEXER} if sizes[f"attends_{number}"] else RULE
    ngrams = SEQUENCES if sizes["hashes"] and sizes["ngram_layer"] == number else {}
    return {**STREAMS, **mixer, **list_experts(sizes, number), **ngrams}


def join_tables(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return reshape(stack(sources), shape)


def list_qwen4exp_global_tensors(sizes: Sizes) -> Layer:
    streams = list_stream_tensors("output_hc", "model.hyper_connection_mixer")
    if not sizes["hashes"]:
        return streams
    place = f"blk.{sizes['ngram_layer']}.ple.ple_embedding.ngram_embedding.shard_{{}}.weight"
    parts = {place.format(number): ("part", "of_hash") for number in range(sizes["parts"])}
    return {**streams, "per_layer_token_embd": DerivedTensor(("rows", "of_hash"), parts, join_tables)}
