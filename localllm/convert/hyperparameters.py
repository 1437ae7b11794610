"""Translate config.json into GGUF metadata and into the sizes that tensor shapes are made of."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from localllm.arch.metadata import MAX_LAYERS
from localllm.convert.config import CheckpointConfig
from localllm.convert.rope_scaling import find_rope_parameters, read_rope
from localllm.frozen import frozen

SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # the only GELU of GGUF's readers
PLAIN_SCALING = ("linear", "yarn")  # RoPE scalings that need metadata only


@frozen
class CheckpointHyperparameters:
    """The hyperparameters in config.json, validated before any weight is read."""

    sizes: Mapping[str, int]  # sizes that shapes are made of: vocab, layers, width, heads, head_dim, ...
    metadata: Mapping[str, Any]  # keys after "ARCH."
    tensors: Mapping[str, np.ndarray]  # tensors that only GGUF has, float32, by name
    tied: bool  # the embedding is also the output matrix
    # Factors that matrices are multiplied with in turn, by GGUF names without layer and ".weight":
    # per row or one for all, float32 [rows] or [1].
    factors: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)

    def update(self, sizes: Mapping[str, int] = {}, /, **metadata: object) -> "CheckpointHyperparameters":
        """Return a copy with added sizes and metadata.

        In the names of metadata, "__" stands for a dot; None removes a key.
        """
        values = {name.replace("__", "."): value for name, value in metadata.items()}
        keys = {key: value for key, value in {**self.metadata, **values}.items() if value is not None}
        return replace(self, sizes={**self.sizes, **sizes}, metadata=keys)


Reader = Callable[[CheckpointConfig], CheckpointHyperparameters]  # reads config.json, as a record describes it


def read_decoder(
    config: CheckpointConfig,
    *,
    activations: tuple[str, ...] = SILU,
    scalings: tuple[str, ...] = PLAIN_SCALING,
    whole_heads: bool = True,  # RoPE must rotate whole heads, not only their beginning
) -> CheckpointHyperparameters:
    """Read the usual keys of a decoder with RoPE and RMS norms. Raises ModelError.

    activations, scalings: values of config.json that the architecture supports. whole_heads: RoPE must rotate all
    dimensions of a head.
    """
    refuse_other_activations(config, activations)
    sizes = read_attention_sizes(config)
    context = config.read_count("max_position_embeddings", 2048)
    dims = count_rotary_dims(config, sizes["head_dim"])
    if whole_heads and dims != sizes["head_dim"]:
        raise config.make_error("partial_rotary_factor must be 1")
    rope = read_rope(config, dims, context, scalings)
    metadata = {
        "block_count": sizes["layers"],
        "context_length": context,
        "embedding_length": sizes["width"],
        "feed_forward_length": sizes["hidden"],
        "attention.head_count": sizes["heads"],
        "attention.head_count_kv": sizes["kv_heads"],
        "attention.layer_norm_rms_epsilon": config.read_number("rms_norm_eps", 1e-6),
        **{f"rope.{name}": value for name, value in rope.metadata.items()},
    }
    if config.get("head_dim") is not None or sizes["queries"] != sizes["width"]:
        metadata |= {f"attention.{side}_length": sizes["head_dim"] for side in ("key", "value")}
    return CheckpointHyperparameters(sizes, metadata, rope.tensors, config.read_flag("tie_word_embeddings"))


def read_attention_sizes(config: CheckpointConfig) -> dict[str, int]:
    """Read the sizes that attention and feed-forward matrices are made of. Raises ModelError."""
    heads, width = config.read_count("num_attention_heads"), config.read_count("hidden_size")
    head_dim = config.read_count("head_dim", width // heads or 1)
    kv_heads = config.read_count("num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise config.make_error(
            f"num_attention_heads {heads} must be divisible by num_key_value_heads {kv_heads}, and head_dim {head_dim} "
            "must be even"
        )
    return {
        "vocab": config.read_count("vocab_size"),
        "width": width,
        "hidden": config.read_count("intermediate_size"),
        "layers": config.read_count("num_hidden_layers", maximum=MAX_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "queries": heads * head_dim,
        "keys": kv_heads * head_dim,
    }


def count_rotary_dims(config: CheckpointConfig, head_dim: int) -> int:
    """Return the number of dimensions of a head that RoPE rotates. Raises ModelError unless it is even and above 0."""
    share = find_rope_parameters(config).read_number("partial_rotary_factor", 1.0)
    dims = int(head_dim * share)
    if not 0 < dims <= head_dim or dims % 2:
        raise config.make_error(
            f"partial_rotary_factor {share} must give an even count of a head's {head_dim} dimensions"
        )
    return dims


def refuse_other_activations(config: CheckpointConfig, allowed: tuple[str, ...]) -> None:
    """Raise ModelError unless config.json names one of the allowed activations, or none."""
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        config.require_value(name, *allowed)


def warn_ignored_window(config: CheckpointConfig) -> None:
    """Warn if config.json has a sliding window that GGUF's readers ignore for this architecture."""
    window = config.get("sliding_window") if config.read_flag("use_sliding_window", True) else None
    if isinstance(window, int) and 0 < window < config.read_count("max_position_embeddings", 2048):
        config.warnings.append(f"the model's sliding window of {window} tokens is ignored: attention covers all tokens")


APPROXIMATED = "GELU is computed with tanh, which differs from the model's in the fourth digit"


def approximate_gelu(config: CheckpointConfig, name: str) -> CheckpointConfig:
    """Replace exact GELU by its tanh approximation, the only one GGUF's readers have, and warn."""
    if config.get(name) == "gelu":
        config.warnings.append(APPROXIMATED)
    return config.update(**{name: None, "hidden_act": config.get(name)})


