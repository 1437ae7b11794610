"""Serve the web page, and the conversations that it shares with `localllm chat`.

The page is one self-contained file, which loads nothing from other sites.
"""

import asyncio
import base64
import hashlib
import os
import re
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import LocalllmError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.frozen import frozen
from localllm.generation.sampling.options import SamplingOptions
from localllm.server.fields import RequestBody, require_present
from localllm.server.http import RejectedRequestError, encode_json, make_json_response, read_json
from localllm.server.messages import parse_tool_calls
from localllm.server.model_pool import ModelEntry
from localllm.server.service import ServerContext
from localllm.services import sessions

FILE = Path(__file__).with_name("page.html")
MAX_MESSAGES = 10_000
WRITING = threading.Lock()  # a reloaded page may write while its older request is still running


@cache
def load_page() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy.

    The policy allows the page's own scripts and styles, by hash, and requests to this server only.
    """
    html = FILE.read_bytes()

    def hash_elements(tag: str) -> str:
        elements = re.findall(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in elements)

    policy = (
        f"default-src 'none'; script-src {hash_elements('script')}; style-src {hash_elements('style')}; "
        "connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


async def serve_page(service: ServerContext, request: Request) -> Response:
    data, policy = load_page()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return Response(data, 200, headers, "text/html; charset=utf-8")


async def list_sessions(service: ServerContext, request: Request) -> Response:
    """List the conversations, latest first; `q`: words that they must contain."""
    query = request.query_params.get("q", "")
    names = await asyncio.to_thread(sessions.search_names, query) if query.strip() else sessions.list_names()
    return make_json_response({"sessions": [{"name": name} for name in names]})


async def read_session(service: ServerContext, request: Request) -> Response:
    """Return a conversation's messages, temperature, revision, and model under its served name."""
    chat = sessions.read_session(request.path_params["name"])
    model = await asyncio.to_thread(find_served_name, [*service.pool.entries.values()], chat)
    return make_json_response(
        {
            "messages": chat.messages, "model": model, "temperature": chat.settings.get("temperature"),
            "revision": compute_revision(chat.messages),
        }
    )  # fmt: skip


async def write_session(service: ServerContext, request: Request) -> Response:
    """Store the messages of a conversation, its temperature, and the model that answered.

    A stored conversation is only changed if the client knows its state: `revision` is that of the stored state ("" for
    a new one), or the messages continue the stored ones. A `temperature` of null is the model's own; without that
    field, the stored one stays. Raises RejectedRequestError with 409 for another stored state.
    """
    body = RequestBody(await read_json(request, service.limits))
    messages = [parse_message(message) for message in body.require_list("messages")]
    if len(messages) > MAX_MESSAGES:
        raise UsageError(f"messages must be at most {MAX_MESSAGES}, not {len(messages)}")
    if any(message["role"] == "system" for message in messages[1:]):
        raise UsageError("messages: only the first message may have the role system")
    entry = service.pool.resolve(name) if (name := body.get_string("model")) else None
    settings = parse_settings(body)
    update = SessionUpdate(request.path_params["name"], messages, entry, body.get_string("revision"), settings)
    revision = await asyncio.to_thread(store_session, update)
    return make_json_response({"name": update.name, "revision": revision})


async def rename_session(service: ServerContext, request: Request) -> Response:
    """Give a conversation another `name`. Raises RejectedRequestError with 409 if that is taken."""
    name, body = request.path_params["name"], RequestBody(await read_json(request, service.limits))
    new_name = body.require_string("name")

    def rename() -> None:
        with WRITING:
            if new_name != name and sessions.has_session(new_name):
                raise RejectedRequestError(409, f"conversation {new_name!r} exists already; choose another name")
            sessions.rename_session(name, new_name)

    await asyncio.to_thread(rename)
    return make_json_response({"name": new_name})


async def remove_session(service: ServerContext, request: Request) -> Response:
    """Delete a conversation whose state is the query's `revision`. Raises RejectedRequestError with 409 for another."""
    name = request.path_params["name"]
    revision = require_present(request.query_params.get("revision"), "the query's revision, which GET returns,")

    def remove() -> None:
        with WRITING:
            if compute_revision(sessions.read_session(name).messages) != revision:
                raise RejectedRequestError(409, f"conversation {name!r} was changed elsewhere; nothing was deleted")
            sessions.remove_session(name)

    await asyncio.to_thread(remove)
    return make_json_response({"name": name})


@frozen
class SessionUpdate:
    """A request to store a conversation; see `write_session`. settings: options to change; None: to reset."""

    name: str
    messages: list[sessions.SessionLine]
    entry: ModelEntry | None
    revision: str | None
    settings: dict[str, object]


