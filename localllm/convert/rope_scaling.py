"""Translate RoPE's settings (rope_parameters, or rope_theta and rope_scaling) to GGUF."""

import math
from dataclasses import dataclass, field

import numpy as np

from localllm.convert.config import CheckpointConfig
from localllm.files.gguf.header import printable

PLAIN = "default"
BEYOND = "dynamic"  # scaling that depends on the length of the sequence; GGUF has no key for it
SECTIONS = "mrope"  # M-RoPE
OPTIONS = ("untruncated", "bordered")  # of YaRN, see read_rope


@dataclass
class RopeScaling:
    """RoPE's metadata, by keys after "ARCH.rope.", and its tensors: divisors of frequencies, float32 [dims / 2]."""

    metadata: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


def find_rope_parameters(config: CheckpointConfig) -> CheckpointConfig:
    """Return the RoPE section of config.json; of one section per layer type, that of full attention."""
    section = config.get_section("rope_parameters")
    if not section.content:
        section = config.get_section("rope_scaling")
    if "full_attention" in section.content:
        section = section.get_section("full_attention")
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    return section.replace_content({**{name: config.get(name) for name in names}, **section.content})


def read_rope(config: CheckpointConfig, dims: int, context: int, kinds: tuple[str, ...]) -> RopeScaling:
    """Read RoPE and its scaling. Raises ModelError for a scaling that the architecture does not support.

    dims: rotated dimensions of a head. context: trained context length. kinds: supported scalings; "untruncated" is
    YaRN whose blended range is not rounded to whole pairs, as GGUF's readers do; "bordered" is YaRN with its betas in
    the file.
    """
    rope = find_rope_parameters(config)
    base = rope.read_number("rope_theta", 10000.0)
    scaling = RopeScaling({"freq_base": base})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if SECTIONS in kinds:
        scaling.metadata["dimension_sections"] = read_sections(rope, dims)
    if kind == PLAIN or (kind == SECTIONS and kind in kinds):
        return scaling
    if kind == BEYOND and kind in kinds:
        description = f"rope scaling {kind} by {rope.read_number('factor', 1.0)}"
        config.warnings.append(f"{description} is ignored: beyond {context} tokens answers get worse")
        return scaling
    if not isinstance(kind, str) or kind not in kinds:
        choices = ", ".join([PLAIN, *(kind for kind in kinds if kind not in OPTIONS)])
        raise config.make_error(f"rope_type must be one of {choices} (found {printable(str(kind))})")
    if kind == "linear":
        scaling.metadata |= {"scaling.type": "linear", "scaling.factor": rope.read_number("factor")}
    elif kind == "yarn":
        rope.require_value("truncate", True, *([False] if "untruncated" in kinds else []))
        for name, usual in () if "bordered" in kinds else (("beta_fast", 32), ("beta_slow", 1)):
            rope.require_value(name, usual)
        scaling.metadata |= read_yarn(rope, context)
    elif kind == "llama3":
        scaling.tensors["rope_freqs.weight"] = compute_llama3_factors(rope, base, dims)
    else:
        add_long_rope(scaling, rope, dims, context)
    return scaling


def read_sections(rope: CheckpointConfig, dims: int) -> list[int]:
    """Return how many pairs rotate by time, height, width and a fourth axis (M-RoPE). Raises ModelError."""
    counts = rope.get("mrope_section")
    if (
        not isinstance(counts, list)
        or len(counts) != 3
        or not all(type(count) is int and count > 0 for count in counts)
    ):
        raise rope.make_error("mrope_section must be three integers")
    if sum(counts) * 2 != dims:
        raise rope.make_error(f"mrope_section must add up to {dims // 2} pairs (found {sum(counts)})")
    return [*counts, 0]


def read_yarn(rope: CheckpointConfig, context: int) -> dict[str, object]:
    """Read YaRN (Peng et al. 2023) as GGUF keys.

    GGUF's readers multiply by 1 + 0.1 ln(factor) themselves, so only the model's deviation from it is stored.
    """
    factor = rope.read_number("factor")
    magnitude = compute_yarn_magnitude(factor, 1)
    if rope.get("attention_factor") is not None:
        magnitude = rope.read_number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        magnitude = compute_yarn_magnitude(factor, rope.read_number("mscale")) / compute_yarn_magnitude(
            factor, rope.read_number("mscale_all_dim")
        )
    original = rope.read_count("original_max_position_embeddings", context)
    scaling = {"scaling.type": "yarn", "scaling.factor": factor, "scaling.original_context_length": original}
    borders = ("beta_fast", "beta_slow")
    scaling |= {f"scaling.yarn_{name}": rope.read_number(name) for name in borders if rope.get(name) is not None}
    ratio = magnitude / (1 + 0.1 * math.log(factor))
    return scaling if math.isclose(ratio, 1) else scaling | {"scaling.attn_factor": ratio}


def compute_yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def compute_llama3_factors(rope: CheckpointConfig, base: float, dims: int) -> np.ndarray:
    """Compute Llama 3.1's divisors of frequencies, float32 [dims / 2].

    Low frequencies are divided by `factor`, high ones by 1, those between by a blend. Raises ModelError.
    """
    factor, original = rope.read_number("factor"), rope.read_count("original_max_position_embeddings", 8192)
    low, high = rope.read_number("low_freq_factor", 1.0), rope.read_number("high_freq_factor", 4.0)
    if high <= low:
        raise rope.make_error(f"rope scaling: high_freq_factor {high} must be above low_freq_factor {low}")
    rotations = (
        original / (2 * math.pi) * base ** (-np.arange(0, dims, 2) / dims)
    )  # positions within the original context
    blend = np.clip((rotations - low) / (high - low), 0, 1)
    return (1 / ((1 - blend) / factor + blend)).astype(np.float32)


def add_long_rope(scaling: RopeScaling, rope: CheckpointConfig, dims: int, context: int) -> None:
    """Add LongRoPE (Ding et al. 2024): divisors for short and for long contexts, and the attention factor."""
    original = rope.read_count("original_max_position_embeddings", context)
    stretch = context / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(max(original, 2))) if stretch > 1 else 1.0
    scaling.metadata["scaling.attn_factor"] = rope.read_number("attention_factor", usual)
    for length in ("long", "short"):
        factors = rope.read_numbers(f"{length}_factor", dims // 2)
        scaling.tensors[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
