"""Hold conversations with local models and servers, and the defaults and formats of their answers.

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
    """The methods and attributes of an answer that a Conversation uses."""

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
    """A conversation with a model; subclasses implement `_start_answer`, which starts an answer of type A.

    Attributes:
        system: the system message, or None.
        forgotten: number of turns that the latest `ask` or `chat` dropped to fit the context.
        earlier: number of tokens of the conversation stored on disk that `messages` restores; set it after `messages`.
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

        is_own: whether the answer is part of this conversation. Raises ContextError if the last turn does not fit.
        """
        raise NotImplementedError

    def park(self) -> None:
        """Keep the cache of this conversation in memory while another one goes on."""

    def leave(self) -> None:
        """Write the cache of this conversation to disk when it ends."""

    @property
    def warning(self) -> str | None:
        """A warning about the chat template; None if there is none."""
        return None

    @property
    def is_single_turn(self) -> bool:
        """Return whether the model answers single questions only."""
        return False

    def count(self, text: str) -> int:
        """Return the number of tokens of a string; 0 if it is not known."""
        return 0

    @property
    def messages(self) -> list[Message]:
        """The conversation so far: the system message, the turns, and the latest answer, which may be partial.

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
        """Ask the next question; by default, the oldest turns are dropped if the conversation is too long.

        images: images before the question; types as in localllm.images.opened. An interrupted answer stays in the
        history as far as it was generated; a question without any answer is removed. Raises ContextError if the
        question alone does not fit, and leaves the conversation unchanged.
        """
        image_fields = {"images": list(images)} if images else {}
        return self.continue_with([{"role": "user", "content": text, **image_fields}], options)

    def continue_with(self, messages: Sequence[Message], options: GenerationOptions | None = None) -> A:
        """Continue with a question, or with the results of the tool calls of the latest answer."""
        options = options or GenerationOptions()
        history = [*self._stop(), *messages]
        history_left, answer = self._start_answer(self._build_system(), history, options, is_own=True)
        self._history, self._answer, self._earlier_part = history_left, answer, NOTHING
        return answer

    def undo(self) -> str | None:
        """Remove the last question and its answer; return the question, or None if the conversation is empty.

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
        """Return the system message as a list; empty without one."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _build_history(self) -> list[Message]:
        """Return the history with the latest answer, or without the last question if it has no answer.

        A continued answer is returned from its beginning, even if it has only reasoning.
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
        """Stop the latest answer; return the history with it."""
        if self._answer is not None:
            self._answer.close()
        return self._build_history()

    if not TYPE_CHECKING:  # names of 0.3
        hold, go_on, answers_one_text = map(RenamedAttribute, ("park", "continue_with", "is_single_turn"))


def is_conversation(prompt: "str | list[int] | Sequence[Message]") -> bool:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and any(isinstance(item, dict) for item in prompt)


def has_calls(message: Message) -> bool:
    """Return whether a message has tool calls or is the result of one."""
    return isinstance(message, dict) and bool(message.get("role") == "tool" or message.get("tool_calls"))


def refuse_image(image: object) -> NoReturn:
    """Raise UsageError: the model has no image encoder."""
    raise UsageError("this model does not accept images: use a model with a projector (mmproj)")


# Unset values of the options that a model's name may set, besides sampling and template variables.
UNSET_VALUES = {name: OPTIONS[name].default for name in map_names("name", OPTIONS)}
INSTRUCTION_ROLES = ("system", "developer")  # roles of a message that replaces the default system message


@frozen
class AnswerDefaults:
    """Default messages and options of a model's answers.

    Attributes:
        system: system message of conversations that have none.
        messages: messages before the first turn.
        options: values of the options that a request leaves unset.
    """

    system: str | None = None
    messages: Sequence[Message] = ()
    options: GenerationOptions = field(default_factory=GenerationOptions)

    def build_head(self, system: Sequence[Message]) -> list[Message]:
        """Return the messages before the first turn.

        system: the conversation's own system message as a list; empty if it has none.
        """
        default = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*(system or default), *self.messages]

    def build_conversation(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation with the default messages before its first turn."""
        first = sum(map(is_instruction, messages[:1]))
        return [*self.build_head(messages[:first]), *messages[first:]]

    def fill_unset(self, defaults: "AnswerDefaults") -> "AnswerDefaults":
        """Return these defaults, with options that they leave unset from other defaults."""
        return replace(self, options=defaults.complete(self.options))

    def complete(self, options: GenerationOptions | None) -> GenerationOptions:
        """Return options with the defaults in place of unset ones."""
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
    """Return whether a message replaces the default system message."""
    return isinstance(message, dict) and message.get("role") in INSTRUCTION_ROLES


MARK, THOUGHT_MARK = "\ufdd4", "\ufdd5"  # noncharacters, put after the content and before the reasoning


class ChatFormat:
    """A chat template, and the formats of reasoning and tool calls derived from it."""

    def __init__(self, template: "ChatTemplate", tokenizer: "Tokenizer"):
        self.template, self._tokenizer = template, tokenizer

    @cached_property
    def thoughts(self) -> "ThinkingFormat | None":
        """The format of the model's reasoning; None if it does not reason."""
        return detect_format(self.template.source, self._tokenizer)

    @cached_property
    def has_thinking_choice(self) -> bool:
        """Return whether turning thinking on or off changes the rendered prompt; True if rendering fails."""
        choices = (make_template_variables(self.template.source, think, None) for think in THINK if think != "auto")
        try:
            question = [{"role": "user", "content": "?"}]
            return len({self._tokenizer.markers.render(self.template, question, **each) for each in choices}) > 1
        except (ModelError, UsageError):  # it needs more than a question
            return True

    @cached_property
    def calls(self) -> "ToolCallFormat":
        """The format of the model's tool calls."""
        from localllm.generation.tools.tool_messages import derive_template_format

        return derive_template_format(self.template, self._tokenizer)

    @cached_property
    def result_marks(self) -> tuple[str, ...]:
        """The tags that the template writes after the result of a call; empty if a result cannot contain them."""
        from localllm.generation.tools.tool_messages import find_result_marks

        return find_result_marks(self.template, self._tokenizer)


@contextmanager
def report_long_prompts(messages: Sequence[Message], tokenizer: "Tokenizer", context: int) -> Iterator[None]:
    """Raise ContextError in place of an error of the template if the messages alone exceed the context."""
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

    choice: the option continue_final; None: continue an assistant's message without tool calls. The content may include
    reasoning between the model's marks. Raises UsageError if `choice` is true and the message cannot be continued.
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

    Returns the text, and whether it includes the reasoning; None if the template does not write the answer. Removes
    white space at the end if the template strips the contents of messages.
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
