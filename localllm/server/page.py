"""The page at /, one file with nothing from elsewhere, and conversations, which it shares with `localllm chat`."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.server.fields import Body
from localllm.server.http import json_response, read_json
from localllm.server.messages import calls_of
from localllm.server.service import Service
from localllm.services import sessions

FILE = Path(__file__).with_name("page.html")
MOST_MESSAGES = 10_000


@cache
def content() -> tuple[bytes, str]:
    """The page, and what a browser may do with it: run what is in it, and ask this server."""
    page = FILE.read_bytes()

    def sources(tag: str) -> str:
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)

    policy = (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


async def page(service: Service, request: Request) -> Response:
    """The page."""
    data, policy = content()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return Response(data, 200, headers, "text/html; charset=utf-8")


async def all_sessions(service: Service, request: Request) -> Response:
    """The names of all conversations that are kept, the latest first."""
    return json_response({"sessions": [{"name": name} for name in sessions.names()]})


async def session(service: Service, request: Request) -> Response:
    """One of them."""
    chat = sessions.read(request.path_params["name"])
    return json_response({"messages": chat.messages, "model": chat.model.name})


async def write_session(service: Service, request: Request) -> Response:
    """What it is now."""
    body = Body(await read_json(request, service.limits))
    messages = [message_of(message) for message in body.needed_items("messages")]
    if len(messages) > MOST_MESSAGES:
        raise UsageError(f"messages should be at most {MOST_MESSAGES}")
    if any(message["role"] == "system" for message in messages[1:]):
        raise UsageError("messages should have the system's first")
    book = service.shelf.book(body.text("model"))
    with sessions.SessionFile(request.path_params["name"]) as file:
        if file.is_new:
            file.chat.model = sessions.SessionModel(book.name, book.path)
        file.write(with_what_is_known(file.chat.messages, messages))
    return json_response({"name": request.path_params["name"]})


def with_what_is_known(old: list[sessions.Line], new: list[sessions.Line]) -> list[sessions.Line]:
    """Of messages that stay, `localllm chat` knows more than the page: when they ended, say."""
    same = list[sessions.Line]()
    for before, now in zip(old, new, strict=False):
        if sessions.plain([before]) != sessions.plain([now]):
            break
        same.append(before)
    return same + new[len(same) :]


def message_of(message: Any) -> dict[str, Any]:
    """One that a session may have. Raises UsageError."""
    body = Body.of(message, "a message")
    role = body.choice("role", sessions.ROLES)
    if role is None:
        raise UsageError("a message should have a role")
    thought = body.text("reasoning_content")
    text = body.needed_text("content")
    found: dict[str, Any] = {"role": role, "content": text, **({"reasoning_content": thought} if thought else {})}
    if calls := body.items("tool_calls"):
        found["tool_calls"] = calls_of(calls, "tool_calls")
    if role == "tool":
        body.needed_text("tool_call_id")
    return found | {name: said for name in ("tool_call_id", "name") if (said := body.text(name))}
