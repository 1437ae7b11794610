"""Refuse to use engines where waiting for their lock would never end: in forked processes, and in their own hooks."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from localllm.errors import LocalllmError, UsageError
from localllm.system.processes import register_after_fork


class LockHolder(Protocol):
    """An object with a lock that forked processes must not wait for."""

    lock: "threading.Lock | ForkedLock | HookLock"


class ForkedLock:
    """The replacement of a lock in a forked process, which cannot be acquired."""

    def __enter__(self) -> NoReturn:
        """Raise LocalllmError."""
        raise LocalllmError("the model was opened before this process was forked: open it again in this process")

    def __exit__(self, *error: object) -> None:
        """Do nothing, because the lock is never held."""


class HookLock:
    """The replacement of a lock while its holder calls a hook, which must not acquire it; other threads wait."""

    def __init__(self, held: "threading.Lock | ForkedLock | HookLock"):
        self._held, self._thread = held, threading.get_ident()

    def __enter__(self) -> None:
        """Acquire the lock. Raises UsageError in a hook."""
        if threading.get_ident() == self._thread:
            raise UsageError("a hook must not use the model that calls it: open the file a second time")
        self._held.__enter__()

    def __exit__(self, *error: object) -> None:
        self._held.__exit__(None, None, None)


@contextmanager
def calling_hooks(owner: LockHolder) -> Iterator[None]:
    """Make hooks that use the owner fail, which would wait for themselves otherwise. The caller holds the lock."""
    held, owner.lock = owner.lock, HookLock(owner.lock)
    try:
        yield
    finally:
        owner.lock = held


_owners: weakref.WeakSet[LockHolder] = weakref.WeakSet()


def create_lock(owner: LockHolder) -> "threading.Lock | ForkedLock | HookLock":
    """Return a lock for an owner; acquiring it in a forked process raises LocalllmError instead of waiting."""
    _owners.add(owner)
    return threading.Lock()


def was_forked(owner: LockHolder) -> bool:
    return isinstance(owner.lock, ForkedLock)


def _replace_locks() -> None:
    for owner in list(_owners):
        owner.lock = ForkedLock()


register_after_fork(_replace_locks)
