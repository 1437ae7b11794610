"""Tools of MCP servers: processes that exchange JSON on stdin and stdout, or servers by HTTP (streamable HTTP).

See https://modelcontextprotocol.io. A file lists the servers, in the format of other clients: {"mcpServers": {"name":
{"command": ..., "args": [...], "env": {...}}}}, or {"url": ..., "headers": {...}} for one by HTTP. The client is the
package `mcp`, in an event loop of its own thread.
"""

import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypedDict, TypeVar, TypeVarTuple, Unpack

from localllm.errors import LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.generation.tools.tool_grammar import NOTHING, Tool
from localllm.services.remote.http import as_objects
from localllm.services.tools.box import OfferedTool, ToolError
from localllm.system.processes import PipeReader

if TYPE_CHECKING:
    from mcp.client.session import ClientSession
    from pydantic import BaseModel

START_SECONDS, CALL_SECONDS = 30.0, 120.0  # timeouts: for a server to start, and for a call
MAX_LOG = 1 << 16  # maximum bytes kept of a server's stderr
LIST_CHANGED = "notifications/tools/list_changed"
T = TypeVar("T")
A = TypeVarTuple("A")
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}")


class ServerSettings(TypedDict):
    """The command that starts an MCP server."""

    command: str
    args: list[str]
    env: dict[str, str]
    cwd: str | None


@frozen
class HttpServer:
    """The address of an MCP server, and the headers of each request."""

    url: str
    headers: Mapping[str, str]


class McpServers:
    """The running servers of a file, whose tools are named SERVER__TOOL; call close at the end."""

    def __init__(self, path: str):
        """Start the servers.

        Raises UsageError for an invalid file, LocalllmError for a server that does not respond.
        """
        servers = parse_servers(path)
        if find_spec("mcp") is None:
            raise LocalllmError("--mcp needs the package mcp: pip install 'localllm[mcp]'")
        from anyio.from_thread import start_blocking_portal

        self._tools = dict[str, list[OfferedTool]]()  # by server
        self._sessions: dict[str, ClientSession] = {}
        self._changed, self._changing = set[str](), set[str]()  # servers whose tools have changed, or may change
        self._stack = ExitStack()
        try:
            self._portal = self._stack.enter_context(start_blocking_portal())
            for name, server in servers.items():
                self._start(name, server)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, name: str, server: ServerSettings | HttpServer) -> None:
        source, target = os.pipe()
        errors = PipeReader(os.fdopen(source, "rb"), MAX_LOG, keeps_end=True)
        self._stack.callback(errors.thread.join, 1)
        log = self._stack.enter_context(os.fdopen(target, "w", encoding="utf-8", errors="replace"))

        async def on_message(message: object) -> None:
            if getattr(getattr(message, "root", message), "method", "") == LIST_CHANGED:
                self._changed.add(name)

        try:
            opened = self._portal.wrap_async_context_manager(open_session(server, log, on_message))
            self._sessions[name], may_change = self._stack.enter_context(opened)
            self._changing |= {name} if may_change else set()
            self._list_tools(name)
        except Exception as error:  # any error; the message names the server
            log.close()
            errors.thread.join(1)
            reason = errors.get_last_line()[:200] or describe_error(error)
            raise LocalllmError(f"the MCP server {name!r} does not respond: {reason}") from None

    def _list_tools(self, name: str) -> None:
        session = self._sessions[name]
        self._changed.discard(name)  # before the request, since they may change again
        self._tools[name] = [
            self._offer(name, session, tool) for tool in self._wait(list_tools, session, seconds=START_SECONDS)
        ]

    @property
    def offered(self) -> list[OfferedTool]:
        """The tools of all servers; servers that have sent `list_changed` are asked again. Raises LocalllmError."""
        for name in sorted(self._changed):
            try:
                self._list_tools(name)
            except Exception as error:
                raise LocalllmError(
                    f"the MCP server {name!r} failed to list its tools: {describe_error(error)}"
                ) from None
        return [tool for tools in self._tools.values() for tool in tools]

    def may_offer(self, tool: str) -> bool:
        """Return whether a server that announces changes may add a tool with this name."""
        return any(tool.startswith(f"{sanitize_name(name)}__") for name in self._changing)

    def _offer(self, server: str, session: "ClientSession", tool: dict[str, object]) -> OfferedTool:
        name = sanitize_name(f"{server}__{tool['name']}")[:64]

        def perform(arguments: dict[str, object]) -> str:
            return extract_result(self._wait(call_tool, session, str(tool["name"]), arguments, seconds=CALL_SECONDS))

        schema = tool.get("inputSchema")
        parameters = schema if isinstance(schema, dict) and schema else dict(NOTHING)
        return OfferedTool(Tool(name, str(tool.get("description") or ""), parameters), perform)

    def _wait(self, function: Callable[[Unpack[A]], Awaitable[T]], *arguments: *A, seconds: float) -> T:
        """Run a coroutine and return its result; Ctrl-C cancels it. Raises ToolError on timeout, and its errors."""
        future = self._portal.start_task_soon(function, *arguments)
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


