"""Decoders with layer norms: Phi 2, GPT-NeoX, Falcon, Cohere, StableLM, Nemotron, Jais 2, BLOOM, MPT."""

from collections.abc import Sequence

import numpy as np

from localllm.convert.config import Config
from localllm.convert.families.layers import ATTENTION, FEED_FORWARD, GATED, NORMS_BEFORE
from localllm.convert.family import DerivedTensor, Family, Layer, Sizes
from localllm.convert.hyperparameters import GELU, CheckpointFacts, decoder, rotary_dims
from localllm.convert.tensors import Shape, TensorSource, as_float32, column, flat, from_array, pick_rows

NORMS = ("attn_norm", "ffn_norm", "output_norm")  # with biases


def use_layer_norm_epsilon(
    config: Config, h: CheckpointFacts, name: str = "layer_norm_eps", **metadata: object
) -> CheckpointFacts:
    """Replace the RMS epsilon by that of layer norms, by its name in config.json."""
    return h.updated(
        attention__layer_norm_rms_epsilon=None, attention__layer_norm_epsilon=config.number(name, 1e-5), **metadata
    )


APPROXIMATED = "GELU is computed with tanh, which differs from the model's in the fourth digit"


def with_gelu(config: Config, name: str) -> Config:
    """Treat exact GELU as the tanh approximation, the only one of GGUF's readers."""
    if config.get(name) == "gelu":
        config.warnings.append(APPROXIMATED)
    return config.updated(**{name: None, "hidden_act": config.get(name)})


