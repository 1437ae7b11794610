"""What only its publishers have code for: InternLM 2, Baichuan, Xverse, Orion, EXAONE 3, MiniCPM, DeepSeek's first
one, Ling, MiniMax-01, PLM, Pangu, Maincoder, Nanbeige."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.convert.config import Config
from localllm.convert.families.deepseek import SIGMOID, SOFTMAX
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    ROTATED,
    SHARED_EXPERT,
    as_it_is,
    as_stored,
)
from localllm.convert.families.llama import LLAMA, LLAMA_SCALING, llama
from localllm.convert.family import Family, Layer, MadeOf, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder, rotated_numbers
from localllm.convert.tensors import Shape, TensorSource, in_pairs, picked

LAYOUT = "Meta AI original pth"  # which files say of themselves, and nobody reads
Rows = Callable[[np.ndarray, Sizes], np.ndarray]  # numbers of fused rows -> those of one part


def fused(name: str, rows: Rows, turns: bool, *dimensions: str) -> MadeOf:
    """Some rows of the matrix that is queries, keys and values; turns: they are in the order of halves."""

    def made(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        numbers = rows(np.arange(sizes["fused_rows"]), sizes)
        found = picked(sources[0], shape, lambda wanted: numbers[wanted])
        return in_pairs(found, sizes["head_dim"]) if turns else found

    return MadeOf(dimensions, {f"{name}.weight": ("fused_rows", "width")}, made)


def unpacked(name: str, parts: Sequence[Rows]) -> Layer:
    """Queries, keys and values of one matrix."""
    shapes = (ATTENTION["attn_q"], ATTENTION["attn_k"], ATTENTION["attn_v"])
    kinds = zip("qkv", parts, shapes, strict=True)
    return {f"attn_{kind}": fused(name, rows, kind != "v", *shape) for kind, rows, shape in kinds}


def of_groups(rows: np.ndarray, sizes: Sizes) -> np.ndarray:
    return rows.reshape(sizes["kv_heads"], -1, sizes["head_dim"])


IN_GROUPS = unpacked(
    "attention.wqkv",
    (
        lambda rows, sizes: of_groups(rows, sizes)[:, :-2].ravel(),
        lambda rows, sizes: of_groups(rows, sizes)[:, -2].ravel(),
        lambda rows, sizes: of_groups(rows, sizes)[:, -1].ravel(),
    ),
)
ONE_AFTER_OTHER: tuple[Rows, ...] = (
    lambda rows, sizes: rows[: sizes["queries"]],
    lambda rows, sizes: rows[sizes["queries"] : -sizes["keys"]],
    lambda rows, sizes: rows[-sizes["keys"] :],
)


def with_fused_rows(h: CheckpointFacts) -> CheckpointFacts:
    return h.plus({"fused_rows": h.sizes["queries"] + 2 * h.sizes["keys"]})


def internlm2(config: Config) -> CheckpointFacts:
    """Rows of a group of heads together: queries, a key and a value."""
    config.only("bias", False)
    return with_fused_rows(decoder(config.plus(head_dim=None)))


INTERNLM2 = Family(
    "internlm2",
    {**IN_GROUPS, "attn_output": ATTENTION["attn_output"], **GATED, **NORMS_BEFORE},
    internlm2,
    defaults={"rms_norm_eps": 1e-6},
)


def baichuan(config: Config) -> CheckpointFacts:
    """The larger ones rotate nothing, as their number of layers tells GGUF's readers."""
    context = config.get("max_position_embeddings", config.get("model_max_length"))
    h = with_fused_rows(decoder(config.plus(max_position_embeddings=context)))
    unsaid = {"rope_theta": "rope__freq_base", "num_key_value_heads": "attention__head_count_kv"}
    own: dict[str, Any] = {key: None for name, key in unsaid.items() if config.get(name) is None}
    return h.plus(tensor_data_layout=LAYOUT, rope__dimension_count=h.sizes["head_dim"], **own)


