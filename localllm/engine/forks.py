"""Refuse to use engines in forked processes.

Their threads are missing there, and locks may stay locked forever.
"""

import threading
import weakref
from typing import NoReturn, Protocol

from localllm.errors import LocalllmError
from localllm.system.processes import register_after_fork


class LockHolder(Protocol):
    """An object with a lock."""

    lock: "threading.Lock | ForkedLock"


class ForkedLock:
    """Replaces a lock in a forked process, and refuses to be acquired."""

    def __enter__(self) -> NoReturn:
        """Raise LocalllmError."""
        raise LocalllmError("the model was opened before this process was forked: open it again in this process")

    def __exit__(self, *error: object) -> None:
        """Do nothing: it is never entered."""


_owners: weakref.WeakSet[LockHolder] = weakref.WeakSet()


def create_lock(owner: LockHolder) -> "threading.Lock | ForkedLock":
    """Create an owner's `lock`; in forked processes, acquiring it raises LocalllmError instead of waiting."""
    _owners.add(owner)
    return threading.Lock()


def was_forked(owner: LockHolder) -> bool:
    return isinstance(owner.lock, ForkedLock)


def _replace_locks() -> None:
    for owner in list(_owners):
        owner.lock = ForkedLock()


register_after_fork(_replace_locks)
