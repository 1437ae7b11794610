"""Pass the events of a response from the worker's thread to the event loop that sends it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from localllm.errors import LocalllmError
from localllm.generation.logprobs import LikelyToken
from localllm.generation.reasoning import TextPart
from localllm.generation.request import Request


class TokenEvent(NamedTuple):
    """A token was generated.

    Attributes:
        number: index of the choice.  parts: text that became complete with this token.
        logprob: log probability of the token, if requested and if it is part of the response's text.
        finish_reason: "stop" or "length" if it is the last, else "".
    """

    number: int
    parts: tuple[TextPart, ...]
    logprob: LikelyToken | None
    finish_reason: str


class Subscriber:
    """The client of one request, in an event loop.

    Attributes:
        request: the request.  begin: when it was received, by the event loop's clock.
    """

    def __init__(self, request: Request, top_logprobs: int | None, cancel: Callable[["Subscriber"], None]):
        """Subscribe to a request.

        top_logprobs: alternatives to report for each token, None for no log probabilities.
        """
        self.request, self.top_logprobs, self._cancel = request, top_logprobs, cancel
        self.loop = asyncio.get_running_loop()
        self.begin = self.loop.time()
        self._events: asyncio.Queue[TokenEvent | LocalllmError | None] = asyncio.Queue()

    def publish(self, event: TokenEvent | LocalllmError | None) -> None:
        """Add an event, called in the event loop; None: all completions have ended."""
        self._events.put_nowait(event)

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Yield events until all completions have ended; leaving early cancels them.

        Raises LocalllmError.
        """
        is_done = False
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, LocalllmError):
                    is_done = True
                    raise event
                yield event
            is_done = True
        finally:
            if not is_done:
                self._cancel(self)
