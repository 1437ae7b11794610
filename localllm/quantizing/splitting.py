"""Divide a model's tensors among files, as gguf-split does, with the metadata that each file needs.

Source: llama.cpp's tools/gguf-split; tests compare with its files byte for byte.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from localllm.errors import UsageError
from localllm.files.gguf.header import DEFAULT_ALIGNMENT, printable
from localllm.files.gguf.writer import pack_value
from localllm.files.models_folder import SPLIT
from localllm.frozen import frozen

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
SPLIT_KEY_ORDER = ("split.no", "split.tensors.count", "split.count")  # the order of gguf-split
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
MAX_FILES = 65535  # split.count has 16 bits, and names five digits
DEFAULT_MAX_TENSORS = 128  # gguf-split's default


@frozen
class SplitLimits:
    """The maximum number of tensors and bytes of a file; 0 for no limit."""

    tensors: int = 0
    nbytes: int = 0  # of tensors, with their padding
    empty_first: bool = False  # the first file has metadata only


def parse_bytes(text: str, option: str) -> int:
    """Parse a size in bytes or decimal units, such as 45G, 45GB, 800M or 3.5GB. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)b?", text.lower())
    number = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if not number:
        raise UsageError(f"{option} {printable(text)}: the value must be a size, such as 45G, 3.5GB or 800MB")
    return number


def divide_tensors(sizes: Mapping[str, int], limits: SplitLimits) -> list[list[str]]:
    """Divide tensors, in their order, among files. Raises UsageError for too many files.

    sizes: in bytes, by name. A tensor that is larger than the limit gets a file of its own.
    """
    files: list[list[str]] = [[], []] if limits.empty_first else [[]]
    part_bytes = 0
    for number, (name, nbytes) in enumerate(sizes.items()):
        padded = -(-nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        is_full = (limits.nbytes and part_bytes + padded > limits.nbytes) or (
            limits.tensors and number % limits.tensors == 0
        )
        if is_full and files[-1]:
            files.append([])
            part_bytes = 0
        files[-1].append(name)
        part_bytes += padded
    if len(files) > MAX_FILES:
        raise UsageError(
            f"these limits would make {len(files)} files, but at most {MAX_FILES} are possible: raise them"
        )
    return files


def describe_oversized(sizes: Mapping[str, int], limits: SplitLimits | None) -> list[str]:
    """Return a warning if single tensors exceed the limit of a file."""
    names = [name for name, nbytes in sizes.items() if limits and limits.nbytes and nbytes > limits.nbytes]
    more_tensors = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"--split-max-size: {printable(names[0])}{more_tensors} alone is larger"] if names else []


def split_metadata(
    metadata: Mapping[str, object], counts: Sequence[int], order: Sequence[str], always: bool = False
) -> list[dict[str, object]]:
    """Divide the metadata among files: the first has all of it, the others only the split.* keys.

    counts: tensors of each file. order: of the split.* keys. always: add these keys even to a single file.
    """
    shared = {key: value for key, value in metadata.items() if key not in SPLIT_KEYS}
    if len(counts) == 1 and not always:
        return [shared]
    values = {"split.count": np.uint16(len(counts)), "split.tensors.count": np.int32(sum(counts))}
    return [
        (shared if number == 0 else {})
        | {key: pack_value((values | {"split.no": np.uint16(number)})[key]) for key in order}
        for number in range(len(counts))
    ]


def merge_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the metadata of one file with all tensors: the first file's with a split.count of 0, as in gguf-split."""
    return {key: value for key, value in metadata.items() if key != "split.count"} | {
        "split.count": pack_value(np.uint16(0))
    }


def list_split_paths(path: str, count: int, always: bool = False) -> list[str]:
    """Return the paths of `count` files for an output path, numbered if there are several, or `always`."""
    if count == 1 and not always:
        return [path]
    match = SPLIT.fullmatch(path)
    stem = match["stem"] if match else path.removesuffix(".gguf")
    return [f"{stem}-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]
