"""Describe Python functions as tools, and call them with checked arguments."""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from localllm.errors import UsageError
from localllm.generation.constraints.schemas import Schema
from localllm.generation.tools.tool_call_parser import ToolCall
from localllm.generation.tools.tool_grammar import CHOICES, Tool, ToolUse

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):?\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(?:\s*:param\s+)?\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


def describe_tool(function_or_tool: object) -> Tool:
    """Return the description of a function, or of a tool in OpenAI's format.

    The format is {"type": "function", "function": {...}}. Raises UsageError for other values.
    """
    if isinstance(function_or_tool, Tool):
        return function_or_tool
    if isinstance(function_or_tool, Mapping):
        function = function_or_tool.get("function", function_or_tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError("tools: a tool must be a function, or an object whose function has a name")
        about, parameters = function.get("description") or "", function.get("parameters") or {"type": "object"}
        return Tool(function["name"], about, parameters, bool(function.get("strict")))
    if not callable(function_or_tool):
        raise UsageError(f"tools: a tool must be a function, or its description, not {function_or_tool!r:.60}")
    text = inspect.getdoc(function_or_tool) or ""
    return Tool(
        get_tool_name(function_or_tool), _SECTION.split(text)[0].strip(), describe_parameters(function_or_tool, text)
    )


def get_tool_name(tool: object) -> str:
    """Return the name of a tool: its attribute `name`, or the name of the function or class."""
    return str(getattr(tool, "name", None) or getattr(tool, "__name__", type(tool).__name__))


def describe_parameters(function: Callable[..., object], text: str) -> Schema:
    """Return the JSON schema of the parameters of a function.

    text: a docstring that describes them. Raises UsageError for parameters that cannot be passed by name, or types
    without a schema.
    """
    from localllm.generation.constraints.json_text import make_json_schema

    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    if kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        raise UsageError(f"tools: {get_tool_name(function)} has parameters that cannot be passed by name (*, ** or /)")
    schema = make_json_schema(function)
    if not isinstance(schema.get("properties"), dict):  # no parameters at all
        return {"type": "object", "properties": {}}
    about = parse_argument_docs(text)
    for name, parameter in schema["properties"].items():
        parameter.pop("title", None)
        if name in about:
            parameter.setdefault("description", about[name])
    return schema


def parse_argument_docs(text: str) -> dict[str, str]:
    """Return the descriptions of parameters in a docstring, by name.

    They are in the section "Args:" of Google's style, or in lines ":param name: ...".
    """
    about, name, is_inside = dict[str, str](), "", False
    for line in text.splitlines():
        if section := _SECTION.match(line.strip()):
            is_inside, name = section[1] in ("Args", "Arguments", "Parameters"), ""
        elif (match := _ARGUMENT.match(line)) and (is_inside or line.lstrip().startswith(":param")):
            name = match[1]
            about[name] = match[2].strip()
        elif name and line.strip() and line.startswith("  "):
            about[name] += " " + line.strip()
        else:
            name = ""
    return about


def make_tool_use(
    tools: Sequence[object], choice: object = "auto", parallel: bool = True, json_calls: bool = True,
    json_whitespace: bool = False, additional_properties: bool = False,
) -> ToolUse:  # fmt: skip
    """Return the ToolUse of functions, or of descriptions in OpenAI's format.

    choice: "auto", "required", "none", or the tool to call, as its name or as the function. Raises UsageError for
    invalid tools or choices.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise UsageError(f"tools must be a list of functions, not {type(tools).__name__}")
    name = choice if isinstance(choice, str) else describe_tool(choice).name
    if name not in CHOICES and name not in (names := [describe_tool(tool).name for tool in tools]):
        raise UsageError(f"tool_choice must be {', '.join(CHOICES)} or one of {', '.join(names)}, not {name[:60]!r}")
    described = [describe_tool(tool) for tool in tools]
    return ToolUse(described, name, parallel, json_calls, json_whitespace, additional_properties)


async def await_value(value: Awaitable[object]) -> object:
    """Await a value; asyncio.run accepts only coroutines."""
    return await value


def run_in_new_loop(value: Awaitable[object]) -> object:
    """Run an awaitable in a new event loop. Raises UsageError if this thread already runs one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(await_value(value))
    if inspect.iscoroutine(value):
        value.close()
    raise UsageError("a tool is asynchronous: within an event loop, use arun_tools")


def perform(
    function: Callable[..., object], call: ToolCall, run: Callable[[Awaitable[object]], object] = run_in_new_loop
) -> str:
    """Call a function with the arguments of a call, converted to its types; return the result as a string.

    A result that is not a string is returned as JSON. run: awaits the result of an asynchronous function. Raises the
    function's exceptions, and pydantic's ValidationError for invalid arguments.
    """
    from pydantic import validate_call
    from pydantic_core import to_json

    result = validate_call(function)(**(call.arguments or {}))
    if inspect.isawaitable(result):
        result = run(result)
    return result if isinstance(result, str) else to_json(result, fallback=str).decode()
