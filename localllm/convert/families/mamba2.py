"""Mamba 2, and models that combine it with attention: Falcon H1, Bamba."""

from dataclasses import replace

import numpy as np

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.families.hybrids import MAMBA2, NORM, attending, mamba2_of, norm_of, with_mamba2
from localllm.convert.families.mamba import CONTEXT
from localllm.convert.family import Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder, refuse_other_activations, rotary_dims
from localllm.convert.layers import ATTENTION, GATED, NORMS_BEFORE, ROTATED


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


def mamba2(config: Config) -> CheckpointFacts:
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


MAMBA2_ALONE = Family(
    "mamba2",
    {"attn_norm": ("width",), **mamba2_of("mixer"), **norm_of("mixer")},
    mamba2,
    defaults={"n_groups": 8, "num_heads": 128, "head_dim": 64, "state_size": 128, "conv_kernel": 4},
)


def falcon_h1(config: Config) -> CheckpointFacts:
    """Read Falcon H1: attention and Mamba 2 side by side; muP multipliers are folded into the matrices."""
    h = decoder(config)
    config.only("tie_word_embeddings", False)
    for name in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        config.only(name, False)
    config.only("mamba_conv_bias", True)
    if config.flag("mamba_rms_norm", False):
        config.only("mamba_norm_before_gate", False)
    inner = config.count("mamba_d_ssm", config.count("mamba_expand", 2) * h.sizes["width"])
    sizes = states_of(config, h.sizes["width"], inner, "mamba_", OF_HYBRIDS)
    flags = {"has_norm": int(config.flag("mamba_rms_norm", False))}
    h = with_states(h.updated(flags, vocab_size=h.sizes["vocab"]), sizes)
    return replace(h, factors=factors_of(config, h.sizes))


def factors_of(config: Config, sizes: Sizes) -> dict[str, list[np.ndarray]]:
    """Return muP's multipliers, by matrix."""

    def factor(name: str) -> np.ndarray:
        return np.array([config.number(f"{name}_multiplier", 1.0)], np.float32)

    groups = sizes["groups"] * sizes["state"]
    rows = [sizes["inner"], sizes["inner"], groups, groups, sizes["state_heads"]]
    of_parts = np.array(config.numbers("ssm_multipliers", len(rows)), np.float32)
    of_gate, of_down = np.array(config.numbers("mlp_multipliers", 2), np.float32)
    attention = factor("attention_in")
    return {
        "token_embd": [factor("embedding")],
        "output": [factor("lm_head")],
        "attn_q": [attention],
        "attn_k": [factor("key"), attention],
        "attn_v": [attention],
        "attn_output": [factor("attention_out")],
        "ffn_gate": [of_gate[None]],
        "ffn_down": [of_down[None]],
        "ssm_in": [factor("ssm_in"), np.repeat(of_parts, rows)],
        "ssm_out": [factor("ssm_out")],
    }


def falcon_h1_layer(sizes: Sizes, number: int) -> Layer:
    return {**NORMS_BEFORE, **ATTENTION, **MAMBA2, **(NORM if sizes["has_norm"] else {}), **GATED}


FALCON_H1 = Family("falcon-h1", falcon_h1_layer, falcon_h1, bare=("ffn_norm",), defaults={"rms_norm_eps": 1e-5})


def bamba(config: Config) -> CheckpointFacts:
    """Read Bamba: attention with partial RoPE in some layers, Mamba 2 in the others."""
    for name in ("attention_bias", "mlp_bias"):
        config.only(name, False)
    dims = config.get("attn_rotary_emb")
    head_dim = config.count("hidden_size") // config.count("num_attention_heads")
    renamed = (
        config if dims is None else config.updated(partial_rotary_factor=config.count("attn_rotary_emb") / head_dim)
    )
    h = decoder(renamed, whole_heads=False)
    indices, layers = config.get("attn_layer_indices"), h.sizes["layers"]
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
        raise config.refusal(f"attn_layer_indices should be a list of some of {layers} layers")
    rotated_dims = rotary_dims(renamed, h.sizes["head_dim"])
    h = with_mamba2(config, h, config.count("mamba_expand", 2) * h.sizes["width"])
    h = attending(config, h.updated({"rotated_dims": rotated_dims}), [number in indices for number in range(layers)])
    return h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=rotated_dims, rope__scaling__finetuned=True)


def bamba_layer(sizes: Sizes, number: int) -> Layer:
    return {**NORMS_BEFORE, **(ATTENTION if sizes[f"attends_{number}"] else {**MAMBA2, **NORM}), **GATED}


BAMBA = Family(
    "granitehybrid", bamba_layer, bamba, rotated=ROTATED, defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
)
