"""Conversations with local models and servers, the defaults of a model's answers, and the format of a chat template.

To continue a partial answer, the template renders the conversation with a mark after the answer's content, and the text
from the mark on is cut off, as transformers does (continue_final_message of
https://huggingface.co/docs/transformers/chat_templating).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from localllm.errors import ContextError, ModelError, UsageError
from localllm.frozen import frozen
from localllm.generation.options import OPTIONS, THINK, GenerationOptions
from localllm.generation.reasoning import TagFormat, detect_format, make_template_variables
from localllm.generation.sampling.options import map_names
from localllm.images.parts import get_text
from localllm.renamed import RenamedAttribute
from localllm.text.messages import Message
from localllm.text.special_tokens import BREAK

if TYPE_CHECKING:
    from collections.abc import Callable

    from localllm.generation.reasoning import ThinkingFormat
    from localllm.generation.tools.tool_call_format import ToolCallFormat
    from localllm.text.templates import ChatTemplate
    from localllm.text.tokenizer import Tokenizer


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

    def park(self) -> None:
        """Park this conversation's cache, because another conversation begins."""

    def leave(self) -> None:
        """Persist this conversation's cache, because the conversation ends."""

    @property
    def warning(self) -> str | None:
        """A warning about the chat template; None if there is none."""
        return None

    @property
    def is_single_turn(self) -> bool:
        return False

    def count(self, text: str) -> int:
        """Count the tokens of a string; 0 if unknown."""
        return 0

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, with the system message and the latest answer, which may be partial.

        Setting it starts another conversation.
        """
        return self._build_system() + self._build_history()

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
        return self.continue_with([{"role": "user", "content": text, **image_fields}], options)

    def continue_with(self, messages: Sequence[Message], options: GenerationOptions | None = None) -> A:
        """Continue with the next messages: a question, or results of the latest answer's tool calls."""
        options = options or GenerationOptions()
        history = [*self._stop(), *messages]
        history_left, answer = self._start_answer(self._build_system(), history, options, is_own=True)
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
        question = get_text(history[question_at]["content"])
        self._history, self._answer, self._earlier_part = history[:question_at], None, NOTHING
        return question

    def clear(self) -> None:
        """Begin a new conversation with the same system message."""
        self._history, self._answer, self._earlier_part, self.earlier = [], None, NOTHING, 0

    def _build_system(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _build_history(self) -> list[Message]:
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
        return self._build_history()

    if not TYPE_CHECKING:  # names of 0.3
        hold, go_on, answers_one_text = map(RenamedAttribute, ("park", "continue_with", "is_single_turn"))


def is_conversation(prompt: "str | list[int] | Sequence[Message]") -> bool:
    return isinstance(prompt, Sequence) and any(isinstance(item, dict) for item in prompt)


def has_calls(message: Message) -> bool:
    return isinstance(message, dict) and bool(message.get("role") == "tool" or message.get("tool_calls"))


def refuse_image(image: object) -> NoReturn:
    """Raise UsageError, because the model has no image encoder."""
    raise UsageError("this model does not accept images")


# Unset values of the options that a model's name may set, besides sampling and template variables.
UNSET_VALUES = {name: OPTIONS[name].default for name in map_names("name", OPTIONS)}
INSTRUCTION_ROLES = ("system", "developer")  # roles of a message that replaces the default system message


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

    def build_head(self, system: Sequence[Message]) -> list[Message]:
        """Return the messages before the first turn.

        system: the conversation's own system message; empty if it has none.
        """
        default = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*(system or default), *self.messages]

    def build_conversation(self, messages: Sequence[Message]) -> list[Message]:
        first = sum(map(is_instruction, messages[:1]))
        return [*self.build_head(messages[:first]), *messages[first:]]

    def fill_unset(self, defaults: "AnswerDefaults") -> "AnswerDefaults":
        """Return these defaults, completed by those of another."""
        return replace(self, options=defaults.complete(self.options))

    def complete(self, options: GenerationOptions | None) -> GenerationOptions:
        if options is None:
            return self.options
        changes = {
            name: getattr(self.options, name)
            for name, unset in UNSET_VALUES.items()
            if getattr(options, name) in (unset, [])
        }
        variables = {**self.options.template_variables, **options.template_variables}
        sampling = options.sampling.fill_unset(self.options.sampling)
        return replace(options, **{**changes, "template_variables": variables, "sampling": sampling})


