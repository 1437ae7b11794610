"""Conversations with local models and servers, and the defaults of a model's answers."""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.options import OPTIONS, GenerationOptions
from localllm.generation.sampling.declaration import names_for
from localllm.images.parts import texts_of
from localllm.text.messages import Message


class PartialAnswer(NamedTuple):
    """The reasoning and text of an answer before it is continued."""

    text: str = ""
    thinking: str = ""


NOTHING = PartialAnswer()


class AnswerInProgress(Protocol):
    """The methods and properties of an answer that a Conversation uses."""

    @property
    def text(self) -> str: ...

    @property
    def thinking(self) -> str: ...

    @property
    def calls(self) -> Sequence[object]: ...

    @property
    def finish_reason(self) -> str: ...

    def message(self) -> Message: ...

    def close(self) -> None: ...


A = TypeVar("A", bound=AnswerInProgress)


class Conversation(Generic[A]):
    """A conversation; subclasses start answers, of type A, in `_start_answer`.

    Attributes:
        system: the system message, or None.
        forgotten: number of turns that the latest `ask` or `chat` dropped, to fit the context.
        earlier: length, in tokens, of the stored conversation that `messages` restores from disk; set it after
            `messages`.
    """

    def __init__(self) -> None:
        self.system: str | None = None
        self.forgotten = self.earlier = 0
        self._history: list[Message] = []
        self._answer: A | None = None  # to the last message of the history; it may be in progress
        self._earlier_part = NOTHING  # the part of the latest answer that it continues

    def _start_answer(
        self, system: list[Message], history: list[Message], options: GenerationOptions, is_own: bool
    ) -> tuple[list[Message], A]:
        """Start an answer; return the turns of `history` that remain, and the answer.

        is_own: whether the answer continues this conversation.
        """
        raise NotImplementedError

    def hold(self) -> None:
        """Park this conversation's cache, because another conversation begins."""

    def leave(self) -> None:
        """Persist this conversation's cache, because the conversation ends."""

    @property
    def warning(self) -> str | None:
        """A warning about the chat template; None if there is none."""
        return None

    @property
    def answers_one_text(self) -> bool:
        return False

    def count(self, text: str) -> int:
        """Count the tokens of a string; 0 if unknown."""
        return 0

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, with the system message and the latest answer, which may be partial.

        Setting it starts another conversation.
        """
        return self._system() + self._history_with_answer()

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        self.clear()
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self._history = list(messages[has_system:])

    def ask(self, text: str, options: GenerationOptions | None = None, images: Sequence[object] = ()) -> A:
        """Ask the next question. If the conversation is too long, drop the oldest turns by default.

        images: put before the question; types as in localllm.images.opened. An interrupted answer stays in the history
        as far as it was generated; a question without any answer is removed. Raises ContextError if the question alone
        does not fit, and leaves the conversation unchanged.
        """
        image_fields = {"images": list(images)} if images else {}
        return self.go_on([{"role": "user", "content": text, **image_fields}], options)

    def go_on(self, messages: Sequence[Message], options: GenerationOptions | None = None) -> A:
        """Continue with the next messages: a question, or results of the latest answer's tool calls."""
        options = options or GenerationOptions()
        history = [*self._stop(), *messages]
        history_left, answer = self._start_answer(self._system(), history, options, is_own=True)
        self._history, self._answer, self._earlier_part = history_left, answer, NOTHING
        return answer

    def undo(self) -> str | None:
        """Remove the last question and its answer; return the question, None if there is none.

        The prefilled tokens stay cached, so the next question costs only its own tokens.
        """
        history = self._stop()
        question_at = next((place for place in reversed(range(len(history))) if history[place]["role"] == "user"), None)
        if question_at is None:
            return None
        question = texts_of(history[question_at]["content"])
        self._history, self._answer, self._earlier_part = history[:question_at], None, NOTHING
        return question

    def clear(self) -> None:
        """Begin a new conversation with the same system message."""
        self._history, self._answer, self._earlier_part, self.earlier = [], None, NOTHING, 0

    def _system(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _history_with_answer(self) -> list[Message]:
        """Return the history with the latest answer, or without an unanswered question.

        A continued answer is included from the start, even if it has only reasoning.
        """
        answer = self._answer
        if answer is None:
            return self._history
        text, reasoning = self._earlier_part.text + answer.text, self._earlier_part.thinking + answer.thinking
        if text or answer.calls or answer.finish_reason != "interrupted" or self._earlier_part is not NOTHING:
            reasoning_fields = {"reasoning_content": reasoning} if reasoning else {}
            return [*self._history, {**answer.message(), "content": text, **reasoning_fields}]
        return self._history[: len(self._history) - (self._history[-1]["role"] == "user")]

    def _stop(self) -> list[Message]:
        """Stop the latest answer and return the history with it."""
        if self._answer is not None:
            self._answer.close()
        return self._history_with_answer()


def is_conversation(prompt: "str | list[int] | Sequence[Message]") -> bool:
    return isinstance(prompt, Sequence) and any(isinstance(item, dict) for item in prompt)


def has_calls(message: Message) -> bool:
    return isinstance(message, dict) and bool(message.get("role") == "tool" or message.get("tool_calls"))


def blind(image: object) -> NoReturn:
    """Raise UsageError, because the model has no image encoder."""
    raise UsageError("this model does not accept images")


# Unset values of the options that a model's name may set, besides sampling and template variables.
UNSET = {name: OPTIONS[name].default for name in names_for("name", OPTIONS)}
INSTRUCTION = ("system", "developer")  # roles of a message that replaces the default system message


@frozen
class AnswerDefaults:
    """Defaults of a model's answers.

    Attributes:
        system: system message of conversations without one.  messages: put before the first turn.
        options: replace options that a request leaves unset.
    """

    system: str | None = None
    messages: Sequence[Message] = ()
    options: GenerationOptions = field(default_factory=GenerationOptions)

    def head(self, system: Sequence[Message]) -> list[Message]:
        """Return the messages before the first turn.

        system: the conversation's own system message; empty if it has none.
        """
        default = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*(system or default), *self.messages]

    def conversation(self, messages: Sequence[Message]) -> list[Message]:
        first = sum(map(is_instruction, messages[:1]))
        return [*self.head(messages[:first]), *messages[first:]]

    def over(self, defaults: "AnswerDefaults") -> "AnswerDefaults":
        """Return these defaults, completed by those of another."""
        return replace(self, options=defaults.complete(self.options))

    def complete(self, options: GenerationOptions | None) -> GenerationOptions:
        if options is None:
            return self.options
        changes = {
            name: getattr(self.options, name) for name, unset in UNSET.items() if getattr(options, name) in (unset, [])
        }
        variables = {**self.options.template_variables, **options.template_variables}
        sampling = options.sampling.over(self.options.sampling)
        return replace(options, **{**changes, "template_variables": variables, "sampling": sampling})


def is_instruction(message: Message) -> bool:
    return isinstance(message, dict) and message.get("role") in INSTRUCTION
