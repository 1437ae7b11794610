"""EXAONE 4, GLM 4, HunYuan and Apertus: like Llama, with other norms, partial RoPE or other activations."""

import re
from collections.abc import Mapping
from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    GATED,
    HEAD_NORMS,
    NORMS_BEFORE,
    NORMS_BEHIND,
    ROTATED,
    SHARED_EXPERT,
    mtp_layer,
)
from localllm.convert.families.llama import LLAMA_SCALING
from localllm.convert.family import Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder, rotary_dims
from localllm.convert.rope_scaling import SECTIONS, rope_parameters
from localllm.convert.tensors import as_float32
from localllm.convert.weights import Stored
from localllm.errors import ModelError


def exaone4(config: Config) -> CheckpointFacts:
    """Read EXAONE 4: the large one has layers with a window, the only ones with RoPE."""
    h = decoder(config, scalings=LLAMA_SCALING)
    h = h.updated(vocab_size=h.sizes["vocab"])
    if config.get("sliding_window") is None:
        config.windows([False] * h.sizes["layers"])
        return h
    return h.updated(
        attention__sliding_window=config.count("sliding_window"),
        attention__sliding_window_pattern=windows_of(config, h.sizes["layers"]),
    )


def windows_of(config: Config, layers: int) -> list[bool]:
    """Return for each layer whether it has a window: layer_types, or a pattern like LLLG or 4 (the last has none)."""
    pattern, types = config.get("sliding_window_pattern", 4), config.get("layer_types")
    if isinstance(types, list) and len(types) == layers and {*types} <= {"sliding_attention", "full_attention"}:
        return [kind == "sliding_attention" for kind in types]
    if isinstance(pattern, str) and pattern and {*pattern} <= {*"LG"} and types is None:
        return [pattern[number % len(pattern)] == "L" for number in range(layers)]
    if types is not None:
        raise config.refusal("layer_types should be sliding_attention or full_attention for each layer")
    period = config.count("sliding_window_pattern", 4)
    return [(number + 1) % period != 0 for number in range(layers)]


