"""What a tiny random model is made of: its metadata, and its tensors with shapes that follow from a few dimensions.

A shape is written as a Python expression over the dimensions: "heads * head_dim, width". Values follow from a tensor's
name: norms are around 1, biases and gates large enough to matter, logits spread over a few units.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from localllm.files.gguf.writer import OutputTensor, build_header
from localllm.quant.formats import BY_NAME

from .numbers import Numbers
from .vocabulary import vocabulary

Shapes = Mapping[str, str]
Dims = SimpleNamespace
DEFAULTS = {"layers": 2, "width": 96, "hidden": 64, "heads": 3, "kv_heads": 1, "vocab": 272, "context": 512}
LENGTHS = {  # what llama.cpp calls the dimensions; written where a declaration has them
    "hidden": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "value_dim": "attention.value_length",
    "rotated": "rope.dimension_count",
    "window": "attention.sliding_window",
    "experts": "expert_count",
    "used": "expert_used_count",
    "expert_hidden": "expert_feed_forward_length",
}

EMBEDDING = {"token_embd.weight": "vocab, width"}
TIED = {**EMBEDDING, "output_norm.weight": "width"}
UNTIED = {**TIED, "output.weight": "vocab, width"}


@dataclass(frozen=True)
class Declaration:
    """A model, but for its numbers.

    Attributes:
        layer: a layer's tensors, or a function of the dimensions and the layer's number that tells them.
        whole: tensors that are there once.
        metadata: what is not among LENGTHS, without the architecture's name in front, or a function of the dimensions.
        dims: dimensions other than the defaults.
        values: numbers of tensors that differ from others of such a name: by name, a function of numbers and shape.
    """

    arch: str
    layer: Shapes | Callable[[Dims, int], Shapes]
    whole: Shapes = field(default_factory=lambda: UNTIED)
    metadata: Mapping[str, Any] | Callable[[Dims], Mapping[str, Any]] = field(default_factory=dict)
    dims: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Callable[[Numbers, tuple[int, ...]], np.ndarray]] = field(default_factory=dict)


def declare(arch: str, layer: Any, whole: Shapes = UNTIED, metadata: Any = None, values: Any = None, **dims: Any):
    """Return a declaration; epsilon and its kind (norm="layer" or "rms"), too, are dimensions."""
    return Declaration(arch, layer, whole, metadata or {}, dims, values or {})


@dataclass(frozen=True)
class Model:
    """A tiny model.

    Attributes:
        metadata: with whole keys.
        tensors: by name, float32, or uint8 [..., bytes of a row] of those that have a format.
        formats: of tensors that are not float32.
    """

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]
    formats: Mapping[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """Tells whether numbers and metadata are those that were recorded."""
        made = hashlib.sha256()
        for name, values in self.tensors.items():
            made.update(f"{name} {values.shape}".encode() + np.ascontiguousarray(values).tobytes())
        numbers = {key: np.asarray(value).tolist() for key, value in sorted(self.metadata.items())}
        return hashlib.sha256(made.digest() + repr(numbers).encode()).hexdigest()


def dims_of(declaration: Declaration, **other: Any) -> Dims:
    given = {**DEFAULTS, "norm": "rms", "epsilon": 1e-2, **declaration.dims, **other}
    given.setdefault("used", 2)
    given["kv_heads"] = given["heads"] if given["kv_heads"] is None else given["kv_heads"]
    head_dim = given.get("head_dim") or given["width"] // max(given["heads"], 1)
    derived = {"head_dim": head_dim, "value_dim": given.get("head_dim", head_dim), "expert_hidden": given["hidden"]}
    return Dims(**{**derived, **given})


def fields(declaration: Declaration, d: Dims, explicit: dict[str, Any]) -> dict[str, Any]:
    """Metadata, without the architecture's name; explicit: the dimensions that were declared."""
    found = {"context_length": d.context, "embedding_length": d.width, "block_count": d.layers, "vocab_size": d.vocab}
    named = {"hidden", "heads", "kv_heads", *explicit, *(("value_dim",) if "head_dim" in explicit else ())}
    named |= {"used"} if "experts" in explicit else set()
    named -= {name for name, value in explicit.items() if value is None}
    found |= {key: getattr(d, name) for name, key in LENGTHS.items() if name in named}
    found[f"attention.layer_norm{'_rms' * (d.norm == 'rms')}_epsilon"] = d.epsilon
    more = declaration.metadata(d) if callable(declaration.metadata) else declaration.metadata
    bare = [key for key in more if key.startswith(("xielu.", "tokenizer."))]  # which have no architecture in front
    named = {f"{declaration.arch}.{key}": value for key, value in {**found, **more}.items() if key not in bare}
    return {**named, **{key: more[key] for key in bare}}


