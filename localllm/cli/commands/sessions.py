"""localllm sessions: list, show, search or remove saved conversations."""

from typing import Literal

from localllm.cli.options.offers import offer_sessions
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import say, say_dim, write
from localllm.cli.terminal.render import format_sessions, to_one_line
from localllm.errors import UsageError


def sessions(
    action: Literal["list", "show", "search", "rm"] | None = argument(
        "[list|show|search|rm]", "List all sessions, show one, search all, or remove one.  [default: list]"
    ),
    name: str | None = argument("[NAME]", "Session to show or remove; for search, the text.", offer_sessions),
    *,
    md: bool = option("--md", "Show a session as Markdown."),
) -> None:
    """List, show, search or remove the saved sessions of `chat`.

    `search` prints the lines of messages with that text, each after the session's name and the message's number.
    Sessions are JSON Lines files in ~/.local/share/localllm/sessions.

    Examples:
      localllm sessions
      localllm sessions show trip
      localllm sessions show trip --md > trip.md
      localllm sessions search "train to Rome"
      localllm sessions rm trip
    """
    from localllm.services import sessions as kept

    if md and action != "show":
        raise UsageError("--md needs `show`: localllm sessions show NAME --md")
    if action in (None, "list"):
        lines = format_sessions()
        if not lines:
            return say_dim("no sessions yet; start one with `localllm chat --session NAME`")
        return write("\n".join(lines) + "\n")
    if not name:
        raise UsageError(
            "the text to search for is missing"
            if action == "search"
            else f"NAME is missing: give the session to {action}"
        )
    if action == "rm":
        kept.remove_session(name)
        return say_dim(f"session {name} removed")
    if action == "search":
        matches = [f"{session}:{number}: {to_one_line(line)}" for session, number, line in kept.find_sessions(name)]
        if not matches:
            return say(f"localllm: no session has {to_one_line(name)!r}")
        return write("\n".join(matches) + "\n")
    messages = kept.read_session(name).messages
    if md:
        return write(kept.format_markdown(messages, name))
    write("\n\n".join(kept.format_message(message) for message in messages) + "\n")
