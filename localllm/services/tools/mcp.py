"""Tools of MCP servers: processes that speak JSON on stdin and stdout.

See https://modelcontextprotocol.io. A file lists them as for other programs: {"mcpServers": {"name": {"command": ...,
"args": [...], "env": {...}}}}. The package `mcp` speaks with them, in an event loop of its own thread.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from localllm.errors import LocalllmError, UsageError
from localllm.generation.tools.tool_grammar import NOTHING, Tool
from localllm.services.tools.box import OfferedTool, ToolError

START, SECONDS = 30.0, 120.0  # for a server to be there, and for a call
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}")


class McpServers:
    """The running servers of a file; close it.

    Attributes:
        offered: their tools, each named SERVER__TOOL.
    """

    def __init__(self, path: str):
        """Start the servers.

        Raises UsageError for an invalid file, LocalllmError for a server that does not respond.
        """
        servers = servers_of(path)
        if find_spec("mcp") is None:
            raise LocalllmError("--mcp needs the package mcp: pip install 'localllm[mcp]'")
        from anyio.from_thread import start_blocking_portal

        self.offered = list[OfferedTool]()
        self._stack = ExitStack()
        try:
            self._portal = self._stack.enter_context(start_blocking_portal())
            for name, server in servers.items():
                self._begin(name, server)
        except BaseException:
            self._stack.close()
            raise

    def _begin(self, name: str, server: dict[str, Any]) -> None:
        """Start one server and list its tools."""
        log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._stack.enter_context(log)
        try:
            session = self._stack.enter_context(self._portal.wrap_async_context_manager(open_session(server, log)))
            for tool in self._wait(tools_of, session, seconds=START):
                self.offered.append(self._offer(name, session, tool))
        except Exception as error:  # whatever it is, the user is to know which server it was
            log.seek(0)
            last = next((line.strip() for line in reversed(log.readlines()) if line.strip()), "")
            reason = last[:200] or reason_of(error)
            raise LocalllmError(f"the MCP server {name!r} does not answer: {reason}") from None

    def _offer(self, server: str, session: Any, tool: dict[str, Any]) -> OfferedTool:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{tool['name']}")[:64]

        def perform(arguments: dict[str, Any]) -> str:
            return result_text(self._wait(call_tool, session, tool["name"], arguments, seconds=SECONDS))

        schema = dict(tool.get("inputSchema") or NOTHING)
        return OfferedTool(Tool(name, tool.get("description") or "", schema), perform)

    def _wait(self, function: Any, *arguments: Any, seconds: float) -> Any:
        """Run a coroutine to its result; Ctrl-C cancels it. Raises ToolError on timeout, and what it raises."""
        future: Future[Any] = self._portal.start_task_soon(function, *arguments)
        try:
            return future.result(seconds)
        except TimeoutError:
            raise ToolError(f"no response within {seconds:.0f} seconds") from None
        finally:
            future.cancel()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def servers_of(path: str) -> dict[str, dict[str, Any]]:
    """Parse the servers of a file: command, args, env and cwd of each. Raises UsageError."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    servers = given.get("mcpServers") if isinstance(given, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise UsageError(f'{path} should have {{"mcpServers": {{NAME: {{"command": ..., "args": [...]}}}}}}')
    return {name: server_of(f"{path}: {name}", server) for name, server in servers.items() if not is_off(server)}


def is_off(server: Any) -> bool:
    return isinstance(server, dict) and server.get("disabled") is True


def server_of(name: str, server: Any) -> dict[str, Any]:
    """Check one server and expand its environment variables. Raises UsageError."""
    if not isinstance(server, dict):
        raise UsageError(f"{name} should be an object")
    if "url" in server and "command" not in server:
        raise UsageError(f"{name} has a url; only servers with a command are supported")
    command, args, env = server.get("command"), server.get("args") or [], server.get("env") or {}
    if not isinstance(command, str) or not command:
        raise UsageError(f"{name} should have a command, a string")
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise UsageError(f"{name}: args should be an array of strings")
    if not isinstance(env, dict) or not all(isinstance(each, str) for each in env.values()):
        raise UsageError(f"{name}: env should be an object of strings")
    cwd = server.get("cwd")
    if cwd is not None and not isinstance(cwd, str):
        raise UsageError(f"{name}: cwd should be a string")
    filled: dict[str, Any] = {"command": expand_variables(command, name)}
    filled["args"] = [expand_variables(each, name) for each in args]
    filled["env"] = {key: expand_variables(value, name) for key, value in env.items()}
    return {**filled, "cwd": cwd and expand_variables(cwd, name)}


def expand_variables(text: str, name: str) -> str:
    """Expand ${NAME}, ${env:NAME} and ${NAME:-else}. Raises UsageError for one that is not set."""

    def value(found: re.Match[str]) -> str:
        given = os.environ.get(found[1], found[2])
        if given is None:
            raise UsageError(f"{name}: the variable {found[1]} is not set")
        return given

    return _VARIABLE.sub(value, text)


# ---- in the event loop


def open_session(server: dict[str, Any], log: Any) -> Any:
    """Start a server and open a session with it."""
    from contextlib import asynccontextmanager

    import anyio
    from mcp.client.session import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    @asynccontextmanager
    async def session() -> Any:
        async with (
            stdio_client(StdioServerParameters(**server), log) as (read, write),
            ClientSession(read, write) as client,
        ):
            with anyio.fail_after(START):
                await client.initialize()
            yield client

    return session()


async def tools_of(session: Any) -> list[dict[str, Any]]:
    """List all tools of a server."""
    found, cursor = list[dict[str, Any]](), None
    while True:
        page = to_json(await session.list_tools(**({"cursor": cursor} if cursor else {})))
        found += page["tools"]
        cursor = page.get("nextCursor")
        if not cursor or len(found) > 1000:
            return found


async def call_tool(session: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return to_json(await session.call_tool(name, arguments))


def to_json(value: Any) -> dict[str, Any]:
    """Convert a value of the protocol for JSON."""
    result: dict[str, Any] = value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return result


def result_text(result: Mapping[str, Any]) -> str:
    """Join the texts of a result. Raises ToolError for an error."""
    texts = [text_of(part) for part in result.get("content") or ()]
    if not texts and "structuredContent" in result:
        texts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
    text = "\n".join(texts)
    if result.get("isError"):
        raise ToolError(text or "it failed")
    return text


def text_of(part: Mapping[str, Any]) -> str:
    """Return the text of a result's part, or name its type."""
    if part.get("type") == "text":
        return str(part.get("text"))
    inner = part.get("resource")
    if isinstance(inner, Mapping) and isinstance(inner.get("text"), str):
        return str(inner["text"])
    if part.get("type") == "resource_link":
        return f"[a link to {part.get('uri')}]"
    return f"[a part of type {part.get('type')}, which cannot be read]"


def reason_of(error: BaseException) -> str:
    """Return the innermost of nested errors in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:200] or type(error).__name__
