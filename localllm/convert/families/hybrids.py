"""Models some of whose layers are recurrent: Granite 4, Jamba, LFM2."""

from collections.abc import Sequence
from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.experts import SIGMOID, with_experts
from localllm.convert.families.llama import GRANITEMOE, granite, granitemoe
from localllm.convert.families.mamba import CONTEXT, MAMBA, decay, squeeze
from localllm.convert.family import DerivedTensor, Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import ATTENTION, EXPERTS, GATED, HEAD_NORMS, NORMS_BEFORE, ROTATED, as_it_is
from localllm.convert.tensors import Shape, TensorSource, as_float32, column, from_array, take_strided

MADE_OF_HALVES = {name: GRANITEMOE.layer[name] for name in ("ffn_gate_exps", "ffn_up_exps")}  # type: ignore[index]
SHARED_HALVES = {"shared_mlp.input_linear.weight": ("both_shared", "width")}
OUT = {"shared_mlp.output_linear.weight": ("width", "shared_hidden")}


def half(number: int) -> DerivedTensor:
    """Take the gate or the up projection of the shared network."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return take_strided(sources[0], shape, 2 * shape[0], number * shape[0])

    return DerivedTensor(("shared_hidden", "width"), SHARED_HALVES, build)


def same(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    return sources[0]


def rates(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Convert logarithms, stored as a vector, to GGUF's column of decay rates."""
    return decay([column(sources[0])], shape, sizes)


