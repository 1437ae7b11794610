"""Conversations on disk: a file of JSON lines for each, which a person can read, in the user's data folder.

    {"session": 1, "created": "2026-11-22 10:34", "model": {"name": …, "path": …, "fingerprint": …}, "settings": {…}}
    {"role": "system", "content": "Be brief."}
    {"role": "user", "content": "Hi"}
    {"role": "assistant", "content": "Hello!", "finish": "stop", "tokens": 31}

A turn is appended in one piece and given to the disk before the next begins: whoever is killed loses at most the turn
in the making, of which a torn line may be left, which is cut off. Whatever else changes replaces the file as a whole.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import LocalllmError, UsageError
from localllm.files.folders import data_folder, make_private
from localllm.files.jsonl_file import json_line
from localllm.files.safe_file import ExclusiveWriter, SafeFile
from localllm.frozen import frozen
from localllm.system.files import name_problem, open_file, sync

if TYPE_CHECKING:
    from localllm.files.gguf.file import GGUFFile

Line = dict[str, Any]  # a message: role and content, and perhaps thinking, finish and tokens
VERSION = 1
NAME = re.compile(r"\w(?:[\w .-]{0,58}\w)?")  # its file's has less than 255 bytes, and is in no other folder
ENDING = ".jsonl"
ROLES = ("system", "user", "assistant", "tool")


@frozen
class SessionModel:
    """Which model it was; fingerprint: of its weights, the same wherever the file lies."""

    name: str = ""
    path: str = ""
    fingerprint: str = ""


@dataclass
class SavedChat:
    """What a session's file says.

    Attributes:
        model: that was talked to.  settings: options by name.  created: a date.  messages: lines, in order.
        trunk: the session that this one branched off from, or that one from another: the first. "" for none.
    """

    model: SessionModel = field(default_factory=SessionModel)
    settings: dict[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))
    messages: list[Line] = field(default_factory=list)
    trunk: str = ""

    def lines(self) -> bytes:
        """All of it as a file."""
        header = {"session": VERSION, "created": self.created, "model": asdict(self.model), "settings": self.settings}
        trunk = {"trunk": self.trunk} if self.trunk else {}
        return b"".join(json_line(line) for line in ({**header, **trunk}, *self.messages))


@frozen
class Listed:
    """A session as lists show it; damage: why it cannot be read, or ""."""

    name: str
    used: float  # seconds since 1970
    chat: SavedChat
    damage: str = ""


def folder() -> Path:
    return data_folder() / "sessions"


def path_of(name: str) -> Path:
    """Of the file of a session. Raises UsageError for what is no name."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is no name for a session: letters, digits, spaces and . _ - within, 60 at most"
        )
    if problem := name_problem(name + ENDING):
        raise UsageError(f"{name!r} is no name for a session: {problem}")
    return folder() / (name + ENDING)


def exists(name: str) -> bool:
    return path_of(name).is_file()


def read(name: str) -> SavedChat:
    """A session, less what a killed process has left at its end. Raises UsageError, naming the line; LocalllmError."""
    return parsed(_content(path_of(name), name), f"the session {name!r}")[0]


