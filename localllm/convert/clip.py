"""Open a CLIP checkpoint as one model with an image and a text encoder (see localllm.arch.vision.clip)."""

import os
from pathlib import Path

import gguf

from localllm.convert.config import CheckpointConfig
from localllm.convert.family import NUMBERS
from localllm.convert.files import read_json
from localllm.convert.folder import Checkpoint, choose_file_type, list_files, refuse_lone_surrogates
from localllm.convert.general_metadata import build_general_metadata
from localllm.convert.projector_folder import CONVOLUTION_DIMENSIONS, read_preprocessing
from localllm.convert.projectors.parts import ProjectorTensor, declare_tensor, declare_with_bias
from localllm.convert.safetensors_files import open_weights
from localllm.convert.tensor_mapping import CheckpointTensor, check_tensor, convert_tensor
from localllm.convert.transforms import to_float32
from localllm.errors import ModelError
from localllm.files.gguf.header import printable

CLIP_CLASS = "CLIPModel"  # sections of config.json
ACTIVATIONS = {"quick_gelu": False, "gelu": True}  # whether the activation is exact GELU
SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
# Values that config.json may omit.
DEFAULTS: dict[str, dict[str, int]] = {
    "text": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
             "max_position_embeddings": 77},
    "vision": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
               "image_size": 224, "patch_size": 32},
}  # fmt: skip
EXTRA_SIZES = {"text": {"context_length": "max_position_embeddings"}, "vision": {"image_size": "image_size",
        "patch_size": "patch_size"}}  # fmt: skip
IGNORED_TENSORS = ("logit_scale", "text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")


def is_clip_folder(folder: str | os.PathLike[str]) -> bool:
    """Return whether config.json in a folder declares a CLIPModel."""
    content = read_json(Path(folder) / "config.json")
    return isinstance(content, dict) and content.get("architectures") == [CLIP_CLASS]


def open_clip(path: str | os.PathLike[str]) -> Checkpoint:
    """Open both encoders of a CLIP checkpoint.

    Raises ModelError if a tensor or a key is missing or unsupported.
    """
    folder = Path(path)
    config = CheckpointConfig.open(folder)
    out, metadata, parts = config.read_count("projection_dim", 512), dict[str, object](), dict[str, ProjectorTensor]()
    kinds = {config.get_section(f"{tower}_config").get("hidden_act", "quick_gelu") for tower in EXTRA_SIZES}
    if len(kinds) != 1 or (kind := kinds.pop()) not in ACTIVATIONS:
        raise config.make_error("hidden_act must be quick_gelu or gelu, and the same for both encoders")
    for tower, names in EXTRA_SIZES.items():
        section = config.get_section(f"{tower}_config")
        sizes = {ours: section.read_count(name, DEFAULTS[tower][name]) for ours, name in (SIZES | names).items()}
        epsilon = section.read_number("layer_norm_eps", 1e-5)
        keys = {**sizes, "projection_dim": out, "attention.layer_norm_epsilon": epsilon}
        metadata |= {f"clip.{tower}.{name}": value for name, value in keys.items()}
        parts |= list_encoder_tensors(tower, sizes, out, section)
    tensors = read_tensors(folder, parts)
    pictures = read_preprocessing(folder)
    for name in ("image_mean", "image_std"):
        metadata[f"clip.vision.{name}"] = pictures.read_numbers(name, 3)
    warnings = list[str]()
    about = {
        "general.architecture": "clip",
        **build_general_metadata(folder, {t.name: t.shape for t in tensors}, warnings),
    }
    about |= {"general.type": "model", "general.file_type": choose_file_type(tensors)}
    about |= {"clip.has_text_encoder": True, "clip.has_vision_encoder": True, "clip.use_gelu": ACTIVATIONS[kind]}
    metadata = about | metadata | read_vocabulary(folder) | {"general.quantization_version": gguf.GGML_QUANT_VERSION}
    refuse_lone_surrogates(folder, metadata)
    return Checkpoint(os.fspath(path), list_files(folder), metadata, tensors, warnings)