BAICHUAN = Family(
    "baichuan",
    {
        **unpacked("self_attn.W_pack", ONE_AFTER_OTHER),
        "attn_output": ATTENTION["attn_output"],
        **GATED,
        **NORMS_BEFORE,
    },
    baichuan,
)


def xverse(config: Config) -> CheckpointFacts:
    h = decoder(config)
    return h.plus(tensor_data_layout=LAYOUT, rope__dimension_count=h.sizes["head_dim"])


XVERSE = replace(LLAMA, arch="xverse", read=xverse)


def orion(config: Config) -> CheckpointFacts:
    """Layer norms, though config.json calls them others."""
    names = ("max_sequence_length", "max_position_embeddings", "model_max_length")
    context = next((config.get(name) for name in names if config.get(name) is not None), None)
    h = decoder(config.plus(max_position_embeddings=context))
    if h.metadata["rope.freq_base"] != BASE:
        raise config.refusal(f"rope_theta {h.metadata['rope.freq_base']} is not supported: GGUF's readers take {BASE}")
    return h.plus(
        tensor_data_layout=LAYOUT,
        attention__layer_norm_epsilon=h.metadata["attention.layer_norm_rms_epsilon"],
        attention__layer_norm_rms_epsilon=None,
    )


BASE = 10000.0
ORION = Family("orion", {**ATTENTION, **GATED, **NORMS_BEFORE}, orion, biased=("attn_norm", "ffn_norm", "output_norm"))


