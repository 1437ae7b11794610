"""The tool loop: call the functions that the model asks for and return the results, until it answers."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from localllm.errors import LocalllmError, UsageError
from localllm.generation.reasoning import TextIterator, TextPart
from localllm.generation.tools.python_tools import name_of, perform, run_alone, wait_for
from localllm.generation.tools.tool_call import ToolCall
from localllm.text.messages import Message
from localllm.values import whole_number

if TYPE_CHECKING:
    from localllm.generation.generate import Generation

RESULT = "result"  # the kind of a part with the result of a call
Permission = Callable[[ToolCall], bool]
REFUSED = "error: the user does not allow this call"


class ToolRun(TextIterator):
    """A conversation that continues until an answer calls no tool: iterate over it for the text, or over `parts`.

    Attributes:
        parts: an iterator over (kind, text): parts of answers, "call" with a tool's name, "arguments" and "result".
        messages: the answers and results so far.
        calls: the calls so far, performed or refused.  answer: the latest answer.
    """

    def __init__(
        self,
        begin: Callable[[list[Message]], "Generation"],
        tools: Sequence[object],
        max_turns: int = 8,
        permission: Permission | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Set up a run. Raises UsageError if a tool is no function.

        begin: starts the model's next answer, after the messages so far.  max_turns: most answers with calls.
        permission: returns whether a call may be performed.  loop: the event loop, of another thread, for asynchronous
        functions; None: each runs in a new one.
        """
        if no_function := next((tool for tool in tools if not callable(tool)), None):
            raise UsageError(f"run_tools needs functions as tools, not {no_function!r:.60}")
        self._functions: dict[str, Callable[..., object]] = {name_of(each): each for each in tools if callable(each)}
        self._begin, self._permission, self._most = begin, permission, whole_number("max_turns", max_turns)
        self._loop, self._is_stopped = loop, False
        self._running: Future[object] | None = None
        self.messages, self.calls = list[Message](), list[ToolCall]()
        self.answer: Generation = begin([])
        self.parts = self._run()

    @property
    def text(self) -> str:
        """The text of the latest answer, so far."""
        return self.answer.text

    @property
    def finish_reason(self) -> str:
        """Return why the latest answer ended: "stop", "length" or "interrupted"."""
        return self.answer.finish_reason

    def _run(self) -> Generator[TextPart, None, None]:
        """Run the turns. Raises LocalllmError if there are too many."""
        turns = 0
        while True:
            yield from self.answer.parts
            if self._is_stopped:
                return
            self.messages.append(self.answer.message())
            if not self.answer.calls:
                return
            turns += 1
            if turns > self._most:
                raise LocalllmError(f"the model called tools {self._most} times without answering; raise max_turns")
            for call in self.answer.calls:
                self.messages.append(self._result(call))
                if self._is_stopped:
                    return
                yield TextPart(RESULT, self.messages[-1]["content"])
            self.answer = self._begin(self.messages)

    def _result(self, call: ToolCall) -> Message:
        """Perform a call; the model is told about errors."""
        self.calls.append(call)
        if self._permission and not self._permission(call):
            text = REFUSED
        else:
            try:
                text = perform(self._functions[call.name], call, self._wait)
            except UsageError:
                raise
            except (Exception, CancelledError) as error:
                text = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}

    def _wait(self, value: Awaitable[object]) -> object:
        """Await the result of an asynchronous function; `stop` cancels it."""
        if self._loop is None:
            return run_alone(value)
        self._running = asyncio.run_coroutine_threadsafe(wait_for(value), self._loop)
        if self._is_stopped:
            self._running.cancel()
        return self._running.result()

    def stop(self) -> None:
        """Stop before the model's next step. Any thread may call this."""
        self._is_stopped = True
        self.answer.stop()
        if self._running:
            self._running.cancel()

    def close(self) -> None:
        """Stop the run."""
        self.stop()
        self.answer.close()
