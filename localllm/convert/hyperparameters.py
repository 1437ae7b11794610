"""A checkpoint's config.json as a GGUF file's metadata, and as the sizes that its weights should have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.arch.fields import MOST, MOST_LAYERS
from localllm.convert.files import read_json
from localllm.errors import ModelError
from localllm.files.gguf_header import shown

PLAIN_ROPE = ("default", "dynamic")  # dynamic scaling begins beyond the context that the model has


@dataclass(frozen=True)
class Hyperparameters:
    """What a decoder's config.json says, checked. Lengths count numbers."""

    architecture: str  # as "LlamaForCausalLM"
    vocab: int
    width: int
    hidden: int  # of the feed-forward network
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    epsilon: float
    rope_base: float
    rope_scaling: Mapping[str, Any]  # metadata below ARCH.rope.scaling
    rope_factors: np.ndarray | None  # float32 [head_dim / 2], which divide the frequencies
    tied: bool  # the embedding is the output matrix too
    warnings: tuple[str, ...]

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    def metadata(self, arch: str) -> dict[str, Any]:
        """The metadata under an architecture's name."""
        values: dict[str, Any] = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.width,
            "feed_forward_length": self.hidden,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "rope.freq_base": self.rope_base,
            "attention.layer_norm_rms_epsilon": self.epsilon,
            "vocab_size": self.vocab,
            "rope.dimension_count": self.head_dim,
        }
        if self.queries != self.width:
            values |= {"attention.key_length": self.head_dim, "attention.value_length": self.head_dim}
        values |= {f"rope.scaling.{name}": value for name, value in self.rope_scaling.items()}
        return {f"{arch}.{name}": value for name, value in values.items()}


def read_hyperparameters(folder: Path) -> Hyperparameters:
    """The hyperparameters in a folder's config.json. Raises ModelError."""
    path = folder / "config.json"
    content = read_json(path)
    if content is None:
        raise ModelError(f"{folder}: no config.json; expected the folder of a Hugging Face checkpoint")
    fields = Fields(content, path)
    fields.refuse_unsupported()
    heads, width, context = (
        fields.count("num_attention_heads"),
        fields.count("hidden_size"),
        fields.count("max_position_embeddings", 2048),
    )
    head_dim, kv_heads = fields.count("head_dim", width // heads or 1), fields.count("num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise fields.refusal(f"{heads} heads of {head_dim} numbers, {kv_heads} for keys and values, make no sense")
    base, scaling, factors = read_rope(fields, head_dim, context)
    return Hyperparameters(
        architecture=fields.architecture,
        vocab=fields.count("vocab_size"),
        width=width,
        hidden=fields.count("intermediate_size"),
        layers=fields.count("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        epsilon=fields.number("rms_norm_eps", 1e-6),
        rope_base=base,
        rope_scaling=scaling,
        rope_factors=factors,
        tied=fields.content.get("tie_word_embeddings") is True,
        warnings=tuple(fields.warnings),
    )


class Fields:
    """Access to values of a JSON object, with checks."""

    def __init__(self, content: Mapping[str, Any], path: Path):
        self.content, self.path = content, path
        self.warnings: list[str] = []
        names = content.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        self.architecture = first if isinstance(first, str) else ""

    def refusal(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def count(self, name: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number above 0."""
        value = self.content.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.refusal(f"{name} should be a number from 1 to {most}, is {shown(str(value))}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.content.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refusal(f"{name} should be a positive number, is {shown(str(value))}")
        return float(value)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse any other value than these (or none): the GGUF architecture could not tell it."""
        value = self.content.get(name)
        if value is not None and value not in allowed:
            raise self.refusal(f"{name} {shown(str(value))} is not supported")

    def refuse_unsupported(self) -> None:
        """Raise ModelError for what would be lost in the conversion; warn of what hardly matters."""
        if method := self.content.get("quantization_config"):
            name = method.get("quant_method") if isinstance(method, dict) else method
            raise self.refusal(f"the weights are quantized ({shown(str(name))}); the original checkpoint is needed")
        self.only("hidden_act", "silu", "swish")
        self.only("partial_rotary_factor", 1, 1.0)
        window = self.content.get("sliding_window")
        if isinstance(window, int) and window < self.count("max_position_embeddings", 2048):
            self.warnings.append(
                f"the model's sliding window of {window} tokens is left out: attention sees all tokens"
            )


def read_rope(fields: Fields, head_dim: int, context: int) -> tuple[float, dict[str, Any], np.ndarray | None]:
    """Base, metadata of the scaling, and factors by which frequencies are divided. Raises ModelError."""
    content = fields.content.get("rope_parameters") or fields.content.get("rope_scaling") or {}
    if not isinstance(content, dict):
        raise fields.refusal("rope_scaling: expected an object")
    rope = Fields({"rope_theta": fields.content.get("rope_theta"), **content}, fields.path)
    base = rope.number("rope_theta", 10000.0)
    rope.only("partial_rotary_factor", 1, 1.0)
    kind = content.get("rope_type", content.get("type", "default"))
    if kind in PLAIN_ROPE:
        return base, {}, None
    if kind == "linear":
        return base, {"type": "linear", "factor": rope.number("factor")}, None
    if kind == "yarn":
        return base, yarn(rope, context), None
    if kind == "llama3":
        return base, {}, llama3_factors(rope, base, head_dim)
    raise fields.refusal(f"rope scaling {shown(str(kind))} is not supported")


def yarn(rope: Fields, context: int) -> dict[str, Any]:
    """YaRN (Peng et al. 2023). GGUF's readers multiply by 1 + 0.1 ln(factor) themselves: what is stored is the rest."""
    rope.only("beta_fast", 32)
    rope.only("beta_slow", 1)
    rope.only("truncate", True)
    factor = rope.number("factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    wanted = magnitude(1)
    if rope.content.get("attention_factor") is not None:
        wanted = rope.number("attention_factor")
    elif rope.content.get("mscale") and rope.content.get("mscale_all_dim"):
        wanted = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    original = rope.count("original_max_position_embeddings", context)
    scaling = {"type": "yarn", "factor": factor, "original_context_length": original}
    rest = wanted / (1 + 0.1 * math.log(factor))
    return scaling if math.isclose(rest, 1) else scaling | {"attn_factor": rest}


def llama3_factors(rope: Fields, base: float, head_dim: int) -> np.ndarray:
    """Llama 3.1's scaling: slow pairs are stretched, fast ones kept, those between blended. float32 [head_dim / 2]."""
    factor, original = rope.number("factor"), rope.count("original_max_position_embeddings", 8192)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if high <= low:
        raise rope.refusal(f"rope scaling: high_freq_factor {high} should be above low_freq_factor {low}")
    turns = original / (2 * math.pi) * base ** (-np.arange(0, head_dim, 2) / head_dim)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / factor + kept)).astype(np.float32)
