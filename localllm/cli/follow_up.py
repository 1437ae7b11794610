"""Follow-up questions of `localllm run`: load the conversation that a question continues, and save the answer."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localllm.cli.open_model import warn
from localllm.cli.terminal.output import say
from localllm.errors import UsageError
from localllm.services import last_answer
from localllm.services.last_answer import AT_ENDPOINT
from localllm.services.sessions import SavedChat, SessionFile, parse_session, select_visible_fields

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.text.messages import Message


class FollowUp:
    """The conversation that `run` continues; a context manager that locks the session."""

    def __init__(self, session: str | None):
        """Open the session of this name; None: the last answer. Raises UsageError."""
        self._file = None if session is None else SessionFile(session)
        self._chat: SavedChat = read_last_conversation() if self._file is None else self._file.chat
        self._name = "the last answer" if session is None else f"the session {session!r}"
        if self._file and self._file.lost:
            warn([f"an incomplete turn at the end of {self._name} was removed"])

    def __enter__(self) -> "FollowUp":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._file.close()

    @property
    def has_messages(self) -> bool:
        return bool(self._chat.messages)

    @property
    def model(self) -> str | None:
        """The path of its model, or None. Raises UsageError for a missing file or a server's model."""
        about = self._chat.model
        if about.fingerprint.startswith(AT_ENDPOINT):
            raise UsageError(f"{self._name} is from a server; continue it with --endpoint {about.path}")
        if about.path and not os.path.exists(about.path):
            raise UsageError(f"the model of {self._name} no longer exists: {about.path}; give another MODEL")
        return about.path or None

    def append_question(self, question: "str | list[Message]") -> "list[Message]":
        """Return the conversation followed by a question, whose system message, if any, replaces the old one.

        Raises UsageError for a model that does not chat.
        """
        if isinstance(question, str):
            raise UsageError("the model takes a single text and cannot chat: leave out --continue and --session")
        earlier = select_visible_fields(self._chat.messages)
        is_newer = bool(question) and question[0]["role"] == "system"
        if is_newer and earlier and earlier[0]["role"] == "system":
            del earlier[0]
        return [question[0], *earlier, *question[1:]] if is_newer else [*earlier, *question]

    def save(self, model: "Model", messages: "Sequence[dict[str, object]]") -> None:
        """Save the conversation if it is a session. Raises LocalllmError."""
        if self._file is None:
            return
        from localllm.cli.interactive.conversation import describe_model

        old, current = self._chat, describe_model(model)
        if select_visible_fields(old.messages) == select_visible_fields(messages[: len(old.messages)]):
            messages = [*old.messages, *messages[len(old.messages) :]]
        if old.model == current:
            return self._file.write(messages)
        if old.model.path:
            say(f"localllm: {self._name} continues with another model, {current.name or current.path}")
        old.model, old.messages = current, list(messages)
        self._file.rewrite()


def read_last_conversation() -> SavedChat:
    """Read the conversation of the last answer. Raises UsageError without one."""
    try:
        data = last_answer.get_path().read_bytes()
    except OSError:
        raise UsageError("there is no answer to continue: generate one with `localllm run` first") from None
    return parse_session(data, str(last_answer.get_path()))[0]
