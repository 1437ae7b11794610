"""Map a GGUF model into memory, from one file or several: its metadata, and read-only views of the weights.

The operating system loads pages on first access and shares them between processes. The first use of each page costs 1.5
microseconds, even if it is in memory. Mapping many pages at once costs a fifth of that, and happens on another core:
the first run of a 0.7 GB model takes 155 ms instead of 176.

Releasing pages reduces the memory of the process; the system may keep the file's content in its cache, from which later
reads map the pages again.
"""

import math
import mmap
import os
import stat
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from threading import Thread
from typing import NamedTuple

import numpy as np

from localllm.errors import MemoryLimitError, ModelError
from localllm.files.gguf.header import MAGIC, NEEDED, TensorEntry, printable, read_header
from localllm.files.gguf.metadata import Irregularities, Metadata
from localllm.files.models_folder import SPLIT
from localllm.quant.formats import Format
from localllm.system import memory
from localllm.system.files import get_file_version, open_file
from localllm.system.memory import describe_limit, is_out_of_memory, prefer_huge_pages

OTHER_FILES = [  # first bytes -> type of the file
    (b"PK\3\4", "a zip archive, perhaps a PyTorch checkpoint"),
    (b"\x80\2", "a Python pickle, perhaps a PyTorch checkpoint"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself (git lfs pull fetches it)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf", "a 7-Zip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"lmgg", "a GGML file, older than GGUF (2023)"),
    (b"fmgg", "a GGML file, older than GGUF (2023)"),
    (b"tjgg", "a GGML file, older than GGUF (2023)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\0" * 24, "zero bytes; download incomplete?"),
]

