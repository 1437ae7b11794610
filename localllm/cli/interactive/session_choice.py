"""Chooses the session that a chat resumes, and its model."""

import os
import sys
from collections.abc import Sequence

from localllm.cli.interactive.conversation import TerminalConversation
from localllm.cli.terminal.output import dim, is_terminal
from localllm.errors import UsageError
from localllm.services import sessions
from localllm.services.last_answer import AT_ENDPOINT
from localllm.text.messages import Message


def session_name(session: str | None, latest: bool) -> str | None:
    """Return the session that --session or --continue names, None if neither is given. Raises UsageError."""
    if session is not None and latest:
        raise UsageError("give either --session or --continue, not both")
    name = sessions.latest_name() if latest else session
    if name is not None:
        sessions.path_of(name)
        if not is_terminal(sys.stdin):
            raise UsageError("sessions need a terminal; leave out --session and --continue for piped input")
    return name


def model_of(session: str) -> str | None:
    """Return the path of a session's model, None for a new session. Raises UsageError if the file is gone."""
    if not sessions.exists(session):
        return None
    about = sessions.read(session).model
    if about.fingerprint.startswith(AT_ENDPOINT):
        raise UsageError(f"the session {session!r} was started with a server; resume it with --endpoint {about.path}")
    if about.path and not os.path.exists(about.path):
        raise UsageError(f"the model of the session {session!r} is gone: {about.path}; give another MODEL")
    return about.path or None


def start(
    conversation: TerminalConversation, session: str | None, system: str | None, first: Sequence[Message] = ()
) -> None:
    """Resume or start the session; a system message from the command line replaces the session's.

    first: messages that a new conversation begins with.
    """
    if session is not None and sessions.exists(session):
        conversation.load(session)
        dim(f"session {session} · {len(conversation.lines)} messages")
    else:
        if first:
            conversation.begin_with(first)
        if session is not None:
            conversation.save(session)
    if system is not None:
        conversation.set_system(system)