def list_encoder_tensors(
    tower: str, sizes: dict[str, int], out: int, section: CheckpointConfig
) -> dict[str, ProjectorTensor]:
    """List the tensors that image and text encoders have in common.

    tower: prefix of their stored names. out: length of the shared embeddings.
    """
    ours, source, width, hidden = tower[0], f"{tower}_model", sizes["embedding_length"], sizes["feed_forward_length"]
    if width == hidden:  # readers recognize the matrices of a layer by their shapes
        raise section.make_error("intermediate_size must differ from hidden_size")
    parts = {} if tower == "text" else list_image_tensors(source, sizes, width)
    if tower == "text":
        embeddings = f"{source}.embeddings"
        parts |= declare_tensor(
            "t.token_embd", f"{embeddings}.token_embedding", section.read_count("vocab_size", 49408), width
        )
        parts |= declare_tensor("t.position_embd", f"{embeddings}.position_embedding", sizes["context_length"], width)
        parts |= declare_with_bias("t.post_ln", f"{source}.final_layer_norm", width)
    for number in range(sizes["block_count"]):
        layer, stored = f"{ours}.blk.{number}", f"{source}.encoder.layers.{number}"
        for name in ("q", "k", "v", "out"):
            parts |= declare_with_bias(f"{layer}.attn_{name}", f"{stored}.self_attn.{name}_proj", width, width)
        for name in ("1", "2"):
            parts |= declare_with_bias(f"{layer}.ln{name}", f"{stored}.layer_norm{name}", width)
        parts |= declare_with_bias(f"{layer}.ffn_down", f"{stored}.mlp.fc1", hidden, width)  # clip.cpp's names
        parts |= declare_with_bias(f"{layer}.ffn_up", f"{stored}.mlp.fc2", width, hidden)
    name = "text_projection" if tower == "text" else "visual_projection"
    return parts | declare_tensor(name, name, out, width)


def list_image_tensors(source: str, sizes: dict[str, int], width: int) -> dict[str, ProjectorTensor]:
    """List the tensors that only the image encoder has: class embedding, convolution, positions, first norm."""
    patch, embeddings = sizes["patch_size"], f"{source}.embeddings"
    patches = (sizes["image_size"] // patch) ** 2
    return {
        "v.class_embd": ProjectorTensor(f"{embeddings}.class_embedding", (width,)),
        **declare_tensor("v.patch_embd", f"{embeddings}.patch_embedding", width, 3, patch, patch),
        **declare_tensor("v.position_embd", f"{embeddings}.position_embedding", patches + 1, width),
        **declare_with_bias("v.pre_ln", f"{source}.pre_layrnorm", width),
        **declare_with_bias("v.post_ln", f"{source}.post_layernorm", width),
    }


def read_tensors(folder: Path, parts: dict[str, ProjectorTensor]) -> list[CheckpointTensor]:
    """Read all declared tensors from a checkpoint.

    Raises ModelError for a missing tensor, and for one that is not declared.
    """
    stored, names = open_weights(folder), {part.theirs for part in parts.values()}
    for name, tensor in stored.items():
        if name not in names and name not in IGNORED_TENSORS:
            raise ModelError(f"{tensor.path}: tensor {printable(name)} is not part of CLIP")
    tensors = list[CheckpointTensor]()
    for name, part in parts.items():
        if part.theirs not in stored:
            raise ModelError(f"{folder}: the tensor {part.theirs} is missing, which becomes {name}")
        numbers = check_tensor(stored[part.theirs], part.shape, NUMBERS)
        tensors.append(
            convert_tensor(name, to_float32(numbers) if len(numbers.shape) == CONVOLUTION_DIMENSIONS else numbers)
        )
    return tensors


def read_vocabulary(folder: Path) -> dict[str, object]:
    """Read tokens and merges from tokenizer.json, or from vocab.json and merges.txt. Raises ModelError."""
    content = read_json(folder / "tokenizer.json")
    if content is not None:
        model = CheckpointConfig(content, folder / "tokenizer.json").get_section("model")
        ids, merges = model.get("vocab"), model.get("merges")
    else:
        ids, merges = read_json(folder / "vocab.json"), read_merges(folder / "merges.txt")
    if not isinstance(ids, dict) or not ids or not isinstance(merges, list):
        raise ModelError(f"{folder}: tokenizer.json, or vocab.json and merges.txt, must have a vocabulary with merges")
    if sorted(ids.values()) != list(range(len(ids))):
        raise ModelError(f"{folder}: the ids of the vocabulary must run from 0 to {len(ids) - 1}")
    pairs = [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in merges]
    return {"tokenizer.ggml.tokens": sorted(ids, key=ids.__getitem__), "tokenizer.ggml.merges": pairs}


def read_merges(path: Path) -> list[str] | None:
    """Read the pairs in a merges.txt; None if the file cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return [line for line in lines if line.strip() and not line.startswith("#version")]
