"""From a conversation to the text that a model was trained to continue, by the Jinja template that its file brings.

Templates are written for Hugging Face's `apply_chat_template` and find here what they find there:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from jinja2 import TemplateSyntaxError

from localllm.errors import ModelError
from localllm.text.plain import Message
from localllm.text.sandbox import LimitError, RefusalError, compile_template, render_template

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


# What llama.cpp takes for a model without a template. Where its tokens are missing, names before what is said: base
# models have read many such conversations.
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


class ChatTemplate:
    """A compiled template. It may be rendered from several threads at once."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Raises ModelError, with the line, if the source is no valid template."""
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = compile_template(source)
        except Exception as error:  # Jinja's parser and Python's compiler both fail in many ways
            raise ModelError(f"the chat template is invalid{_place(error)}: {_reason(error)}") from None

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> Self:
        """The template of the tokenizer's file; without one, ChatML if its tokens exist and plain lines otherwise."""
        fallback = CHATML if "<|im_start|>" in tokenizer.pieces else PLAIN
        bos_token, eos_token = (
            "" if token is None else tokenizer.pieces[token] for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(tokenizer.chat_template or fallback, bos_token, eos_token)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation; with `add_generation_prompt` it ends where the assistant's message begins.

        `variables` are the template's own, such as enable_thinking. A system message that the template refuses or drops
        goes in front of the first user message instead. Raises ModelError with the template's line and reason.
        """
        variables = {**self._tokens, **variables, "add_generation_prompt": add_generation_prompt}
        folded = _without_system(messages)
        try:
            text = self._render(messages, variables)
        except RefusalError as error:
            if folded is None:
                raise _refused(error) from None
        else:
            if folded is None or messages[0]["content"].strip() in text:
                return text
        try:
            return self._render(folded, variables)
        except RefusalError as error:
            raise _refused(error) from None

    def _render(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        """One rendering. Raises ModelError and, for the caller to decide, RefusalError."""
        try:
            return render_template(self._template, {**variables, "messages": [dict(message) for message in messages]})
        except RefusalError:
            raise
        except LimitError as error:
            raise ModelError(f"the chat template was stopped{_place(error)}: {_reason(error)}") from None
        except Exception as error:  # the code in a template can raise whatever Python can
            raise ModelError(f"the chat template fails{_place(error)}: {_reason(error)}") from None


def _without_system(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation with its system message in front of the first user's; None if there are no two such messages."""
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return None
    system, user = messages[0]["content"], messages[1]["content"]
    if not isinstance(system, str) or not isinstance(user, str):
        return None
    return [{**messages[1], "content": f"{system}\n\n{user}"}, *messages[2:]]


def _refused(error: RefusalError) -> ModelError:
    return ModelError(f"the chat template refuses the conversation{_place(error)}: {_reason(error)}")


def _place(error: Exception) -> str:
    """Where in the template it happened, as far as Jinja knows."""
    if isinstance(error, TemplateSyntaxError):
        return f" in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


def _reason(error: Exception) -> str:
    """An error's message as one short line of printable characters."""
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return "".join(character if character.isprintable() else "�" for character in text)