GUESSED = 1 << 10  # flag in general.file_type: the type was guessed from the tensors (llama.h, LLAMA_FTYPE_GUESSED)


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """A vector, a matrix or a stack of matrices, as stored in the file."""

    name: str
    format: Format
    shape: tuple[int, ...]  # in weights; rows first, the length of a row last (GGUF's ne reversed)
    data: np.ndarray  # uint8, read-only; [bytes] for a vector, else shape[:-1] + (bytes of a row,)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class GGUFFile:
    """A model file in memory; views of its tensors stay valid after `close`.

    Attributes:
        packed: the metadata values as stored in the file, uint8, each after its type id.
        parts: names of the tensors in each file of a split model, by path.
        oddities: notes on irregularities found so far.
    """

    def __init__(self, part: "FileSplit", parts: dict[str, list[str]]):
        self.path = part.path
        self.metadata = part.metadata
        self.tensors = part.tensors
        self.packed = part.packed
        self.oddities = part.oddities
        self.parts = parts

    @classmethod
    def open(cls, path: str | os.PathLike[str], needed: Collection[str] = NEEDED) -> "GGUFFile":
        """Open a model file, or all files of a split model if `path` is one of them (-00001-of-00003.gguf).

        A metadata value is an int, float, bool or str; an array of numbers is a read-only NumPy array, an array of
        strings list[str]. needed: keys whose arrays of strings are decoded now, others on first access. Raises
        ModelError if a file is invalid or cannot be read.
        """
        path = os.fsdecode(path)
        part = map_split(path, needed)
        count = part.read_integer("split.count", default=0)
        parts = open_split(path, part, count) if count > 1 else [part]  # a merged file keeps the key, with the value 0
        if count <= 1:
            part.require_whole()
        merged = merge_parts(parts) if count > 1 else part
        return cls(merged._replace(path=path), {part.path: list(part.tensors) for part in parts})

    def locate(self, view: np.ndarray) -> tuple[str, int] | None:
        """Return the path and offset of an array that is a view of a file; None for other arrays."""
        if (mapping := get_map(view)) is None:
            return None
        for path, names in self.parts.items():
            if names and (of_part := get_map(self.tensors[names[0]].data)) and of_part[0] is mapping[0]:
                return path, mapping[1]
        return None

    @property
    def parameters(self) -> int:
        """The number of weights of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def main_format(self) -> str:
        """The name of the format that most weights have; "none" without tensors."""
        weights: Counter[str] = Counter()
        for tensor in self.tensors.values():
            weights[tensor.format.name] += math.prod(tensor.shape)
        return weights.most_common(1)[0][0] if weights else "none"

    def stat_files(self) -> list[tuple[int, int, int]]:
        """Return the version (size and times of change) of each file. Raises OSError."""
        return [get_file_version(path) for path in self.parts]

    @property
    def type_name(self) -> str:
        """The recipe that general.file_type names, such as "Q4_K_M", or the main format."""
        from localllm.quant.recipes import find_recipe  # here, because most commands do not need it

        number = self.metadata.get("general.file_type")
        try:
            return find_recipe(str(number & ~GUESSED)).name if isinstance(number, int) else self.main_format
        except KeyError:
            return self.main_format

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def close(self) -> None:
        """Drop metadata and tensors; the memory is unmapped when the last view of it is gone."""
        self.metadata, self.tensors = Metadata(), {}

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class FileSplit(NamedTuple):
    """One file in memory: a whole model, or a split of a model."""

    path: str
    metadata: Metadata
    tensors: dict[str, Tensor]
    packed: dict[str, np.ndarray]
    oddities: Irregularities

    def read_integer(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < min(default, 0):
            actual = value if isinstance(value, int) else type(value).__name__
            raise make_error(self.path, f"{key}: expected an integer, found {actual}")
        return value

    def require_whole(self) -> None:
        """Raise ModelError if a file without split.count is nevertheless a split.

        A merged file may keep split.no and split.tensors.count, with values that fit a whole model.
        """
        for key, expected in (("split.no", 0), ("split.tensors.count", len(self.tensors))):
            if (actual := self.read_integer(key, default=expected)) != expected:
                raise make_error(self.path, f"{key}: expected {expected}, found {actual}, in a file that is not split")


def make_error(path: str, problem: str) -> ModelError:
    return ModelError(f"{printable(path, 4096)}: {problem}")


def map_split(path: str, needed: Collection[str] = NEEDED) -> FileSplit:
    data = map_file(path)
    header = read_header(data, path, needed)
    bytes_of_file = np.frombuffer(data, np.uint8)
    tensors = {entry.name: make_tensor(entry, bytes_of_file) for entry in header.entries}
    packed = {key: bytes_of_file[place] for key, place in header.packed.items()}
    return FileSplit(path, header.metadata, tensors, packed, header.oddities)


def make_tensor(entry: TensorEntry, bytes_of_file: np.ndarray) -> Tensor:
    data = bytes_of_file[entry.start : entry.start + entry.size]
    if len(entry.shape) > 1:
        data = data.reshape(*entry.shape[:-1], entry.format.row_bytes(entry.shape[-1]))
    return Tensor(entry.name, entry.format, entry.shape, data)


def map_file(path: str) -> mmap.mmap:
    """Map a file read-only. Raises ModelError unless it begins like a GGUF file."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            is_checkpoint = os.path.exists(os.path.join(path, "config.json"))
            advice = f"; `localllm quantize {path} Q4_K_M` converts this checkpoint" if is_checkpoint else ""
            raise make_error(path, f"expected a GGUF file, found a directory{advice}")
        if not stat.S_ISREG(mode):  # a pipe would block, a device has no size
            raise make_error(path, "expected a GGUF file, found no regular file")
        with os.fdopen(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
            beginning = file.read(1024)
            if not beginning:
                raise make_error(path, "expected a GGUF file, found an empty file")
            if not beginning.startswith(MAGIC):
                raise make_error(path, f"not a GGUF file: it {describe_other_file(beginning)}")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            prefer_huge_pages(data)
            return data
    except FileNotFoundError:
        raise make_error(path, "the file does not exist") from None
    except PermissionError:
        raise make_error(path, "no permission to read this file") from None
    except OSError as error:
        if is_out_of_memory(error):
            raise MemoryLimitError(f"{path}: not enough address space to map the file: {describe_limit()}") from None
        raise make_error(path, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise make_error(path, f"cannot be read: {error}") from None


def describe_other_file(beginning: bytes) -> str:
    """Describe a file that is not a GGUF file by its first bytes, as the end of a sentence: "is a text file"."""
    for magic, kind in OTHER_FILES:
        if beginning.startswith(magic):
            return f"is {kind}"
    text = beginning.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "is an HTML page; the download brought a web page instead of the model"
    if beginning[8:9] == b"{":
        return "is a safetensors file; convert it to GGUF first"
    if text.startswith(b"{"):
        return "is a JSON file"
    is_text = beginning.isascii() and "".join(beginning.decode("ascii").split()).isprintable()
    return "is a text file" if is_text else f"does not begin with {MAGIC.decode()}"


def open_split(path: str, named: FileSplit, count: int) -> list[FileSplit]:
    """Open all `count` files of a split model.

    path, named: one of them, already open.
    """
    match = SPLIT.fullmatch(path)
    if not match or int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        ending = f"expected a name that ends in -NNNNN-of-{count:05d}.gguf"
        raise make_error(path, f"split.count: this is one of the {count} files of a split model; {ending}")
    parts = []
    for number in range(count):
        name = f"{match['stem']}-{number + 1:05d}-of-{count:05d}.gguf"
        if not os.path.exists(name):
            raise make_error(name, f"this file is missing; the model is split into {count} files")
        part = named if name == path else map_split(name)
        for key, expected in (("split.no", number), ("split.count", count)):
            if (actual := part.read_integer(key, default=-1)) != expected:
                raise make_error(name, f"{key}: expected {expected}, found {'nothing' if actual == -1 else actual}")
        parts.append(part)
    for part in parts[1:]:
        require_same_model(parts[0], part)
    return parts


def require_same_model(first: FileSplit, part: FileSplit) -> None:
    """Raise ModelError if two splits differ in a metadata key that both have, except split.no."""
    for key in part.packed.keys() & first.packed.keys() - {"split.no"}:
        if not np.array_equal(part.packed[key], first.packed[key]):
            raise make_error(
                part.path,
                f"{printable(key)}: must equal that of {printable(first.path, 4096)}: files of different models?",
            )


def merge_parts(parts: list[FileSplit]) -> FileSplit:
    """Merge the splits of a model: the metadata of the first, the tensors of all. Raises ModelError."""
    first = parts[0]
    tensors: dict[str, Tensor] = {}
    for part in parts:
        first.oddities.extend(part.oddities)
        for name in part.tensors.keys() & tensors.keys():
            raise make_error(part.path, f"tensor {printable(name)}: an earlier file of the split model also has it")
        tensors |= part.tensors
    expected = first.read_integer("split.tensors.count", default=len(tensors))
    if expected != len(tensors):
        raise make_error(first.path, f"split.tensors.count: expected {expected} tensors, found {len(tensors)}")
    return first._replace(tensors=tensors)


BYTES_PER_CALL = 1 << 22  # bytes mapped by one system call, during which other threads cannot allocate memory
MIN_BYTES = 1 << 28  # bytes; for smaller files contention between the threads costs as much as prefaulting saves


def prefault(file: GGUFFile) -> None:
    """Start a background thread that maps the pages of a model's large files, if this system can."""
    if memory.can_prefault():
        contents = {path: get_content(file.tensors[names[0]].data) for path, names in file.parts.items() if names}
        large = {path: content for path, content in contents.items() if len(content) >= MIN_BYTES}
        if large:
            Thread(target=map_pages, args=(large,), daemon=True).start()


def map_pages(contents: dict[str, np.ndarray]) -> None:
    """Map the pages of files: the work of the background thread.

    contents: uint8 arrays by path, which keep the files mapped. A page that cannot be mapped now is mapped on first
    use.
    """
    for path, content in contents.items():
        memory.prefault(path, content.ctypes.data, len(content), BYTES_PER_CALL)


def get_content(view: np.ndarray) -> np.ndarray:
    """Return the array that a view belongs to: for a tensor the whole file, uint8 [bytes]."""
    content = view
    while isinstance(content.base, np.ndarray):
        content = content.base
    return content


def get_map(view: np.ndarray) -> tuple[mmap.mmap, int] | None:
    """Return the map of a file that an array is a view of, and the offset in it; None for other arrays."""
    content = get_content(view)
    data = content.base.obj if isinstance(content.base, memoryview) else content.base
    return (data, view.ctypes.data - content.ctypes.data) if isinstance(data, mmap.mmap) else None


def release_pages(view: np.ndarray) -> None:
    """Release the memory of the whole pages within a view of a file; do nothing for other arrays."""
    if mapping := get_map(view):
        data, start = mapping
        memory.release_pages(data, start, start + view.nbytes)
