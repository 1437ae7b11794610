"""Files that a command would replace: only those of the kind that it writes, unless it is told to."""

import os
from collections.abc import Callable

from localllm.errors import LocalllmError, UsageError
from localllm.files.gguf.header import printable


def is_model(path: str) -> bool:
    """Whether it is a model in a GGUF file, or the vocabulary of one."""
    from localllm.files.gguf.file import GGUFFile

    with GGUFFile.open(path, needed=()) as file:
        return file.metadata.get("general.type") not in ("imatrix", "adapter")


def is_imatrix(path: str) -> bool:
    """Whether it is an importance matrix."""
    from localllm.files.imatrix_file import read_imatrix

    return bool(read_imatrix(path).squares)


def are_logits(path: str) -> bool:
    """Whether --save-logits has written it."""
    from localllm.files.logits_file import LogitsFile

    return bool(len(LogitsFile.open(path).chunks))


def is_receipt(path: str) -> bool:
    """Whether --receipt has written it."""
    from localllm.services.receipts import read

    return bool(read(path))


def require_kind(path: str, is_kind: Callable[[str], bool], what: str, force: bool) -> None:
    """Raises UsageError for a file that is not of this kind, and not empty, unless its end is forced."""
    if force or not os.path.isfile(path) or not os.path.getsize(path):
        return
    try:
        is_own = is_kind(path)
    except LocalllmError:
        is_own = False
    if not is_own:
        raise UsageError(f"{printable(path, 4096)}: this file exists, and is no {what}; --force replaces it")
