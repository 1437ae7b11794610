"""Open a checkpoint's folder: read its files, and check that they fit together."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import gguf

from localllm.convert.config import CheckpointConfig, warn_unused_config
from localllm.convert.families.bert import RANK
from localllm.convert.family import PACKED, TRANSPOSED
from localllm.convert.files import read_json
from localllm.convert.general_metadata import build_general_metadata, translate_sampling
from localllm.convert.quantized import open_quantized
from localllm.convert.records import can_keep_blocks, find_family
from localllm.convert.safetensors_files import StoredTensor, list_weight_files, open_weights
from localllm.convert.sentence_transformers import load_projections, read_pooling_type, read_prompts, warn_unconverted
from localllm.convert.tensor_mapping import CheckpointTensor, add_mtp_layers, arrange_tensors, convert_tensor
from localllm.convert.transforms import from_array
from localllm.convert.vocabulary import build_vocabulary_metadata
from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import count_rows
from localllm.quant.recipes import find_recipe, sort_like_llama

TEMPLATE = "tokenizer.chat_template"
OUTPUT_SUFFIXES = (".gguf", ".part", ".ladder", ".calibration")  # suffixes of files that quantizing writes


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint, which localllm.quantizing.quantize reads like a GGUF file."""

    path: str
    files: list[str]  # paths of all its files
    metadata: dict[str, object]
    tensors: list[CheckpointTensor]
    warnings: list[str]  # lines for the user
    count: int = 1  # number of the language model's weight files

    @property
    def packed(self) -> dict[str, object]:
        return self.metadata

    @property
    def ignored(self) -> Sequence[str]:
        return ()

    @property
    def parts(self) -> list[list[str]]:
        return split_names({tensor.name: count_bytes(tensor) for tensor in self.tensors}, self.count)


