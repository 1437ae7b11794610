"""An answer for programs with an event loop: its steps run in threads, the loop stays free."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from localllm.generation.generate import Generation
    from localllm.generation.tools.tool_run import ToolRun

Answer = TypeVar("Answer", bound="Generation | ToolRun")


class AsyncGeneration(Generic[Answer]):
    """An answer that is being generated: `async for` over it for pieces of text; attributes are those of the answer.

    Leaving the loop or cancelling the task ends the answer: it stops before the model's next step.
    """

    def __init__(self, begin: Callable[[], Answer]):
        """Store `begin`, which starts the answer; it runs in a thread, since templates and vocabularies take time."""
        self._begin: Callable[[], Answer] | None = begin
        self._generation: Answer | None = None

    @property
    def generation(self) -> Answer | None:
        """The answer, None before the first piece was requested."""
        return self._generation

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._generation is None:
            advice = "iterate over it with `async for`, or await complete()"
            raise AttributeError(f"the answer has no {name!r} before generation starts: {advice}", name=name, obj=self)
        return getattr(self._generation, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """Return the next part. Raises the errors of Generation, and StopAsyncIteration at the end."""
        try:
            piece = await asyncio.to_thread(self._next)
        except asyncio.CancelledError:
            self.stop()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _next(self) -> str | None:
        """Return the next piece of text, None at the end; in a thread."""
        if self._begin:
            begin, self._begin = self._begin, None
            self._generation = begin()
        return next(self._generation, None) if self._generation else None

    async def complete(self) -> Answer:
        """Run to the end and return the finished answer."""
        async for _ in self:
            pass
        assert self._generation
        return self._generation

    def stop(self) -> None:
        """End the answer before the model's next step."""
        self._begin = None
        if self._generation:
            self._generation.stop()

    async def aclose(self) -> None:
        """Stop the answer, and release its sequence for other answers."""
        self.stop()
        if self._generation:
            await asyncio.to_thread(self._generation.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and deepcopy the answer so far as plain data. Raises TypeError before generation starts."""
        if self._generation is None:
            raise TypeError("an answer that has not begun cannot be copied or pickled: await complete() first")
        return self._generation.__reduce__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
