"""The tools that a model may call, and the results of its calls."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from localllm.errors import LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.generation.tools.tool_call_parser import ToolCall
from localllm.generation.tools.tool_grammar import Tool, ToolUse
from localllm.text.special_tokens import replace_surrogates

MAX_RESULT = 30_000  # maximum characters of a result


class ToolError(LocalllmError):
    """A failed tool call; the message is the result that the model gets."""


@frozen
class OfferedTool:
    """A tool offered to the model.

    Attributes:
        tool: its name, description and schema.  perform: runs a call with its arguments and returns the result; raises
            ToolError, OSError.
    """

    tool: Tool
    perform: Callable[[dict[str, object]], str]


class ToolResult(NamedTuple):
    """The result of a call.

    Attributes:
        text: the result for the model.  failed: whether it is an error.
    """

    text: str
    failed: bool = False


class Toolbox:
    """The tools offered to a model.

    Attributes:
        use: the value of GenerationOptions.tools.  most: maximum characters of a result; longer ones are truncated.
    """

    def __init__(
        self,
        offered: Sequence[OfferedTool],
        limit: int = MAX_RESULT,
        json_calls: bool = True,
        current: Callable[[], Sequence[OfferedTool]] | None = None,
        may_offer: Callable[[str], bool] = lambda name: False,
    ):
        """Combine tools. Raises UsageError if two have the same name.

        current: returns the tools offered at the moment; None if they never change.
        may_offer: returns whether a tool with this name may be added later.
        """
        self._current, self.may_offer, self._only = current or (lambda: offered), may_offer, frozenset[str]()
        self.most, self._json_calls = limit, json_calls
        self._offer(offered)

    def refresh(self) -> None:
        """Offer the current tools. Raises UsageError if two have the same name; LocalllmError."""
        self._offer(self._current())

    def _offer(self, tools: Sequence[OfferedTool]) -> None:
        offered = [each for each in tools if not self._only or each.tool.name in self._only]
        self._offered = {each.tool.name: each for each in offered}
        if len(self._offered) < len(offered):
            names = [each.tool.name for each in offered]
            double = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"two tools are named {double}: leave one out of --tools, or its server out of --mcp")
        self.use = ToolUse([each.tool for each in offered], json_calls=self._json_calls)

    def limit_to(self, names: Collection[str]) -> None:
        """Offer only these tools, now and later."""
        self._only = frozenset(names)
        self.refresh()

    @property
    def names(self) -> list[str]:
        return [*self._offered]

    def perform(self, call: ToolCall) -> ToolResult:
        offered, arguments = self._offered.get(call.name), call.arguments
        if offered is None:
            return ToolResult(f"error: unknown tool {call.name[:60]!r}; available: {', '.join(self.names)}", True)
        if arguments is None:
            return ToolResult("error: the arguments must be a JSON object", True)
        try:
            return ToolResult(self._truncate(offered.perform(arguments)))
        except KeyboardInterrupt:
            return ToolResult("error: the user stopped this call", True)
        except (OSError, ValueError) as error:
            return ToolResult(self._truncate(f"error: {getattr(error, 'strerror', None) or error}"), True)
        except LocalllmError as error:
            return ToolResult(self._truncate(f"error: {error}"), True)

    def _truncate(self, text: str) -> str:
        """Truncate a result to the limit, with a note."""
        text = replace_surrogates(text)
        if len(text) <= self.most:
            return text
        return f"{text[: self.most]}\n[cut: these are the first {self.most} of {len(text)} characters]"


def get_string(arguments: dict[str, object], name: str, usual: str | None = None) -> str:
    value = arguments.get(name, usual)
    if not isinstance(value, str):
        raise ToolError(f"{name} must be a string")
    return value


def get_positive_int(arguments: dict[str, object], name: str, usual: int) -> int:
    value = arguments.get(name, usual)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ToolError(f"{name} must be an integer, 1 or greater")
    return value
