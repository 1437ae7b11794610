"""Read rows of the tensors in a checkpoint's safetensors files on demand.

The safetensors package checks each header (lengths, overlaps, gaps). The rows are read by this module, because the
package cannot return bfloat16 to NumPy, and so that only the requested rows need memory. Format:
https://github.com/huggingface/safetensors#format
"""

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TypedDict

import numpy as np
from safetensors import SafetensorError, safe_open

from localllm.convert.files import read_json, refuse_lfs_pointer, report_as_model_error
from localllm.convert.transforms import BYTES
from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.frozen import frozen

WRAPPERS = ("base_model.model.", "_orig_mod.", "module.")  # prefixes of PEFT, torch.compile, data parallel training
ADAPTER = re.compile(r".*\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\..+")
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")


@frozen
class StoredTensor:
    """A tensor in a safetensors file, whose rows are read on demand."""

    name: str
    path: Path
    dtype: str  # a key of BYTES
    shape: tuple[int, ...]  # the row length last
    start: int  # offset of its first byte in the file

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Read rows first to last - 1 as bytes: uint8 [last - first, bytes per row]. Raises ModelError."""
        row_bytes = self.shape[-1] * BYTES[self.dtype]
        nbytes = (last - first) * row_bytes
        try:
            data = np.fromfile(self.path, np.uint8, nbytes, offset=self.start + first * row_bytes)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        if len(data) != nbytes:
            raise ModelError(f"{self.path}: the file was truncated while it was read")
        return data.reshape(last - first, row_bytes)


class HeaderEntry(TypedDict):
    """The description of a tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # of its first byte and after its last one, from the end of the header


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name. Raises ModelError if files are missing or contradict the index."""
    tensors_found: dict[str, StoredTensor] = {}
    for path in list_weight_files(folder):
        tensors = read_header(path)
        for name in tensors.keys() & tensors_found.keys():
            raise ModelError(f"{path}: tensor {printable(name)} is also in {tensors_found[name].path.name}")
        tensors_found |= tensors
    if not (folder / WHOLE).is_file():
        for name, file in (read_index(folder) or {}).items():
            if name not in tensors_found:
                raise ModelError(f"{folder / INDEX}: tensor {printable(name)} is not in {file}, as the index states")
    return remove_wrappers(tensors_found)


def remove_wrappers(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Remove the prefix that PEFT, torch.compile or data parallel training adds to all names.

    Raises ModelError for the matrices of an adapter.
    """
    for name, tensor in stored.items():
        if ADAPTER.fullmatch(name):
            raise ModelError(f"{tensor.path}: merge the adapter weights ({printable(name)}) into the model first")
    for prefix in WRAPPERS:
        if stored and all(name.startswith(prefix) for name in stored):
            return remove_wrappers({name.removeprefix(prefix): tensor for name, tensor in stored.items()})
    return dict(stored)


def list_weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint. Raises ModelError if one is missing."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if index := read_index(folder):
        names = sorted(set(index.values()))
    else:
        parts = sorted(path.name for path in folder.glob("model-*.safetensors"))
        counts = {int(match[2]) for name in parts if (match := PART.fullmatch(name))}
        names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for count in counts for n in range(min(count, 99999))]
    if not names:
        raise ModelError(f"{folder}: {describe_missing_weights(folder)}")
    for number, name in enumerate(names):
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: this file is missing; it is file {number + 1} of {len(names)}")
    return [folder / name for name in names]


def read_index(folder: Path) -> dict[str, str] | None:
    """Return the file name of each tensor; None if the checkpoint has no index. Raises ModelError."""
    content = read_json(folder / INDEX)
    if content is None:
        return None
    index = content.get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelError(f"{folder / INDEX}: the index must have a weight_map")
    for file in index.values():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", file):
            raise ModelError(f"{folder / INDEX}: expected the name of a safetensors file, found {printable(str(file))}")
    return index


def describe_missing_weights(folder: Path) -> str:
    """Explain why a folder has no safetensors files that can be read."""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return "the weights are PyTorch pickles, which can run code and are not read; save them as safetensors first"
    if (folder / "consolidated.safetensors").is_file():
        return "the weights are in Mistral's own layout; the folder with config.json and model.safetensors is needed"
    if any(folder.glob("*.gguf")):
        return "model.safetensors is missing; name the GGUF file itself"
    files = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    if files:
        return f"model.safetensors is missing; if {printable(files[0], 80)} has the weights, rename it"
    return "model.safetensors is missing"


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name. Raises ModelError."""
    try:
        with path.open("rb") as file:
            refuse_lfs_pointer(path, file.read(64))
        with safe_open(path, framework="numpy") as checked:
            names = set(checked.keys())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a valid safetensors file: {printable(str(error))}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    with report_as_model_error(path):
        return {name: make_tensor(path, name, header[name], 8 + length) for name in sorted(names)}


def make_tensor(path: Path, name: str, entry: "HeaderEntry", data_start: int) -> StoredTensor:
    """Build a tensor from its header entry.

    Raises ValueError if offsets and shape disagree. A tensor of an unknown type is accepted, so that it can be ignored.
    """
    dtype, shape, (start, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), entry["data_offsets"]
    if dtype in BYTES and end - start != prod(shape) * BYTES[dtype]:
        raise ValueError(f"tensor {name}: expected {prod(shape) * BYTES[dtype]} bytes, found {end - start}")
    return StoredTensor(name, path, dtype, shape, data_start + int(start))