def is_instruction(message: Message) -> bool:
    return isinstance(message, dict) and message.get("role") in INSTRUCTION_ROLES


MARK, THOUGHT_MARK = "\ufdd4", "\ufdd5"  # noncharacters, put after the content and before the reasoning


class ChatFormat:
    """A chat template and the formats derived from it."""

    def __init__(self, template: "ChatTemplate", tokenizer: "Tokenizer"):
        self.template, self._tokenizer = template, tokenizer

    @cached_property
    def thoughts(self) -> "ThinkingFormat | None":
        """The format of the model's reasoning; None if it has none."""
        return detect_format(self.template.source, self._tokenizer)

    @cached_property
    def has_thinking_choice(self) -> bool:
        """Return whether the choice of thinking changes the rendered prompt; True if rendering fails."""
        choices = (make_template_variables(self.template.source, think, None) for think in THINK if think != "auto")
        try:
            question = [{"role": "user", "content": "?"}]
            return len({self._tokenizer.markers.render(self.template, question, **each) for each in choices}) > 1
        except (ModelError, UsageError):  # it needs more than a question
            return True

    @cached_property
    def calls(self) -> "ToolCallFormat":
        from localllm.generation.tools.tool_messages import derive_template_format

        return derive_template_format(self.template, self._tokenizer)

    @cached_property
    def result_marks(self) -> tuple[str, ...]:
        """The tags that the template writes after a call's result, if they could occur in a result."""
        from localllm.generation.tools.tool_messages import find_result_marks

        return find_result_marks(self.template, self._tokenizer)


@contextmanager
def report_long_prompts(messages: Sequence[Message], tokenizer: "Tokenizer", context: int) -> Iterator[None]:
    """Raise ContextError instead of a template's error if the messages alone exceed the context."""
    try:
        yield
    except ModelError:
        length = sum(len(tokenizer.encode(message["content"] or "")) for message in messages)
        if length < context:
            raise
        reason = f"the prompt has over {length} tokens, but the context holds only {context} with the answer"
        raise ContextError(reason, length - context + 1) from None


def find_partial_answer(
    messages: Sequence[Message], choice: bool | None, format: "ThinkingFormat | None"
) -> PartialAnswer | None:
    """Return the text and reasoning of the last message if the answer should continue it, else None.

    choice: the caller's continue_final; None: continue an assistant's message without tool calls. The content may
    include reasoning between the model's marks. Raises UsageError.
    """
    final = messages[-1] if messages else {"role": ""}
    if choice and (final["role"] != "assistant" or final.get("tool_calls")):
        problem = "has calls" if final.get("tool_calls") else f"is of the role {final['role'][:40]!r}"
        raise UsageError(
            f"continue_final: the last message {problem}; only an assistant message with text can be continued"
        )
    if choice is False or final["role"] != "assistant" or final.get("tool_calls"):
        return None
    reasoning = next((final[name] for name in ("reasoning_content", "thinking", "reasoning") if final.get(name)), "")
    text = final["content"] or ""
    if isinstance(format, TagFormat) and text.lstrip().startswith(format.opens):
        inner, closing, after = text.lstrip()[len(format.opens) :].partition(format.closes)
        reasoning, text = inner.strip() if closing else inner.lstrip(), after.lstrip()
    return PartialAnswer(text if text.strip() else "", reasoning if format else "")


def render_partial_answer(
    render: "Callable[[Sequence[Message]], str]", messages: Sequence[Message], partial: PartialAnswer
) -> tuple[str, bool] | None:
    """Render a conversation up to the end of its partial answer.

    Returns the text and whether it includes the reasoning; None if the template does not write the answer. Strips the
    text's end if the template strips contents.
    """
    thoughts = {"reasoning_content": THOUGHT_MARK + partial.thinking} if partial.thinking else {}
    final = {"role": "assistant", "content": partial.text + MARK + " ", **thoughts}
    try:
        text, mark, after = render([*messages[:-1], final]).rpartition(MARK)
    except ModelError:
        return None
    if not mark:
        return None
    is_whole, is_stripped = not thoughts or THOUGHT_MARK in text, not after.lstrip(BREAK).startswith(" ")
    text = text.replace(THOUGHT_MARK, "")
    return (text.rstrip() if is_stripped else text), is_whole
