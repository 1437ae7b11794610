"""The latest question of `localllm run` and its answer, in the user's state folder, for --continue.

The file is a session (see sessions.py, which is not imported to write it) without a name. Every answer replaces it.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import LocalllmError
from localllm.files.folders import make_private, state_folder
from localllm.system.files import replace

if TYPE_CHECKING:
    from localllm.api import Model

MOST_BYTES = 16 << 20  # of a conversation that is kept
VERSION = 1  # of sessions.py
AT_ENDPOINT = "endpoint "  # what the fingerprint of a server's model begins with


def path() -> Path:
    return state_folder() / "last-answer.jsonl"


def keep(model: "Model", messages: Sequence[dict[str, Any]]) -> None:
    """Replace the file; does nothing where it cannot be written. It is not synced: it is a convenience."""
    if not all(isinstance(message.get("content"), str) for message in messages):
        return
    place = os.path.abspath(model.path) if model.file else model.path
    fingerprint = "" if model.file else f"{AT_ENDPOINT}{model.name}"
    about = {"name": model.name or os.path.basename(place), "path": place, "fingerprint": fingerprint}
    header = {"session": VERSION, "created": time.strftime("%Y-%m-%d %H:%M"), "model": about, "settings": {}}
    data = b"".join(json.dumps(line).encode() + b"\n" for line in (header, *messages))
    target = path()
    if len(data) > MOST_BYTES:
        return
    own = target.with_name(f"{target.name}.{os.getpid()}")
    with suppress(OSError, LocalllmError):
        make_private(target.parent)
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        replace(str(own), str(target))


def turn(asked: Sequence[dict[str, Any]], between: Sequence[dict[str, Any]], answer: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation with its answer, as a file of it has them.

    between: tool calls and their results.  Images that are no files are left out.
    """
    used = answer.prompt_tokens + answer.completion_tokens
    last = {**answer.message(), "finish": answer.finish_reason, "tokens": used}
    return [with_paths(message) for message in (*asked, *between, last)]


def with_paths(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with absolute paths of images."""
    if "images" not in message:
        return message
    return {**message, "images": [os.path.abspath(each) for each in message["images"] if isinstance(each, str)]}
