"""Store conversations on disk: a readable JSON Lines file for each, in the user's data folder.

    {"session": 1, "created": "2026-11-22 10:34", "model": {"name": …, "path": …, "fingerprint": …}, "settings": {…}}
    {"role": "system", "content": "Be brief."}
    {"role": "user", "content": "Hi"}
    {"role": "assistant", "content": "Hello!", "finish": "stop", "tokens": 31}

Each turn is appended and flushed to disk before the next begins: a killed process loses at most the current turn, whose
incomplete line is removed later. All other changes replace the whole file.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from localllm.errors import LocalllmError, UsageError
from localllm.files.jsonl_file import encode_line
from localllm.files.safe_file import SafeFile, WriteLock, create_private_folder
from localllm.frozen import frozen
from localllm.services.last_answer import VERSION
from localllm.system.files import find_name_problem, get_user_folder, open_file, sync_file
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.files.gguf.file import GGUFFile

SessionLine = Message  # may also have `finish` (the finish_reason) and `tokens` (of the context so far)
NAME = re.compile(r"\w(?:[\w .-]{0,58}\w)?")  # without slashes; in UTF-8 below the limit of 255 bytes for file names
ENDING = ".jsonl"
ROLES = ("system", "user", "assistant", "tool")


@frozen
class SessionModel:
    """The model of a session; fingerprint: identifies its weights, regardless of the path."""

    name: str = ""
    path: str = ""
    fingerprint: str = ""

    def is_same(self, other: "SessionModel") -> bool:
        """Return whether both models have the same weights; without fingerprints, the same path."""
        if self.fingerprint and other.fingerprint:
            return self.fingerprint == other.fingerprint
        return os.path.realpath(self.path) == os.path.realpath(other.path)


@dataclass
class SavedChat:
    """The content of a session's file.

    Attributes:
        model: the model in use.  settings: options by name.  created: date and time.  messages: in order.
        trunk: the original session from which this one was branched, or "".
    """

    model: SessionModel = field(default_factory=SessionModel)
    settings: dict[str, object] = field(default_factory=dict)
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))
    messages: list[SessionLine] = field(default_factory=list)
    trunk: str = ""

    def serialize(self) -> bytes:
        header = {"session": VERSION, "created": self.created, "model": asdict(self.model), "settings": self.settings}
        trunk = {"trunk": self.trunk} if self.trunk else {}
        return b"".join(encode_line(line) for line in ({**header, **trunk}, *self.messages))


@frozen
class ListedSession:
    """A session in a list; damage: why it cannot be read, or ""."""

    name: str
    used: float  # seconds since 1970
    chat: SavedChat
    damage: str = ""


def get_folder() -> Path:
    return get_user_folder("data") / "sessions"


def get_path(name: str) -> Path:
    if not NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is not a valid session name; use up to 60 letters, digits, spaces and . _ -")
    if problem := find_name_problem(name + ENDING):
        raise UsageError(f"{name!r} is not a valid session name: {problem}")
    return get_folder() / (name + ENDING)


def has_session(name: str) -> bool:
    return get_path(name).is_file()


def read_session(name: str) -> SavedChat:
    """Read a session, without an incomplete last turn.

    Raises UsageError, which names the damaged line, and LocalllmError.
    """
    return parse_session(_read_content(get_path(name), name), f"the session {name!r}")[0]


def _read_content(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"session {name!r} not found; `localllm sessions` lists them") from None
    except OSError as error:
        raise LocalllmError(f"the session {name!r} cannot be read: {error.strerror}") from None


def parse_session(data: bytes, subject: str) -> tuple[SavedChat, int]:
    """Parse a file; return the conversation and the length of its complete turns in bytes.

    Raises UsageError, which names the line. A line without its end, and a question without an answer, belong to an
    incomplete turn.
    """
    *lines, torn = data.split(b"\n")
    if torn and _parse_object(torn) is not None:  # complete, for example after manual editing
        lines.append(torn)
    header = _parse_object(lines[0]) if lines else None
    if header is None or header.get("session") != VERSION:
        raise UsageError(f"{subject} is damaged: line 1 is not a session header")
    chat, length, complete = _parse_header(header, subject), 0, 0
    for number, line in enumerate(lines, 1):
        length = min(length + len(line) + 1, len(data))
        if number > 1:
            chat.messages.append(_parse_message(line, number, subject))
        if number == 1 or chat.messages[-1]["role"] != "user":
            complete = length
    if chat.messages and chat.messages[-1]["role"] == "user":
        chat.messages.pop()
    return chat, complete


def _parse_header(header: SessionLine, subject: str) -> SavedChat:
    try:
        settings = dict(header["settings"])
        model, created, trunk = SessionModel(**header["model"]), str(header["created"]), str(header.get("trunk", ""))
        return SavedChat(model, settings, created, trunk=trunk)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{subject} is damaged: line 1 is not a session header") from None


def _parse_message(line: bytes, number: int, subject: str) -> SessionLine:
    message = _parse_object(line)
    is_text = (
        message is not None and isinstance(message.get("content"), str) and is_path_list(message.get("images", []))
    )
    roles = ROLES if number == 2 else ROLES[1:]
    if message is None or not is_text or message.get("role") not in roles:
        raise UsageError(f"{subject} is damaged: line {number} is not a message")
    return message


def is_path_list(value: object) -> bool:
    """Return whether a value is a message's list of image paths."""
    return isinstance(value, list) and all(isinstance(path, str) for path in value)


