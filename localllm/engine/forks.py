"""A process that was forked has none of the engine's threads, and locks that they held stay locked: it is refused."""

import threading
import weakref
from typing import Any, NoReturn, Protocol

from localllm.errors import LocalllmError
from localllm.system.processes import after_fork


class Locked(Protocol):
    """What one thread at a time may use, which holds its lock."""

    lock: Any


class Refusal:
    """Takes the place of a lock."""

    def __enter__(self) -> NoReturn:
        """Raises LocalllmError."""
        raise LocalllmError("the model was opened before this process was forked: open it here")

    def __exit__(self, *error: object) -> None:
        """Never happens."""


_owners: weakref.WeakSet[Locked] = weakref.WeakSet()


def lock_for(owner: Locked) -> "threading.Lock | Refusal":
    """A lock, to be its owner's `lock`; in processes that are forked from this one, `with owner.lock` will be an
    error, and not a wait without end."""
    _owners.add(owner)
    return threading.Lock()


def was_forked(owner: Locked) -> bool:
    """Whether the owner is one of the process from which this one was forked."""
    return isinstance(owner.lock, Refusal)


def _refuse() -> None:
    for owner in list(_owners):
        owner.lock = Refusal()


after_fork(_refuse)
