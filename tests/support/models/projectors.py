"""Vision encoders with projectors, tiny and random, as llama.cpp's files have them: a declaration for each family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np

from localllm.files.gguf.writer import OutputTensor, build_header
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
CLASS = {**PATCHES, "v.class_embd": "width", "v.position_embd.weight": "(side // patch) ** 2 + 1, width"}
CLIP = {**CLASS, "v.pre_ln.weight": "width", "v.pre_ln.bias": "width"}
NORMED_MLP = {
    "mm.model.mlp.0.weight": "merge**2 * width", "mm.model.mlp.0.bias": "merge**2 * width",
    "mm.model.mlp.1.weight": "out, merge**2 * width", "mm.model.mlp.1.bias": "out",
    "mm.model.mlp.3.weight": "out, out", "mm.model.mlp.3.bias": "out",
}  # fmt: skip
TWO = {"mm.0.weight": "out, width", "mm.0.bias": "out", "mm.2.weight": "out, out", "mm.2.bias": "out"}
FRAMES = {**PATCHES, "v.patch_embd.weight.1": "width, 3, patch, patch", "v.post_ln.weight": "width"}
MERGER = {
    "mm.0.weight": "merge**2 * width, merge**2 * width", "mm.0.bias": "merge**2 * width",
    "mm.2.weight": "out, merge**2 * width", "mm.2.bias": "out",
}  # fmt: skip
GATE = {"ffn_gate.weight": "hidden, width", "ffn_gate.bias": "hidden"}


def without_biases(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if not name.endswith(".bias")}


QWEN3 = {
    **FRAMES, "v.patch_embd.bias": "width", "v.position_embd.weight": "(side // patch) ** 2, width",
    "v.post_ln.bias": "width", **MERGER,
}  # fmt: skip
QWEN3_LAYER = {
    **NORMS, "attn_qkv.weight": "3 * width, width", "attn_qkv.bias": "3 * width", "attn_out.weight": "width, width",
    "attn_out.bias": "width", **NETWORK,
}  # fmt: skip
DEEP = {
    f"v.deepstack.{layer}.{name}": shape
    for layer in (0, 2)
    for name, shape in {
        "norm.weight": "merge**2 * width", "norm.bias": "merge**2 * width",
        "fc1.weight": "merge**2 * width, merge**2 * width", "fc1.bias": "merge**2 * width",
        "fc2.weight": "out, merge**2 * width", "fc2.bias": "out",
    }.items()
}  # fmt: skip
NORM_AND_TWO = {
    "mm.input_norm.weight": "merge**2 * width", "mm.input_norm.bias": "merge**2 * width",
    "mm.1.weight": "hidden, merge**2 * width", "mm.1.bias": "hidden", "mm.2.weight": "out, hidden", "mm.2.bias": "out",
}  # fmt: skip
PIXTRAL = {
    **PATCHES, "v.pre_ln.weight": "width", "v.token_embd.img_break": "out", "mm.1.weight": "out, width",
    "mm.1.bias": "out", "mm.2.weight": "out, out", "mm.2.bias": "out",
}  # fmt: skip
PIXTRAL_LAYER = without_biases({**NORMS, **ATTENTION, **NETWORK, **GATE})


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
    "qwen2vl": Projector(
        "qwen2vl_merger", {**FRAMES, "v.post_ln.bias": "width", **MERGER}, dims={"hidden": 192, "merge": 2}
    ),
    "qwen25vl": Projector(
        "qwen2.5vl_merger", {**FRAMES, **MERGER}, {**without_biases(NORMS), **ATTENTION, **NETWORK, **GATE},
        {"use_silu": True, "vision.n_wa_pattern": 2}, {"layers": 4, "merge": 2},
    ),
    "qwen3vl": Projector(
        "qwen3vl_merger", {**QWEN3, **DEEP}, QWEN3_LAYER,
        {"use_gelu": True, "vision.is_deepstack_layers": np.array([True, False, True, False])},
        {"layers": 4, "merge": 2, "patch": 16, "side": 96},
    ),
    "qwen35": Projector(
        "qwen3vl_merger", QWEN3, QWEN3_LAYER, {"use_gelu": True}, {"merge": 2, "patch": 16, "side": 96}
    ),
    "lfm2": Projector(
        "lfm2", {**SIGLIP, **NORM_AND_TWO}, metadata={"use_gelu": True, "vision.projector.scale_factor": 2},
        dims={"merge": 2, "patch": 32, "side": 96},
    ),
    "pixtral": Projector("pixtral", PIXTRAL, PIXTRAL_LAYER, {"use_silu": True}, {"patch": 20, "side": 60}),
    "mistral3": Projector(
        "pixtral",
        {**PIXTRAL, "mm.input_norm.weight": "width", "mm.patch_merger.weight": "width, merge**2 * width"},
        PIXTRAL_LAYER, {"use_silu": True, "vision.spatial_merge_size": 2}, {"merge": 2},
    ),
    "internvl": Projector(
        "internvl", {**CLASS, "v.patch_embd.bias": "width", **NORMED_MLP},
        {**NORMS, **ATTENTION, **NETWORK, "ls1.weight": "width", "ls2.weight": "width"},
        {"use_gelu": True, "vision.projector.scale_factor": 2}, {"merge": 2},
    ),
    "llava": Projector("mlp", {**CLIP, **TWO}, metadata={"has_llava_projector": True}),
    "llava_feature": Projector("mlp", {**CLIP, **TWO}, metadata={"vision.feature_layer": [1]}),
    "llava16": Projector(
        "mlp", {**CLIP, **TWO, "v.image_newline": "out"},
        metadata={
            "vision.image_grid_pinpoints": [56, 112, 112, 56, 112, 112, 168, 56, 56, 168],
            "vision.mm_patch_merge_type": "spatial_unpad",
        },
    ),
}  # fmt: skip


def projector(name: str, seed: int = 0, metadata: Mapping[str, Any] | None = None, **dims: int) -> Model:
    """Return the projector of a declaration, with other numbers, dimensions and metadata if wanted."""
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
    """Return the random numbers of a tensor of that name."""
    if name.endswith((".bias", "class_embd", "position_embd.weight", "image_newline")):
        return lambda n, shape: n.normal(shape, 0.5)
    if "ln" in name or "norm" in name or name.endswith("mlp.0.weight"):
        return lambda n, shape: n.uniform(shape, 0.5, 1.5)
    return lambda n, shape: n.normal(shape, 1.3 * float(np.prod(shape[1:])) ** -0.5)


def write_projector(model: Model, path: Path, format: str = "F32") -> Path:
    """Write one as a GGUF file and return the path. format: of matrices, as far as their rows are whole blocks."""
    outputs, contents = [], []
    for name, numbers in model.tensors.items():
        wanted = BY_NAME[format]
        fits = numbers.ndim == 2 and not numbers.shape[-1] % wanted.block and "position" not in name
        is_matrix = numbers.ndim == 4 or (numbers.ndim == 2 and "position" not in name)
        chosen = wanted if fits else BY_NAME["F16" if is_matrix and format != "F32" else "F32"]
        outputs.append(OutputTensor(name, chosen, numbers.shape))
        contents.append(gguf.quantize(np.ascontiguousarray(numbers), gguf.GGMLQuantizationType[chosen.name]).tobytes())
    with open(path, "wb") as file:
        file.write(build_header(model.metadata, outputs))
        for data in contents:
            file.write(data + bytes(-len(data) % 32))
    return path


TEXT = {
    "gemma3": "gemma3", "gemma3_odd": "gemma3", "qwen2vl": "qwen2vl", "qwen25vl": "qwen2vl", "internvl": "qwen2",
    "lfm2": "lfm2", "qwen3vl": "qwen3vl", "qwen35": "qwen35",
}  # others: llama # fmt: skip
TEXT_DIMS = {
    "qwen3vl": {"layers": 3},
    "lfm2": {"vocab": 304, "context": 1024},
}  # in llama.cpp the last layer cannot go deep
MARKS = {
    "gemma3": ["<start_of_image>", "<end_of_image>"],
    "idefics3": ["<fake_token_around_image>", "<global-img>", *(f"<row_{y}_col_{x}>" for y in (1, 2) for x in (1, 2))],
    "qwen2vl": ["<|vision_start|>", "<|vision_end|>"],
    "qwen25vl": ["<|vision_start|>", "<|vision_end|>"],
    "qwen3vl": ["<|vision_start|>", "<|vision_end|>"],
    "qwen35": ["<|vision_start|>", "<|vision_end|>"],
    "lfm2": [
        "<|image_start|>",
        "<|image_end|>",
        "<|img_thumbnail|>",
        *(f"<|img_row_{y}_col_{x}|>" for y in (1, 2, 3, 4) for x in (1, 2)),
    ],
    "pixtral": ["[IMG_END]"],
    "mistral3": ["[IMG_END]"],
    "internvl": ["<img>", "</img>"],
}
SECTIONS = {"qwen2vl": [4, 6, 6, 0], "qwen3vl": [6, 5, 5, 0]}  # all pairs turn, by time, height or width
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"


def seeing(name: str, seed: int = 0, **dims: Any) -> Model:
    """Return a language model that goes with a projector: as wide as its rows, and with the tokens that it needs."""
    made = model(
        TEXT.get(name, "llama"),
        seed,
        **{**TEXT_DIMS.get(name, {}), "width": 96, "heads": 3, "kv_heads": 1, "head_dim": 32, **dims},
    )
    size = made.metadata[f"{made.arch}.vocab_size"]
    found, marks = vocabulary(size), MARKS.get(name.partition("_")[0], [])
    tokens, types = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    tokens[size - len(marks) :], types[size - len(marks) :] = marks, [CONTROL] * len(marks)
    tokens[size - len(marks) - 1] = "ĊĊ"
    found["tokenizer.ggml.merges"] = [*found["tokenizer.ggml.merges"], "Ċ Ċ"]
    found["tokenizer.chat_template"] = TEMPLATE + "<|im_start|>assistant\n"
    if made.arch in SECTIONS:
        found[f"{made.arch}.rope.dimension_sections"] = SECTIONS[made.arch]
    if name == "qwen3vl":
        found["qwen3vl.n_deepstack_layers"] = 2
    return replace(made, metadata={**made.metadata, **found})


# ---- what llama.cpp sees: two images, text before, between and behind

TEXT_AROUND = "Look: ", " and ", ". Which one?"
SIZES = (131, 90), (33, 100)  # of the images: columns, rows
SHOWN = {
    "gemma3": ((131, 131), (33, 33)),  # squares, for llama.cpp puts bars on others
    "lfm2": ((1100, 2000), (131, 90)),  # of which the first one is cut
}


def shown(name: str) -> list[np.ndarray]:
    """uint8 [rows, columns, 3] each: blocks of 8 pixels, some with noise."""
    made = []
    for columns, rows in SHOWN.get(name.partition("_")[0], SIZES):
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
    """The recorded rows and logits.

    Attributes:
        tokens: of the whole prompt, -1 for each row of an image.
        rows: of all images, float32 [rows, width], or of every so many of them (`some`).
        logits: behind the last token.  trained: the rows as transformers computes them, in float64.
        said: the logits as transformers computes them.  digest: of both.
    """

    tokens: np.ndarray
    rows: np.ndarray
    logits: np.ndarray
    trained: np.ndarray
    said: np.ndarray
    digest: str

    @staticmethod
    def some(rows: np.ndarray) -> np.ndarray:
        """60 of them at most."""
        return rows[:: -(-len(rows) // 60)]

    @classmethod
    def load(cls, name: str) -> "PictureGolden":
        with np.load(FOLDER / f"picture_{name}.npz") as file:
            return cls(**{**file, "digest": str(file["digest"])})

    def save(self, name: str) -> None:
        np.savez(FOLDER / f"picture_{name}.npz", **vars(self))
