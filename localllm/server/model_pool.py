"""The models that a server has by name: opened when somebody asks for one, put away when another needs the memory."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from time import time
from typing import TYPE_CHECKING

from localllm.errors import LocalllmError, MemoryLimitError
from localllm.server.metrics import Metrics
from localllm.server.worker import Worker

if TYPE_CHECKING:
    from localllm.api import Model

WORKING = 300_000_000  # bytes that a model takes beside weights and cache, see services.fit


class UnknownModelError(LocalllmError):
    """Nobody has told the server of a model with this name."""


class ModelEntry:
    """One of the models.

    Attributes:
        name: by which it is asked for.  path: of its file.  created: when the file was changed, seconds since 1970.
        worker: what answers, None while the model is put away.  readers: requests that need it now.
        used: when it was asked for last, by the event loop's clock.
    """

    def __init__(self, name: str, path: str):
        self.name, self.path = name, path
        try:
            self.created = int(os.stat(path).st_mtime)
        except OSError:
            self.created = int(time())
        self.worker: Worker | None = None
        self.readers, self.used = 0, 0.0

    @property
    def model(self) -> "Model | None":
        return self.worker.model if self.worker else None

    @property
    def held_bytes(self) -> int:
        """What it takes now: weights, those of a projector too, and the cache's places that are in use."""
        if (model := self.model) is None:
            return 0
        places = model.engine.places()[0]
        return model.file.nbytes + model.sight.nbytes + WORKING + places * model.engine.place_bytes

    @property
    def needed_bytes(self) -> int:
        """What it takes at least when it is opened."""
        from localllm.files.gguf.file import GGUFFile
        from localllm.files.gguf.projectors import projector_bytes

        with GGUFFile.open(self.path) as file:
            return file.nbytes + projector_bytes(self.path) + WORKING


class ModelPool:
    """All models of a server. To be used in one event loop.

    Attributes:
        books: by name, in the order in which they were named; the first is meant where nobody names one.
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        open_model: "Callable[[str], Model]",
        metrics: Metrics,
        memory: int | None = None,
        parallel: int | None = None,
        is_strict: bool = False,
    ):
        """paths: of files, by name.  open_model: opens one.  memory: the most bytes of all together, None for any.

        parallel: the most answers of one model at once.  is_strict: whether a single model answers to its name only.
        """
        self.books = {name: ModelEntry(name, path) for name, path in paths.items()}
        self._open, self._metrics, self.memory, self._parallel = open_model, metrics, memory, parallel
        self._is_strict = is_strict
        self._changing = asyncio.Condition()  # held by who opens or closes one
        self._waits = 0  # requests that need room
        self._notice: asyncio.Task[None] | None = None

    def book(self, name: str | None) -> ModelEntry:
        """Who answers to a name: the first if there is none, and the only one to any. Raises UnknownModelError."""
        is_any = not name or (len(self.books) == 1 and not self._is_strict)
        return next(iter(self.books.values())) if is_any else self.named(name or "")

    def named(self, name: str) -> ModelEntry:
        """Raises UnknownModelError."""
        if name not in self.books:
            there = ", ".join(self.books)
            raise UnknownModelError(f"there is no model {name[:100]!r} here; there are: {there}")
        return self.books[name]

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Worker]:
        """A model that stays open meanwhile. Raises UnknownModelError, ModelError, MemoryLimitError."""
        book = self.book(name)
        book.readers += 1
        try:
            if book.worker is None:
                async with self._changing:
                    if book.worker is None:
                        await self._make_room(book)
                        book.worker = await asyncio.to_thread(self._opened, book)
            book.used = asyncio.get_running_loop().time()
            yield book.worker
        finally:
            book.readers -= 1
            if not book.readers and self._waits:
                self._notice = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        """Who waits for room looks again."""
        async with self._changing:
            self._changing.notify_all()

    async def _make_room(self, book: ModelEntry) -> None:
        """Put away those that were used longest ago, until there is memory for this one. Raises MemoryLimitError."""
        if self.memory is None:
            return
        needed = await asyncio.to_thread(lambda: book.needed_bytes)
        if needed > self.memory:
            raise MemoryLimitError(
                f"{book.name} needs {needed / 1e9:.1f} GB, and the server may take {self.memory / 1e9:.1f} GB"
            )
        while await asyncio.to_thread(self._held_bytes) + needed > self.memory:
            idle = [other for other in self.books.values() if other.worker and not other.readers]
            if idle:
                await self._put_away(min(idle, key=lambda other: other.used))
            else:
                self._waits += 1
                try:
                    await self._changing.wait()
                finally:
                    self._waits -= 1

    def _held_bytes(self) -> int:
        return sum(book.held_bytes for book in [*self.books.values()])

    def _opened(self, book: ModelEntry) -> Worker:
        model = self._open(book.path)
        taken = model.file.nbytes + model.sight.nbytes + WORKING
        room = None if self.memory is None else max(0, self.memory - taken)
        return Worker(model, self._metrics, self._parallel, room)

    async def _put_away(self, book: ModelEntry) -> None:
        worker, book.worker = book.worker, None
        if worker:
            await asyncio.to_thread(close, worker)

    def stop_answers(self) -> None:
        """End all that are in the making, and take no more; who waits for one is told."""
        for book in self.books.values():
            if book.worker:
                book.worker.stop()

    async def close(self) -> None:
        """Put all away; who still waits for an answer is told."""
        async with self._changing:
            for book in self.books.values():
                await self._put_away(book)

    async def measures(self) -> dict[str, float]:
        """Of memory: how much is held, and how much may be."""
        opened = [book for book in self.books.values() if book.worker]
        held = await asyncio.to_thread(self._held_bytes)
        allowed = {} if self.memory is None else {"memory_allowed_bytes": float(self.memory)}
        return {"models_open": float(len(opened)), "memory_held_bytes": float(held), **allowed}

    def counts(self) -> tuple[int, int]:
        """Answers in the making and requests that wait, of all models."""
        workers = [book.worker for book in self.books.values() if book.worker]
        return sum(worker.running for worker in workers), sum(worker.waiting for worker in workers)


def close(worker: Worker) -> None:
    worker.close()
    worker.model.close()
