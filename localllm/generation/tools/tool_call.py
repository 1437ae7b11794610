"""A tool call in an answer."""

import json
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field

from localllm.generation.reasoning import TextPart
from localllm.generation.tools.tool_call_parser import ARGUMENTS, CALL


def call_id() -> str:
    """Make the id of a call: nine letters and digits, which some templates demand."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass
class ToolCall:
    """A tool call, as far as it is generated; `pieces`, joined, are its arguments as JSON."""

    name: str
    pieces: list[str] = field(default_factory=list)
    id: str = field(default_factory=call_id)

    @property
    def text(self) -> str:
        """The arguments as JSON, which may be incomplete."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, object] | None:
        """The call's arguments; None if their JSON is incomplete or no object."""
        try:
            parsed = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else None

    def to_message(self) -> dict[str, object]:
        """Return the call as an entry of a message's tool_calls."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}


def append_part(calls: list[ToolCall], part: TextPart) -> bool:
    """Add a part of type CALL or ARGUMENTS to the calls; return whether it is one."""
    if part.kind == CALL:
        calls.append(ToolCall(part.text))
    elif part.kind == ARGUMENTS:
        calls[-1].pieces.append(part.text)
    return part.kind in (CALL, ARGUMENTS)


def complete_calls(calls: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the complete calls."""
    return [call for call in calls if call.arguments is not None]
