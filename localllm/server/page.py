"""Serve the web page, and the conversations that it shares with `localllm chat`.

The page is one self-contained file, which loads nothing from other sites.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.server.fields import Body
from localllm.server.http import json_response, read_json
from localllm.server.messages import parse_tool_calls
from localllm.server.service import Service
from localllm.services import sessions

FILE = Path(__file__).with_name("page.html")
MOST_MESSAGES = 10_000


@cache
def load_page() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy.

    The policy allows the page's own scripts and styles, by hash, and requests to this server only.
    """
    html = FILE.read_bytes()

    def sources(tag: str) -> str:
        elements = re.findall(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in elements)

    policy = (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


async def serve_page(service: Service, request: Request) -> Response:
    """Serve the web page."""
    data, policy = load_page()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return Response(data, 200, headers, "text/html; charset=utf-8")


async def list_sessions(service: Service, request: Request) -> Response:
    """List the names of all stored conversations, most recent first."""
    return json_response({"sessions": [{"name": name} for name in sessions.names()]})


async def read_session(service: Service, request: Request) -> Response:
    """Return one conversation's messages and model."""
    chat = sessions.read(request.path_params["name"])
    return json_response({"messages": chat.messages, "model": chat.model.name})


async def write_session(service: Service, request: Request) -> Response:
    """Store the messages of a conversation."""
    body = Body(await read_json(request, service.limits))
    messages = [parse_message(message) for message in body.require_list("messages")]
    if len(messages) > MOST_MESSAGES:
        raise UsageError(f"messages should be at most {MOST_MESSAGES}")
    if any(message["role"] == "system" for message in messages[1:]):
        raise UsageError("messages: only the first message may have the role system")
    entry = service.pool.resolve(body.get_text("model"))
    with sessions.SessionFile(request.path_params["name"]) as file:
        if file.is_new:
            file.chat.model = sessions.SessionModel(entry.name, entry.path)
        file.write(keep_stored_details(file.chat.messages, messages))
    return json_response({"name": request.path_params["name"]})


def keep_stored_details(old: list[sessions.Line], new: list[sessions.Line]) -> list[sessions.Line]:
    """Return the new messages, with the stored form of unchanged leading ones.

    `localllm chat` stores more fields with a message than the page sends, such as when it ended.
    """
    lines = list[sessions.Line]()
    for old_line, new_line in zip(old, new, strict=False):
        if sessions.visible_fields([old_line]) != sessions.visible_fields([new_line]):
            break
        lines.append(old_line)
    return lines + new[len(lines) :]


def parse_message(message: object) -> dict[str, object]:
    """Parse one message of a session. Raises UsageError."""
    body = Body.of(message, "messages[]")
    role = body.get_choice("role", sessions.ROLES)
    if role is None:
        raise UsageError("role is missing")
    reasoning = body.get_text("reasoning_content")
    text = body.require_text("content")
    parsed: dict[str, object] = {"role": role, "content": text}
    if reasoning:
        parsed["reasoning_content"] = reasoning
    if calls := body.get_list("tool_calls"):
        parsed["tool_calls"] = parse_tool_calls(calls, "tool_calls")
    if role == "tool":
        body.require_text("tool_call_id")
    return parsed | {name: value for name in ("tool_call_id", "name") if (value := body.get_text(name))}
