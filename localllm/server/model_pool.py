"""The server's models by name; each is opened on demand, and unloaded when another one needs the memory."""

import asyncio
import gc
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import field
from time import time
from typing import TYPE_CHECKING

from localllm.errors import LocalllmError
from localllm.frozen import frozen
from localllm.generation.conversation import AnswerDefaults
from localllm.server.metrics import Metrics
from localllm.server.worker import Worker
from localllm.system.memory import return_free_memory

if TYPE_CHECKING:
    from localllm.api import Model

OVERHEAD_BYTES = 300_000_000  # bytes in addition to weights and KV cache, see services.inspection.fit


class UnknownModelError(LocalllmError):
    """Raised for a model name that the server does not have."""


@frozen
class NameOptions:
    """Options that belong to one name of a model.

    Attributes:
        defaults: defaults of its answers.  open_model: opens the file, if not as the server opens other models.
    """

    defaults: AnswerDefaults = field(default_factory=AnswerDefaults)
    open_model: "Callable[[str], Model] | None" = None


# Given the paths of the known names, returns further or changed models: name, path and options; the path is "" for a
# name that was removed.
Find = Callable[..., Iterable[tuple[str, str, NameOptions]]]


class ModelEntry:
    """One model of the pool.

    Attributes:
        name: in requests.  path: path of its file.  created: modification time of the file, seconds since 1970.
        options: options of this name.
        shared: the entry that opens this file: itself, or the first of several names. Only it uses the following:
        worker: its thread, None while unloaded.  active_requests: count of requests using it now.
        last_used: time of the latest request, by the event loop's clock.
        idle_timer: unloads it after the idle time; None while it is in use or never unloaded.
        is_ending: whether to unload it after its running requests, even if they set keep_alive.
    """

    def __init__(self, name: str, path: str, shared: "ModelEntry | None" = None, options: NameOptions | None = None):
        self.name, self.path, self.shared, self.options = name, path, shared or self, options or NameOptions()
        try:
            self.created = int(os.stat(path).st_mtime)
        except OSError:
            self.created = int(time())
        self.worker: Worker | None = None
        self.active_requests, self.last_used, self.is_ending = 0, 0.0, False
        self.idle_timer: asyncio.TimerHandle | None = None

    @property
    def model(self) -> "Model | None":
        worker = self.shared.worker
        return worker.model if worker else None

    @property
    def held_bytes(self) -> int:
        """Memory in use, in bytes: weights, including a projector's, and occupied positions of the KV cache."""
        if self.worker is None:
            return 0
        return self.worker.model.memory + OVERHEAD_BYTES

    @property
    def needed_bytes(self) -> int:
        """Minimum memory to open the model, in bytes."""
        from localllm.files.gguf.file import GGUFFile
        from localllm.files.models_folder import get_projector_size

        with GGUFFile.open(self.path) as file:
            return file.nbytes + get_projector_size(self.path) + OVERHEAD_BYTES


