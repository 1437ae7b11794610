"""What is asked: from options, files and pipes to a prompt, and to the answer in the making."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.terminal import is_terminal, say
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.generate import Generation, GenerationOptions
    from localllm.text.plain import Message


def whole_prompt(prompt: str | None, file: str | None) -> str:
    """The text of -p, the file of -f and what is piped to stdin, with blank lines between. Raises UsageError."""
    parts = [] if prompt is None else [prompt.encode(errors="surrogateescape").decode(errors="replace")]
    if file is not None:
        parts.append(read_text(file, "the prompt"))
    if sys.stdin is not None and not is_terminal(sys.stdin):
        parts.append(text_of(sys.stdin.buffer.read()))
    text = "\n\n".join(part for part in parts if part)
    if not text:
        raise UsageError("there is no prompt: give one with -p TEXT, -f FILE or through a pipe")
    return text


def read_text(file: str, what: str) -> str:
    """A file's text. Raises UsageError, which says what it should have been."""
    try:
        return text_of(Path(file).read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {what} from {file}: {error.strerror}") from None


def text_of(data: bytes) -> str:
    """A text file's text: UTF-8, with or without a byte order mark, less the line break at its end."""
    text = data.decode("utf-8-sig", errors="replace")
    return text.removesuffix("\n").removesuffix("\r")


def request(model: "Model", text: str, system: str | None, raw: bool) -> "str | list[Message]":
    """The prompt as messages; as it is with `raw`. A template that the file does not have is worth a warning."""
    if raw:
        return text
    warn_of_template(model)
    instruction = [] if system is None else [{"role": "system", "content": system}]
    return [*instruction, {"role": "user", "content": text}]


def warn_of_template(model: "Model") -> None:
    if warning := model.session.template.warning:
        say(f"localllm: warning: {warning}; --chat-template names another, `run --raw` continues a text as it is")


def begin(model: "Model", text: str, system: str | None, raw: bool, chosen: "GenerationOptions") -> "Generation":
    """The answer to the prompt, in the making."""
    asked = request(model, text, system, raw)
    return model.session.complete(asked, chosen) if isinstance(asked, str) else model.session.chat(asked, chosen)