def open_folder(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the language model in a checkpoint's folder.

    Raises ModelError if a file is missing, files contradict each other, or the architecture is not supported.
    """
    folder = Path(path)
    refuse_adapter(folder)
    config = CheckpointConfig.open(folder)
    if (folder / "adapter_config.json").is_file():
        config.warnings.append("adapter_config.json: the adapter in this folder is not merged: only the model is read")
    family = find_family(config)
    config = config.merge_text_config(family.defaults)
    stored = open_weights(folder) if can_keep_blocks(config) else open_quantized(open_weights(folder), config)
    h = family.read(config)
    if family.named:
        stored = {family.named(name, h.sizes["layers"]): tensor for name, tensor in stored.items()}
    h = add_mtp_layers(h, stored)
    h = h.update({"packed": detect_expert_packing(stored, h.sizes["width"])})
    tensors = [*arrange_tensors(folder, stored, family, h, config.warnings)]
    tensors += [convert_tensor(name, from_array(values)) for name, values in h.tensors.items()]
    for name, matrix in load_projections(folder, family.projects).items():
        tensors.append(convert_tensor(f"{name}.weight", matrix))
        sizes = zip(("out", "in"), matrix.shape, strict=True)
        h = h.update({}, **{f"{name}_feat_{side}": size for side, size in sizes})
    vocabulary, warnings = build_vocabulary_metadata(folder, h.sizes["vocab"], family.vocabulary)
    sampling, unknown = translate_sampling(read_json(folder / "generation_config.json") or {})
    metadata = {"general.architecture": family.arch, **sampling}
    metadata |= build_general_metadata(folder, {t.name: t.shape for t in tensors}, config.warnings)
    if (pooling := read_pooling_type(folder)) is not None and h.metadata.get("pooling_type") != RANK:
        h = h.update(pooling_type=pooling)
    metadata |= (
        {f"{family.arch}.{name}": value for name, value in h.metadata.items()} | vocabulary | read_prompts(folder)
    )
    if "types" in h.sizes:
        metadata["tokenizer.ggml.token_type_count"] = h.sizes["types"]
    metadata |= {**family.more, **(family.of_tensors(stored, h) if family.of_tensors else {})}
    metadata |= {
        "general.file_type": choose_file_type(tensors),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    refuse_lone_surrogates(folder, metadata)
    warnings = [*config.warnings, *warn_unused_config(config), *unknown, *warnings, *warn_unconverted(folder)]
    warnings += find_invalid_templates(metadata)
    return Checkpoint(os.fspath(path), list_files(folder), metadata, tensors, warnings, len(list_weight_files(folder)))


def refuse_adapter(folder: Path) -> None:
    """Raise ModelError if a folder holds an adapter (LoRA, ...) without its base model."""
    path = folder / "adapter_config.json"
    if (settings := read_json(path)) is None or (folder / "config.json").is_file():
        return
    kind, base = settings.get("peft_type"), settings.get("base_model_name_or_path")
    name = "a LoRA adapter" if kind in (None, "LORA") else f"an adapter ({printable(str(kind), 20)})"
    of = f", {printable(base, 80)}," if isinstance(base, str) and base else ""
    raise ModelError(f"{folder}: is {name}, not a model: merge it into its base model{of} first")


def find_invalid_templates(metadata: Mapping[str, object]) -> list[str]:
    """Return a warning for each chat template that Jinja cannot parse."""
    from localllm.text.templates import ChatTemplate  # importing Jinja takes 40 ms

    templates = []
    for key, text in metadata.items():
        if isinstance(text, str) and (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")):
            try:
                ChatTemplate(text)
            except ModelError as error:
                name = key.removeprefix(TEMPLATE).removeprefix(".")
                templates.append(f"{error}{f' ({printable(name)})' if name else ''}: it is written unchanged")
    return templates


def count_bytes(tensor: CheckpointTensor) -> int:
    return count_rows(tensor.shape) * tensor.format.row_bytes(tensor.shape[-1])


def split_names(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide tensor names, in llama.cpp's order, among `count` files of similar size.

    sizes: of each tensor in bytes. No file stays empty.
    """
    names, total = sort_like_llama(sizes), sum(sizes.values())
    ends = list(accumulate(sizes[name] for name in names))
    parts: list[list[str]] = [[] for _ in range(min(count, len(names)))]
    number = 0
    for place, name in enumerate(names):
        is_full = bool(parts[number]) and ends[place] > total * (number + 1) // len(parts)
        if number + 1 < len(parts) and (is_full or len(names) - place < len(parts) - number):
            number += 1
        parts[number].append(name)
    return parts


def detect_expert_packing(stored: Mapping[str, StoredTensor], width: int) -> int:
    """Detect how experts are stored: 0 for one tensor per expert, else PACKED or TRANSPOSED.

    width: embedding length, which the last dimension of a transposed down projection equals.
    """
    shapes = [tensor.shape for name, tensor in stored.items() if name.endswith(".experts.down_proj")]
    return 0 if not shapes else TRANSPOSED if shapes[0][-1:] == (width,) else PACKED


def list_files(folder: Path) -> list[str]:
    """List the paths of a checkpoint's files, without those that quantizing writes."""
    return sorted(str(file) for file in folder.iterdir() if file.suffix not in OUTPUT_SUFFIXES and file.is_file())


def choose_file_type(tensors: list[CheckpointTensor]) -> int:
    """Return general.file_type: MXFP4 if any tensor has it, else the most frequent format of the matrices."""
    formats = [tensor.format.name for tensor in tensors if len(tensor.shape) > 1]
    return find_recipe("MXFP4" if "MXFP4" in formats else max(sorted(set(formats)), key=formats.count)).number


def refuse_lone_surrogates(folder: Path, metadata: Mapping[str, object]) -> None:
    """Raise ModelError for a string with a lone surrogate, which JSON can hold but UTF-8 cannot."""
    for key, value in metadata.items():
        try:
            "".join(text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)).encode()
        except UnicodeEncodeError:
            raise ModelError(
                f"{folder}: {key}: the string must not have a lone surrogate, which UTF-8 cannot encode"
            ) from None