def sanitize_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def parse_servers(path: str) -> dict[str, ServerSettings | HttpServer]:
    """Parse the servers of a file, by name. Raises UsageError."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise UsageError(f'{path} must contain {{"mcpServers": {{NAME: {{"command": ..., "args": [...]}}}}}}')
    return {
        name: parse_server(f"{path}: {name}", server) for name, server in servers.items() if not is_disabled(server)
    }


def is_disabled(server: object) -> bool:
    return isinstance(server, dict) and server.get("disabled") is True


def parse_server(name: str, server: object) -> ServerSettings | HttpServer:
    """Check one server and expand its environment variables. Raises UsageError."""
    if not isinstance(server, dict):
        raise UsageError(f"{name} must be an object")
    if "url" in server and "command" not in server:
        return parse_http_server(name, server)
    command, args, env = server.get("command"), server.get("args") or [], server.get("env") or {}
    if not isinstance(command, str) or not command:
        raise UsageError(f"{name}: command must be a string that is not empty")
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise UsageError(f"{name}: args must be an array of strings")
    if not isinstance(env, dict) or not all(isinstance(each, str) for each in env.values()):
        raise UsageError(f"{name}: env must be an object of strings")
    cwd = server.get("cwd")
    if cwd is not None and not isinstance(cwd, str):
        raise UsageError(f"{name}: cwd must be a string")
    return {
        "command": expand_variables(command, name),
        "args": [expand_variables(each, name) for each in args],
        "env": {key: expand_variables(value, name) for key, value in env.items()},
        "cwd": cwd and expand_variables(cwd, name),
    }


def parse_http_server(name: str, server: Mapping[str, object]) -> HttpServer:
    """Check a server by HTTP and expand its environment variables. Raises UsageError."""
    url, headers, kind = server.get("url"), server.get("headers") or {}, server.get("type", "http")
    if kind not in ("http", "streamable-http", "streamableHttp"):
        raise UsageError(f"{name}: type {kind!r} is not supported: use http (streamable HTTP), or a command")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise UsageError(f"{name}: url must begin with http:// or https://")
    if not isinstance(headers, dict) or not all(isinstance(each, str) for each in headers.values()):
        raise UsageError(f"{name}: headers must be an object of strings")
    expanded = {key: expand_variables(value, name) for key, value in headers.items()}
    return HttpServer(expand_variables(url, name), expanded)


def expand_variables(text: str, name: str) -> str:
    """Expand ${NAME}, ${env:NAME} and ${NAME:-DEFAULT}. Raises UsageError for an unset variable."""

    def get_value(match: re.Match[str]) -> str:
        text = os.environ.get(match[1], match[2])
        if text is None:
            raise UsageError(f"{name}: the environment variable {match[1]} is not set")
        return text

    return _VARIABLE.sub(get_value, text)


# ---- in the event loop


@asynccontextmanager
async def connect(server: ServerSettings | HttpServer, log: TextIO) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server, or connect to one by HTTP; yield the streams of its messages, from it and to it."""
    if isinstance(server, HttpServer):
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with (
            create_mcp_http_client(headers={**server.headers}) as client,
            streamable_http_client(server.url, http_client=client) as streams,
        ):
            yield streams[0], streams[1]
        return
    from mcp.client.stdio import StdioServerParameters, stdio_client

    async with stdio_client(StdioServerParameters(**server), log) as streams:
        yield streams[0], streams[1]


@asynccontextmanager
async def open_session(
    server: ServerSettings | HttpServer, log: TextIO, listen: Any
) -> "AsyncIterator[tuple[ClientSession, bool]]":
    """Start or reach a server and open a session; yield it and whether the server announces changes of its tools.

    log: the server's stderr.  listen: the session's message_handler.
    """
    import anyio
    from mcp.client.session import ClientSession

    async with (
        connect(server, log) as (read, write),
        ClientSession(read, write, message_handler=listen) as client,
    ):
        with anyio.fail_after(START_SECONDS):
            hello = to_json(await client.initialize())
        capabilities = hello.get("capabilities")
        tools = capabilities.get("tools") if isinstance(capabilities, dict) else None
        yield client, isinstance(tools, dict) and tools.get("listChanged") is True


async def list_tools(session: "ClientSession") -> list[dict[str, object]]:
    from mcp.types import PaginatedRequestParams

    tools, cursor = list[dict[str, object]](), None
    while True:
        params = PaginatedRequestParams(cursor=str(cursor)) if cursor else None
        page = to_json(await session.list_tools(params=params))
        tools += as_objects(page["tools"])
        cursor = page.get("nextCursor")
        if not cursor or len(tools) > 1000:
            return tools


async def call_tool(session: "ClientSession", name: str, arguments: dict[str, object]) -> dict[str, object]:
    return to_json(await session.call_tool(name, arguments))


def to_json(value: "BaseModel") -> dict[str, object]:
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


def extract_result(result: Mapping[str, object]) -> str:
    """Return a result's content as text. Raises ToolError for an error."""
    texts = [extract_text(part) for part in as_objects(result.get("content"))]
    if not texts and "structuredContent" in result:
        texts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
    text = "\n".join(texts)
    if result.get("isError"):
        raise ToolError(text or "the tool call failed")
    return text


def extract_text(part: Mapping[str, object]) -> str:
    """Return the text of a result's part, or a description if it has another type."""
    if part.get("type") == "text":
        return str(part.get("text"))
    inner = part.get("resource")
    if isinstance(inner, Mapping) and isinstance(inner.get("text"), str):
        return str(inner["text"])
    if part.get("type") == "resource_link":
        return f"[a link to {part.get('uri')}]"
    return f"[a part of type {part.get('type')}, which cannot be read]"


def describe_error(error: BaseException) -> str:
    """Return the message of an error, or of the first error in a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:200] or type(error).__name__
