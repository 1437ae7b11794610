"""The base of answers that are iterated over."""

from collections.abc import Generator
from inspect import GEN_CREATED, getgeneratorstate
from typing import Self

from localllm.generation.reasoning import ANSWER, TextPart


class TextIterator:
    """Iterates over the pieces of an answer's text; parts: iterates over all parts, such as reasoning and calls."""

    parts: Generator[TextPart, None, None]

    def __iter__(self) -> Self:
        return self

    def finish_unread(self) -> None:
        """Generate the whole answer if nobody has begun to iterate over it. Raises the errors of iterating."""
        if getgeneratorstate(self.parts) == GEN_CREATED:
            for _ in self.parts:
                pass

    def __next__(self) -> str:
        for kind, text in self.parts:
            if kind == ANSWER:
                return text
        raise StopIteration