def in_rows(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """View a vector as a matrix."""
    return from_array(as_float32(sources[0].rows(0, 1), sources[0].dtype).reshape(shape))


def mamba2_of(prefix: str) -> Layer:
    """List the tensors of a Mamba 2 layer without its norm; prefix: of names in the checkpoint."""
    return {
        "ssm_in": ("into_state", "width"),
        "ssm_conv1d": DerivedTensor(
            ("convolved", "kernel"), {f"{prefix}.conv1d.weight": ("convolved", "one", "kernel")}, squeeze
        ),
        "ssm_conv1d.bias": ("convolved",),
        "ssm_dt.bias": DerivedTensor(("state_heads",), {f"{prefix}.dt_bias": ("state_heads",)}, same),
        "ssm_a": DerivedTensor(("state_heads", "one"), {f"{prefix}.A_log": ("state_heads",)}, rates),
        "ssm_d": DerivedTensor(
            ("state_heads", "one"), {f"{prefix}.D": ("state_heads",)}, lambda s, shape, _: column(s[0])
        ),
        "ssm_out": ("width", "inner"),
    }


def norm_of(prefix: str) -> Layer:
    """Declare Mamba 2's norm over groups; prefix: of names in the checkpoint."""
    return {"ssm_norm": DerivedTensor(("groups", "inner_of_group"), {f"{prefix}.norm.weight": ("inner",)}, in_rows)}


MAMBA2, NORM = mamba2_of("mamba"), norm_of("mamba")


def with_mamba2(config: Config, h: CheckpointFacts, inner: int) -> CheckpointFacts:
    """Add sizes and metadata of Mamba 2 by hybrids' names; inner: width between its matrices."""
    config.only("mamba_conv_bias", True)
    config.only("mamba_proj_bias", False)
    heads, groups, state = (config.count(f"mamba_{name}") for name in ("n_heads", "n_groups", "d_state"))
    if inner != heads * config.count("mamba_d_head") or heads % groups:
        raise config.refusal(f"{heads} heads in {groups} groups do not have {inner} numbers")
    kernel = config.count("mamba_d_conv", 4)
    sizes = {
        "state_heads": heads,
        "groups": groups,
        "inner": inner,
        "inner_of_group": inner // groups,
        "convolved": inner + 2 * groups * state,
        "into_state": 2 * inner + 2 * groups * state + heads,
        "kernel": kernel,
        "one": 1,
    }
    return h.updated(
        sizes,
        ssm__conv_kernel=kernel,
        ssm__state_size=state,
        ssm__group_count=groups,
        ssm__inner_size=inner,
        ssm__time_step_rank=heads,
    )


def attending(config: Config, h: CheckpointFacts, attends: Sequence[bool]) -> CheckpointFacts:
    """Mark the layers with attention: those that have key heads."""
    flags = {f"attends_{number}": int(does) for number, does in enumerate(attends)}
    return h.updated(flags, attention__head_count_kv=[h.sizes["kv_heads"] if does else 0 for does in attends])


KINDS = {"mamba": False, "attention": True, "linear_attention": False, "full_attention": True}


def granitehybrid(config: Config) -> CheckpointFacts:
    """Read Granite 4: no RoPE; experts next to a shared network, or the shared network alone."""
    h = granite(config)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or len(kinds) != h.sizes["layers"] or not {*kinds} <= KINDS.keys():
        raise config.refusal(f"layer_types should be {', '.join(KINDS)} for each of {h.sizes['layers']} layers")
    attends = [KINDS[kind] for kind in kinds]
    if all(attends):
        raise config.refusal("a model in which all layers have attention is not supported by this architecture")
    config.only("position_embedding_type", "nope")
    h = with_mamba2(config, h, config.count("mamba_expand", 2) * h.sizes["width"])
    h = attending(config, h, attends)
    experts, shared = config.count("num_local_experts", 0), config.count("shared_intermediate_size")
    sizes = {"experts": experts, "shared_hidden": shared, "both_shared": 2 * shared}
    sizes |= {"expert_hidden": h.sizes["hidden"], "both_hidden": 2 * h.sizes["hidden"]}
    h = h.updated(
        sizes, context_length=CONTEXT, rope__scaling__finetuned=False, expert_shared_feed_forward_length=shared
    )
    if not experts:
        config.only("shared_intermediate_size", h.sizes["hidden"])
    return h.updated(expert_count=experts, expert_used_count=config.count("num_experts_per_tok", 0))


def granitehybrid_layer(sizes: Sizes, number: int) -> Layer:
    mixer = ATTENTION if sizes[f"attends_{number}"] else {**MAMBA2, **NORM}
    if not sizes["experts"]:
        network: Layer = {"ffn_gate": half(0), "ffn_up": half(1), "ffn_down": DerivedTensor(OUT_SHAPE, OUT, same)}
        return {**NORMS_BEFORE, **mixer, **network}
    shared = {"ffn_gate_shexp": half(0), "ffn_up_shexp": half(1), "ffn_down_shexp": DerivedTensor(OUT_SHAPE, OUT, same)}
    return {**NORMS_BEFORE, **mixer, **EXPERTS, **MADE_OF_HALVES, **shared}


OUT_SHAPE = ("width", "shared_hidden")
GRANITEHYBRID = Family("granitehybrid", granitehybrid_layer, granitehybrid, rotated=ROTATED)


def granitemoe_shared(config: Config) -> CheckpointFacts:
    """Read Granite 3 with experts next to a shared network."""
    h, shared = granitemoe(config), config.count("shared_intermediate_size", 0)
    return h.updated(
        {"shared_hidden": shared, "both_shared": 2 * shared}, expert_shared_feed_forward_length=shared or None
    )


def granitemoe_shared_layer(sizes: Sizes, number: int) -> Layer:
    shared = {"ffn_gate_shexp": half(0), "ffn_up_shexp": half(1), "ffn_down_shexp": DerivedTensor(OUT_SHAPE, OUT, same)}
    experts = {**EXPERTS, **MADE_OF_HALVES}
    return {**ATTENTION, **NORMS_BEFORE, **experts, **(shared if sizes["shared_hidden"] else {})}


GRANITEMOE_SHARED = replace(GRANITEMOE, layer=granitemoe_shared_layer, read=granitemoe_shared)


def jamba(config: Config) -> CheckpointFacts:
    """Read Jamba: no RoPE; experts in every few layers; norms of the scan's inputs."""
    h = decoder(config)
    config.only("mamba_conv_bias", True)
    config.only("mamba_proj_bias", False)
    layers, width = h.sizes["layers"], h.sizes["width"]
    kernel, state = config.count("mamba_d_conv", 4), config.count("mamba_d_state", 16)
    inner, rank = config.count("mamba_expand", 2) * width, config.get("mamba_dt_rank")
    rank = -(-width // 16) if rank in (None, "auto") else config.count("mamba_dt_rank")
    sizes = {"kernel": kernel, "state": state, "inner": inner, "both_inner": 2 * inner, "rank": rank, "one": 1}
    sizes |= {"rank_and_states": rank + 2 * state, "expert_hidden": h.sizes["hidden"]}
    experts, every = config.count("num_experts", 16), every_so_many(config, "expert", layers, 2, 1)
    sizes |= {"experts": experts} | {f"mixes_{n}": int(does and experts > 1) for n, does in enumerate(every)}
    h = attending(config, h.updated(sizes), every_so_many(config, "attn", layers, 8, 4))
    return h.updated(
        ssm__conv_kernel=kernel,
        ssm__state_size=state,
        ssm__inner_size=inner,
        ssm__time_step_rank=rank,
        expert_count=experts,
        expert_used_count=config.count("num_experts_per_tok", 2),
    )


def every_so_many(config: Config, name: str, layers: int, period: int, offset: int) -> list[bool]:
    """Mark every `period`-th layer from `offset` on."""
    period, offset = config.count(f"{name}_layer_period", period), config.get(f"{name}_layer_offset", offset)
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise config.refusal(f"{name}_layer_offset should be below {name}_layer_period, {period}")
    return [number % period == offset for number in range(layers)]


def jamba_layer(sizes: Sizes, number: int) -> Layer:
    mixer = ATTENTION if sizes[f"attends_{number}"] else MAMBA1
    return {**NORMS_BEFORE, **mixer, **(EXPERTS if sizes[f"mixes_{number}"] else GATED)}


MAMBA1: Layer = {
    **{name: MAMBA.layer[name] for name in ("ssm_in", "ssm_conv1d.bias", "ssm_x", "ssm_dt", "ssm_d", "ssm_out")},  # type: ignore[index]
    "ssm_conv1d": DerivedTensor(("inner", "kernel"), {"mamba.conv1d.weight": ("inner", "one", "kernel")}, squeeze),
    "ssm_a": DerivedTensor(("inner", "state"), {"mamba.A_log": ("inner", "state")}, decay),
    "ssm_dt_norm": ("rank",),
    "ssm_b_norm": ("state",),
    "ssm_c_norm": ("state",),
}
JAMBA = Family("jamba", jamba_layer, jamba)


def lfm2(config: Config) -> CheckpointFacts:
    """Read LFM2: convolutions over the last few tokens; some layers have attention."""
    epsilon = {"rms_norm_eps": config.number("norm_eps", 1e-5), "intermediate_size": hidden_of_lfm2(config)}
    h = decoder(config.updated(**epsilon))
    config.only("conv_bias", False)
    kinds, layers, taps = config.get("layer_types"), h.sizes["layers"], config.count("conv_L_cache", 3)
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {"conv", "full_attention"}:
        raise config.refusal(f"layer_types should be conv or full_attention for each of {layers} layers")
    h = attending(
        config, h.updated({"taps": taps, "one": 1, "into_gates": 3 * h.sizes["width"]}), [k != "conv" for k in kinds]
    )
    return h.updated(vocab_size=h.sizes["vocab"], shortconv__l_cache=taps)


def hidden_of_lfm2(config: Config) -> int:
    """Return the feed-forward hidden size, adjusted as transformers does unless config.json's is final."""
    hidden = config.count("block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return hidden
    multiple = config.count("block_multiple_of", 256)
    hidden = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * hidden / 3))
    return -(-hidden // multiple) * multiple


def lfm2_layer(sizes: Sizes, number: int) -> Layer:
    mixer = {**ATTENTION, **HEAD_NORMS} if sizes[f"attends_{number}"] else SHORT_CONVOLUTION
    return {**NORMS_BEFORE, **mixer, **GATED}


SHORT_CONVOLUTION: Layer = {
    "shortconv.in_proj.weight": ("into_gates", "width"),
    "shortconv.conv.weight": DerivedTensor(("width", "taps"), {"conv.conv.weight": ("width", "one", "taps")}, squeeze),
    "shortconv.out_proj.weight": ("width", "width"),
}
LFM2 = Family(
    "lfm2",
    lfm2_layer,
    lfm2,
    last_norm="token_embd_norm.weight",
    renamed={"model.embedding_norm": "token_embd_norm"},
    defaults={"tie_word_embeddings": True, "rope_theta": 1e6},
)


def lfm2moe(config: Config) -> CheckpointFacts:
    """Read LFM2 with experts after the first layers."""
    for name, value in (("norm_topk_prob", True), ("use_expert_bias", True), ("routed_scaling_factor", 1.0)):
        config.only(name, value)
    h = with_experts(config, lfm2(config.updated(block_auto_adjust_ff_dim=False)), "moe_intermediate_size")
    leading = config.count("num_dense_layers", 2)
    return h.updated(
        {"leading_dense": leading},
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_gating_func=SIGMOID,
        leading_dense_block_count=leading,
    )


def lfm2moe_layer(sizes: Sizes, number: int) -> Layer:
    layer = lfm2_layer(sizes, number)
    if number < sizes["leading_dense"]:
        return layer
    others = {name: its for name, its in layer.items() if name not in GATED}
    names = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
    experts = {name: as_it_is(f"feed_forward.experts.{its}.weight", *EXPERTS[name]) for name, its in names.items()}
    return {**others, **EXPERTS, **experts, "exp_probs_b.bias": as_it_is("feed_forward.expert_bias", "experts")}


LFM2MOE = replace(LFM2, arch="lfm2moe", layer=lfm2moe_layer, read=lfm2moe)
