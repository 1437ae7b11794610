"""Tools that a model may use, and what becomes of a call: a text for the model, never more than it has room for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from localllm.errors import LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.generation.tools.tool_call import ToolCall
from localllm.generation.tools.tool_grammar import Tool, ToolUse
from localllm.text.marker_escaping import without_surrogates

MOST = 30_000  # characters of a result


class ToolError(LocalllmError):
    """Why a tool could not do what it was called for; the model is told."""


@frozen
class OfferedTool:
    """One of them.

    Attributes:
        perform: does what a call's arguments say, and returns what comes of it. Raises ToolError, OSError.
    """

    tool: Tool
    perform: Callable[[dict[str, Any]], str]


class Outcome(NamedTuple):
    """What came of a call.

    Attributes:
        text: that the model gets.  failed: whether it is a reason why nothing came.
    """

    text: str
    failed: bool = False


class Toolbox:
    """All that are offered.

    Attributes:
        use: what an answer's options have.  most: characters of a result.
    """

    def __init__(self, offered: Sequence[OfferedTool], most: int = MOST, json_calls: bool = True):
        """Raises UsageError for two of a name."""
        self._offered = {each.tool.name: each for each in offered}
        if len(self._offered) < len(offered):
            names = [each.tool.name for each in offered]
            raise UsageError(f"two tools are called {next(name for name in names if names.count(name) > 1)}")
        self.most = most
        self.use = ToolUse([each.tool for each in offered], json_calls=json_calls)

    def without(self, names: Sequence[str]) -> "Toolbox":
        """The same but for some."""
        offered = [each for name, each in self._offered.items() if name not in names]
        return Toolbox(offered, self.most, self.use.json_calls)

    @property
    def names(self) -> list[str]:
        return [*self._offered]

    def perform(self, call: ToolCall) -> Outcome:
        """What comes of a call; Ctrl-C ends it."""
        offered, arguments = self._offered.get(call.name), call.arguments
        if offered is None:
            return Outcome(f"error: there is no tool {call.name[:60]!r}", True)
        if arguments is None:
            return Outcome("error: the arguments are no JSON object", True)
        try:
            return Outcome(self._within(offered.perform(arguments)))
        except KeyboardInterrupt:
            return Outcome("error: the user has stopped it", True)
        except (OSError, ValueError) as error:
            return Outcome(self._within(f"error: {getattr(error, 'strerror', None) or error}"), True)
        except LocalllmError as error:
            return Outcome(self._within(f"error: {error}"), True)

    def _within(self, text: str) -> str:
        """As much of a text as there may be, and how much that is."""
        text = without_surrogates(text)
        if len(text) <= self.most:
            return text
        return f"{text[: self.most]}\n[cut: these are the first {self.most} of {len(text)} characters]"


def text_in(arguments: dict[str, Any], name: str, usual: str | None = None) -> str:
    """An argument that is a text. Raises ToolError."""
    value = arguments.get(name, usual)
    if not isinstance(value, str):
        raise ToolError(f"{name} should be a text")
    return value


def number_in(arguments: dict[str, Any], name: str, usual: int) -> int:
    """An argument that is a whole number, 1 or above. Raises ToolError."""
    value = arguments.get(name, usual)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ToolError(f"{name} should be a whole number, 1 or above")
    return value
