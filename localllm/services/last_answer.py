"""Save the latest conversation of `localllm run` in the user's state folder, for --continue.

The file has the format of a session (see sessions.py, which writing does not import). Every answer replaces it.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import LocalllmError
from localllm.files.safe_file import create_private_folder
from localllm.system.files import get_user_folder, replace_file

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.scheduler import Generation
    from localllm.services.remote.model import RemoteGeneration, RemoteModel
    from localllm.text.messages import Message

MAX_BYTES = 16 << 20  # longer conversations are not saved
VERSION = 1  # of the session format
AT_ENDPOINT = "endpoint "  # prefix of the fingerprint of a server's model


def get_path() -> Path:
    return get_user_folder("state") / "last-answer.jsonl"


def save_conversation(model: "Model | RemoteModel", messages: "Sequence[Message]") -> str:
    """Replace the saved conversation (without fsync), unless a message's content is not a string.

    Return a warning if writing fails while an older file exists, since --continue would continue that one.
    """
    if not all(isinstance(message.get("content"), str) for message in messages):
        return ""
    location = os.path.abspath(model.path) if model.file else model.path
    fingerprint = "" if model.file else f"{AT_ENDPOINT}{model.name}"
    about = {"name": model.name or os.path.basename(location), "path": location, "fingerprint": fingerprint}
    header = {"session": VERSION, "created": time.strftime("%Y-%m-%d %H:%M"), "model": about, "settings": {}}
    data = b"".join(json.dumps(line).encode() + b"\n" for line in (header, *messages))
    target = get_path()
    if len(data) > MAX_BYTES:
        return ""
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        create_private_folder(target.parent)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        replace_file(str(partial), str(target))
    except (OSError, LocalllmError) as error:
        with suppress(OSError):
            partial.unlink()
        if target.exists():
            reason = getattr(error, "strerror", None) or error
            return f"this answer could not be saved ({reason}): --continue will continue an earlier one"
    return ""


def append_answer(
    question: "Sequence[Message]", between: "Sequence[Message]", answer: "Generation | RemoteGeneration"
) -> "list[Message]":
    """Return a conversation's messages including the answer, as a session stores them.

    between: tool calls and their results. Images that are not files are omitted.
    """
    tokens = answer.prompt_tokens + answer.completion_tokens
    last = {**answer.message(), "finish": answer.finish_reason, "tokens": tokens}
    return [make_image_paths_absolute(message) for message in (*question, *between, last)]


def make_image_paths_absolute(message: "Message") -> "Message":
    images = message.get("images")
    if not isinstance(images, Sequence):
        return message
    return {**message, "images": [os.path.abspath(each) for each in images if isinstance(each, str)]}
