"""Formats derived from a chat template, and conversations that end with a partial answer.

To continue a partial answer, the template renders the conversation with a mark after the answer's content, and the text
from the mark on is cut off, as transformers does (continue_final_message of
https://huggingface.co/docs/transformers/chat_templating).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from localllm.errors import ContextError, ModelError, UsageError
from localllm.generation.conversation import PartialAnswer
from localllm.generation.options import THINK
from localllm.generation.reasoning import Tags, format_of, template_variables
from localllm.text.messages import Message
from localllm.text.special_tokens import BREAK

if TYPE_CHECKING:
    from collections.abc import Callable

    from localllm.generation.reasoning import ThinkingFormat
    from localllm.generation.tools.tool_call_format import ToolCallFormat
    from localllm.text.templates import ChatTemplate
    from localllm.text.tokenizer import Tokenizer

MARK, THOUGHT_MARK = "\ufdd4", "\ufdd5"  # noncharacters, put after the content and before the reasoning


class ChatFormat:
    """A chat template and the formats derived from it."""

    def __init__(self, template: "ChatTemplate", tokenizer: "Tokenizer"):
        self.template, self._tokenizer = template, tokenizer

    @cached_property
    def thoughts(self) -> "ThinkingFormat | None":
        """The format of the model's reasoning; None if it has none."""
        return format_of(self.template.source, self._tokenizer)

    @cached_property
    def has_thinking_choice(self) -> bool:
        """Return whether the choice of thinking changes the rendered prompt; True if rendering fails."""
        choices = (template_variables(self.template.source, think, None) for think in THINK if think != "auto")
        try:
            question = [{"role": "user", "content": "?"}]
            return len({self._tokenizer.markers.render(self.template, question, **each) for each in choices}) > 1
        except (ModelError, UsageError):  # it needs more than a question
            return True

    @cached_property
    def calls(self) -> "ToolCallFormat":
        from localllm.generation.tools.tool_messages import format_of_template

        return format_of_template(self.template, self._tokenizer)

    @cached_property
    def result_marks(self) -> tuple[str, ...]:
        """The tags that the template writes after a call's result, if they could occur in a result."""
        from localllm.generation.tools.tool_messages import marks_of_results

        return marks_of_results(self.template, self._tokenizer)


@contextmanager
def naming_long_prompts(messages: Sequence[Message], tokenizer: "Tokenizer", context: int) -> Iterator[None]:
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
    if isinstance(format, Tags) and text.lstrip().startswith(format.opens):
        inner, closing, after = text.lstrip()[len(format.opens) :].partition(format.closes)
        reasoning, text = inner.strip() if closing else inner.lstrip(), after.lstrip()
    return PartialAnswer(text if text.strip() else "", reasoning if format else "")


def render_up_to(
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
