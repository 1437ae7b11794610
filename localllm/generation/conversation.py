"""The turns of a conversation, answered by a model here or by a server."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from localllm.generation.generate import GenerationOptions
from localllm.images.parts import texts_of
from localllm.text.marker_escaping import Message


class PartialAnswer(NamedTuple):
    """The reasoning and text of an answer before it is continued."""

    text: str = ""
    thinking: str = ""


NOTHING = PartialAnswer()


class Conversation:
    """A conversation; subclasses start answers in `_start_answer`.

    Attributes:
        system: the instruction in front of the conversation, or None.
        forgotten: how many turns the latest `ask` or `chat` dropped from the conversation, to fit the context.
        earlier: how many tokens the conversation held in an earlier process, if it began there; to be set after
            `messages`. What files hold of it is not read again.
    """

    def __init__(self) -> None:
        self.system: str | None = None
        self.forgotten = self.earlier = 0
        self._history: list[Message] = []
        self._answer: Any = None  # to the last message in the history, perhaps still being said: a Generation
        self._begun = NOTHING  # of the latest answer, which goes on with it

    def _start_answer(
        self, system: list[Message], history: list[Message], options: GenerationOptions, is_own: bool
    ) -> tuple[list[Message], Any]:
        """Start an answer; return the part of the conversation that stays, and it. is_own: for this one."""
        raise NotImplementedError

    def hold(self) -> None:
        """Park this conversation's cache, because another conversation begins."""

    def leave(self) -> None:
        """Persist this conversation's cache, because it ends here."""

    @property
    def warning(self) -> str | None:
        """A warning for the user about the chat template, None if there is none."""
        return None

    @property
    def answers_one_text(self) -> bool:
        """Return whether the model answers single texts only."""
        return False

    def count(self, text: str) -> int:
        """Return how many tokens a text has; 0 if unknown."""
        return 0

    @property
    def messages(self) -> list[Message]:
        """Return the conversation so far, with the system message and the latest answer, perhaps partial.

        It can be set: then the conversation is another one.
        """
        return self._system() + self._history_with_answer()

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        self.clear()
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self._history = list(messages[has_system:])

    def ask(self, text: str, options: GenerationOptions | None = None, images: Sequence[Any] = ()) -> Any:
        """Ask the next question. If the conversation is too long, the oldest turns are dropped by default.

        images: that come before the text, as in localllm.images.opened. An interrupted answer stays in the history as
        far as it was generated; a question without any answer is withdrawn. Raises ContextError if the text alone does
        not fit; the conversation is then as before.
        """
        shown = {"images": list(images)} if images else {}
        return self.go_on([{"role": "user", "content": text, **shown}], options)

    def go_on(self, messages: Sequence[Message], options: GenerationOptions | None = None) -> Any:
        """Continue with the next messages: a question, or results of the calls in the latest answer."""
        options = options or GenerationOptions()
        history = [*self._stop(), *messages]
        kept, answer = self._start_answer(self._system(), history, options, is_own=True)
        self._history, self._answer, self._begun = kept, answer, NOTHING
        return answer

    def undo(self) -> str | None:
        """Remove the last question and its answer; return the question, None if there is none.

        The prefilled tokens stay cached, so the next question costs only its own tokens.
        """
        history = self._stop()
        asked = next((place for place in reversed(range(len(history))) if history[place]["role"] == "user"), None)
        if asked is None:
            return None
        question = texts_of(history[asked]["content"])
        self._history, self._answer, self._begun = history[:asked], None, NOTHING
        return question

    def clear(self) -> None:
        """Begin a new conversation with the same system message."""
        self._history, self._answer, self._begun, self.earlier = [], None, NOTHING, 0

    def _system(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _history_with_answer(self) -> list[Message]:
        """Return the history with the latest answer, or without an unanswered question.

        A continued answer is included from the start, even if it has only reasoning.
        """
        answer = self._answer
        if answer is None:
            return self._history
        said, thought = self._begun.text + answer.text, self._begun.thinking + answer.thinking
        if said or answer.calls or answer.finish_reason != "interrupted" or self._begun is not NOTHING:
            thoughts = {"reasoning_content": thought} if thought else {}
            return [*self._history, {**answer.message(), "content": said, **thoughts}]
        return self._history[: len(self._history) - (self._history[-1]["role"] == "user")]

    def _stop(self) -> list[Message]:
        """Stop the latest answer and return the history with it."""
        if self._answer is not None:
            self._answer.close()
        return self._history_with_answer()


def is_conversation(asked: "str | list[int] | Sequence[Message]") -> bool:
    """Return whether a prompt is messages."""
    return isinstance(asked, Sequence) and any(isinstance(item, dict) for item in asked)


def has_calls(message: Message) -> bool:
    """Return whether a message is a tool call or a result: it has calls, or the result of one."""
    return isinstance(message, dict) and bool(message.get("role") == "tool" or message.get("tool_calls"))