def by_kind(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Reorder rows or biases of groups of heads (queries, a key, a value) to all queries, all keys, all values."""
    groups = np.arange(shape[0]).reshape(sizes["kv_heads"], -1, sizes["head_dim"])
    order = np.concatenate([groups[:, :-2].ravel(), groups[:, -2].ravel(), groups[:, -1].ravel()])
    matrix = sources[0] if len(shape) > 1 else column(sources[0])
    sorted_rows = pick_rows(matrix, matrix.shape, lambda rows: order[rows])
    return sorted_rows if len(shape) > 1 else flat(sorted_rows)


def of_groups(name: str, biased: bool = True) -> Layer:
    """Declare a fused QKV matrix whose rows are in groups of heads; name: in the checkpoint."""
    weight, bias = ("fused_rows", "width"), ("fused_rows",)
    fused: Layer = {"attn_qkv": DerivedTensor(weight, {f"{name}.weight": weight}, by_kind)}
    return {**fused, "attn_qkv.bias": DerivedTensor(bias, {f"{name}.bias": bias}, by_kind)} if biased else fused


def phi2(config: Config) -> CheckpointFacts:
    """Read Phi 2: attention and feed-forward network share a norm."""
    config.only("qk_layernorm", False)
    config.only("tie_word_embeddings", False)
    h = decoder(config, activations=GELU, whole_heads=False)
    return use_layer_norm_epsilon(config, h, rope__dimension_count=rotary_dims(config, h.sizes["head_dim"]))


PHI2 = Family(
    "phi2",
    {**ATTENTION, **FEED_FORWARD, "attn_norm": ("width",)},
    phi2,
    biased=(*ATTENTION, *FEED_FORWARD, *NORMS, "output"),
    defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
)


def gptneox(config: Config) -> CheckpointFacts:
    """Read GPT-NeoX: queries, keys and values of a head are adjacent."""
    config.only("attention_bias", True)
    base = config.get("rope_theta", config.get("rotary_emb_base"))
    renamed = with_gelu(config, "hidden_act").updated(
        num_key_value_heads=None, rope_theta=base, partial_rotary_factor=config.get("rotary_pct")
    )
    h = decoder(renamed, activations=(*GELU, "gelu"), whole_heads=False)
    return use_layer_norm_epsilon(
        config,
        h.updated({"fused_rows": 3 * h.sizes["queries"]}, attention__head_count_kv=None),
        rope__dimension_count=rotary_dims(renamed, h.sizes["head_dim"]),
        use_parallel_residual=config.flag("use_parallel_residual", True),
    )


GPTNEOX = Family(
    "gptneox",
    {
        **of_groups("attention.query_key_value"),
        "attn_output": ATTENTION["attn_output"],
        **FEED_FORWARD,
        **NORMS_BEFORE,
    },
    gptneox,
    biased=("attn_output", *FEED_FORWARD, *NORMS),
    defaults={"hidden_act": "gelu", "rotary_pct": 0.25},
)


def falcon(config: Config) -> CheckpointFacts:
    """Read Falcon: one KV head per group of heads, or one for all; newer models have a norm per branch."""
    for name, value in (("alibi", False), ("bias", False), ("parallel_attn", True)):
        config.only(name, value)
    newer, heads = config.flag("new_decoder_architecture"), config.count("num_attention_heads", config.get("n_head"))
    groups = 1 if config.flag("multi_query", True) and not newer else config.count("num_kv_heads", heads)
    renamed = {"num_attention_heads": heads, "num_key_value_heads": groups}
    renamed |= {"num_hidden_layers": config.get("num_hidden_layers", config.get("n_layer"))}
    renamed |= {"intermediate_size": config.count("ffn_hidden_size", 4 * config.count("hidden_size"))}
    h = decoder(with_gelu(config, "activation").updated(**renamed), activations=(*GELU, "gelu"))
    two_norms = newer and config.get("num_ln_in_parallel_attn", 2) == 2
    rows = h.sizes["queries"] + 2 * h.sizes["keys"]
    return use_layer_norm_epsilon(
        config,
        h.updated({"fused_rows": rows, "two_norms": two_norms}),
        "layer_norm_epsilon",
        tensor_data_layout="jploski",
    )


def falcon_layer(sizes: Sizes, number: int) -> Layer:
    norms = {"attn_norm": ("width",), **({"attn_norm_2": ("width",)} if sizes["two_norms"] else {})}
    fused = of_groups("self_attention.query_key_value", biased=False)
    return {**norms, **fused, "attn_output": ATTENTION["attn_output"], **FEED_FORWARD}


FALCON = Family(
    "falcon",
    falcon_layer,
    falcon,
    biased=(*NORMS, "attn_norm_2"),
    defaults={"activation": "gelu", "tie_word_embeddings": True},
)


def command_r(config: Config) -> CheckpointFacts:
    """Read Command R: attention and feed-forward network share a norm; the context may exceed the positions."""
    config.only("attention_bias", False)
    config.only("tie_word_embeddings", True)
    h = decoder(config)
    return use_layer_norm_epsilon(
        config,
        h.updated({"head_norms": int(config.flag("use_qk_norm"))}),
        context_length=config.count("model_max_length", h.metadata["context_length"]),
        logit_scale=config.number("logit_scale"),
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
    )


def command_r_layer(sizes: Sizes, number: int) -> Layer:
    norms = {"attn_q_norm": ("heads", "head_dim"), "attn_k_norm": ("kv_heads", "head_dim")}
    return {**ATTENTION, **GATED, "attn_norm": ("width",), **(norms if sizes["head_norms"] else {})}


def cohere2(config: Config) -> CheckpointFacts:
    """Read Command R7B: three layers of four have a window, the only ones with RoPE."""
    for name, value in (("use_qk_norm", False), ("rotary_pct", 1.0), ("sliding_window_pattern", 4)):
        config.only(name, value)
    h = command_r(config)
    config.windows([number % 4 != 3 for number in range(h.sizes["layers"])])
    return h.updated(
        vocab_size=h.sizes["vocab"],
        attention__sliding_window=config.count("sliding_window"),
        rope__dimension_count=h.sizes["head_dim"],
    )


TIED = {"tie_word_embeddings": True, "logit_scale": 0.0625}
COMMAND_R = Family(
    "command-r",
    command_r_layer,
    command_r,
    defaults={**TIED, "rope_theta": 5e5, "max_position_embeddings": 8192},
)
COHERE2 = Family(
    "cohere2",
    command_r_layer,
    cohere2,
    defaults={**TIED, "head_dim": 128, "sliding_window": 4096, "max_position_embeddings": 8192},
)


def stablelm(config: Config) -> CheckpointFacts:
    """Read StableLM: the largest has head norms, and one norm for attention and feed-forward network."""
    h = decoder(config, whole_heads=False)
    parallel = config.flag("use_parallel_residual")
    flags = {"head_norms": int(config.flag("qk_layernorm")), "parallel": int(parallel)}
    return use_layer_norm_epsilon(
        config,
        h.updated(flags),
        rope__dimension_count=rotary_dims(config, h.sizes["head_dim"]),
        use_parallel_residual=parallel,
    )


def of_heads(kind: str, heads: int) -> DerivedTensor:
    """Stack norms that are stored per head; kind: q or k in the checkpoint."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return from_array(np.concatenate([as_float32(source.rows(0, 1), source.dtype) for source in sources]))

    stored = {f"self_attn.{kind}_layernorm.norms.{head}.weight": ("head_dim",) for head in range(heads)}
    return DerivedTensor(("heads" if kind == "q" else "kv_heads", "head_dim"), stored, build)


def stablelm_layer(sizes: Sizes, number: int) -> Layer:
    layer: Layer = {**ATTENTION, **GATED, "attn_norm": ("width",)}
    if not sizes["parallel"]:
        layer = {**layer, "ffn_norm": ("width",)}
    if not sizes["head_norms"]:
        return layer
    heads = {"q": sizes["heads"], "k": sizes["kv_heads"]}
    return {**layer, **{f"attn_{kind}_norm": of_heads(kind, count) for kind, count in heads.items()}}


STABLELM = Family(
    "stablelm",
    stablelm_layer,
    stablelm,
    biased=NORMS,
    defaults={"partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
)


def nemotron(config: Config) -> CheckpointFacts:
    """Read Nemotron: squared ReLU without gates, and norms that multiply by 1 + weight."""
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    h = decoder(config, activations=("relu2",), scalings=("linear",), whole_heads=False)
    epsilon = config.number("norm_eps", 1e-5)
    return h.updated(
        attention__layer_norm_rms_epsilon=epsilon,  # unused
        attention__layer_norm_epsilon=epsilon,
        vocab_size=h.sizes["vocab"],
        rope__dimension_count=rotary_dims(config, h.sizes["head_dim"]),
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
    )


NEMOTRON = Family(
    "nemotron",
    {**ATTENTION, **FEED_FORWARD, **NORMS_BEFORE},
    nemotron,
    offset_norms=True,
    biased=NORMS,
    defaults={"hidden_act": "relu2", "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
)


def jais2(config: Config) -> CheckpointFacts:
    """Read Jais 2: like Nemotron, with biases and plain norms."""
    config.only("attention_bias", True)
    config.only("mlp_bias", True)
    h = decoder(config, activations=("relu2",))
    return use_layer_norm_epsilon(config, h, rope__dimension_count=h.sizes["head_dim"])


JAIS2 = Family(
    "jais2",
    {**ATTENTION, **FEED_FORWARD, **NORMS_BEFORE},
    jais2,
    biased=(*ATTENTION, *FEED_FORWARD, *NORMS),
    defaults={"hidden_act": "relu2", "max_position_embeddings": 8192},
)


def bloom(config: Config) -> CheckpointFacts:
    """Read BLOOM: ALiBi instead of RoPE."""
    config.only("apply_residual_connection_post_layernorm", False)
    width, heads = config.count("hidden_size", config.get("n_embed")), config.count("n_head", config.get("num_heads"))
    layers = config.get("n_layer", config.get("num_hidden_layers"))
    renamed: dict[str, object] = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "head_dim": None,
    }
    renamed |= {"num_key_value_heads": heads, "intermediate_size": 4 * width}
    h = decoder(config.updated(**renamed))
    return use_layer_norm_epsilon(
        config,
        h.updated({"fused_rows": 3 * width}, rope__freq_base=None),
        "layer_norm_epsilon",
        context_length=config.count("seq_length", 2048),
    )


BLOOM = Family(
    "bloom",
    {
        **of_groups("self_attention.query_key_value"),
        "attn_output": ATTENTION["attn_output"],
        **FEED_FORWARD,
        **NORMS_BEFORE,
    },
    bloom,
    whole={"token_embd_norm": ("width",)},
    biased=("attn_output", *FEED_FORWARD, *NORMS, "token_embd_norm"),
    prefixes=("transformer.",),
    defaults={"tie_word_embeddings": True},
)


def mpt(config: Config) -> CheckpointFacts:
    """Read MPT: like BLOOM, without biases."""
    attention, width = config.section("attn_config"), config.count("d_model")
    for name, value in (("alibi", True), ("qk_ln", False), ("prefix_lm", False), ("softmax_scale", None)):
        attention.only(name, value)
    config.only("no_bias", True)
    config.only("logit_scale", None)
    config.warnings.append(APPROXIMATED)
    heads = config.count("n_heads")
    renamed: dict[str, object] = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": config.count("n_layers"),
    }
    renamed |= {"num_key_value_heads": heads, "intermediate_size": config.count("expansion_ratio", 4) * width}
    renamed |= {"max_position_embeddings": config.count("max_seq_len", 2048), "head_dim": None}
    h = decoder(config.updated(**renamed)).updated(
        {"fused_rows": 3 * width}, rope__freq_base=None, attention__head_count_kv=None
    )
    limit = attention.number("clip_qkv") if attention.get("clip_qkv") else None
    return use_layer_norm_epsilon(
        config,
        h,
        "layer_norm_epsilon",
        attention__clamp_kqv=limit,
        attention__max_alibi_bias=attention.number("alibi_bias_max", 8.0),
    )


FUSED = {"attn_qkv": ("fused_rows", "width"), "attn_output": ("width", "queries")}
MPT = Family("mpt", {**FUSED, **FEED_FORWARD, **NORMS_BEFORE}, mpt, defaults={"tie_word_embeddings": True})
