"""Tools of /v1/responses: functions, also in namespaces, and custom tools, whose only argument is a string.

The model gets a flat list of functions; its calls are reported with the client's names.
"""

from collections.abc import Iterator
from json import loads
from typing import TYPE_CHECKING

from localllm.frozen import frozen
from localllm.server.fields import Body
from localllm.server.request_options import flat_name, parse_call_options, parse_function, parse_tool_choice

if TYPE_CHECKING:
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

INPUT = "input"  # the parameter of a custom tool
TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


@frozen
class Origin:
    """A tool as the client declared it; is_custom: whether it is a custom tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def parse_tools(body: Body) -> "ToolUse | None":
    """Parse the tools; those that OpenAI's servers would run are ignored. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import ToolUse

    choice, parallel = body.get("tool_choice"), body.get("parallel_tool_calls") is not False
    options, tools = parse_call_options(body), [tool for tool, _ in client_tools(body)]
    if not tools:
        return None
    if isinstance(choice, dict) and choice.get("type") not in ("function", "custom", "allowed_tools"):
        choice = None
    mode, allowed = parse_tool_choice(choice)
    return ToolUse(tools, mode, parallel, allowed=allowed, **options)


def tool_origins(body: Body) -> dict[str, Origin]:
    """Return the client's declarations of the tools, by the names that the model calls."""
    return {tool.name: origin for tool, origin in client_tools(body)}


def client_tools(body: Body) -> Iterator[tuple["Tool", Origin]]:
    """Yield the tools that the client runs. Raises UsageError."""
    for number, value in enumerate(body.get_list("tools") or ()):
        tool = Body.of(value, "tools")
        kind = tool.get_text("type") or "function"
        if kind == "function":
            yield as_function(tool)
        elif kind == "custom":
            yield as_text_function(tool)
        elif kind == "namespace":
            space = tool.require_text("name")
            for inner in tool.require_list("tools"):
                function = Body.of(inner, "tools.tools")
                yield (as_text_function if function.get("type") == "custom" else as_function)(function, space)
        else:
            body.ignore(f"tools[{number}]:{kind}")


def as_function(tool: Body, namespace: str | None = None) -> tuple["Tool", Origin]:
    parsed = parse_function(tool, namespace)
    return parsed, Origin(tool.require_text("name"), namespace)


def as_text_function(tool: Body, namespace: str | None = None) -> tuple["Tool", Origin]:
    """Parse a custom tool as a function with one parameter. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import Tool

    name, about = tool.require_text("name"), tool.get_text("description") or ""
    format = tool.get_object("format")
    if format and (grammar := format.get_text("definition")):
        about += f"\n\nThe input is of this grammar ({format.get_text('syntax') or 'lark'}):\n{grammar}"
    return Tool(flat_name(namespace, name), about, TEXT), Origin(name, namespace, is_custom=True)


def input_text(arguments: str) -> str:
    """Return the string argument of a custom tool's call; incomplete arguments are returned unchanged."""
    try:
        return str(loads(arguments)[INPUT])
    except (ValueError, TypeError, KeyError):
        return arguments


def format_call(origin: Origin, id: str, call_id: str, arguments: str, status: str) -> dict[str, object]:
    """Format a call as an output item."""
    namespace = {"namespace": origin.namespace} if origin.namespace else {}
    call_input = {"input": input_text(arguments)} if origin.is_custom else {"arguments": arguments}
    kind = "custom_tool_call" if origin.is_custom else "function_call"
    return {
        "type": kind,
        "id": id,
        "call_id": call_id,
        "name": origin.name,
        **namespace,
        **call_input,
        "status": status,
    }
