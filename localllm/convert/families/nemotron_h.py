"""Nemotron H, with experts and without: every layer is attention, Mamba 2 or a feed-forward network."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.experts import with_experts
from localllm.convert.families.mamba import CONTEXT
from localllm.convert.families.mamba2 import mixer, states_of, with_states
from localllm.convert.family import Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.layers import ATTENTION

NAMES = {
    "heads": "mamba_num_heads",
    "dim": "mamba_head_dim",
    "groups": "n_groups",
    "state": "ssm_state_size",
    "kernel": "conv_kernel",
}
STATES, ATTENDS, FEEDS = 0, 1, 2  # types of layers
KINDS = {"M": STATES, "*": ATTENDS, "-": FEEDS, "E": FEEDS, "mamba": STATES, "linear_attention": STATES}
KINDS |= {"attention": ATTENDS, "full_attention": ATTENDS, "mlp": FEEDS, "moe": FEEDS}
OF_EXPERTS = ("E", "moe")


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Nemotron H, which has no RoPE."""
    kinds = kinds_of(config)
    renamed = {"num_hidden_layers": len(kinds), "rope_parameters": None, "rope_scaling": None}
    h = declared(config.updated(**renamed))
    inner = config.count("mamba_num_heads") * config.count("mamba_head_dim")
    h = with_states(h, states_of(config, h.sizes["width"], inner, "", NAMES))
    hidden = config.count("moe_intermediate_size") if has_experts(config) else h.sizes["hidden"]
    epsilon = config.number("layer_norm_epsilon", config.number("rms_norm_eps", config.number("norm_eps", 1e-5)))
    return h.updated(
        {f"kind_{number}": kind for number, kind in enumerate(kinds)}
        | {f"feeds_{number}": int(kind == FEEDS) for number, kind in enumerate(kinds)},
        context_length=CONTEXT,
        feed_forward_length=[hidden if kind == FEEDS else 0 for kind in kinds],
        attention__head_count_kv=[h.sizes["kv_heads"] if kind == ATTENDS else 0 for kind in kinds],
        attention__key_length=h.sizes["head_dim"],
        attention__value_length=h.sizes["head_dim"],
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=epsilon,
        rope__dimension_count=h.sizes["head_dim"],
        rope__freq_base=None,
        rope__scaling__finetuned=False,
    )


def layer_kinds(config: Config) -> list[str]:
    """Return the layers' types as in config.json: letters, or words."""
    kinds = config.get("hybrid_override_pattern", config.get("layers_block_type"))
    if not isinstance(kinds, str | list) or not kinds or not {*map(str, kinds)} <= KINDS.keys():
        raise config.refusal(f"layers_block_type should be a list of {', '.join(KINDS)}")
    return [*kinds]


def kinds_of(config: Config) -> list[int]:
    kinds = layer_kinds(config)
    config.only("num_hidden_layers", len(kinds))
    if {KINDS[kind] for kind in kinds} != {STATES, ATTENDS, FEEDS}:
        raise config.refusal("a model without attention, Mamba 2 or feed-forward networks is not supported")
    if {kind in OF_EXPERTS for kind in kinds if KINDS[kind] == FEEDS} == {True, False}:
        raise config.refusal("experts in some layers only are not supported")
    return [KINDS[kind] for kind in kinds]


def has_experts(config: Config) -> bool:
    """Return whether feed-forward networks are experts."""
    return any(kind in OF_EXPERTS for kind in layer_kinds(config))


def moe(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Nemotron H with ungated experts next to a shared one."""
    h = with_experts(config, read(config, declared), "moe_intermediate_size", "n_routed_experts")
    shared = config.count("moe_shared_expert_intermediate_size")
    return h.updated(
        {"shared_hidden": shared},
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_feed_forward_length=shared,
        expert_shared_count=1,
        expert_weights_norm=config.flag("norm_topk_prob", True),
        expert_weights_scale=config.number("routed_scaling_factor", 1.0),
        expert_group_count=1,
        expert_group_used_count=1,
    )


def select(config: Config) -> str:
    """Name the record of a model with experts, or without."""
    return "NemotronHForCausalLM+experts" if has_experts(config) else "NemotronHForCausalLM"


def layer(sizes: Sizes, number: int) -> Layer:
    """List a layer's tensors without those of a feed-forward network."""
    kind = sizes[f"kind_{number}"]
    return ATTENTION if kind == ATTENDS else mixer(sizes, number) if kind == STATES else {}
