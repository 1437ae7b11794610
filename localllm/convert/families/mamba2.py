"""Mamba 2, and what models that combine it with attention share."""

from collections.abc import Callable, Sequence

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.families.mamba import CONTEXT
from localllm.convert.family import DerivedTensor, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, refuse_other_activations
from localllm.convert.tensor_functions import FUNCTIONS
from localllm.convert.tensors import Shape, TensorSource, as_float32, column, from_array


def states_of(config: Config, width: int, inner: int, prefix: str, names: dict[str, str]) -> dict[str, int]:
    """Read the sizes of a layer's state; prefix and names: of keys in config.json."""
    heads, head_dim, groups, state, kernel = (config.count(prefix + names[name]) for name in names)
    if inner != heads * head_dim or inner % groups or heads % groups:
        raise config.refusal(f"{heads} heads of {head_dim} in {groups} groups do not have {inner} numbers")
    return {
        "state_heads": heads,
        "groups": groups,
        "state": state,
        "inner": inner,
        "inner_of_group": inner // groups,
        "convolved": inner + 2 * groups * state,
        "into_state": 2 * inner + 2 * groups * state + heads,
        "kernel": kernel,
        "one": 1,
    }


def with_states(h: CheckpointFacts, sizes: dict[str, int]) -> CheckpointFacts:
    """Add the ssm.* metadata."""
    return h.updated(
        sizes,
        ssm__conv_kernel=sizes["kernel"],
        ssm__inner_size=sizes["inner"],
        ssm__state_size=sizes["state"],
        ssm__time_step_rank=sizes["state_heads"],
        ssm__group_count=sizes["groups"],
    )


OF_MAMBA2 = {"heads": "num_heads", "dim": "head_dim", "groups": "n_groups", "state": "state_size",
             "kernel": "conv_kernel"}  # fmt: skip


OF_HYBRIDS = {"heads": "n_heads", "dim": "d_head", "groups": "n_groups", "state": "d_state", "kernel": "d_conv"}


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Mamba 2 (Dao and Gu 2024, arXiv 2405.21060)."""
    refuse_other_activations(config, ("silu", "swish"))
    config.only("use_conv_bias", True)
    config.only("use_bias", False)
    config.only("rms_norm", True)
    width, layers = config.count("hidden_size"), config.count("num_hidden_layers", maximum=MOST_LAYERS)
    sizes = states_of(config, width, config.count("expand", 2) * width, "", OF_MAMBA2)
    metadata = {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": width,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon", 1e-5),
    }
    sizes_of_model = {"vocab": config.count("vocab_size"), "layers": layers, "width": width}
    return with_states(CheckpointFacts(sizes_of_model, metadata, {}, config.flag("tie_word_embeddings")), sizes)


def rates(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Convert logarithms, stored as a vector, to GGUF's column of decay rates."""
    return FUNCTIONS["decay"]([column(sources[0])], shape, sizes)


def in_rows(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """View a vector as a matrix."""
    return from_array(as_float32(sources[0].rows(0, 1), sources[0].dtype).reshape(shape))


def mamba2_of(prefix: str) -> Layer:
    """List the tensors of a Mamba 2 layer without its norm; prefix: of names in the checkpoint."""
    return {
        "ssm_in": ("into_state", "width"),
        "ssm_conv1d": DerivedTensor(
            ("convolved", "kernel"), {f"{prefix}.conv1d.weight": ("convolved", "one", "kernel")}, FUNCTIONS["reshape"]
        ),
        "ssm_conv1d.bias": ("convolved",),
        "ssm_dt.bias": DerivedTensor(("state_heads",), {f"{prefix}.dt_bias": ("state_heads",)}, FUNCTIONS["same"]),
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


def mixer(sizes: Sizes, number: int) -> Layer:
    return {**mamba2_of("mixer"), **norm_of("mixer")}
