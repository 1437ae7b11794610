"""Protect existing files: a command overwrites only files of the type that it writes, unless --force is given."""

import os
from collections.abc import Callable

from localllm.errors import LocalllmError, UsageError
from localllm.files.gguf.header import printable


def is_model(path: str) -> bool:
    """Return whether a file is a GGUF model or vocabulary."""
    from localllm.files.gguf.file import GGUFFile
    from localllm.files.gguf.kinds import get_kind

    with GGUFFile.open(path, needed=()) as file:
        return not get_kind(file.metadata) and file.metadata.get("general.type") != "imatrix"


def is_control_vector(path: str) -> bool:
    """Return whether a file is a control vector."""
    from localllm.files.gguf.file import GGUFFile
    from localllm.files.gguf.kinds import CONTROL_VECTOR, get_kind

    with GGUFFile.open(path, needed=()) as file:
        return get_kind(file.metadata) == CONTROL_VECTOR


def is_imatrix(path: str) -> bool:
    """Return whether a file is an importance matrix."""
    from localllm.files.imatrix_file import read_imatrix

    return bool(read_imatrix(path).squares)


def is_logits_file(path: str) -> bool:
    """Return whether a file was written by --save-logits."""
    from localllm.files.logits_file import LogitsFile

    return bool(len(LogitsFile.open(path).chunks))


def is_receipt(path: str) -> bool:
    """Return whether a file was written by --receipt."""
    from localllm.services.receipts import read_receipt

    return bool(read_receipt(path))


def require_replaceable(path: str, is_kind: Callable[[str], bool], kind: str, force: bool) -> None:
    """Raise UsageError for a non-empty file of another type, unless forced; kind: the type for the message."""
    if force or not os.path.isfile(path) or not os.path.getsize(path):
        return
    try:
        is_own = is_kind(path)
    except LocalllmError:
        is_own = False
    if not is_own:
        raise UsageError(f"{printable(path, 4096)}: the file exists and is not {kind}; use --force to replace it")
