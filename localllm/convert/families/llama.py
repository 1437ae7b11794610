"""Read checkpoints that differ little from Llama's, and select the language model of a vision model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from localllm.arch.families.llama4 import EXPERTS_OF_MAVERICK
from localllm.arch.families.smallthinker import PERIOD, WINDOW
from localllm.arch.metadata import MAX_LAYERS
from localllm.convert.config import CheckpointConfig
from localllm.convert.family import DerivedTensor, Layer
from localllm.convert.hyperparameters import (
    SIGMOID,
    SLIDING,
    SOFTMAX,
    CheckpointHyperparameters,
    Reader,
    add_experts,
    list_windows,
    name_layer_sizes,
    read_layer_flags,
)
from localllm.convert.rope_scaling import find_rope_parameters
from localllm.convert.safetensors_files import StoredTensor
from localllm.convert.transforms import Shape, Sizes, TensorSource, as_float32, from_array
from localllm.errors import ModelError
from localllm.files.gguf.header import printable

BASE = 10000.0  # of RoPE; the only one that GGUF's readers of some architectures support
NO_ROPE = {"0", "0.0", "None"}  # base of layers without RoPE
USUAL_MASK = 156895  # mask token of LLaDA with experts, missing in its config.json
ROPE_OF_APERTUS = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
                   "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
UNLIKE = "GGUF's readers apply RMS norms and normalize the weights of both experts, which the model does not"
IN_VISION_MODELS = ("lfm2", "llama", "mistral", "qwen2", "qwen3")


def read_llama4(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Llama 4: three layers of four have RoPE and attend within chunks; experts in every few layers."""
    config.require_value("use_qk_norm", config.get("num_local_experts") != EXPERTS_OF_MAVERICK)
    h = declared(config)
    layers, step = h.sizes["layers"], h.sizes["step"]
    config.require_value("moe_layers", [*range(step - 1, layers, step)])
    chunks = [number % 4 != 3 for number in range(layers)]
    config.require_value("layer_types", ["chunked_attention" if chunk else "full_attention" for chunk in chunks])
    config.require_value("no_rope_layers", [*map(int, chunks)], [])
    h = add_experts(config, h, "intermediate_size", "num_local_experts")
    hidden = h.sizes["expert_hidden"]
    dense = name_layer_sizes("dense", [(number + 1) % step for number in range(layers)])
    return h.update({**dense, "shared_hidden": hidden, "both_hidden": 2 * hidden}, expert_feed_forward_length=hidden)


def read_afmoe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read AFMoE. Raises ModelError unless it scales embeddings, as GGUF's readers do."""
    if not config.read_flag("mup_enabled"):
        raise config.make_error("mup_enabled must be true: GGUF's readers always scale embeddings")
    return declared(config)