SLIDING = "sliding_attention"


def list_windows(config: CheckpointConfig, layers: int, period: int = 5) -> list[bool]:
    """Return whether each layer has a sliding window.

    Follows layer_types; without it, every layer has one except each `period`-th.
    """
    if config.get("layer_types") is None:
        return [(number + 1) % period != 0 for number in range(layers)]
    return [kind == SLIDING for kind in read_layer_types(config, "layer_types", layers, (SLIDING, "full_attention"))]


def read_layer_types(
    config: CheckpointConfig, name: str, layers: int, kinds: Collection[str], given: object = None
) -> list[str]:
    """Read a list that has one of several values for each layer. Raises ModelError.

    kinds: the allowed values. given: the list itself, if it is not stored under `name`.
    """
    values = config.get(name) if given is None else given
    if not isinstance(values, list) or len(values) != layers or not {*map(str, values)} <= {*kinds}:
        choices = (" or " if len(kinds) == 2 else ", ").join(kinds)
        raise config.make_error(f"{name} must be {choices} for each of {layers} layers")
    return values


def read_layer_flags(config: CheckpointConfig, name: str, layers: int) -> list[int]:
    """Read a list with a 0 or 1 for each layer. Raises ModelError."""
    values = config.get(name)
    if (
        not isinstance(values, list)
        or len(values) != layers
        or any(type(n) is not int or n not in (0, 1) for n in values)
    ):
        raise config.make_error(f"{name} must be 0 or 1 for each of {layers} layers")
    return values


def read_uniform_value(config: CheckpointConfig, name: str, layers: int | None = None) -> object:
    """Read a value that config.json may repeat for each layer. Raises ModelError if layers differ."""
    value = config.get(name)
    if isinstance(value, list) and (len({*map(str, value)}) != 1 or layers not in (None, len(value))):
        raise config.make_error(f"{name} must be the same for all layers")
    return value[0] if isinstance(value, list) else value


def name_layer_sizes(name: str, values: Sequence[int]) -> dict[str, int]:
    """Return a size for each layer under the names NAME_0, NAME_1, ..."""
    return {f"{name}_{number}": int(value) for number, value in enumerate(values)}


SOFTMAX, SIGMOID = 1, 2  # GGUF's numbers of the router's score functions
SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID}


def add_experts(
    config: CheckpointConfig,
    h: CheckpointHyperparameters,
    hidden: str,
    count: str = "num_experts",
    active_key: str = "num_experts_per_tok",
) -> CheckpointHyperparameters:
    """Add sizes and metadata of a mixture of experts.

    hidden, count, active_key: keys of the experts' hidden size, their count, and the number selected per token.
    """
    experts, active, size = (
        section.read_count(name) for section, name in map(config.find_key, (count, active_key, hidden))
    )
    if active > experts:
        raise config.make_error(f"{active_key} {active} must be at most {count}, {experts}")
    return h.update({"experts": experts, "expert_hidden": size}, expert_count=experts, expert_used_count=active)


def add_deepseek_experts(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    """Add DeepSeek's experts, which are selected in groups; V3 adds a bias to the scores first."""
    h = add_experts(config, h, "moe_intermediate_size", "n_routed_experts")
    score, shared = config.get("scoring_func"), config.read_count("n_shared_experts", 0)
    config.require_value("scoring_func", "softmax", "sigmoid")
    if config.get("topk_method") == "group_limited_greedy":
        config.warnings.append(
            "GGUF's readers rank expert groups by their two best experts, but the model by the best one"
        )
    leading = count_leading_dense(config)
    sizes = {"shared_hidden": shared * h.sizes["expert_hidden"], "leading_dense": leading}
    sizes |= {"biased": int(config.get("topk_method") == "noaux_tc")}
    sizes |= {"mtp_layers": config.read_count("num_nextn_predict_layers", 0), "both_inputs": 2 * h.sizes["width"]}
    return h.update(
        sizes,
        leading_dense_block_count=leading,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_count=shared,
        expert_weights_scale=config.read_number("routed_scaling_factor", 1.0),
        expert_weights_norm=config.read_flag("norm_topk_prob") or None,
        expert_group_count=config.get("n_group") and config.read_count("n_group"),
        expert_group_used_count=config.get("topk_group") and config.read_count("topk_group"),
        expert_gating_func=None if score is None else SCORES[score],
    )


def add_sigmoid_experts(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    """Add experts with sigmoid routing after the first, dense layers, and a multi-token prediction layer."""
    hidden = config.read_count("num_shared_experts", 1) * h.sizes["expert_hidden"]
    sizes = {"leading_dense": count_leading_dense(config), "shared_hidden": hidden, "both_inputs": 2 * h.sizes["width"]}
    sizes |= {"mtp_layers": config.read_count("num_nextn_predict_layers", 0)}
    return h.update(
        sizes,
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_feed_forward_length=hidden,
        expert_gating_func=SIGMOID,
    )


def count_leading_dense(config: CheckpointConfig) -> int:
    """Count the leading layers without experts, from first_k_dense_replace or mlp_layer_types."""
    types = config.get("mlp_layer_types")
    if not isinstance(types, list):
        return config.read_count("first_k_dense_replace", 0)
    leading = types.index("sparse") if "sparse" in types else len(types)
    if types != ["dense"] * leading + ["sparse"] * (len(types) - leading):
        raise config.make_error("mlp_layer_types must have dense layers before sparse ones only")
    config.require_value("first_k_dense_replace", leading)
    return leading
