"""Tool calls of an answer: show, confirm and run each, and return its result to the model."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Self, TextIO

from localllm.cli.terminal.output import ProgressLine, is_terminal, make_printable, say, say_dim, write
from localllm.cli.terminal.render import print_stream
from localllm.errors import LocalllmError, UsageError
from localllm.services.tools.box import Toolbox, ToolResult
from localllm.services.tools.transcript import ToolTranscript
from localllm.system.terminal import KEYBOARD_PATH, SCREEN_PATH, discard_input, use_normal_keys

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.options import GenerationOptions
    from localllm.generation.scheduler import Generation
    from localllm.generation.tools.tool_call_parser import ToolCall
    from localllm.text.messages import Message

DENIED = "error: the user does not allow this call"
ASKED, ALWAYS, NAMED, NO = "asked", "always", "yes", "no"  # how a call was permitted


class ToolCallRunner:
    """Runs the tools that a model calls, after asking the user for permission.

    Attributes:
        box: the tools that are offered.
    """

    def __init__(
        self,
        box: Toolbox,
        yes: Sequence[str],
        most_steps: int,
        keyboard: "ConsentTerminal | None",
        transcript: str | None,
    ):
        """Set up the tools; transcript: the name of a file, or None."""
        self.box, self._yes, self._always, self._most = box, {*yes}, set[str](), most_steps
        self._keyboard, self._steps = keyboard, 0
        self._path = transcript
        self._transcript: ToolTranscript | None = None

    @classmethod
    def create(
        cls, box: Toolbox, yes: Sequence[str], most_steps: int, transcript: str | None, stack: ExitStack
    ) -> Self:
        """Create a runner that asks on the terminal; without one, offer only the tools in `yes`.

        Raises UsageError for an unknown tool in `yes`, and if no tool is left.
        """
        if unknown := [name for name in yes if not (name in box.names or box.may_offer(name))]:
            raise UsageError(f"yes: unknown tool {unknown[0]!r}; available: {', '.join(box.names)}")
        keyboard = None
        if silent := [name for name in box.names if name not in yes]:
            keyboard = ConsentTerminal.open()
            if keyboard is None and len(silent) == len(box.names):
                raise UsageError(
                    f"there is no terminal to ask for consent: allow the calls with --yes {','.join(silent)}"
                )
            if keyboard is None:
                names = ",".join(silent)
                say(f"localllm: no terminal to ask for consent: {names} not offered; allow them with --yes {names}")
                box.limit_to(yes)
            else:
                stack.callback(keyboard.close)
        return cls(box, yes, most_steps, keyboard, transcript)

    def begin(self, model: "Model", options: "GenerationOptions", stack: ExitStack) -> "GenerationOptions":
        self.box.most = min(self.box.most, max(1000, model.context or self.box.most))
        if self._path is not None and self._transcript is None:
            self._transcript = stack.enter_context(ToolTranscript(self._path, model.name or str(model.path)))
        return replace(options, tools=self.box.use)

    def refresh(self, options: "GenerationOptions") -> "GenerationOptions":
        """Return the options with the current tools. Raises LocalllmError."""
        self.box.refresh()
        return replace(options, tools=self.box.use)

    def note(self, message: "Message", **fields: object) -> None:
        if self._transcript:
            self._transcript.add({**message, **fields})

    def log_question(self, messages: "Sequence[Message]") -> None:
        """Start a new question, with the step count reset."""
        self._steps = 0
        for message in messages:
            self.note(message)

    def run_calls(self, calls: "Sequence[ToolCall]") -> "list[Message]":
        """Run the calls of an answer; return their results. Raises LocalllmError after too many steps."""
        self._steps += 1
        if self._steps > self._most:
            raise LocalllmError(f"the model called tools {self._most} times without answering; raise --max-steps")
        return [self._run_call(call) for call in calls]

    def _run_call(self, call: "ToolCall") -> "Message":
        started = perf_counter()
        allowed = self._ask_permission(call)
        outcome = ToolResult(DENIED, True) if allowed == NO else self.box.perform(call)
        show_result(outcome)
        message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": outcome.text}
        seconds = round(perf_counter() - started, 3)
        self.note(message, allowed=allowed, failed=outcome.failed, seconds=seconds)
        return message

    def _ask_permission(self, call: "ToolCall") -> str:
        """Ask the user for permission unless it was given before; return ASKED, ALWAYS, NAMED or NO."""
        arguments = {} if call.arguments is None else call.arguments
        call_text = f"{call.name} {json.dumps(arguments, ensure_ascii=False)}"
        if call.name in self._yes or call.name in self._always or call.name not in self.box.names:
            say(f"localllm: tool: {call_text}")
            return NAMED if call.name in self._yes else ALWAYS
        self._keyboard = self._keyboard or ConsentTerminal.open()  # none is open yet if the tool was added later
        if self._keyboard is None:
            return NO
        answer = self._keyboard.ask(f"tool: {call_text}\nallow it? [y]es, [n]o, [a]lways {call.name}: ")
        if answer in ("a", "always"):
            self._always.add(call.name)
            return ALWAYS
        return ASKED if answer in ("y", "yes") else NO


def show_result(outcome: ToolResult) -> None:
    """Print a line about a call's result, on a terminal."""
    first, _, further = outcome.text.strip().partition("\n")
    say_dim(first[:200] if outcome.failed or not further else f"{len(outcome.text)} characters: {first[:100]} …")


class ConsentTerminal:
    """The controlling terminal, on which to ask the user even if stdin and stderr are redirected."""

    def __init__(self, keys: TextIO, screen: TextIO):
        self._keys, self._screen = keys, screen

    @classmethod
    def open(cls) -> "ConsentTerminal | None":
        """Open the terminal for questions; return None without one."""
        with ExitStack() as stack:
            try:
                keys = stack.enter_context(open(KEYBOARD_PATH, encoding="utf-8", errors="replace"))
                screen = stack.enter_context(open(SCREEN_PATH, "w", encoding="utf-8", errors="replace"))
            except OSError:
                return None
            stack.pop_all()
            return cls(keys, screen)

    def ask(self, question: str) -> str:
        with use_normal_keys():
            discard_input(self._keys)
            self._screen.write(make_printable(question))
            self._screen.flush()
            try:
                return self._keys.readline().strip().lower() or "n"
            except KeyboardInterrupt:
                self._screen.write("\n")
                return "n"

    def close(self) -> None:
        self._keys.close()
        with suppress(OSError):
            self._screen.close()


def answer_with_tools(
    model: "Model",
    question: "list[Message]",
    options: "GenerationOptions",
    tools: ToolCallRunner,
    line: ProgressLine,
    silent: bool = False,
    thoughts: bool = True,
) -> "tuple[Generation, list[Message], bool]":
    """Run all tool calls; return the final answer, the messages before it, and whether Ctrl-C interrupted it.

    If stdout is not a terminal, it gets only the final answer, not the text before calls.
    """
    tools.log_question(question)
    messages, holds = list(question), silent or not is_terminal(sys.stdout)
    while True:
        answer = model.session.chat(messages, options)
        interrupted = print_stream(answer, line, holds, thoughts)
        message = answer.message()
        tools.note(message, finish=answer.finish_reason)
        messages.append(message)
        if interrupted or not answer.calls:
            if holds and not silent and (answer.text or not interrupted):
                write(f"{answer.text}\n")
            return answer, messages[len(question) :], interrupted
        messages += tools.run_calls(answer.calls)
        options = tools.refresh(options)
