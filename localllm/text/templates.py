"""Render conversations with chat templates, in the text format that a model was trained on.

The Jinja templates in files are written for Hugging Face's `apply_chat_template`, and get the same variables:
https://huggingface.co/docs/transformers/chat_templating_writing
"""

import hashlib
import json
import re
import traceback
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from jinja2 import TemplateSyntaxError

from localllm.errors import ModelError, UsageError
from localllm.files.cache.checksummed_cache import is_recorded, record_check
from localllm.text.builtin_templates import BUILTIN_TEMPLATES, choose_template
from localllm.text.messages import ANSWERED, Message, iter_arrangements, make_system_probe
from localllm.text.sandbox import LimitError, TemplateRefusalError, compile_template, render_template

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


# Calls with which a template splits a content at a string or variable; a bracketed tag.
SPLIT_CALLS = r"(?:\.(?:r?split|r?partition|replace|removeprefix|removesuffix|r?find|r?index)|\|\s*replace)\(\s*"
TAG = r"""(["'])([<\[◁](?:(?!\1).)*[>\]▷])\1"""


def find_tags(source: str) -> re.Pattern[str]:
    """Return an expression that matches the bracketed tags, such as </think>, at which a template splits contents."""
    names = "|".join(map(re.escape, {name for name in re.findall(SPLIT_CALLS + r"([A-Za-z_]\w*)\s*[,)]", source)}))
    places = [SPLIT_CALLS + TAG, TAG + r"\s+(?:not\s+)?in\s", *([rf"\b(?:{names})\s*=\s*{TAG}"] if names else [])]
    tags = {tag for place in places for _, tag in re.findall(place, source)}
    return re.compile("|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True)) or "(?!)")


class StoppedTemplateError(ModelError):
    """A template exceeded its limits, as it would with any conversation."""


class ChatTemplate:
    """A compiled chat template, which several threads can render at once.

    Attributes:
        source: the Jinja source.
        stops: strings that end an answer in addition to the vocabulary's tokens.
        warning: one line for the user, or None.
        tags: matches the bracketed tags, such as </think>, at which the template splits contents.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Compile a template. Raises ModelError with the line if it is invalid or exceeds the limits."""
        self.source = source
        self.stops: tuple[str, ...] = ()
        self.warning: str | None = None
        self.tags = find_tags(source)
        self._kept_systems: dict[tuple[int, str], bool] = {}
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if source not in BUILTIN_TEMPLATES.values():
            require_safe_template(source)
        try:
            self._template = compile_template(source)
        except MemoryError:
            raise
        except Exception as error:  # Jinja's parser and Python's compiler raise many errors
            raise ModelError(f"the chat template is invalid{_describe_line(error)}: {_describe_error(error)}") from None

    @classmethod
    def from_tokenizer(cls, tokenizer: "Tokenizer", choice: str | None = None) -> Self:
        """Return the chosen template, or the file's default.

        choice: the name of one of the file's templates, or as in choose_template. The default of a file that has only a
        template for tools is that one. A file without any gets ChatML, as in llama.cpp, if the vocabulary has ChatML's
        tokens, otherwise "plain" ("User: ...", a format common in the training data of base models); both set
        `warning`.
        """
        named = tokenizer.chat_templates
        source = tokenizer.chat_template or named.get("tool_use")
        if choice is not None:
            source = named[choice] if choice in named else choose_template(choice)
        builtin = "chatml" if "<|im_start|>" in tokenizer.pieces else "plain"
        bos, eos = ("" if id is None else tokenizer.pieces[id] for id in (tokenizer.bos_id, tokenizer.eos_id))
        template = cls(BUILTIN_TEMPLATES[builtin] if source is None else source, bos, eos)
        if template.source == BUILTIN_TEMPLATES["plain"]:
            template.stops = ("\nUser:",)
        template.stops += tuple(text for text in tokenizer.end_texts if text in template.source)
        if source is None:
            template.warning = f"the file has no chat template: using {builtin!r}"
        return template

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object) -> str:
        """Render a conversation.

        add_generation_prompt: end with the beginning of the assistant's message. variables: of the template, such as
        enable_thinking.

        If the template refuses the conversation, or drops a system message, the arrangements of messages.py are tried
        in turn. Raises ModelError with the template's line and reason.
        """
        variables = {**variables, "add_generation_prompt": add_generation_prompt}
        refusal = None
        for arranged in iter_arrangements(messages, self.keeps_system):
            try:
                return self._render(arranged, variables)
            except (TemplateRefusalError, ModelError) as error:
                if isinstance(error, StoppedTemplateError):
                    raise
                refusal = refusal or error
        if not isinstance(refusal, TemplateRefusalError):
            raise refusal or UsageError("messages must contain at least one message")
        raise ModelError(
            f"the chat template refuses the conversation{_describe_line(refusal)}: {_describe_error(refusal)}"
        ) from None

    def keeps_system(self, at_head: int, later: str) -> bool:
        """Return whether the template renders all system messages at these positions; the result is cached.

        at_head: count of leading system messages. later: position of another one, BETWEEN, LAST, ... of messages.py; ""
        for none.
        """
        if (at_head, later) not in self._kept_systems:
            probe, marks = make_system_probe(at_head, later)
            try:
                text = self._render(probe, {"add_generation_prompt": True})
                self._kept_systems[at_head, later] = all(mark in text for mark in marks)
            except (TemplateRefusalError, ModelError):  # the probe itself fails
                self._kept_systems[at_head, later] = later == ANSWERED
        return self._kept_systems[at_head, later]

    @cached_property
    def _needs_parts(self) -> bool:
        """Return whether contents must be lists of parts, because the template drops plain strings (SmolVLM's)."""
        if "type" not in self.source:
            return False

        def shows(content: object) -> bool:
            try:
                probe = [{"role": "user", "content": content}]
                return "xyzzy" in self._render_messages(probe, {"add_generation_prompt": True})
            except (TemplateRefusalError, ModelError):
                return False

        return not shows("xyzzy") and shows([{"type": "text", "text": "xyzzy"}])

    @cached_property
    def _uses_functions(self) -> bool:
        """Return whether the template reads tools from a JSON string named `functions`, as Firefunction's does."""
        return bool(re.search(r"\bfunctions\b", self.source)) and not re.search(r"\btools\b", self.source)

    def _make_function_variables(self, tools: Any) -> dict[str, str]:
        """Return the variables `functions` and `datetime` of such a template.

        The date is without the time, which would change every prompt.
        """
        if not self._uses_functions:
            return {}
        functions = json.dumps([tool["function"] for tool in tools], indent=4, ensure_ascii=False)
        return {"functions": functions, "datetime": datetime.now().strftime("%b %d %Y")}

    def _render(self, messages: Sequence[Message], variables: dict[str, object]) -> str:
        """Render one arrangement. Raises ModelError, and TemplateRefusalError, which the caller handles."""
        return self._render_messages([*map(_to_parts, messages)] if self._needs_parts else messages, variables)

    def _render_messages(self, messages: Sequence[Message], variables: dict[str, object]) -> str:
        """Render messages whose contents have the format that the template expects. Raises like _render."""
        context = {
            **self._tokens,
            **self._make_function_variables(variables.get("tools") or ()),
            **variables,
            "messages": [_to_hugging_face(message) for message in messages],
        }
        try:
            try:
                return render_template(self._template, {"tools": None, "documents": None, **context})
            except TypeError:  # a template that iterates over `tools` fails for None, but not for an undefined variable
                return render_template(self._template, context)
        except (TemplateRefusalError, MemoryError):
            raise
        except LimitError as error:
            raise StoppedTemplateError(
                f"the chat template was stopped{_describe_line(error)}: {_describe_error(error)}"
            ) from None
        except Exception as error:  # a template's code can raise any error
            raise ModelError(f"the chat template failed{_describe_line(error)}: {_describe_error(error)}") from None


