"""What becomes of an answer, told from the thread that computes to the event loop that writes to a client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from localllm.errors import LocalllmError
from localllm.generation.reasoning import TextPart
from localllm.generation.request import Request


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability by the model's own logits."""

    token: int
    logprob: float


class LikelyToken(NamedTuple):
    """A token of an answer's text, and the likeliest ones in its place, likeliest first."""

    chosen: TokenLogprob
    likeliest: tuple[TokenLogprob, ...]


class TokenEvent(NamedTuple):
    """A token has come.

    Attributes:
        number: of the answer, from 0.  parts: the text that is complete with it.
        logprob: of the token, if that was asked for and it is part of the answer's text.
        finish_reason: "stop" or "length" if it is the last, else "".
    """

    number: int
    parts: tuple[TextPart, ...]
    logprob: LikelyToken | None
    finish_reason: str


class Subscriber:
    """Who waits for the answers to one request, in an event loop.

    Attributes:
        request: what is answered.  begin: when it was asked, by the clock of the event loop.
    """

    def __init__(self, request: Request, most_likely: int | None, cancel: Callable[["Subscriber"], None]):
        """most_likely: how many tokens to tell in place of each, None for no probabilities at all."""
        self.request, self.most_likely, self._cancel = request, most_likely, cancel
        self.loop = asyncio.get_running_loop()
        self.begin = self.loop.time()
        self._told: asyncio.Queue[TokenEvent | LocalllmError | None] = asyncio.Queue()

    def tell(self, told: TokenEvent | LocalllmError | None) -> None:
        """Within the event loop; None: all answers are there."""
        self._told.put_nowait(told)

    async def events(self) -> AsyncIterator[TokenEvent]:
        """All that is told, until every answer has ended. Who leaves earlier stops them. Raises LocalllmError."""
        ended = False
        try:
            while (told := await self._told.get()) is not None:
                if isinstance(told, LocalllmError):
                    ended = True
                    raise told
                yield told
            ended = True
        finally:
            if not ended:
                self._cancel(self)