def read_apertus(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Apertus, whose RoPE is scaled even if config.json has no parameters for it."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = config.update(rope_parameters=ROPE_OF_APERTUS)
    return declared(config)


def read_xielu(stored: Mapping[str, StoredTensor], h: CheckpointHyperparameters) -> dict[str, object]:
    """Read the parameters of the activation xIELU, one per layer, as metadata. Raises ModelError."""
    numbers: dict[str, list[float]] = {name: [] for name in XIELU}
    for number in range(h.sizes["layers"]):
        for name, values in numbers.items():
            tensor = stored.get(f"model.layers.{number}.mlp.act_fn.{name}")
            if tensor is None or tensor.shape not in ((), (1,)):
                raise ModelError(f"the parameter {name} of the activation of layer {number} is missing")
            values.append(float(as_float32(replace(tensor, shape=(1,)).read_rows(0, 1), tensor.dtype)[0, 0]))
    return {f"xielu.{name}": values for name, values in numbers.items()}


def read_baichuan(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Baichuan. The larger models use ALiBi, which GGUF's readers infer from the layer count."""
    unsaid = {"rope_theta": "rope__freq_base", "num_key_value_heads": "attention__head_count_kv"}
    defaults: dict[str, object] = {key: None for name, key in unsaid.items() if config.get(name) is None}
    return declared(config).update(**defaults)


def round_to_ternary(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Round each weight to -1, 0 or 1 times the mean magnitude of its matrix (Ma et al. 2024)."""
    numbers = as_float32(sources[0].read_rows(0, shape[0]), sources[0].dtype)
    inverse = np.float32(1) / np.float32(max(np.abs(numbers).mean(dtype=np.float64), 1e-5))
    return from_array(np.clip(np.round(numbers * inverse), -1, 1) / inverse)


def read_diffusion(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    return add_mask_token(config, declared(config))


def read_diffusion_moe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    return add_mask_token(config, declared(config), USUAL_MASK)


def add_mask_token(config: CheckpointConfig, h: CheckpointHyperparameters, usual: int = 0) -> CheckpointHyperparameters:
    """Add the id of the mask token.

    usual: the id if config.json has none; 0 omits it.
    """
    mask = config.read_count("mask_token_id", usual) if config.get("mask_token_id") is not None else usual
    return h.update({"mask": mask}, attention__causal=False)


def mask_token(stored: Mapping[str, StoredTensor], h: CheckpointHyperparameters) -> dict[str, object]:
    return {"tokenizer.ggml.mask_token_id": h.sizes["mask"]} if h.sizes["mask"] else {}


def read_granite_swa(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Granite 4 with sliding windows: an attention sink per head; RoPE in some layers. Raises ModelError."""
    h = declared(config.update(sliding_window=None))
    layers, base = h.sizes["layers"], h.metadata["rope.freq_base"]
    if config.get("layer_types") is None:
        types = ["full_attention" if number % 4 == 0 else SLIDING for number in range(layers)]
        config = config.update(layer_types=types)
    thetas = config.get("layer_rope_theta", [base] * layers)
    if not isinstance(thetas, list) or len(thetas) != layers or not {*map(str, thetas)} <= NO_ROPE | {str(base)}:
        raise config.make_error(f"layer_rope_theta must be {base} or 0 for each of {layers} layers")
    rotates = [str(theta) not in NO_ROPE for theta in thetas]
    if config.get("no_rope_layers"):
        rotates = [*map(bool, read_layer_flags(config, "no_rope_layers", layers))]
    return h.update(
        attention__rope_pattern=None if all(rotates) and not config.get("no_rope_layers") else rotates,
        attention__sliding_window=config.read_count("sliding_window"),
        attention__sliding_window_pattern=list_windows(config, layers),
    )


def read_minicpm(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read MiniCPM: scaled embeddings, residuals and logits; RoPE divisors for short and long contexts."""
    h = declared(config)
    magnitude = h.metadata.get("rope.scaling.attn_factor")
    return h.update(
        embedding_scale=config.read_number("scale_emb"),
        residual_scale=config.read_number("scale_depth") / h.sizes["layers"] ** 0.5,
        logit_scale=h.sizes["width"] / config.read_number("dim_model_base"),
        rope__scaling__type="longrope" if h.tensors else h.metadata.get("rope.scaling.type"),
        rope__scaling__attn_factor=None if magnitude == 1 else magnitude,
    )


def read_minicpm3(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read MiniCPM 3: latent attention. Its multipliers are constants of GGUF's readers. Raises ModelError."""
    heads, rotated = config.read_count("num_attention_heads"), config.read_count("qk_rope_head_dim")
    h = declared(config.update(head_dim=rotated))
    if h.metadata["rope.freq_base"] != BASE:
        raise config.make_error(
            f"rope_theta must be {BASE}, as GGUF's readers assume (found {h.metadata['rope.freq_base']})"
        )
    magnitude = h.metadata.get("rope.scaling.attn_factor")
    latent, narrow = config.read_count("kv_lora_rank"), config.read_count("q_lora_rank")
    key_dim, value_dim = (
        config.read_count("qk_nope_head_dim"),
        config.read_count("v_head_dim", h.sizes["width"] // heads),
    )
    sizes = {"latent": latent, "narrow": narrow, "latent_and_key": latent + rotated, "values": heads * value_dim}
    sizes |= {"queries": heads * (key_dim + rotated), "both_rows": heads * (key_dim + value_dim)}
    return h.update(
        sizes,
        attention__q_lora_rank=narrow,
        attention__kv_lora_rank=latent,
        attention__key_length=key_dim + rotated,
        attention__value_length=None if value_dim == h.sizes["width"] // heads else value_dim,
        rope__dimension_count=rotated,
        rope__scaling__attn_factor=None if magnitude == 1 else magnitude,
    )


def read_mistral3(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read the language model of Mistral Small 3 or Ministral 3, which adds YaRN and scales queries by position."""
    h = declared(config)
    if h.metadata.get("rope.scaling.type") != "yarn":
        return h
    rope = find_rope_parameters(config)
    rope.require_value("attention_factor")
    rope.require_value("mscale", 1)
    return h.update(
        rope__scaling__attn_factor=None,
        rope__scaling__yarn_log_multiplier=rope.read_number("mscale_all_dim"),
        attention__temperature_scale=rope.read_number("llama_4_scaling_beta"),
    )


def read_muse_glimmer(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Muse Glimmer: three layers of four have RoPE and a window; one weight per head norm. Raises ModelError."""
    scale = np.array([config.read_number("qk_scale_factor")], np.float32)
    h = declared(config)
    base, windows = h.metadata["rope.freq_base"], list_windows(config, h.sizes["layers"], period=4)
    config.require_value("layer_rope_theta", [base if window else 0 for window in windows])
    return replace(h, factors={"attn_q_norm": [scale]}).update(attention__sliding_window_pattern=windows)


def read_olmo2(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read OLMo 2 or OLMo 3, some of whose layers have a sliding window."""
    h = declared(config)
    if config.get("sliding_window") is None:
        return h
    windows = [(number + 1) % 4 != 0 for number in range(h.sizes["layers"])]
    config.require_windows(windows)
    local = config.get_section("rope_parameters").get_section("sliding_attention")
    return h.update(
        attention__sliding_window=config.read_count("sliding_window"),
        attention__sliding_window_pattern=windows,
        rope__freq_base_swa=local.read_number("rope_theta", h.metadata["rope.freq_base"]),
    )


def read_phi3(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Phi 3: fused matrices, and RoPE divisors for long contexts."""
    h = declared(config)
    rope, context = find_rope_parameters(config), h.metadata["context_length"]
    return h.update(rope__scaling__original_context_length=rope.read_count("original_max_position_embeddings", context))


def read_phimoe(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Phi 3.5 MoE, and warn that GGUF's readers compute it differently."""
    config.warnings.append(UNLIKE)
    return read_phi3(config, declared)


def read_smallthinker(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read SmallThinker, where either three layers of four or all of them have RoPE."""
    layers = config.read_count("num_hidden_layers", maximum=MAX_LAYERS)
    config.require_value("moe_layer_layout", [1] * layers)
    windows = [int(number % PERIOD != 0) for number in range(layers)]
    layout = config.get("sliding_window_layout")
    has_windows = isinstance(layout, list) and any(layout) and config.get("sliding_window_size") is not None
    config.require_value("sliding_window_layout", windows if has_windows else [0] * layers)
    config.require_value("rope_layout", windows if has_windows else [1] * layers)
    if has_windows:
        config.require_value("sliding_window_size", WINDOW)
    return declared(config).update(
        expert_gating_func=SOFTMAX if config.read_flag("moe_primary_router_apply_softmax") else SIGMOID,
        attention__sliding_window=WINDOW if has_windows else None,
    )


def read_smollm3(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read SmolLM 3. Raises ModelError unless every fourth layer lacks RoPE, as GGUF's readers assume."""
    h = declared(config)
    config.require_value("no_rope_layer_interval", 4)
    config.require_value("no_rope_layers", [int((number + 1) % 4 != 0) for number in range(h.sizes["layers"])])
    return h


def read_stablelm(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read StableLM; the largest has head norms, and one norm for attention and feed-forward network."""
    parallel = config.read_flag("use_parallel_residual")
    flags = {"head_norms": int(config.read_flag("qk_layernorm")), "parallel": int(parallel)}
    return declared(config).update(flags, use_parallel_residual=parallel)


def list_head_norm_tensors(sizes: Sizes, number: int) -> Layer:
    """List the norms of queries and keys, which the checkpoint stores per head."""
    heads = {"q": sizes["heads"], "k": sizes["kv_heads"]}
    return {f"attn_{kind}_norm": stack_head_norms(kind, count) for kind, count in heads.items()}


def stack_head_norms(kind: str, heads: int) -> DerivedTensor:
    """Declare norms that are stored per head as one tensor.

    kind: q or k.
    """

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return from_array(np.concatenate([as_float32(source.read_rows(0, 1), source.dtype) for source in sources]))

    stored = {f"self_attn.{kind}_layernorm.norms.{head}.weight": ("head_dim",) for head in range(heads)}
    return DerivedTensor(("heads" if kind == "q" else "kv_heads", "head_dim"), stored, build)


def read_orion(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Orion: layer norms, although config.json calls them RMS norms. Raises ModelError."""
    h = declared(config)
    if h.metadata["rope.freq_base"] != BASE:
        raise config.make_error(
            f"rope_theta must be {BASE}, as GGUF's readers assume (found {h.metadata['rope.freq_base']})"
        )
    return h.update(
        attention__layer_norm_epsilon=h.metadata["attention.layer_norm_rms_epsilon"],
        attention__layer_norm_rms_epsilon=None,
    )


def select_vision(config: CheckpointConfig) -> str:
    """Return the name of the record for a vision model's language model. Raises ModelError."""
    kind = config.get_section("text_config").get("model_type", "llama")
    if kind not in IN_VISION_MODELS:
        supported = f"({', '.join(IN_VISION_MODELS)} are)"
        raise config.make_error(f"text_config: model_type {printable(str(kind))} is not supported {supported}")
    return f"vision+{kind}"