def _parse_object(line: bytes) -> SessionLine | None:
    """Parse the object in a line; return None for anything else."""
    with suppress(ValueError, RecursionError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


class SessionFile:
    """A session locked for writing; a context manager, or call close.

    Attributes:
        name: name of the session.  chat: the file's content.  is_new: whether the file did not exist.
        lost: whether an incomplete last turn was removed.  is_written: False after a failed write.
    """

    def __init__(self, name: str):
        """Open or create a session.

        Raises UsageError for an invalid name, a damaged file or one that is open in another chat; LocalllmError.
        """
        self.name, self._path = name, get_path(name)
        self.is_written = True
        create_private_folder(get_folder())
        self._only = WriteLock(str(self._path))
        try:
            self._only.__enter__()
        except UsageError:
            raise UsageError(f"session {name!r} is open in another chat") from None
        try:
            self.is_new = not self._path.exists()
            self.chat, self.lost = SavedChat(), False
            if not self.is_new:
                data = _read_content(self._path, name)
                self.chat, complete = parse_session(data, f"the session {name!r}")
                self.lost = complete < len(data)
                if self.lost or not data.endswith(b"\n"):
                    self.rewrite()
                with suppress(OSError):
                    os.utime(self._path)  # so that it is listed first
        except BaseException:
            self.close()
            raise

    def write(self, messages: Sequence[SessionLine]) -> None:
        """Save the conversation: append new messages, or replace the file if old ones changed.

        Raises LocalllmError if writing fails; the file is then unchanged.
        """
        old, self.chat.messages = self.chat.messages, list(messages)
        if not self.is_written or not self._path.exists() or old != self.chat.messages[: len(old)]:
            return self.rewrite()
        new = b"".join(encode_line(message) for message in messages[len(old) :])
        self.is_written = not new
        try:
            if new:
                _append(self._path, new)
        except OSError as error:
            raise LocalllmError(f"the session {self.name!r} cannot be written: {error.strerror}") from None
        self.is_written = True

    def rewrite(self) -> None:
        """Replace the whole file atomically. Raises LocalllmError."""
        self.is_written = False
        create_private_folder(get_folder())
        with SafeFile(self._path) as file:
            file.write(self.chat.serialize())
        self.is_written = True

    def close(self) -> None:
        self._only.__exit__()

    def __enter__(self) -> "SessionFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _append(path: Path, data: bytes) -> None:
    """Append data and flush it to disk; on failure, remove what was written. Raises OSError."""
    descriptor = open_file(path, os.O_WRONLY | os.O_APPEND)
    try:
        size, remaining = os.fstat(descriptor).st_size, memoryview(data)
        try:
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            sync_file(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def list_names() -> list[str]:
    """List the names of all sessions, most recent first."""
    return [name for _, name in sorted(_iter_files(), reverse=True)]


def list_branches(name: str) -> list[str]:
    """List the names of all sessions with the same trunk as this one, including itself."""
    trunks = {each: _read_trunk(each) for each in list_names()}
    trunk_here = trunks.get(name, name)
    return sorted({name, *(each for each, trunk in trunks.items() if trunk == trunk_here)})


def _read_trunk(name: str) -> str:
    """Read the trunk from a session's first line, or return its own name."""
    with suppress(OSError), open(get_path(name), "rb") as file:
        return str((_parse_object(file.readline()) or {}).get("trunk") or name)
    return name


def _iter_files() -> Iterable[tuple[float, str]]:
    """Yield the modification time and name of each session."""
    try:
        items = list(os.scandir(get_folder()))
    except OSError:
        return
    for item in items:
        name = item.name.removesuffix(ENDING)
        with suppress(OSError):  # removed since it was listed
            if name != item.name and NAME.fullmatch(name) and item.is_file():
                yield item.stat().st_mtime, name


def list_sessions() -> list[ListedSession]:
    """List all sessions, most recent first."""
    listed = []
    for last_used, name in sorted(_iter_files(), reverse=True):
        try:
            listed.append(ListedSession(name, last_used, read_session(name)))
        except LocalllmError as error:
            listed.append(ListedSession(name, last_used, SavedChat(), str(error)))
    return listed


def find_latest_name() -> str:
    """Return the name of the most recent session. Raises UsageError without sessions."""
    recent = list_names()
    if not recent:
        raise UsageError("there are no sessions yet; start one with `localllm chat --session NAME` or /save NAME")
    return recent[0]


def remove_session(name: str) -> None:
    """Delete a session. Raises UsageError if it does not exist or is open in a chat; LocalllmError."""
    path = get_path(name)
    _read_content(path, name)
    try:
        with WriteLock(str(path)):
            path.unlink()
    except UsageError:
        raise UsageError(f"session {name!r} is open in another chat") from None
    except OSError as error:
        raise LocalllmError(f"the session {name!r} cannot be removed: {error.strerror}") from None


def rename_session(name: str, new_name: str) -> None:
    """Rename a session; its branches stay its branches.

    Raises UsageError if it does not exist, if the new name is taken, or if a chat has one of them open; LocalllmError.
    """
    if new_name == name:
        return
    with SessionFile(name) as old, SessionFile(new_name) as new:
        if old.is_new:
            raise UsageError(f"session {name!r} not found; `localllm sessions` lists them")
        if not new.is_new:
            raise UsageError(f"session {new_name!r} already exists; choose another name")
        new.chat = old.chat
        if len(list_branches(name)) > 1:
            new.chat.trunk = old.chat.trunk or name
        new.rewrite()
        try:
            get_path(name).unlink()
        except OSError as error:
            raise LocalllmError(f"the session {name!r} cannot be removed: {error.strerror}") from None


def search_names(query: str) -> list[str]:
    """List the sessions whose name and messages contain all words of a query, regardless of case, latest first."""
    words = query.casefold().split()
    matches = []
    for listed in list_sessions():
        text = "\n".join([listed.name, *(message["content"] for message in listed.chat.messages)]).casefold()
        if all(word in text for word in words):
            matches.append(listed.name)
    return matches


def select_visible_fields(messages: Sequence[SessionLine]) -> list[SessionLine]:
    """Return messages with only the fields that chat templates may use."""
    field_names = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "images")
    return [{name: message[name] for name in field_names if name in message} for message in messages]


def format_message(message: SessionLine) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [f"{function['name']} {function['arguments']}" for function in functions]
    return f"{message['role']}: " + "\n".join(filter(None, [message["content"], *calls]))


def format_markdown(messages: Sequence[SessionLine], title: str) -> str:
    """Format a conversation as a Markdown document, with a heading for each message."""
    blocks = [f"# {title}"]
    for message in messages:
        blocks.append(f"## {message['role'].capitalize()}")
        if reasoning := message.get("reasoning_content"):
            blocks.append("\n".join(f"> {line}".rstrip() for line in reasoning.strip().splitlines()))
        blocks += [f"![image]({quote(path)})" for path in message.get("images", ())]
        if message["content"].strip():
            blocks.append(message["content"].strip("\n"))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            blocks.append(f"```json\n{function['name']} {function['arguments']}\n```")
    return "\n\n".join(blocks) + "\n"


def find_sessions(text: str) -> list[tuple[str, int, str]]:
    """Find messages that contain a text, ignoring case; return (session, message number, line) for each line."""
    wanted = text.casefold()
    return [
        (listed.name, number, f"{message['role']}: {line.strip()}")
        for listed in list_sessions()
        for number, message in enumerate(listed.chat.messages, 1)
        for line in message["content"].splitlines()
        if wanted in line.casefold()
    ]


def describe_model(file: "GGUFFile") -> SessionModel:
    """Describe a model for a session file: its own name, or else its file's."""
    name = file.metadata.get("general.name")
    stem = Path(file.path).name.removesuffix(".gguf")
    return SessionModel(
        name if isinstance(name, str) and name else stem, os.path.abspath(file.path), compute_fingerprint(file)
    )


def compute_fingerprint(file: "GGUFFile") -> str:
    """Hash a model's tensors: shapes, formats and samples of the data. Return 16 hexadecimal digits."""
    import hashlib

    from localllm.engine.prefix_store import sample_bytes

    key = hashlib.blake2b(digest_size=8)
    for name, tensor in file.tensors.items():
        key.update(f"{name} {tensor.format.name} {tensor.shape} ".encode() + sample_bytes(tensor.data.reshape(-1)))
    return key.hexdigest()
