"""Write GGUF files whose tensors are copied from others: split a model, merge its files, change metadata."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count

import numpy as np

from localllm.errors import LocalllmError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import MAGIC
from localllm.files.gguf.tensor_source import GGUFTensor, count_rows
from localllm.files.gguf.writer import OutputTensor, PackedValue, build_header, get_alignment, pack_value, write_body
from localllm.files.safe_file import SafeFile, WriteLock, resolve_target
from localllm.frozen import frozen
from localllm.quantizing import splitting
from localllm.quantizing.metadata_edits import MetadataEdits
from localllm.quantizing.sources import SourceGuard
from localllm.system.files import sync_file

CHUNK_BYTES = 8 << 20  # bytes that are copied at once
MAX_HEADER_BYTES = 1 << 30  # bytes; the headers of the largest vocabularies have 20 MB
OnBytes = Callable[[int, str], None]  # (bytes written so far, tensor)


@frozen
class OutputFile:
    """A file to be written: its path, its metadata, and the names of its tensors."""

    path: str
    metadata: Mapping[str, object]
    names: Sequence[str]

    def count_bytes(self, source: GGUFFile) -> int:
        tensors, step = list_outputs(source, self.names), get_alignment(self.metadata)
        return len(build_header(self.metadata, tensors, step)) + sum(-(-t.nbytes // step) * step for t in tensors)


def list_outputs(source: GGUFFile, names: Sequence[str]) -> list[OutputTensor]:
    tensors = [source.tensors[name] for name in names]
    return [OutputTensor(tensor.name, tensor.format, tensor.shape) for tensor in tensors]


def plan_split(source: GGUFFile, out: str, limits: splitting.SplitLimits) -> tuple[list[OutputFile], list[str]]:
    """Divide a model among files that are named as by gguf-split; also return warnings. Raises UsageError."""
    sizes = {tensor.name: tensor.nbytes for tensor in source.tensors.values()}
    parts = splitting.divide_tensors(sizes, limits)
    metadata = splitting.split_metadata(
        get_packed_metadata(source), [len(part) for part in parts], splitting.SPLIT_KEY_ORDER, always=True
    )
    paths = splitting.list_split_paths(out, len(parts), always=True)
    files = [OutputFile(*each) for each in zip(paths, metadata, parts, strict=True)]
    return files, splitting.describe_oversized(sizes, limits)


def plan_merge(source: GGUFFile, out: str) -> OutputFile:
    return OutputFile(out, splitting.merge_metadata(get_packed_metadata(source)), list(source.tensors))


def check_files(paths: Sequence[str], inputs: Sequence[str], nbytes: int) -> list[str]:
    """Return the resolved output paths.

    Raises UsageError if they must not be written, LocalllmError if the disk is too full. One file may replace an older
    one, because that is atomic; several never replace any.
    """
    targets = [resolve_target(name, tuple(inputs)) for name in paths]
    if len(targets) > 1:
        for name in filter(os.path.lexists, targets):
            raise UsageError(
                f"{name}: this file exists; remove it first, because files of a split model are not overwritten"
            )
    free = shutil.disk_usage(os.path.dirname(targets[0])).free
    if free < nbytes:
        raise LocalllmError(f"{paths[0]}: {nbytes} bytes needed, but only {free} free on this disk")
    return targets


def write_files(source: GGUFFile, files: Sequence[OutputFile], on_bytes: OnBytes, replaces: bool = False) -> list[str]:
    """Write the files, which appear when all are complete or not at all, and return their paths.

    replaces: a file may replace one of the source.
    """
    total = sum(file.count_bytes(source) for file in files)
    targets = check_files([file.path for file in files], () if replaces else list(source.parts), total)
    guard = SourceGuard(list(source.parts))
    bytes_written = 0

    def iterate_chunks(name: str) -> Iterator[np.ndarray]:
        nonlocal bytes_written
        for piece in iterate_bytes(GGUFTensor(source.tensors[name])):
            yield piece
            bytes_written += piece.nbytes
            on_bytes(bytes_written, name)

    with ExitStack() as stack:
        for target in targets:
            stack.enter_context(WriteLock(target))
        safe_files = [stack.enter_context(SafeFile(target)) for target in targets]
        for safe, file in zip(safe_files, files, strict=True):
            tensors = [
                OutputTensor(each.name, each.format, each.shape, iterate_chunks(each.name))
                for each in list_outputs(source, file.names)
            ]
            write_body(safe, file.metadata, tensors)
            safe.sync()
        guard.check()
        finish_files(safe_files)
    return targets


def iterate_bytes(tensor: GGUFTensor) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor, some rows at a time, and release the file's pages."""
    rows = count_rows(tensor.shape)
    step = max(CHUNK_BYTES // tensor.format.row_bytes(tensor.shape[-1]), 1)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        yield tensor.read_rows(first, last)
        tensor.release_rows(first, last)


def finish_files(files: Sequence[SafeFile]) -> None:
    """Give all files their final names, or none if one fails."""
    finished: list[str] = []
    try:
        for file in files:
            finished.append(file.path)
            file.finish()
    except BaseException:
        for path in finished if len(files) > 1 else ():
            with suppress(FileNotFoundError):
                os.unlink(path)
        raise


# ---- a changed header


def plan_edit(source: GGUFFile, out: str, edits: MetadataEdits) -> list[OutputFile]:
    """Return the files of the model with changed metadata, as many as before. Raises UsageError."""
    names = list(source.parts.values())
    first: dict[str, object] = edits.apply(get_packed_metadata(source))
    other_parts = [{key: value for key, value in first.items() if key in splitting.SPLIT_KEYS} for _ in names[1:]]
    for number, metadata in enumerate(other_parts):
        metadata["split.no"] = pack_value(np.uint16(number + 1))
    paths = splitting.list_split_paths(out, len(names))
    return [OutputFile(*each) for each in zip(paths, [first, *other_parts], names, strict=True)]


def get_packed_metadata(source: GGUFFile) -> dict[str, PackedValue]:
    """Return the metadata values as they are stored in the file."""
    return {key: PackedValue(value) for key, value in source.packed.items()}


def edit_in_place(source: GGUFFile, edits: MetadataEdits, on_bytes: OnBytes) -> str | None:
    """Change the metadata in the first file of a model.

    A new header of the same length overwrites the old one, which is saved next to the file first: the path of this copy
    is returned. Otherwise the whole file is rewritten, and None is returned. Raises LocalllmError, UsageError.
    """
    path, names = next(iter(source.parts.items()))
    old_metadata, tensors = get_packed_metadata(source), list_outputs(source, names)
    after = edits.apply(old_metadata)
    old, new = (build_header(packed, tensors, get_alignment(packed)) for packed in (old_metadata, after))
    resolve_target(path)
    is_same_place = len(new) == len(old) and get_alignment(old_metadata) == get_alignment(after)
    if is_same_place and read_first_bytes(path, len(old)) == old:
        with WriteLock(path):
            return replace_header(path, new)
    write_files(source, [OutputFile(path, after, names)], on_bytes, replaces=True)
    return None


def read_first_bytes(path: str, count: int) -> bytes:
    """Read the first bytes of a file. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None


def replace_header(path: str, header: bytes) -> str:
    """Save the header of a file to a copy, overwrite it, and return the path of the copy. Raises LocalllmError."""
    copy = next(name for name in list_copy_names(path) if not os.path.lexists(name))
    with SafeFile(copy) as file:
        file.write(read_first_bytes(path, len(header)))
    try:
        with open(path, "r+b") as file:
            file.write(header)
            file.flush()
            sync_file(file.fileno())
    except OSError as error:
        raise LocalllmError(
            f"{path}: cannot be written: {error.strerror or error}; the old header is in {copy}"
        ) from None
    return copy


def list_copy_names(path: str) -> Iterator[str]:
    yield f"{path}.header"
    for number in count(2):
        yield f"{path}.header.{number}"


def restore_header(path: str, copy: str) -> str:
    """Write a saved header back; return the path of a copy of the header that it replaced.

    Raises UsageError if `copy` is not a header of this file, LocalllmError.
    """
    source, header = GGUFFile.open(path, needed=()), read_first_bytes(copy, MAX_HEADER_BYTES)
    first, names = next(iter(source.parts.items()))
    packed, tensors = get_packed_metadata(source), list_outputs(source, names)
    is_as_long = len(header) == len(build_header(packed, tensors, get_alignment(packed)))
    if not (header.startswith(MAGIC) and is_as_long and ends_with_table(header, build_header({}, tensors))):
        raise UsageError(f"{copy}: the file must be a saved header of {path}")
    resolve_target(first, (copy,))
    with WriteLock(first):
        return replace_header(first, header)


def ends_with_table(header: bytes, bare: bytes) -> bool:
    """Return whether a header ends with the tensor table of `bare` and padding.

    bare: a header without metadata.
    """
    table = bare[24:].rstrip(b"\0")  # its last bytes, those of an offset, may be zeros
    place = header.rfind(table)
    return len(table) > 0 and place > 0 and not any(header[place + len(table) :])
