"""Vision encoders with projectors, tiny and random, as llama.cpp's files have them: a declaration for each family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np

from localllm.files.gguf_writer import Output, header
from localllm.quant.formats import BY_NAME

from . import model
from .declaration import Model
from .golden import FOLDER
from .numbers import Numbers
from .vocabulary import CONTROL, vocabulary

Shapes = Mapping[str, str]
DEFAULTS = {"layers": 2, "width": 96, "hidden": 112, "heads": 3, "side": 56, "patch": 14, "merge": 1, "out": 96}
LENGTHS = {
    "layers": "block_count", "width": "embedding_length", "hidden": "feed_forward_length", "out": "projection_dim",
    "heads": "attention.head_count", "side": "image_size", "patch": "patch_size",
}  # fmt: skip
NORMS = {"ln1.weight": "width", "ln1.bias": "width", "ln2.weight": "width", "ln2.bias": "width"}
ATTENTION = {
    f"{name}.{part}": shape
    for name in ("attn_q", "attn_k", "attn_v", "attn_out")
    for part, shape in (("weight", "width, width"), ("bias", "width"))
}
NETWORK = {
    "ffn_up.weight": "hidden, width", "ffn_up.bias": "hidden", "ffn_down.weight": "width, hidden",
    "ffn_down.bias": "width",
}  # fmt: skip
PATCHES = {"v.patch_embd.weight": "width, 3, patch, patch"}
SIGLIP = {
    **PATCHES, "v.patch_embd.bias": "width", "v.position_embd.weight": "(side // patch) ** 2, width",
    "v.post_ln.weight": "width", "v.post_ln.bias": "width",
}  # fmt: skip
CLIP = {
    **PATCHES, "v.class_embd": "width", "v.position_embd.weight": "(side // patch) ** 2 + 1, width",
    "v.pre_ln.weight": "width", "v.pre_ln.bias": "width",
}  # fmt: skip
TWO = {"mm.0.weight": "out, width", "mm.0.bias": "out", "mm.2.weight": "out, out", "mm.2.bias": "out"}


@dataclass(frozen=True)
class Projector:
    """layer: tensors of a layer; whole: those that are there once; metadata: without "clip." in front."""

    kind: str
    whole: Shapes
    layer: Shapes = field(default_factory=lambda: {**NORMS, **ATTENTION, **NETWORK})
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)


PROJECTORS = {
    "gemma3": Projector(
        "gemma3", {**SIGLIP, "mm.soft_emb_norm.weight": "width", "mm.input_projection.weight": "width, out"},
        metadata={"use_gelu": True, "vision.projector.scale_factor": 2}, dims={"merge": 2},
    ),
    "gemma3_odd": Projector(  # a side that is no whole number of patches, each of which is a row
        "gemma3",
        {**SIGLIP, "mm.soft_emb_norm.weight": "width", "mm.input_projection.weight": "width, out"},
        metadata={"use_gelu": True, "vision.projector.scale_factor": 1},
        dims={"side": 75},
    ),
    "idefics3": Projector(
        "idefics3", {**SIGLIP, "mm.model.fc.weight": "out, width * merge ** 2"},
        metadata={"use_gelu": True, "vision.projector.scale_factor": 2, "vision.preproc_image_size": 112},
        dims={"merge": 2},
    ),
    "llava": Projector("mlp", {**CLIP, **TWO}, metadata={"has_llava_projector": True}),
    "llava_feature": Projector("mlp", {**CLIP, **TWO}, metadata={"vision.feature_layer": [1]}),
}  # fmt: skip


def projector(name: str, seed: int = 0, metadata: Mapping[str, Any] | None = None, **dims: int) -> Model:
    """The projector of a declaration, with other numbers, dimensions and metadata if wanted."""
    declared = PROJECTORS[name]
    d = SimpleNamespace(**{**DEFAULTS, **declared.dims, **dims})
    shapes = dict(declared.whole)
    for layer in range(d.layers):
        shapes |= {f"v.blk.{layer}.{tensor}": shape for tensor, shape in declared.layer.items()}
    found = {tensor: eval(f"({shape},)", vars(d).copy()) for tensor, shape in shapes.items()}
    tensors = {tensor: values(tensor)(Numbers(seed, name, tensor), shape) for tensor, shape in found.items()}
    fields = {f"vision.{key}": getattr(d, name) for name, key in LENGTHS.items()}
    fields |= {"projector_type": declared.kind, "has_vision_encoder": True, "vision.attention.layer_norm_epsilon": 1e-3}
    fields |= {"vision.image_mean": np.float32([0.48, 0.46, 0.41]), "vision.image_std": np.float32([0.27, 0.26, 0.28])}
    named = {f"clip.{key}": value for key, value in {**fields, **declared.metadata, **(metadata or {})}.items()}
    return Model("clip", {"general.architecture": "clip", "general.type": "mmproj", **named}, tensors)


def values(name: str) -> Callable[[Numbers, tuple[int, ...]], np.ndarray]:
    """What numbers a tensor of that name gets."""
    if name.endswith((".bias", "class_embd", "position_embd.weight")):
        return lambda n, shape: n.normal(shape, 0.5)
    if "ln" in name or "norm" in name:
        return lambda n, shape: n.uniform(shape, 0.5, 1.5)
    return lambda n, shape: n.normal(shape, 1.3 * float(np.prod(shape[1:])) ** -0.5)


def write_projector(model: Model, path: Path, format: str = "F32") -> Path:
    """Write one as a GGUF file and return the path. format: of matrices, as far as their rows are whole blocks."""
    outputs, contents = [], []
    for name, numbers in model.tensors.items():
        wanted = BY_NAME[format]
        fits = numbers.ndim == 2 and not numbers.shape[-1] % wanted.block and "position" not in name
        chosen = wanted if fits else BY_NAME["F16" if numbers.ndim == 4 and format != "F32" else "F32"]
        outputs.append(Output(name, chosen, numbers.shape))
        contents.append(gguf.quantize(np.ascontiguousarray(numbers), gguf.GGMLQuantizationType[chosen.name]).tobytes())
    with open(path, "wb") as file:
        file.write(header(model.metadata, outputs))
        for data in contents:
            file.write(data + bytes(-len(data) % 32))
    return path


TEXT = {"gemma3": "gemma3", "gemma3_odd": "gemma3", "idefics3": "llama", "llava": "llama", "llava_feature": "llama"}
MARKS = {
    "gemma3": ["<start_of_image>", "<end_of_image>"],
    "idefics3": ["<fake_token_around_image>", "<global-img>", *(f"<row_{y}_col_{x}>" for y in (1, 2) for x in (1, 2))],
}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"


def seeing(name: str, seed: int = 0, **dims: Any) -> Model:
    """A language model that goes with a projector: as wide as its rows, and with the tokens that it needs."""
    made = model(TEXT[name], seed, **{"width": 96, "heads": 3, "kv_heads": 1, "head_dim": 32, **dims})
    size = made.metadata[f"{made.arch}.vocab_size"]
    found, marks = vocabulary(size), MARKS.get(name.partition("_")[0], [])
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    tokens[size - len(marks) :], types[size - len(marks) :] = marks, [CONTROL] * len(marks)
    tokens[size - len(marks) - 1] = "ĊĊ"
    found["tokenizer.ggml.merges"] = [*found["tokenizer.ggml.merges"], "Ċ Ċ"]
    found["tokenizer.chat_template"] = TEMPLATE + "<|im_start|>assistant\n"
    return replace(made, metadata={**made.metadata, **found})


# ---- what llama.cpp sees: two images, text before, between and behind

TEXT_AROUND = "Look: ", " and ", ". Which one?"
SIZES = (131, 90), (33, 100)  # of the images: columns, rows
SQUARES = (131, 131), (33, 33)  # for Gemma 3, where llama.cpp puts bars on others


def shown(name: str) -> list[np.ndarray]:
    """uint8 [rows, columns, 3] each: blocks of 8 pixels, some with noise."""
    made = []
    for columns, rows in SQUARES if name.startswith("gemma3") else SIZES:
        numbers = Numbers(0, "image", columns, rows)
        blocks = numbers.raw((rows // 8 + 1) * (columns // 8 + 1) * 3).reshape(rows // 8 + 1, columns // 8 + 1, 3)
        image = np.kron(blocks, np.ones((8, 8, 1), np.uint8))[:rows, :columns]
        noise = numbers.raw(rows * columns * 3).reshape(rows, columns, 3) // 8
        made.append(np.ascontiguousarray(np.where(image < 128, image + noise, image).astype(np.uint8)))
    return made


def digest_of(name: str) -> str:
    return projector(name).digest() + seeing(name).digest()


@dataclass(frozen=True)
class PictureGolden:
    """Attributes:
    tokens: of the whole prompt, -1 for each row of an image.  rows: of all images, float32 [rows, width].
    logits: behind the last token.  trained: the rows as transformers computes them, in float64.  digest: of both.
    """

    tokens: np.ndarray
    rows: np.ndarray
    logits: np.ndarray
    trained: np.ndarray
    digest: str

    @classmethod
    def load(cls, name: str) -> "PictureGolden":
        with np.load(FOLDER / f"picture_{name}.npz") as file:
            return cls(**{**file, "digest": str(file["digest"])})

    def save(self, name: str) -> None:
        np.savez(FOLDER / f"picture_{name}.npz", **vars(self))