def shapes(declaration: Declaration, d: Dims) -> dict[str, tuple[int, ...]]:
    """Of all tensors, in the order of the file."""
    found = dict(declaration.whole)
    for number in range(d.layers):
        layer = declaration.layer(d, number) if callable(declaration.layer) else declaration.layer
        found |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return {name: eval(f"({shape},)", vars(d).copy()) for name, shape in found.items()}


def make(declaration: Declaration, name: str, seed: int = 0, **dims: Any) -> Model:
    """Return the model; dims: other dimensions than declared, None for metadata that shall be missing."""
    d = dims_of(declaration, **dims)
    found = shapes(declaration, d)
    tied, tensors = "output.weight" not in found, {}
    for tensor, shape in found.items():
        own = declaration.values.get(tensor.split(".", 2)[-1] if tensor.startswith("blk.") else tensor)
        tensors[tensor] = (own or values_of(tensor, tied))(Numbers(seed, name, tensor), shape)
    whole = {tensor: "I32" for tensor, values in tensors.items() if values.dtype == np.int32}
    tensors = {tensor: values.view(np.uint8) if tensor in whole else values for tensor, values in tensors.items()}
    metadata = fields(declaration, d, {**declaration.dims, **dims})
    return Model(declaration.arch, {"general.architecture": declaration.arch, **metadata}, tensors, whole)


def values_of(name: str, tied: bool) -> Callable[[Numbers, tuple[int, ...]], np.ndarray]:
    """Return the mean and the deviation of a tensor's random numbers."""
    kind = name.split(".", 2)[-1] if name.startswith("blk.") else name
    if kind == "token_embd.weight":
        return lambda n, shape: n.normal(shape, 2.5 * shape[-1] ** -0.5 if tied else 1)
    if kind in ("output_norm.weight", "token_embd_norm.weight") and tied:  # lest every token be followed by itself
        return lambda n, shape: n.uniform(shape, 0.5, 1.5) * n.signs(shape)
    if kind == "output.weight":
        return lambda n, shape: n.normal(shape, 2.5 * shape[-1] ** -0.5)
    if "norm" in kind and kind.endswith(".weight"):
        return lambda n, shape: n.uniform(shape, 0.5, 1.5)
    for end, values in ENDINGS.items():
        if kind.endswith(end):
            return values
    return lambda n, shape: n.normal(shape, 1.3 * shape[-1] ** -0.5)


ENDINGS: dict[str, Callable[[Numbers, tuple[int, ...]], np.ndarray]] = {
    "ssm_dt.bias": lambda n, shape: n.uniform(shape, -2, 0),
    "exp_probs_b": lambda n, shape: n.uniform(shape, -0.2, 0.2),
    "exp_probs_b.bias": lambda n, shape: n.uniform(shape, -0.2, 0.2),
    ".bias": lambda n, shape: n.normal(shape, 0.3),
    "ssm_a": lambda n, shape: n.uniform(shape, -2, -0.1),
    "ssm_d": lambda n, shape: n.normal(shape, 1),
    "conv1d.weight": lambda n, shape: n.normal(shape, 0.6),
    "attn_sinks.weight": lambda n, shape: n.normal(shape, 1),
    "rope_freqs.weight": lambda n, shape: n.uniform(shape, 1, 8),
    "rope_factors_long.weight": lambda n, shape: n.uniform(shape, 4, 12),
    "rope_factors_short.weight": lambda n, shape: n.uniform(shape, 1, 2.5),
    "output_scale.weight": lambda n, shape: n.uniform(shape, 0.4, 0.8),
}


def write(model: Model, path: Path) -> Path:
    """Write a model as a GGUF file and return the path."""
    outputs = []
    for name, values in model.tensors.items():
        format = BY_NAME[model.formats.get(name, "F32")]
        columns = values.shape[-1] if format.name == "F32" else values.shape[-1] // format.bytes * format.block
        outputs.append(OutputTensor(name, format, (*values.shape[:-1], columns)))
    metadata = {**model.metadata}
    if "tokenizer.ggml.model" not in metadata:
        metadata |= vocabulary(metadata[f"{model.arch}.vocab_size"])
    with open(path, "wb") as file:
        file.write(build_header(metadata, outputs))
        for values in model.tensors.values():
            data = np.ascontiguousarray(values).tobytes()
            file.write(data + bytes(-len(data) % 32))
    return path
