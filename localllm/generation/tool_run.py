"""Perform the tool calls of a model and return their results, until it answers without a call."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from localllm.errors import LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.generation.answer_record import TextIterator
from localllm.generation.reasoning import TextPart
from localllm.generation.tools.python_tools import await_value, get_tool_name, perform, run_in_new_loop
from localllm.generation.tools.tool_call_parser import ToolCall
from localllm.text.messages import Message
from localllm.values import require_integer

if TYPE_CHECKING:
    from localllm.generation.answer_record import AnswerRecord
    from localllm.generation.scheduler import Generation

RESULT = "result"  # type of a part with the result of a call
Permission = Callable[[ToolCall], bool]
REFUSED = "error: the user does not allow this call"


@frozen
class ToolRunRecord:
    """The data of a pickled or copied ToolRun, which cannot be continued."""

    messages: list[Message]
    calls: list[ToolCall]
    answer: "AnswerRecord"

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def finish_reason(self) -> str:
        return self.answer.finish_reason


class ToolRun(TextIterator):
    """A conversation that goes on until an answer calls no tool; iterate over it for the text, or over `parts`.

    Reading an attribute of the result, such as its text, runs it to the end if iteration has not begun.

    Attributes:
        parts: iterator over (kind, text): parts of answers, "call" with a tool's name, "arguments" and "result".
    """

    def __init__(
        self, begin: Callable[[list[Message]], "Generation"], tools: Sequence[object], max_turns: int = 8,
        permission: Permission | None = None, loop: asyncio.AbstractEventLoop | None = None,
    ):  # fmt: skip
        """Set up a run. Raises UsageError if a tool is not a function.

        begin: starts the model's next answer, after the messages of the run so far.
        max_turns: maximum number of answers with calls.
        permission: returns whether a call may be performed; None: all may.
        loop: event loop of another thread, for asynchronous functions; None: each runs in a new one.
        """
        if no_function := next((tool for tool in tools if not callable(tool)), None):
            raise UsageError(f"run_tools needs functions as tools, not {no_function!r:.60}")
        self._functions: dict[str, Callable[..., object]] = {
            get_tool_name(each): each for each in tools if callable(each)
        }
        self._begin, self._permission, self._most = begin, permission, require_integer("max_turns", max_turns)
        self._loop, self._is_stopped = loop, False
        self._running: Future[object] | None = None
        self._messages, self._calls = list[Message](), list[ToolCall]()
        self._answer: Generation = begin([])
        self.parts = self._run()

    @property
    def messages(self) -> list[Message]:
        """The messages of the run so far: answers and results of calls."""
        self.generate_rest()
        return self._messages

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far, performed or refused."""
        self.generate_rest()
        return self._calls

    @property
    def answer(self) -> "Generation":
        """The latest answer."""
        self.generate_rest()
        return self._answer

    @property
    def text(self) -> str:
        """The text of the latest answer so far."""
        return self.answer.text

    @property
    def finish_reason(self) -> str:
        """Why the latest answer ended: "stop", "length" or "interrupted"."""
        return self.answer.finish_reason

    def __reduce__(self) -> tuple[type[ToolRunRecord], tuple[Any, ...]]:
        """Pickle and deepcopy as plain data; run to the end first if iteration has not begun."""
        return ToolRunRecord, (self.messages, self.calls, self.answer)

    def _run(self) -> Generator[TextPart, None, None]:
        """Run the turns, and yield the parts of text.

        Raises LocalllmError after max_turns answers with calls.
        """
        turns = 0
        while True:
            yield from self._answer.parts
            if self._is_stopped:
                return
            self._messages.append(self._answer.message())
            if not self._answer.calls:
                return
            turns += 1
            if turns > self._most:
                raise LocalllmError(f"the model called tools {self._most} times without answering; raise max_turns")
            for call in self._answer.calls:
                self._messages.append(self._perform_call(call))
                if self._is_stopped:
                    return
                yield TextPart(RESULT, self._messages[-1]["content"])
            self._answer = self._begin(self._messages)

    def _perform_call(self, call: ToolCall) -> Message:
        """Perform a call and return the message with its result; an error becomes the result."""
        self._calls.append(call)
        if self._permission and not self._permission(call):
            text = REFUSED
        else:
            try:
                text = perform(self._functions[call.name], call, self._await_result)
            except UsageError:
                raise
            except (Exception, CancelledError) as error:
                text = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}

    def _await_result(self, value: Awaitable[object]) -> object:
        """Wait for the result of an asynchronous function, which `stop` cancels."""
        if self._loop is None:
            return run_in_new_loop(value)
        self._running = asyncio.run_coroutine_threadsafe(await_value(value), self._loop)
        if self._is_stopped:
            self._running.cancel()
        return self._running.result()

    def stop(self) -> None:
        """Stop before the model's next step. Any thread may call this."""
        self._is_stopped = True
        self._answer.stop()
        if self._running:
            self._running.cancel()

    def close(self) -> None:
        """Stop the run, and return the sequence of the latest answer."""
        self.stop()
        self._answer.close()