def _content(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no session {name!r}; `localllm sessions` lists them") from None
    except OSError as error:
        raise LocalllmError(f"the session {name!r} cannot be read: {error.strerror}") from None


def parsed(data: bytes, what: str) -> tuple[SavedChat, int]:
    """The conversation in a file, and how many of its bytes that is. Raises UsageError, naming the line.

    A line without its end, and a question whose answer did not come to be written, are of a turn in the making.
    """
    *lines, torn = data.split(b"\n")
    if torn and _json(torn) is not None:  # a person has edited it
        lines.append(torn)
    header = _json(lines[0]) if lines else None
    if header is None or header.get("session") != VERSION:
        raise UsageError(f"{what} is damaged: line 1 does not say what it is of")
    chat, length, whole = _with_header(header, what), 0, 0
    for number, line in enumerate(lines, 1):
        length = min(length + len(line) + 1, len(data))
        if number > 1:
            chat.messages.append(_message(line, number, what))
        if number == 1 or chat.messages[-1]["role"] != "user":
            whole = length
    if chat.messages and chat.messages[-1]["role"] == "user":
        chat.messages.pop()
    return chat, whole


def _with_header(header: Line, what: str) -> SavedChat:
    try:
        settings = dict(header["settings"])
        model, created, trunk = SessionModel(**header["model"]), str(header["created"]), str(header.get("trunk", ""))
        return SavedChat(model, settings, created, trunk=trunk)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{what} is damaged: line 1 does not say what it is of") from None


def _message(line: bytes, number: int, what: str) -> Line:
    message = _json(line)
    is_text = message is not None and isinstance(message.get("content"), str) and are_paths(message.get("images", []))
    roles = ROLES if number == 2 else ROLES[1:]
    if message is None or not is_text or message.get("role") not in roles:
        raise UsageError(f"{what} is damaged: line {number} is no message")
    return message


def are_paths(value: Any) -> bool:
    """Whether they are those of a message's images."""
    return isinstance(value, list) and all(isinstance(path, str) for path in value)


def _json(line: bytes) -> Line | None:
    """The object in a line, None if there is none."""
    with suppress(ValueError, RecursionError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


class SessionFile:
    """A session that is being talked in, by nobody else at the same time. Use it in a `with` statement, or close it.

    Attributes:
        name: its own.  conversation: what the file says.  is_new: whether there was none.
        lost: whether a turn in the making was cut off.
    """

    def __init__(self, name: str):
        """Raises UsageError for a name that is none, a damaged file or one that is open in another chat; others."""
        self.name, self._path = name, path_of(name)
        self._is_written = True  # whether the file has all of the conversation
        make_private(folder())
        self._only = ExclusiveWriter(str(self._path))
        try:
            self._only.__enter__()
        except UsageError:
            raise UsageError(f"the session {name!r} is open in another chat") from None
        try:
            self.is_new = not self._path.exists()
            self.chat, self.lost = SavedChat(), False
            if not self.is_new:
                data = _content(self._path, name)
                self.chat, whole = parsed(data, f"the session {name!r}")
                self.lost = whole < len(data)
                if self.lost or not data.endswith(b"\n"):
                    self.rewrite()
                with suppress(OSError):
                    os.utime(self._path)  # it is the latest now
        except BaseException:
            self.close()
            raise

    def write(self, messages: Sequence[Line]) -> None:
        """What the conversation is now: more of it is appended, another one replaces the file.

        Raises LocalllmError if it cannot be written; the file is then as before.
        """
        old, self.chat.messages = self.chat.messages, list(messages)
        if not self._is_written or not self._path.exists() or old != self.chat.messages[: len(old)]:
            return self.rewrite()
        new = b"".join(json_line(message) for message in messages[len(old) :])
        self._is_written = not new
        try:
            if new:
                _append(self._path, new)
        except OSError as error:
            raise LocalllmError(f"the session {self.name!r} cannot be written: {error.strerror}") from None
        self._is_written = True

    def rewrite(self) -> None:
        """All of it, at once or not at all. Raises LocalllmError."""
        self._is_written = False
        make_private(folder())
        with SafeFile(self._path) as file:
            file.write(self.chat.lines())
        self._is_written = True

    def close(self) -> None:
        """Let others have it."""
        self._only.__exit__()

    def __enter__(self) -> "SessionFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _append(path: Path, data: bytes) -> None:
    """All of it and to the disk, or nothing. Raises OSError."""
    descriptor = open_file(path, os.O_WRONLY | os.O_APPEND)
    try:
        before, rest = os.fstat(descriptor).st_size, memoryview(data)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            sync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def names() -> list[str]:
    """Of all sessions, the latest first."""
    return [name for _, name in sorted(_found(), reverse=True)]


def branches(name: str) -> list[str]:
    """All sessions that branched off from where this one did, itself among them."""
    trunks = {each: _trunk(each) for each in names()}
    own = trunks.get(name, name)
    return sorted({name, *(each for each, trunk in trunks.items() if trunk == own)})


def _trunk(name: str) -> str:
    """Where a session branched off, which its first line says; its own name if it did nowhere."""
    with suppress(OSError), open(path_of(name), "rb") as file:
        return str((_json(file.readline()) or {}).get("trunk") or name)
    return name


def _found() -> Iterable[tuple[float, str]]:
    """When each was last changed, and its name."""
    try:
        items = list(os.scandir(folder()))
    except OSError:
        return
    for item in items:
        name = item.name.removesuffix(ENDING)
        with suppress(OSError):  # it may have gone meanwhile
            if name != item.name and NAME.fullmatch(name) and item.is_file():
                yield item.stat().st_mtime, name


def listed() -> list[Listed]:
    """All sessions, the latest first."""
    found = []
    for used, name in sorted(_found(), reverse=True):
        try:
            found.append(Listed(name, used, read(name)))
        except LocalllmError as error:
            found.append(Listed(name, used, SavedChat(), str(error)))
    return found


def latest() -> str:
    """The name of the session that was talked in last. Raises UsageError if there is none."""
    found = names()
    if not found:
        raise UsageError("there is no session yet: `localllm chat --session NAME` begins one, and so does /save NAME")
    return found[0]


def remove(name: str) -> None:
    """Raises UsageError if there is none, or if a chat has it open; LocalllmError."""
    path = path_of(name)
    _content(path, name)
    try:
        with ExclusiveWriter(str(path)):
            path.unlink()
    except UsageError:
        raise UsageError(f"the session {name!r} is open in another chat") from None
    except OSError as error:
        raise LocalllmError(f"the session {name!r} cannot be removed: {error.strerror}") from None


def plain(messages: Sequence[Line]) -> list[Line]:
    """What models and templates are to see of messages."""
    known = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "images")
    return [{name: message[name] for name in known if name in message} for message in messages]


def shown(message: Line) -> str:
    """A message as it is to be read, with its calls of tools."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [f"{function['name']} {function['arguments']}" for function in functions]
    return f"{message['role']}: " + "\n".join(filter(None, [message["content"], *calls]))


def fingerprint(file: "GGUFFile") -> str:
    """What tells a model from others: shapes and formats of its tensors, and samples of them; 16 hexadecimal digits."""
    import hashlib

    from localllm.engine.memory.fingerprint import sample

    key = hashlib.blake2b(digest_size=8)
    for name, tensor in file.tensors.items():
        key.update(f"{name} {tensor.format.name} {tensor.shape} ".encode() + sample(tensor.data.reshape(-1)))
    return key.hexdigest()