class ModelPool:
    """All models of a server, for use in one event loop.

    Attributes:
        entries: by name, in the order given; the first one is the default.
        find: finds models that were added since the start, and one by name; None if the server's models are fixed.
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        open_model: "Callable[[str], Model]",
        metrics: Metrics,
        memory: int | None = None,
        parallel: int | None = None,
        is_strict: bool = False,
        idle_seconds: float | None = None,
        names: Mapping[str, NameOptions] | None = None,
    ):
        """Create the pool without opening a model.

        paths: paths of files, by name.  open_model: opens a file.  memory: limit in bytes for all models; None: no
        limit.
        parallel: concurrent requests per model.  is_strict: whether a single model is only available by its own name.
        idle_seconds: seconds without a request after which a model is unloaded; None: never.
        names: options by name; names with the same file and the same `open_model` share one open model.
        """
        self.entries, self._by_file = dict[str, ModelEntry](), dict[tuple[str, object], ModelEntry]()
        self.find: Find | None = None
        for name, path in paths.items():
            self._add(name, path, (names or {}).get(name, NameOptions()))
        self._open, self._metrics, self.memory, self.parallel = open_model, metrics, memory, parallel
        self._is_strict, self._idle_seconds = is_strict, idle_seconds
        self._unloading = set[asyncio.Task[None]]()
        self._changing = asyncio.Condition()  # held while a model is opened or closed
        self._waiting = 0  # number of requests waiting for memory
        self._notify_task: asyncio.Task[None] | None = None

    def _add(self, name: str, path: str, options: NameOptions) -> None:
        file = os.path.realpath(path), options.open_model
        self.entries[name] = ModelEntry(name, path, self._by_file.get(file), options)
        self._by_file.setdefault(file, self.entries[name])

    @property
    def _has_single_model(self) -> bool:
        return len({file for file, _ in self._by_file}) == 1

    def refresh(self) -> None:
        """Add models installed since the start, and drop removed ones, if the server offers all installed models.

        The last one stays.
        """
        if self.find is None:
            return
        removed = {name: None for name, entry in self.entries.items() if not os.path.exists(entry.path)}
        for name, path, options in [*self.find(self._get_paths())]:
            if path:
                earlier = self.entries.get(name)
                self._add(name, path, options)
                self._release(earlier)
            else:
                removed[name] = None
        for name in [*removed][: len(self.entries) - 1]:
            self._release(self.entries.pop(name))

    def _get_paths(self) -> dict[str, str]:
        return {name: entry.path for name, entry in self.entries.items()}

    def _release(self, entry: ModelEntry | None) -> None:
        """Unload the model of a removed entry after its running requests, if no other name has it."""
        entry = entry and entry.shared
        if entry is None or any(each.shared is entry for each in self.entries.values()):
            return
        if entry.active_requests:
            entry.is_ending = True
        elif entry.worker:
            self._unload_later(entry, 0)

    def add_found(self, name: str) -> None:
        """Add a model of another program, which is not listed until it is requested. Raises LocalllmError."""
        for each, path, options in self.find(self._get_paths(), name) if self.find else ():
            if each not in self.entries:
                self._add(each, path, options)

    async def forget(self, name: str) -> None:
        """Remove a name, and unload its model if no other name has it."""
        entry = self.entries.pop(name, None)
        if entry is None or any(each.shared is entry.shared for each in self.entries.values()):
            return
        self._by_file = {file: each for file, each in self._by_file.items() if each is not entry.shared}
        async with self._changing:
            await self._unload(entry.shared)

    def _find_same(self, name: str) -> str:
        """Return the served name with the file and the options of another name; the name itself if there is none.

        A server of all installed models also serves those of other programs by their names, which it adds.
        """
        try:
            found = [*self.find(self._get_paths(), name)] if self.find else []
        except LocalllmError:
            return name
        for each, path, options in found:
            file = os.path.realpath(path)
            for entry in self.entries.values():
                if os.path.realpath(entry.path) == file and entry.options == options:
                    return entry.name
            self._add(each, path, options)
        return name

    def resolve(self, name: str | None) -> ModelEntry:
        """Return the model of a name.

        Without a name, this is the first model. A single model answers to any name unless is_strict. Raises
        UnknownModelError.
        """
        if name and name not in self.entries:
            self.refresh()
            base = name.rpartition(":")[0]
            name = base if base in self.entries else self._find_same(name)  # base:adapter
        is_any = not name or (self._has_single_model and not self._is_strict and name not in self.entries)
        return next(iter(self.entries.values())) if is_any else self.get(name or "")

    def get(self, name: str) -> ModelEntry:
        """Return the model with exactly this name. Raises UnknownModelError."""
        if name not in self.entries:
            self.refresh()
            name = self._find_same(name)
        if name not in self.entries:
            names = ", ".join(self.entries)
            raise UnknownModelError(f"model {name[:100]!r} not found; available models: {names}")
        return self.entries[name]

    @asynccontextmanager
    async def use(self, name: str | None, keep_seconds: float | None = None) -> AsyncIterator[Worker]:
        """Keep a model open while in use, and for keep_seconds afterwards (None: the server's default).

        Raises UnknownModelError, ModelError, MemoryLimitError.
        """
        entry = self.resolve(name).shared
        entry.active_requests += 1
        if entry.idle_timer:
            entry.idle_timer.cancel()
        try:
            if entry.worker is None:
                async with self._changing:
                    if entry.worker is None:
                        await self._make_room(entry)
                        entry.worker = await asyncio.to_thread(self._start_worker, entry)
            entry.last_used = asyncio.get_running_loop().time()
            yield entry.worker
        finally:
            entry.active_requests -= 1
            if not entry.active_requests:
                keep_seconds = self._idle_seconds if keep_seconds is None else keep_seconds
                self._unload_later(entry, 0 if entry.is_ending else keep_seconds)
                if self._waiting:
                    self._notify_task = asyncio.ensure_future(self._notify_waiting())

    async def unload(self, name: str | None) -> None:
        """Unload a model, as soon as its running requests have ended. Raises UnknownModelError."""
        entry = self.resolve(name).shared
        if entry.active_requests:
            entry.is_ending = True
        else:
            await self._unload_if_idle(entry)

    def _unload_later(self, entry: ModelEntry, seconds: float | None) -> None:
        """Unload a model after `seconds` without a request; None or negative: never."""

        def begin() -> None:
            task = asyncio.ensure_future(self._unload_if_idle(entry))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

        is_kept = seconds is None or seconds < 0 or seconds == math.inf
        entry.idle_timer = None if is_kept else asyncio.get_running_loop().call_later(seconds or 0, begin)

    async def _unload_if_idle(self, entry: ModelEntry) -> None:
        async with self._changing:
            if not entry.active_requests:
                await self._unload(entry)

    async def _notify_waiting(self) -> None:
        async with self._changing:
            self._changing.notify_all()

    async def _make_room(self, entry: ModelEntry) -> None:
        """Unload idle models, least recently used first, until the new one fits or is alone."""
        if self.memory is None:
            return
        nbytes = min(await asyncio.to_thread(lambda: entry.needed_bytes), self.memory)  # more is read from the disk
        while await asyncio.to_thread(self._count_held_bytes) + nbytes > self.memory:
            idle = [
                candidate for candidate in self._by_file.values() if candidate.worker and not candidate.active_requests
            ]
            if idle:
                await self._unload(min(idle, key=lambda candidate: candidate.last_used))
            else:
                self._waiting += 1
                try:
                    await self._changing.wait()
                finally:
                    self._waiting -= 1

    def _count_held_bytes(self) -> int:
        return sum(entry.held_bytes for entry in [*self._by_file.values()])

    def _start_worker(self, entry: ModelEntry) -> Worker:
        model = (entry.options.open_model or self._open)(entry.path)
        room = None
        if self.memory is not None:
            # Weights that are streamed give memory back to a growing cache.
            least = self.memory // 4 if model.engine.streamed_bytes else 0
            room = max(least, self.memory - model.memory - OVERHEAD_BYTES)  # its cache is empty yet
        return Worker(model, self._metrics, self.parallel, room)

    async def _unload(self, entry: ModelEntry) -> None:
        worker, entry.worker, entry.is_ending = entry.worker, None, False
        if worker:
            await asyncio.to_thread(close_worker, worker)
            del worker
            await asyncio.to_thread(free_unused)

    def stop_responses(self) -> None:
        for entry in self._by_file.values():
            if entry.worker:
                entry.worker.stop()

    async def close(self) -> None:
        """Unload all models; requests still running fail."""
        async with self._changing:
            for entry in self._by_file.values():
                if entry.idle_timer:
                    entry.idle_timer.cancel()
                await self._unload(entry)

    def measure_disk(self) -> dict[str, float]:
        """Sum the disk statistics of all open models: see Engine.get_disk_statistics."""
        total = dict[str, float]()
        for model in [entry.model for entry in [*self.entries.values()] if entry.shared is entry]:
            for name, value in (model.engine.get_disk_statistics() if model else {}).items():
                total[name] = total.get(name, 0.0) + value
        return total

    async def measure_memory(self) -> dict[str, float]:
        open_entries = [entry for entry in self._by_file.values() if entry.worker]
        held_bytes = await asyncio.to_thread(self._count_held_bytes)
        allowed = {} if self.memory is None else {"memory_allowed_bytes": float(self.memory)}
        return {"models_open": float(len(open_entries)), "memory_held_bytes": float(held_bytes), **allowed}

    def count_requests(self) -> tuple[int, int]:
        workers = [entry.worker for entry in self._by_file.values() if entry.worker]
        return sum(worker.running for worker in workers), sum(worker.waiting for worker in workers)


def close_worker(worker: Worker) -> None:
    worker.close()
    worker.model.close()


def free_unused() -> None:
    """Return the memory of an unloaded model: its vocabulary is in reference cycles, and glibc keeps freed pages."""
    gc.collect()
    return_free_memory()
