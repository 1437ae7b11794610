"""Mixtures of experts: ERNIE 4.5, AFMoE, HunYuan 3, K-EXAONE, Llama 4, DBRX."""

import re
from collections.abc import Callable, Sequence

from localllm.arch.families.llama4 import EXPERTS_OF_MAVERICK
from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.families.deepseek import SIGMOID, leading_dense
from localllm.convert.families.llama import LLAMA_SCALING
from localllm.convert.families.qwen_next import with_mtp
from localllm.convert.family import DerivedTensor, Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import (
    ATTENTION,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    NORMS_BEHIND,
    SHARED_EXPERT,
    as_it_is,
    experts_of,
    mtp_layer,
)
from localllm.convert.records import family_named
from localllm.convert.tensors import Shape, TensorSource, reshape, transpose


def ernie_moe(config: Config) -> CheckpointFacts:
    """Read ERNIE 4.5: experts, and shared experts that are stored as one network."""
    config.only("use_bias", False)
    config.only("moe_layer_interval", 1)
    layers, leading = config.count("num_hidden_layers"), config.count("moe_layer_start_index")
    config.only("moe_layer_end_index", layers - 1, -1)
    h = decoder(config, scalings=LLAMA_SCALING)
    h = with_experts(config, h, "moe_intermediate_size", "moe_num_experts", "moe_k")
    shared = config.count("moe_num_shared_experts", 0)
    return h.updated(
        {"leading_dense": leading, "shared_hidden": shared * h.sizes["expert_hidden"], "one": 1},
        interleave_moe_layer_step=1,
        leading_dense_block_count=leading,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        expert_shared_feed_forward_length=shared * h.sizes["expert_hidden"] or None,
    )


def ernie_moe_layer(sizes: Sizes, number: int) -> Layer:
    layer: Layer = {**ATTENTION, **NORMS_BEFORE}
    if number < sizes["leading_dense"]:
        return {**layer, **GATED}
    bias = {"exp_probs_b.bias": as_it_is("mlp.moe_statics.e_score_correction.bias", "one", "experts")}
    return {**layer, **EXPERTS, **(SHARED_EXPERT if sizes["shared_hidden"] else {}), **bias}


ERNIE4_5_MOE = Family(
    "ernie4_5-moe",
    ernie_moe_layer,
    ernie_moe,
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "moe_layer_start_index": 1,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
    },
    unread=re.compile(r"model\.mtp_.*"),
)


def afmoe(config: Config) -> CheckpointFacts:
    """Read AFMoE: three layers of four have a window; the heads' output is gated."""
    for name, value in (("route_norm", True), ("score_func", "sigmoid"), ("global_attn_every_n_layers", 4)):
        config.only(name, value)
    if not config.flag("mup_enabled"):
        raise config.refusal("mup_enabled false is not supported: GGUF's readers always scale embeddings")
    h = with_experts(config, decoder(config, scalings=("yarn",)), "moe_intermediate_size")
    config.windows([number % 4 != 3 for number in range(h.sizes["layers"])])
    shared, leading = config.count("num_shared_experts"), config.count("num_dense_layers")
    return h.updated(
        {"leading_dense": leading, "shared_hidden": shared * h.sizes["expert_hidden"]},
        vocab_size=h.sizes["vocab"],
        rope__dimension_count=h.sizes["head_dim"],
        attention__sliding_window=config.count("sliding_window"),
        leading_dense_block_count=leading,
        expert_shared_count=shared,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_gating_func=SIGMOID,
        expert_weights_norm=True,
        expert_weights_scale=config.number("route_scale", 1.0),
    )


def afmoe_layer(sizes: Sizes, number: int) -> Layer:
    bias = {"exp_probs_b.bias": as_it_is("mlp.expert_bias", "experts")}
    feeds: Layer = GATED if number < sizes["leading_dense"] else {**EXPERTS, **SHARED_EXPERT, **bias}
    gate: Layer = {"attn_gate": ("queries", "width")}
    return {**ATTENTION, **gate, **HEAD_NORMS, **NORMS_BEFORE, **NORMS_BEHIND, **feeds}


AFMOE = Family(
    "afmoe",
    afmoe_layer,
    afmoe,
    defaults={
        "rms_norm_eps": 1e-5,
        "num_dense_layers": 1,
        "sliding_window": 1024,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "num_shared_experts": 2,
    },
)


def llama4(config: Config) -> CheckpointFacts:
    """Read Llama 4: three layers of four attend within chunks and have RoPE; experts in every few layers."""
    config.only("num_experts_per_tok", 1)
    config.only("no_rope_layer_interval", 4)
    for name, value in (("attention_chunk_size", 8192), ("floor_scale", 8192), ("attn_scale", 0.1)):
        config.only(name, value)
    config.only("use_qk_norm", config.get("num_local_experts") != EXPERTS_OF_MAVERICK)
    step = config.count("interleave_moe_layer_step", 1)
    h = decoder(config.updated(intermediate_size=config.count("intermediate_size_mlp")), scalings=LLAMA_SCALING)
    layers = h.sizes["layers"]
    config.only("moe_layers", [*range(step - 1, layers, step)])
    chunks = [number % 4 != 3 for number in range(layers)]
    config.only("layer_types", ["chunked_attention" if chunk else "full_attention" for chunk in chunks])
    config.only("no_rope_layers", [*map(int, chunks)], [])
    h = with_experts(config, h, "intermediate_size", "num_local_experts")
    hidden = h.sizes["expert_hidden"]
    return h.updated(
        {"step": step, "shared_hidden": hidden, "both_hidden": 2 * hidden},
        vocab_size=h.sizes["vocab"],
        rope__dimension_count=h.sizes["head_dim"],
        interleave_moe_layer_step=step,
        expert_feed_forward_length=hidden,
    )


