"""A call of a tool, as an answer says it."""

import json
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from localllm.generation.reasoning import TextPart
from localllm.generation.tools.tool_call_parser import ARGUMENTS, CALL


def call_id() -> str:
    """Make the id of a call: nine letters and digits, which some templates demand."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass
class ToolCall:
    """A tool call, as far as it was written."""

    name: str
    pieces: list[str] = field(default_factory=list)
    id: str = field(default_factory=call_id)

    @property
    def text(self) -> str:
        """Return the arguments as JSON, perhaps incomplete."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Return the call's arguments, None if it was cut off."""
        try:
            given = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return given if isinstance(given, dict) else None

    def to_message(self) -> dict[str, Any]:
        """Return the call as a part of a message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}


def append_part(calls: list[ToolCall], part: TextPart) -> bool:
    """Add a part to the calls, if it belongs to one; return whether it does."""
    if part.kind == CALL:
        calls.append(ToolCall(part.text))
    elif part.kind == ARGUMENTS:
        calls[-1].pieces.append(part.text)
    return part.kind in (CALL, ARGUMENTS)


def complete_calls(calls: Iterable[ToolCall]) -> list[ToolCall]:
    """Return the complete calls."""
    return [call for call in calls if call.arguments is not None]
