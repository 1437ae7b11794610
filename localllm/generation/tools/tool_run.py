"""The tool loop: functions are called, and the model gets their results, until it answers without a call."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from localllm.errors import LocalllmError, UsageError
from localllm.generation.reasoning import TextIterator, TextPart
from localllm.generation.tools.python_tools import name_of, perform, run_alone, wait_for
from localllm.generation.tools.tool_call import ToolCall
from localllm.text.marker_escaping import Message
from localllm.values import whole_number

if TYPE_CHECKING:
    from localllm.generation.generate import Generation

RESULT = "result"  # the kind of a part that has what a call came to
Permission = Callable[[ToolCall], bool]
REFUSED = "error: the user does not allow this call"


class ToolRun(TextIterator):
    """A conversation that continues until an answer calls no tool: iterate over it for the text, or over `parts`.

    Attributes:
        parts: to iterate over instead: (kind, text) of answers, "call" with a tool's name, "arguments" and "result".
        messages: the messages since, with calls and results; grows as it continues.
        calls: those that were performed or refused.  answer: the latest answer, a Generation.
    """

    def __init__(
        self,
        begin: Callable[[list[Message]], "Generation"],
        tools: Sequence[Any],
        max_turns: int = 8,
        permission: Permission | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Set up a run; begin: makes the model's answer to `messages`. Raises UsageError if a tool is no function.

        max_turns: the most turns with calls.  permission: whether a call may be performed.  loop: in which asynchronous
        functions run, of another thread; None for one of their own.
        """
        if no_function := next((tool for tool in tools if not callable(tool)), None):
            raise UsageError(f"run_tools needs functions as tools, not {no_function!r:.60}")
        self._functions = {name_of(function): function for function in tools}
        self._begin, self._permission, self._most = begin, permission, whole_number("max_turns", max_turns)
        self._loop, self._is_stopped = loop, False
        self._running: Future[Any] | None = None
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

    def _wait(self, value: Awaitable[Any]) -> Any:
        """Wait for what an asynchronous function returns; `stop` cancels it."""
        if self._loop is None:
            return run_alone(value)
        self._running = asyncio.run_coroutine_threadsafe(wait_for(value), self._loop)
        if self._is_stopped:
            self._running.cancel()
        return self._running.result()

    def stop(self) -> None:
        """End before the model's next step. Any thread may call it."""
        self._is_stopped = True
        self.answer.stop()
        if self._running:
            self._running.cancel()

    def close(self) -> None:
        """Stop the run."""
        self.stop()
        self.answer.close()
