"""SmallThinker, Arctic, CodeShell and Refact, for which only their publishers have code."""

from collections.abc import Sequence

from localllm.arch.families.smallthinker import PERIOD, WINDOW
from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.families.deepseek import SIGMOID, SOFTMAX
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import ATTENTION, EXPERTS, GATED, NORMS_BEFORE, ROTATED, as_stored
from localllm.convert.family import Family, Layer, MadeOf, Sizes
from localllm.convert.hyperparameters import GELU, CheckpointFacts, decoder, refuse_other_activations
from localllm.convert.tensors import Shape, TensorSource, spread


def smallthinker(config: Config) -> CheckpointFacts:
    """Three layers of four have a window and rotate, or all do the latter."""
    for name, value in (("norm_topk_prob", True), ("moe_enable_early_router", True)):
        config.only(name, value)
    config.only("moe_enable_secondary_experts", False)
    layers, hidden = config.count("num_hidden_layers", most=MOST_LAYERS), config.count("moe_ffn_hidden_size")
    config.only("moe_layer_layout", [1] * layers)
    windows = [int(number % PERIOD != 0) for number in range(layers)]
    layout = config.get("sliding_window_layout")
    has_windows = isinstance(layout, list) and any(layout) and config.get("sliding_window_size") is not None
    config.only("sliding_window_layout", windows if has_windows else [0] * layers)
    config.only("rope_layout", windows if has_windows else [1] * layers)
    if has_windows:
        config.only("sliding_window_size", WINDOW)
    used = "moe_num_active_primary_experts"
    h = decoder(config.plus(intermediate_size=hidden))
    h = with_experts(config, h, "moe_ffn_hidden_size", "moe_num_primary_experts", used)
    return h.plus(
        expert_feed_forward_length=hidden,
        expert_gating_func=SOFTMAX if config.flag("moe_primary_router_apply_softmax") else SIGMOID,
        attention__sliding_window=WINDOW if has_windows else None,
    )


SMALLTHINKER = Family(
    "smallthinker",
    {
        **ATTENTION,
        **NORMS_BEFORE,
        **EXPERTS,
        "ffn_gate_inp": as_stored("block_sparse_moe.primary_router", *EXPERTS["ffn_gate_inp"]),
    },
    smallthinker,
)


def arctic(config: Config) -> CheckpointFacts:
    """Experts beside a network that is as wide as the model."""
    for name in ("use_residual", "parallel_attn_mlp_res"):
        config.only(name, True)
    config.only("moe_layer_frequency", 1)
    h = with_experts(config, decoder(config), "intermediate_size", "num_local_experts")
    return h.plus(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"])


SQUARE = ("width", "width")
ARCTIC = Family(
    "arctic",
    {
        **ATTENTION,
        "attn_norm": ("width",),
        "ffn_norm": as_stored("residual_layernorm", "width"),
        "ffn_gate": as_stored("residual_mlp.w1", *SQUARE),
        "ffn_up": as_stored("residual_mlp.w3", *SQUARE),
        "ffn_down": as_stored("residual_mlp.w2", *SQUARE),
        "ffn_norm_exps": as_stored("post_attention_layernorm", "width"),
        **EXPERTS,
    },
    arctic,
    rotated=ROTATED,
    named_as="llama",  # gguf's own table for it changes those of all others
)


def early(config: Config, hidden: int, groups: int) -> CheckpointFacts:
    """What says things as GPT-2 does."""
    config.only("scale_attn_weights", True)
    own = {"hidden_size": config.count("n_embd"), "num_attention_heads": config.count("n_head"), "head_dim": None}
    own |= {"num_hidden_layers": config.count("n_layer", most=MOST_LAYERS), "num_key_value_heads": groups}
    own |= {"max_position_embeddings": config.count("n_positions"), "intermediate_size": hidden}
    return decoder(config.plus(**own), activations=(*GELU, "silu"))


def codeshell(config: Config) -> CheckpointFacts:
    """Rotated, with biases."""
    refuse_other_activations(config, GELU)
    config.only("position_embedding_type", "rope")
    config.only("group_query_attention", True)
    width = config.count("n_embd")
    config.only("n_inner", 4 * width)
    h = early(config, 4 * width, config.count("num_query_groups"))
    return h.plus(
        {"fused_rows": h.sizes["queries"] + 2 * h.sizes["keys"]},
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        rope__scaling__type="linear",
        rope__scaling__factor=1.0,
    )


NORMS = ("attn_norm", "ffn_norm", "output_norm")
FUSED: Layer = {"attn_qkv": ("fused_rows", "width"), "attn_output": ("width", "queries")}
PLAIN: Layer = {"ffn_up": ("hidden", "width"), "ffn_down": ("width", "hidden")}
CODESHELL = Family("codeshell", {**FUSED, **PLAIN, **NORMS_BEFORE}, codeshell, biased=(*NORMS, *FUSED, *PLAIN))


def refact(config: Config) -> CheckpointFacts:
    """Nothing is rotated; one head of keys for all."""
    refuse_other_activations(config, ("silu",))
    config.only("multi_query", True)
    hidden = -(-int(8 * config.count("n_embd") / 3) // 256) * 256  # as its code has it, whatever n_inner says
    h = early(config.plus(rms_norm_eps=config.number("layer_norm_epsilon", 1e-5)), hidden, 1)
    sizes = {"both_keys": 2 * h.sizes["head_dim"], "both_hidden": 2 * hidden}
    return h.plus(sizes, rope__freq_base=None)


def half(name: str, number: int, both: str, *dimensions: str) -> MadeOf:
    """One of two matrices, the second below the first."""

    def made(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return spread(sources[0], shape, 2 * shape[0], number * shape[0])

    return MadeOf(dimensions, {f"{name}.weight": (both, "width")}, made)


REFACT = Family(
    "refact",
    {
        **NORMS_BEFORE,
        "attn_q": as_stored("attn.q", *ATTENTION["attn_q"]),
        "attn_k": half("attn.kv", 0, "both_keys", "keys", "width"),
        "attn_v": half("attn.kv", 1, "both_keys", "keys", "width"),
        "attn_output": ATTENTION["attn_output"],
        "ffn_gate": half("mlp.gate_up_proj", 0, "both_hidden", "hidden", "width"),
        "ffn_up": half("mlp.gate_up_proj", 1, "both_hidden", "hidden", "width"),
        "ffn_down": GATED["ffn_down"],
    },
    refact,
)