def exaone(config: Config) -> CheckpointFacts:
    """The names of GPT-2."""
    own = {"num_hidden_layers": config.get("num_layers", config.get("num_hidden_layers"))}
    own |= {"rms_norm_eps": config.number("layer_norm_epsilon", 1e-5)}
    h = decoder(config.plus(**own), scalings=LLAMA_SCALING, whole_heads=False)
    dims = rotated_numbers(config, h.sizes["width"] // h.sizes["heads"])
    return h.plus(attention__layer_norm_epsilon=own["rms_norm_eps"], rope__dimension_count=dims)


EXAONE = Family(
    "exaone",
    {
        **{f"attn_{kind}": as_stored(f"attn.attention.{kind}_proj", *ATTENTION[f"attn_{kind}"]) for kind in "qkv"},
        "attn_output": as_stored("attn.attention.out_proj", *ATTENTION["attn_output"]),
        **GATED,
        **NORMS_BEFORE,
    },
    exaone,
    defaults={"activation_function": "silu"},
)


def minicpm(config: Config) -> CheckpointFacts:
    """Factors for embeddings, what is added, and logits; frequency factors for short and for long contexts."""
    h = decoder(config, scalings=("longrope",))
    magnitude = h.metadata.get("rope.scaling.attn_factor")
    return h.plus(
        embedding_scale=config.number("scale_emb"),
        residual_scale=config.number("scale_depth") / h.sizes["layers"] ** 0.5,
        logit_scale=h.sizes["width"] / config.number("dim_model_base"),
        rope__scaling__type="longrope" if h.tensors else h.metadata.get("rope.scaling.type"),
        rope__scaling__attn_factor=None if magnitude == 1 else magnitude,
    )


MINICPM = replace(LLAMA, arch="minicpm", read=minicpm, defaults={"tie_word_embeddings": True})


def deepseek(config: Config) -> CheckpointFacts:
    """Experts beside some for all tokens, behind the first layers."""
    for name, value in (("scoring_func", "softmax"), ("norm_topk_prob", False), ("moe_layer_freq", 1)):
        config.only(name, value)
    h = decoder(config, scalings=())
    h = with_experts(config, h, "moe_intermediate_size", "n_routed_experts")
    return early_experts(config, h, config.count("n_shared_experts")).plus(
        rope__scaling__type="none", expert_gating_func=None if config.get("scoring_func") is None else SOFTMAX
    )


def early_experts(config: Config, h: CheckpointFacts, shared: int) -> CheckpointFacts:
    """What those say that are built like it."""
    leading, hidden = config.count("first_k_dense_replace", 0), h.sizes["expert_hidden"]
    return h.plus(
        {"leading_dense": leading, "shared_hidden": shared * hidden},
        vocab_size=h.sizes["vocab"],
        rope__dimension_count=h.sizes["head_dim"],
        leading_dense_block_count=leading,
        expert_feed_forward_length=hidden,
        expert_weights_scale=1.0,
        expert_shared_count=shared,
    )


def deepseek_layer(sizes: Sizes, number: int) -> Layer:
    feeds: Layer = GATED if number < sizes["leading_dense"] else {**EXPERTS, **SHARED_EXPERT}
    return {**ATTENTION, **NORMS_BEFORE, **feeds}


DEEPSEEK = Family("deepseek", deepseek_layer, deepseek, rotated=ROTATED)


def bailing(config: Config) -> CheckpointFacts:
    """The same, with one matrix for queries, keys and values."""
    for name in ("norm_head", "use_bias", "use_qkv_bias", "use_qk_norm"):
        config.only(name, False)
    h = with_experts(config, decoder(config, scalings=()), "moe_intermediate_size")
    h = early_experts(config, with_fused_rows(h), config.count("num_shared_experts"))
    return h.plus(expert_weights_norm=config.flag("norm_topk_prob"))


def bailing_layer(sizes: Sizes, number: int) -> Layer:
    attention: Layer = {
        **unpacked("attention.query_key_value", ONE_AFTER_OTHER),
        "attn_output": as_stored("attention.dense", *ATTENTION["attn_output"]),
    }
    return {**deepseek_layer(sizes, number), **attention}


BAILINGMOE = Family("bailingmoe", bailing_layer, bailing)


def bailing2(config: Config) -> CheckpointFacts:
    """Norms of heads; experts are chosen with a bias, of the best groups."""
    for name, value in (("use_bias", False), ("use_qkv_bias", False), ("use_qk_norm", True)):
        config.only(name, value)
    config.only("num_nextn_predict_layers", 0)
    config.only("score_function", "sigmoid", "softmax")
    share = {"partial_rotary_factor": config.get("partial_rotary_factor", 0.5)}
    h = decoder(config.plus(**share), scalings=("yarn",), whole_heads=False)
    h = with_experts(config, h, "moe_intermediate_size")
    shared, function = config.count("num_shared_experts"), config.get("score_function")
    h = early_experts(config, with_fused_rows(h), shared)
    hidden = config.count("moe_shared_expert_intermediate_size", h.sizes["shared_hidden"])
    return h.plus(
        {"shared_hidden": hidden},
        rope__dimension_count=rotated_numbers(config.plus(**share), h.sizes["head_dim"]),
        expert_shared_feed_forward_length=hidden,
        expert_weights_scale=config.number("routed_scaling_factor"),
        expert_weights_norm=config.flag("norm_topk_prob"),
        expert_gating_func=function and {"sigmoid": SIGMOID, "softmax": SOFTMAX}[function],
        expert_group_count=config.get("n_group") and config.count("n_group"),
        expert_group_used_count=config.get("topk_group") and config.count("topk_group"),
        nextn_predict_layers=config.get("num_nextn_predict_layers"),
    )


def bailing2_layer(sizes: Sizes, number: int) -> Layer:
    attention: Layer = {
        "attn_qkv": as_stored("attention.query_key_value", "fused_rows", "width"),
        "attn_output": as_stored("attention.dense", *ATTENTION["attn_output"]),
        "attn_q_norm": as_stored("attention.query_layernorm", "head_dim"),
        "attn_k_norm": as_stored("attention.key_layernorm", "head_dim"),
    }
    bias: Layer = {"exp_probs_b.bias": as_it_is("mlp.gate.expert_bias", "experts")}
    mixture: Layer = {**EXPERTS, **SHARED_EXPERT, **bias}
    return {**NORMS_BEFORE, **attention, **(GATED if number < sizes["leading_dense"] else mixture)}


BAILINGMOE2 = Family("bailingmoe2", bailing2_layer, bailing2)


def minimax01(config: Config) -> CheckpointFacts:
    """Every eighth layer attends; what is added to a layer's output is its norm, scaled."""
    kinds = ("full_attention", "linear_attention", "mlp")
    for kind in kinds:
        config.only(f"layernorm_{kind}_beta", 1)
        config.only(f"layernorm_{kind}_alpha", config.get(f"layernorm_{kinds[0]}_alpha"))
    config.only("postnorm", True)
    config.only("shared_intermediate_size", 0)
    h = with_experts(config, decoder(config, whole_heads=False), "intermediate_size", "num_local_experts")
    attends = [number % 8 == 7 for number in range(h.sizes["layers"])]
    config.only("attn_type_list", [*map(int, attends)])
    own = {f"attends_{number}": int(does) for number, does in enumerate(attends)}
    return h.plus(
        {**own, "fused_rows": 3 * h.sizes["queries"]},
        residual_scale=config.number(f"layernorm_{kinds[0]}_alpha", 1.0),
        rope__dimension_count=config.count("rotary_dim"),
    )


def minimax01_layer(sizes: Sizes, number: int) -> Layer:
    lightning: Layer = {
        "attn_qkv": as_stored("self_attn.qkv_proj", "fused_rows", "width"),
        "attn_gate": as_stored("self_attn.output_gate", "queries", "width"),
        "attn_norm_2": as_stored("self_attn.norm", "queries"),
        "attn_output": as_stored("self_attn.out_proj", "width", "queries"),
    }
    return {**(ATTENTION if sizes[f"attends_{number}"] else lightning), **NORMS_BEFORE, **EXPERTS}


MINIMAX01 = Family("minimax-01", minimax01_layer, minimax01, named_as="minimax-m2")


def plm(config: Config) -> CheckpointFacts:
    """Latent rows, and the square of a ReLU."""
    heads, rotated, latent = (config.count(f"{n}") for n in ("num_attention_heads", "qk_rope_head_dim", "kv_lora_rank"))
    config.only("q_lora_rank")
    h = decoder(config.plus(head_dim=rotated), activations=("relu2",))
    key_dim, value_dim = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    sizes = {"latent": latent, "latent_and_key": latent + rotated, "values": heads * value_dim}
    sizes |= {"queries": heads * (key_dim + rotated), "both_rows": heads * (key_dim + value_dim)}
    return h.plus(
        sizes,
        vocab_size=h.sizes["vocab"],
        attention__kv_lora_rank=latent,
        attention__key_length=key_dim + rotated,
        attention__value_length=value_dim,
        rope__dimension_count=rotated,
    )


PLM = Family(
    "plm",
    {
        **NORMS_BEFORE,
        **FEED_FORWARD,
        "attn_q": ("queries", "width"),
        "attn_kv_a_mqa": ("latent_and_key", "width"),
        "attn_kv_a_norm": ("latent",),
        "attn_kv_b": ("both_rows", "latent"),
        "attn_output": ("width", "values"),
    },
    plm,
    defaults={"hidden_act": "relu2"},
)


def pangu(config: Config) -> CheckpointFacts:
    """Biases."""
    h = decoder(config)
    lengths: dict[str, Any] = {f"attention__{side}_length": h.sizes["head_dim"] for side in ("key", "value")}
    return h.plus(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"], **lengths)


PANGU = Family("pangu-embedded", {**ATTENTION, **GATED, **NORMS_BEFORE}, pangu, biased=tuple(ATTENTION))


def maincoder(config: Config) -> CheckpointFacts:
    """Norms of heads."""
    h = decoder(config)
    return h.plus(rope__dimension_count=h.sizes["head_dim"] if config.get("head_dim") is not None else None)


MAINCODER = Family("maincoder", {**ATTENTION, **HEAD_NORMS, **GATED, **NORMS_BEFORE}, maincoder)


def nanbeige(config: Config) -> CheckpointFacts:
    """Layers may be gone through several times."""
    return llama(config).plus(
        num_loops=config.count("num_loops", 1), skip_loop_final_norm=config.flag("skip_loop_final_norm")
    )


NANBEIGE = replace(LLAMA, arch="nanbeige", read=nanbeige, named_as="llama")
