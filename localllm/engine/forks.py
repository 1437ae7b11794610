"""Refuse to use engines in forked processes, where their threads are missing and locks may stay locked."""

import threading
import weakref
from typing import NoReturn, Protocol

from localllm.errors import LocalllmError
from localllm.system.processes import register_after_fork


class LockHolder(Protocol):
    """An object with a lock that forked processes must not wait for."""

    lock: "threading.Lock | ForkedLock"


class ForkedLock:
    """The replacement of a lock in a forked process, which cannot be acquired."""

    def __enter__(self) -> NoReturn:
        """Raise LocalllmError."""
        raise LocalllmError("the model was opened before this process was forked: open it again in this process")

    def __exit__(self, *error: object) -> None:
        """Do nothing, because the lock is never held."""


_owners: weakref.WeakSet[LockHolder] = weakref.WeakSet()


def create_lock(owner: LockHolder) -> "threading.Lock | ForkedLock":
    """Return a lock for an owner; acquiring it in a forked process raises LocalllmError instead of waiting."""
    _owners.add(owner)
    return threading.Lock()


def was_forked(owner: LockHolder) -> bool:
    return isinstance(owner.lock, ForkedLock)


def _replace_locks() -> None:
    for owner in list(_owners):
        owner.lock = ForkedLock()


register_after_fork(_replace_locks)