def parse_settings(body: RequestBody) -> dict[str, object]:
    """Return the options in a request, None for the model's own value; {} if there are none. Raises UsageError."""
    if "temperature" not in body:
        return {}
    if (value := body.get_number("temperature")) is not None:
        SamplingOptions(temperature=value)  # checks the range
    return {"temperature": value}


def store_session(update: SessionUpdate) -> str:
    """Store a conversation; return its revision. Raises UsageError, LocalllmError, RejectedRequestError."""
    with WRITING, sessions.SessionFile(update.name) as file:
        if not (file.is_new or may_replace(file.chat.messages, update)):
            raise RejectedRequestError(
                409, f"conversation {update.name!r} exists already, or was changed elsewhere; choose another name"
            )
        lines = keep_stored_details(file.chat.messages, update.messages)
        model = describe_model(update.entry) if update.entry else file.chat.model
        merged = {**file.chat.settings, **update.settings}
        settings = {name: value for name, value in merged.items() if value is not None}
        if (model, settings) == (file.chat.model, file.chat.settings):
            file.write(lines)
        else:
            file.chat.model, file.chat.settings, file.chat.messages = model, settings, lines
            file.rewrite()
    return compute_revision(lines)


def may_replace(stored: list[sessions.SessionLine], update: SessionUpdate) -> bool:
    """Return whether an update's sender knows the stored messages, or sends the same update again."""
    head = update.messages if update.revision == "" else update.messages[: len(stored)]
    return update.revision == compute_revision(stored) or sessions.select_visible_fields(
        stored
    ) == sessions.select_visible_fields(head)


def compute_revision(messages: Sequence[sessions.SessionLine]) -> str:
    """Return a digest of the visible fields of a conversation's messages, without an unanswered last question.

    Reading a session also drops a last question without an answer.
    """
    if messages and messages[-1]["role"] == "user":
        messages = messages[:-1]
    return hashlib.blake2b(encode_json(sessions.select_visible_fields(messages)), digest_size=8).hexdigest()


def describe_model(entry: ModelEntry) -> sessions.SessionModel:
    """Describe a pool's model for a session file, by its weights if its file can be read."""
    if model := entry.model:
        return sessions.describe_model(model.file)
    try:
        with GGUFFile.open(entry.path) as file:
            return sessions.describe_model(file)
    except LocalllmError:  # a conversation is saved all the same
        return sessions.SessionModel(entry.name, entry.path)


def find_served_name(entries: Sequence[ModelEntry], chat: sessions.SavedChat) -> str:
    """Return the name under which a conversation's model is served, or its own name if it is not served.

    The name that answered last has priority, then the path, then the name, then the weights' fingerprint.
    """
    names = [message["model"] for message in reversed(chat.messages) if "model" in message][:1]
    if any(entry.name in names for entry in entries):
        return str(names[0])
    files = [entry for entry in entries if os.path.realpath(entry.path) == os.path.realpath(chat.model.path)]
    for entry in files or [entry for entry in entries if entry.name == chat.model.name]:
        return entry.name
    fingerprint = chat.model.fingerprint
    alike = (entry.name for entry in entries if fingerprint and describe_model(entry).fingerprint == fingerprint)
    return next(alike, chat.model.name)


def keep_stored_details(old: list[sessions.SessionLine], new: list[sessions.SessionLine]) -> list[sessions.SessionLine]:
    """Return the new messages, with the stored form of unchanged leading ones.

    `localllm chat` stores more fields with a message than the page sends, such as its end time.
    """
    lines = list[sessions.SessionLine]()
    for old_line, new_line in zip(old, new, strict=False):
        if sessions.select_visible_fields([old_line]) != sessions.select_visible_fields([new_line]):
            break
        lines.append(old_line)
    return lines + new[len(lines) :]


def parse_message(message: object) -> dict[str, object]:
    body = RequestBody.parse(message, "messages[]")
    role = body.get_choice("role", sessions.ROLES)
    if role is None:
        raise UsageError("role is missing")
    reasoning = body.get_string("reasoning_content")
    text = body.require_string("content")
    parsed: dict[str, object] = {"role": role, "content": text}
    if reasoning:
        parsed["reasoning_content"] = reasoning
    if role == "assistant" and (model := body.get_string("model")):
        parsed["model"] = model
    if calls := body.get_list("tool_calls"):
        parsed["tool_calls"] = parse_tool_calls(calls, "tool_calls")
    if role == "tool":
        body.require_string("tool_call_id")
    return parsed | {name: value for name in ("tool_call_id", "name") if (value := body.get_string(name))}