def llama4_layer(sizes: Sizes, number: int) -> Layer:
    dense = (number + 1) % sizes["step"]
    return {
        **ATTENTION,
        **NORMS_BEFORE,
        **(GATED if dense else {**experts_of(sizes, "feed_forward.experts"), **SHARED_EXPERT}),
    }


LLAMA4 = Family("llama4", llama4_layer, llama4, sees=True, defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5})


def sparse(config: Config, h: CheckpointFacts, scale: str) -> CheckpointFacts:
    """Add experts with sigmoid routing after the first layers, and a multi-token prediction layer."""
    config.only("scoring_func", "sigmoid")
    config.only("moe_router_use_sigmoid", True)
    h = with_experts(config, h, "moe_intermediate_size")
    hidden = config.count("num_shared_experts", 1) * h.sizes["expert_hidden"]
    sizes = {"leading_dense": leading_dense(config), "shared_hidden": hidden, "both_inputs": 2 * h.sizes["width"]}
    sizes |= {"mtp_layers": config.count("num_nextn_predict_layers", 0)}
    return h.updated(
        sizes,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_feed_forward_length=hidden,
        expert_weights_scale=config.number(scale, 1.0),
        expert_gating_func=SIGMOID,
    )


def hy_v3(config: Config) -> CheckpointFacts:
    """Read HunYuan 3."""
    h = sparse(config, decoder(config), "router_scaling_factor")
    return h.updated(expert_weights_norm=config.flag("route_norm", True))


def exaone_moe(config: Config) -> CheckpointFacts:
    """Read K-EXAONE: windows as in EXAONE 4."""
    h = sparse(config, family_named("Exaone4ForCausalLM").read(config), "routed_scaling_factor")
    return h.updated(
        expert_shared_count=config.count("num_shared_experts"),
        expert_weights_norm=config.flag("norm_topk_prob", True),
        expert_group_count=config.count("n_group", 1),
        expert_group_used_count=config.count("topk_group", 1),
        leading_dense_block_count=h.sizes["leading_dense"],
        nextn_predict_layers=0,
        rope__scaling__type=h.metadata.get("rope.scaling.type", "none"),
    )


def sparse_layer(bias: Layer) -> Callable[[Sizes, int], Layer]:
    def layer(sizes: Sizes, number: int) -> Layer:
        feeds: Layer = GATED if number < sizes["leading_dense"] else {**EXPERTS, **SHARED_EXPERT, **bias}
        return {**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **feeds, **mtp_layer(sizes, number)}

    return layer


HY_V3 = Family(
    "hy_v3",
    sparse_layer({"exp_probs_b": as_it_is("mlp.expert_bias", "experts")}),
    hy_v3,
    bare=("exp_probs_b",),
    named_as="dots1",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "head_dim": 128, "router_scaling_factor": 2.826},
    named=lambda name, layers: name.replace(f"layers.{layers}.final_layernorm.", f"layers.{layers}.shared_head.norm."),
)
EXAONE_MOE = Family(
    "exaone-moe",
    sparse_layer({"exp_probs_b.bias": ("experts",)}),
    exaone_moe,
    defaults={"rms_norm_eps": 1e-5, "sliding_window_pattern": 4, "num_shared_experts": 1, "routed_scaling_factor": 2.5},
    named=with_mtp,
)


def dbrx(config: Config) -> CheckpointFacts:
    """Read DBRX: layer norms; fused QKV with clamping."""
    attention, networks = config.section("attn_config"), config.section("ffn_config")
    networks.only("moe_normalize_expert_weights", 1)
    networks.only("ffn_act_fn", {"name": "silu"})
    renamed: dict[str, object] = {
        "hidden_size": config.count("d_model"),
        "num_attention_heads": config.count("n_heads"),
    }
    renamed |= {"num_hidden_layers": config.count("n_layers"), "num_key_value_heads": attention.count("kv_n_heads", 1)}
    renamed |= {"max_position_embeddings": config.count("max_seq_len", 2048), "head_dim": None}
    renamed |= {"intermediate_size": networks.count("ffn_hidden_size"), "rope_theta": attention.get("rope_theta")}
    h = decoder(config.updated(**renamed))
    h = with_experts(networks, h, "ffn_hidden_size", "moe_num_experts", "moe_top_k")
    sizes = {"fused_rows": h.sizes["queries"] + 2 * h.sizes["keys"]}
    sizes |= {"all_hidden": h.sizes["experts"] * h.sizes["expert_hidden"]}
    return h.updated(
        sizes,
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=1e-5,
        attention__clamp_kqv=None if attention.get("clip_qkv") is None else attention.number("clip_qkv"),
    )


def of_all(name: str, place: str, is_transposed: bool = False) -> DerivedTensor:
    """Declare matrices of all experts, stored as one."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        stack = (sizes["experts"], sizes["expert_hidden"], sizes["width"])
        return transpose(reshape(sources[0], stack)) if is_transposed else reshape(sources[0], stack)

    return DerivedTensor(EXPERTS[place], {f"ffn.experts.mlp.{name}": ("all_hidden", "width")}, build)


DBRX = Family(
    "dbrx",
    {
        "attn_qkv": ("fused_rows", "width"),
        "attn_output": ("width", "queries"),
        "attn_norm": ("width",),
        "attn_output_norm": ("width",),
        **EXPERTS,
        "ffn_gate_exps": of_all("w1", "ffn_gate_exps"),
        "ffn_up_exps": of_all("v1", "ffn_up_exps"),
        "ffn_down_exps": of_all("w2", "ffn_down_exps", is_transposed=True),
    },
    dbrx,
)