def require_safe_template(source: str) -> None:
    """Raise ModelError for a template that takes too much time or memory.

    A template that fails otherwise passes, because rendering reports that. The hash of a template that passes is
    cached, so that it is probed only once. Raises the errors of `probe_template`.
    """
    mark = hashlib.sha256(source.encode(errors="replace")).hexdigest()
    if is_recorded("template", mark):
        return
    from localllm.text.template_probe import probe_template  # once per template

    if (problem := probe_template(source)) is not None:
        raise ModelError(f"the chat template was stopped: {problem}")
    record_check("template", mark)


def _to_parts(message: Message) -> Message:
    """Return the message with a string content as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _to_hugging_face(message: Message) -> Message:
    """Copy a message in the format that Hugging Face passes to templates.

    Omits fields that are None, such as the content of a message with only tool calls. Reasoning gets both names that
    templates use, thinking and reasoning_content.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in ("reasoning_content", "thinking", "reasoning") if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _describe_line(error: Exception) -> str:
    """Return " in line N" for the template's line that raised an error; "" if it is unknown."""
    if isinstance(error, TemplateSyntaxError):
        return f" in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


def _describe_error(error: Exception) -> str:
    """Return the message of an error as one short line of printable characters."""
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return "".join(character if character.isprintable() else "�" for character in text)
