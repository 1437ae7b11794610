"""localllm sessions: list, show or remove saved conversations."""

from typing import Literal

from localllm.cli.options.offers import offer_sessions
from localllm.cli.parameters import argument
from localllm.cli.terminal.output import say_dim, write
from localllm.cli.terminal.render import format_sessions
from localllm.errors import UsageError


def sessions(
    action: Literal["list", "show", "rm"] | None = argument(
        "[list|show|rm]", "List all sessions, show one, or remove one.  [default: list]"
    ),
    name: str | None = argument("[NAME]", "Session to show or remove.", offer_sessions),
) -> None:
    """List, show or remove the saved sessions of `chat`.

    Sessions are JSON Lines files in ~/.local/share/localllm/sessions.

    Examples:
      localllm sessions
      localllm sessions show trip
      localllm sessions rm trip
    """
    from localllm.services import sessions as kept

    if action in (None, "list"):
        lines = format_sessions()
        if not lines:
            return say_dim("no sessions yet; start one with `localllm chat --session NAME`")
        return write("\n".join(lines) + "\n")
    if name is None:
        raise UsageError(f"NAME is missing: give the session to {action}")
    if action == "rm":
        kept.remove_session(name)
        return say_dim(f"session {name} removed")
    write("\n\n".join(kept.format_message(message) for message in kept.read_session(name).messages) + "\n")
