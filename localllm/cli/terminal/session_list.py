"""Sessions as a list."""

from time import localtime, strftime

from localllm.cli.terminal.render import columns, one_line, terminal_width
from localllm.services import sessions

TITLE = 40  # characters of the first question


def session_lines() -> list[str]:
    """Format the sessions below a header, the latest first; empty if there are none."""
    rows: list[tuple[str, ...]] = []
    for listed in sessions.list_sessions():
        messages = listed.chat.messages
        question = next((message["content"] for message in messages if message["role"] == "user"), "")
        title = one_line(question)
        title = title if len(title) <= TITLE else f"{title[: TITLE - 1]}…"
        when = strftime("%Y-%m-%d %H:%M", localtime(listed.used))
        name = listed.chat.model.name or listed.chat.model.path
        about = (title, one_line(name)) if not listed.damage else ("damaged", "")
        rows.append((listed.name, when, str(len(messages)), *about))
    header = ("session", "last used", "messages", "first question", "model")
    return columns(header, rows, "<<><<", terminal_width()) if rows else []
