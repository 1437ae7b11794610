"""Open the vision projector of a checkpoint, as llama.cpp's converter does with --mmproj."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf

from localllm.convert.config import CheckpointConfig
from localllm.convert.family import NUMBERS
from localllm.convert.files import read_json
from localllm.convert.folder import Checkpoint, choose_file_type, list_files, refuse_lone_surrogates
from localllm.convert.general_metadata import build_general_metadata
from localllm.convert.projectors import find_projector
from localllm.convert.projectors.parts import ProjectorDeclaration, VisionConfig
from localllm.convert.quantized import open_quantized
from localllm.convert.safetensors_files import StoredTensor, open_weights
from localllm.convert.tensor_mapping import CheckpointTensor, check_tensor, convert_tensor
from localllm.convert.transforms import to_float32
from localllm.errors import ModelError
from localllm.files.gguf.header import printable

IMAGE_MODULES = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector)\.(vision_model\.)?"
    r"|(model\.)?(?=image_newline$)"
    r"|(model\.)?(language_model\.)?(model\.)?(?=embed_tokens\.weight$)"  # some projectors need a row of it
)
UNREAD = re.compile(r"head\..*|embed_tokens\.weight|.*\.(position_ids|inv_freq)")  # ignored, after these prefixes
LLAMA_WIDTH = 4096  # of Llama and Mistral, which config.json may omit
CONVOLUTION_DIMENSIONS = 4  # dimensions of a convolution; readers take them in F32 and F16 only


def open_projector(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the image encoder and projector in a checkpoint's folder.

    Raises ModelError if a file is missing, files contradict each other, or the projector is not supported.
    """
    folder = Path(path)
    config = CheckpointConfig.open(folder)
    read = find_projector(config)
    seeing = VisionConfig(
        config, config.get_section("vision_config"), read_preprocessing(folder), read_text_width(config)
    )
    facts = read(seeing)
    tensors = [*build_tensors(folder, open_quantized(open_weights(folder), config), facts)]
    warnings = list[str]()
    metadata = {
        "general.architecture": "clip",
        **build_general_metadata(folder, {t.name: t.shape for t in tensors}, warnings),
    }
    metadata |= {"general.type": "mmproj", "general.file_type": choose_file_type(tensors)}
    metadata |= {"clip.has_vision_encoder": True}
    metadata |= {f"clip.vision.{name}": size for name, size in facts.encoder.metadata.items()}
    for name in ("image_mean", "image_std"):
        metadata[f"clip.vision.{name}"] = seeing.pictures.read_numbers(name, 3)
    metadata |= {f"clip.{name}": value for name, value in facts.metadata.items() if value is not None}
    metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    refuse_lone_surrogates(folder, metadata)
    return Checkpoint(os.fspath(path), list_files(folder), metadata, tensors, warnings)


def read_text_width(config: CheckpointConfig) -> int:
    """Return the embedding length of the language model, whose config.json section may omit it. Raises ModelError."""
    kind = config.get_section("text_config").get("model_type")
    return config.merge_text_config({"hidden_size": LLAMA_WIDTH} if kind in ("llama", "mistral") else {}).read_count(
        "hidden_size"
    )


def read_preprocessing(folder: Path) -> CheckpointConfig:
    """Read how images are preprocessed, from preprocessor_config.json and processor_config.json. Raises ModelError."""
    path = folder / "preprocessor_config.json"
    settings, newer = read_json(path), read_json(folder / "processor_config.json")
    if settings is None and (newer is None or "image_processor" not in newer):
        raise ModelError(f"{path}: the preprocessing of images is missing: copy this file from the original checkpoint")
    return CheckpointConfig(
        {**(settings or {}), **CheckpointConfig(newer or {}, path).get_section("image_processor").content}, path
    )


def build_tensors(
    folder: Path, stored: Mapping[str, StoredTensor], facts: ProjectorDeclaration
) -> Iterator[CheckpointTensor]:
    """Yield the tensors of image encoder and projector.

    Raises ModelError for a missing tensor, and for one that is not declared.
    """
    images = {
        IMAGE_MODULES.sub("", name, count=1): tensor for name, tensor in stored.items() if IMAGE_MODULES.match(name)
    }
    names = {part.theirs for part in facts.parts.values()}
    for name, tensor in images.items():
        if name not in names and not UNREAD.fullmatch(name) and not name.startswith(facts.unread):
            kind = facts.metadata["projector_type"]
            raise ModelError(
                f"{tensor.path}: tensor {printable(tensor.name)} is not part of projectors of the type {kind}"
            )
    for name, part in facts.parts.items():
        if part.theirs not in images:
            raise ModelError(f"{folder}: the tensor {part.theirs} is missing, which becomes {name}")
        numbers = part.convert(check_tensor(images[part.theirs], part.shape, NUMBERS))
        yield convert_tensor(name, to_float32(numbers) if len(numbers.shape) == CONVOLUTION_DIMENSIONS else numbers)
