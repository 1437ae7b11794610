"""Sessions as a list."""

from time import localtime, strftime

from localllm.cli.render import one_line, table
from localllm.services import sessions

TITLE = 40  # characters of the first question


def session_lines() -> list[str]:
    """A line for each, the latest first, below a header; nothing if there are none."""
    rows: list[tuple[str, ...]] = []
    for listed in sessions.listed():
        messages = listed.chat.messages
        question = next((message["content"] for message in messages if message["role"] == "user"), "")
        title = one_line(question)
        title = title if len(title) <= TITLE else f"{title[: TITLE - 1]}…"
        when = strftime("%Y-%m-%d %H:%M", localtime(listed.used))
        name = listed.chat.model.name or listed.chat.model.path
        about = (one_line(name), title) if not listed.damage else ("", "damaged")
        rows.append((listed.name, when, str(len(messages)), *about))
    return aligned(rows) if rows else []


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Names, models and questions to the left, numbers to the right."""
    header = ("session", "last used", "messages", "model", "first question")
    models = max(len(row[3]) for row in (header, *rows))
    left = [(row[0], row[1], row[2], row[3].ljust(models)) for row in (header, *rows)]
    return [f"{line}  {row[4]}".rstrip() for line, row in zip(table(left[0], left[1:]), (header, *rows), strict=True)]