EXAONE4 = Family(
    "exaone4",
    {**ATTENTION, **HEAD_NORMS, **GATED, **NORMS_BEHIND},
    exaone4,
    defaults={"rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
)


def glm4(config: Config) -> CheckpointFacts:
    """Read GLM 4: partial RoPE; one matrix for gate and up projections."""
    h = decoder(config, whole_heads=False)
    return h.updated(
        {"both_hidden": 2 * h.sizes["hidden"]}, rope__dimension_count=rotary_dims(config, h.sizes["head_dim"])
    )


def chatglm(config: Config) -> CheckpointFacts:
    """Read GLM: like GLM 4, with heads of width / heads numbers."""
    h = glm4(config)
    if h.sizes["queries"] != h.sizes["width"]:
        raise config.refusal("head_dim should be hidden_size over num_attention_heads")
    return h.updated(attention__key_length=None, attention__value_length=None)


def glm4v(config: Config) -> CheckpointFacts:
    """Read GLM-4V: M-RoPE on pairs half a head apart in GGUF.

    GLM-OCR has a multi-token prediction layer, which is counted even where the checkpoint lacks it.
    """
    h = decoder(config, whole_heads=False, scalings=(SECTIONS,))
    rotated_dims, mtp_layers = rotary_dims(config, h.sizes["head_dim"]), config.count("num_nextn_predict_layers", 0)
    sizes = {"both_hidden": 2 * h.sizes["hidden"], "rotated_dims": rotated_dims}
    return h.updated(
        sizes | {"mtp_layers": mtp_layers, "both_inputs": 2 * h.sizes["width"]},
        block_count=h.sizes["layers"] + mtp_layers,
        nextn_predict_layers=mtp_layers or None,
        rope__dimension_count=rotated_dims,
    )


def glm4v_layer(sizes: Sizes, number: int) -> Layer:
    return {**OF_GLM4, **mtp_layer(sizes, number)}


FUSED_FEED_FORWARD: Layer = {"ffn_up": ("both_hidden", "width"), "ffn_down": ("width", "hidden")}
OF_GLM = {"rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}
OF_GLM4 = {**ATTENTION, **FUSED_FEED_FORWARD, **NORMS_BEFORE, **NORMS_BEHIND}
GLM4 = Family("glm4", OF_GLM4, glm4, defaults={**OF_GLM})
OF_GLM4V = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
GLM4V = replace(GLM4, layer=glm4v_layer, read=glm4v, sees=True, parted=ROTATED, defaults=OF_GLM4V)
CHATGLM = replace(GLM4, arch="chatglm", layer={**ATTENTION, **FUSED_FEED_FORWARD, **NORMS_BEFORE}, read=chatglm)


def hunyuan(config: Config) -> CheckpointFacts:
    """Read HunYuan: head norms after RoPE."""
    rope = config.section("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if rope.get("type", rope.get("rope_type")) != "dynamic":
        return decoder(config)
    base = {"rope_theta": rope_parameters(config).number("rope_theta", 10000.0)}
    h = decoder(config.updated(rope_parameters=base, rope_scaling=None))
    alpha, dims = rope.number("alpha"), h.sizes["head_dim"]
    if rope.number("factor", 1.0) != 1:
        raise config.refusal("rope scaling dynamic by a factor is not supported")
    return h.updated(
        rope__freq_base=h.metadata["rope.freq_base"] * alpha ** (dims / (dims - 2)),
        rope__scaling__type="none",
        rope__scaling__factor=1.0,
        rope__scaling__original_context_length=LONGEST,
        context_length=LONGEST,
    )


def hunyuan_vl(config: Config) -> CheckpointFacts:
    """Read HunYuan VL: four positions; GGUF's readers compute the base from alpha themselves."""
    rope = rope_parameters(config)
    if rope.get("rope_type", rope.get("type")) not in ("dynamic", "xdrope"):
        raise config.refusal("rope_parameters: only those with alpha and sections are supported")
    counts = rope.get("xdrope_section", rope.get("mrope_section"))
    plain = {"rope_type": "default", "rope_theta": rope.number("rope_theta", 10000.0)}
    h = decoder(config.updated(rope_parameters=plain, rope_scaling=None))
    of_counts = (
        isinstance(counts, list) and len(counts) == 4 and all(isinstance(count, int) and count > 0 for count in counts)
    )
    if not of_counts or 2 * sum(counts) != h.sizes["head_dim"]:
        raise config.refusal(f"mrope_section should be four numbers, {h.sizes['head_dim'] // 2} in all")
    return h.updated(
        rope__scaling__alpha=rope.number("alpha"),
        rope__scaling__type="none",
        rope__scaling__factor=rope.number("factor", 1.0),
        rope__scaling__original_context_length=h.metadata["context_length"],
        rope__dimension_sections=counts,
    )


LONGEST = 1 << 18  # HunYuan's training context, where config.json says less


def hunyuan_moe(config: Config) -> CheckpointFacts:
    """Read HunYuan MoE: experts next to a shared one; some values are given per layer."""
    layers = config.count("num_hidden_layers")
    names = ("moe_topk", "moe_intermediate_size", "num_shared_expert")
    values = {name: one_for_all(config, name, layers) for name in names}
    values["moe_intermediate_size"] = values["moe_intermediate_size"] or config.count("intermediate_size")
    config = config.updated(**values)
    count = config.count("num_shared_expert", 1)
    shared = count * config.count("intermediate_size")
    h = with_experts(config, hunyuan(config), "moe_intermediate_size", active_key="moe_topk")
    return h.updated(
        {"shared_hidden": shared},
        expert_feed_forward_length=h.sizes["expert_hidden"],
        expert_shared_feed_forward_length=shared,
        expert_shared_count=count,
    )


def one_for_all(config: Config, name: str, layers: int) -> object:
    """Read a value that may be given per layer. Raises ModelError if layers differ."""
    value = config.get(name)
    if isinstance(value, list) and (len(value) != layers or len({*map(str, value)}) != 1):
        raise config.refusal(f"{name} should be the same for all layers")
    return value[0] if isinstance(value, list) else value


HUNYUAN_DENSE = Family(
    "hunyuan-dense",
    {**ATTENTION, **HEAD_NORMS, **GATED, **NORMS_BEFORE},
    hunyuan,
    defaults={"rms_norm_eps": 1e-5},
)
HUNYUAN_VL = replace(
    HUNYUAN_DENSE, arch="hunyuan_vl", read=hunyuan_vl, sees=True, unread=re.compile(r"(model\.)?vit\..*")
)
HUNYUAN_MOE = replace(
    HUNYUAN_DENSE,
    arch="hunyuan-moe",
    layer={**ATTENTION, **HEAD_NORMS, **NORMS_BEFORE, **EXPERTS, **SHARED_EXPERT},
    read=hunyuan_moe,
)


def apertus(config: Config) -> CheckpointFacts:
    """Read Apertus: no gates; the activation has learned parameters per layer."""
    config.only("attention_bias", False)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = config.updated(rope_parameters=ROPE_OF_APERTUS)
    h = decoder(config, activations=("xielu",), scalings=LLAMA_SCALING)
    return h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"])


ROPE_OF_APERTUS = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
OF_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def xielu(stored: Mapping[str, Stored], h: CheckpointFacts) -> dict[str, object]:
    """Read the activation's parameters as metadata. Raises ModelError."""
    numbers: dict[str, list[float]] = {name: [] for name in OF_XIELU}
    for number in range(h.sizes["layers"]):
        for name, values in numbers.items():
            tensor = stored.get(f"model.layers.{number}.mlp.act_fn.{name}")
            if tensor is None or tensor.shape not in ((), (1,)):
                raise ModelError(f"there is no {name} of the activation of layer {number}")
            values.append(float(as_float32(replace(tensor, shape=(1,)).rows(0, 1), tensor.dtype)[0, 0]))
    return {f"xielu.{name}": values for name, values in numbers.items()}


APERTUS = Family(
    "apertus",
    {**ATTENTION, **HEAD_NORMS, **FEED_FORWARD, **NORMS_BEFORE},
    apertus,
    defaults={"hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "rope_theta": 12e6},
    unread=re.compile(r"model\.layers\.[0-9]+\.mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)"),
    of_tensors=xielu,
)
