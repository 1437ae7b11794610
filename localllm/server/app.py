"""The server's routes as one ASGI application, with request ids and an access log."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import fields
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.errors import LocalllmError
from localllm.generation.sampling.options import DEFAULTS, SamplingOptions
from localllm.generation.scheduler import PARALLEL
from localllm.server import http, ollama_changes, ollama_models
from localllm.server.adapters import list_adapters, set_scales
from localllm.server.anthropic_messages import count_tokens, create_message
from localllm.server.embeddings import create_embeddings, rerank
from localllm.server.guard import AccessGuard, AccessRules
from localllm.server.infill import infill
from localllm.server.llama_completions import complete
from localllm.server.ollama_chat import chat, generate
from localllm.server.openai_chat import create_chat_completion, list_models, retrieve_model
from localllm.server.openai_completions import create_completion
from localllm.server.openai_responses import count_input_tokens, create_response
from localllm.server.page import list_sessions, read_session, remove_session, rename_session, serve_page, write_session
from localllm.server.service import ServerContext
from localllm.server.tokens import apply_template, detokenize, tokenize
from localllm.server.worker import STOPPING, StoppedError

if TYPE_CHECKING:
    from localllm.api import Model

REQUEST_ID = "X-Request-Id"
_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)
MAX_PATH = 200  # characters of an address in a line
ALIASES = {"/reranking": "/rerank", "/v1/reranking": "/v1/rerank", "/v2/rerank": "/v1/rerank"}
PREFIX = "/v1"
PROVIDER_PREFIXES = ("/api", "/openai")  # prefixes of /v1 at other providers
Endpoint = Callable[[ServerContext, Request], Awaitable[Response]]


async def report_health(service: ServerContext, request: Request) -> Response:
    """Report that the server is up, and the number of running and waiting requests."""
    running, waiting = service.pool.count_requests()
    return http.make_json_response({"status": "ok", "running": running, "waiting": waiting})


async def report_props(service: ServerContext, request: Request) -> Response:
    """Describe each model; only open models have details."""
    service.pool.refresh()
    descriptions = []
    for entry in service.pool.entries.values():
        model = entry.model
        facts = {"name": entry.name, "open": model is not None}
        if model:
            facts |= {
                "architecture": model.arch, "format": model.format, "context": model.context,
                "trained_context": model.trained_context, "device": model.engine.device,
                "modalities": {"vision": model.vision.nbytes > 0}, "chat_template": model.session.template.source,
            }  # fmt: skip
        descriptions.append(facts)
    first = next(iter(service.pool.entries.values()))
    answer: dict[str, object] = {"models": descriptions, "n_ctx": first.model and first.model.context}
    if first.model:
        answer |= describe_as_llama_server(first.name, first.model, service.pool.parallel or PARALLEL)
    return http.make_json_response(answer)


def describe_as_llama_server(name: str, model: "Model", parallel: int) -> dict[str, object]:
    """Return llama-server's properties of the first model, for programs that ask it."""
    options = model.session.with_defaults(None).sampling.fill_unset(SamplingOptions(**DEFAULTS))
    sampling = {field.name: getattr(options, field.name) for field in fields(options)}
    params = sampling | {"seed": -1, "n_predict": -1, "stop": [], "stream": True}
    return {
        "default_generation_settings": {"n_ctx": model.context, "params": params},
        "total_slots": parallel, "model_alias": name, "model_path": model.path,
        "modalities": {"vision": model.vision.nbytes > 0, "audio": False},
        "chat_template": model.session.template.source, "build_info": f"localllm {version('localllm')}",
        "bos_token": decode_token(model, model.tokenizer.bos_id),
        "eos_token": decode_token(model, model.tokenizer.eos_id),
    }  # fmt: skip


def decode_token(model: "Model", token: int | None) -> str:
    return "" if token is None else model.tokenizer.decode([token], special=True)


async def report_metrics(service: ServerContext, request: Request) -> Response:
    running, waiting = service.pool.count_requests()
    memory, disk = await service.pool.measure_memory(), service.pool.measure_disk()
    text = service.metrics.format(running, waiting, memory, disk)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/", serve_page),
    ("GET", "/sessions", list_sessions),
    ("GET", "/sessions/{name}", read_session),
    ("PUT", "/sessions/{name}", write_session),
    ("PATCH", "/sessions/{name}", rename_session),
    ("DELETE", "/sessions/{name}", remove_session),
    ("GET", "/health", report_health),
    ("GET", "/props", report_props),
    ("GET", "/metrics", report_metrics),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", retrieve_model),
    ("POST", "/v1/chat/completions", create_chat_completion),
    ("POST", "/v1/completions", create_completion),
    ("POST", "/v1/responses", create_response),
    ("POST", "/v1/responses/input_tokens", count_input_tokens),
    ("POST", "/v1/embeddings", create_embeddings),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/v1/messages", create_message),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/infill", infill),
    ("POST", "/completion", complete),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/apply-template", apply_template),
    ("GET", "/lora-adapters", list_adapters),
    ("POST", "/lora-adapters", set_scales),
    ("POST", "/api/chat", chat),
    ("POST", "/api/generate", generate),
    ("POST", "/api/embed", ollama_models.embed),
    ("POST", "/api/embeddings", ollama_models.embed_prompt),
    ("GET", "/api/tags", ollama_models.list_tags),
    ("POST", "/api/show", ollama_models.show_model),
    ("GET", "/api/ps", ollama_models.list_running),
    ("GET", "/api/version", ollama_models.report_version),
    ("POST", "/api/pull", ollama_changes.pull),
    ("POST", "/api/create", ollama_changes.create),
    ("POST", "/api/copy", ollama_changes.copy),
    ("DELETE", "/api/delete", ollama_changes.delete),
    ("POST", "/api/push", ollama_changes.refuse_push),
    ("HEAD", "/api/blobs/{digest}", ollama_changes.refuse_blob),
    ("POST", "/api/blobs/{digest}", ollama_changes.refuse_blob),
)
PATHS = tuple(dict.fromkeys(path for _, path, _ in ROUTES))


def create_application(service: ServerContext, rules: AccessRules, log: Callable[[str], None] | None = None) -> ASGIApp:
    """Build the ASGI application.

    log: called with one line for each request; None: no log.
    """
    routes = [
        Route(path, partial(call_endpoint, service, path, endpoint), methods=[method])
        for method, path, endpoint in ROUTES
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: partial(respond_not_found, service)})
    app.router.redirect_slashes = False
    return AccessLog(AccessGuard(app, rules, lambda path: normalize_path(path, PATHS)), log)


async def call_endpoint(service: ServerContext, path: str, endpoint: Endpoint, request: Request) -> Response:
    try:
        response = await endpoint(service, request)
    except LocalllmError as error:
        response = http.make_error_response(error, http.select_error_format(path))
    except http.ClientDisconnectedError:
        service.metrics.responses[path, 499] += 1
        raise
    except asyncio.CancelledError:  # by the listener at shutdown
        response = http.make_error_response(StoppedError(STOPPING), http.select_error_format(path))
    except Exception as error:
        response = http.make_error_response(error, http.select_error_format(path))
    service.metrics.responses[path, response.status_code] += 1
    return response


async def respond_not_found(service: ServerContext, request: Request, error: Exception) -> Response:
    status, path = error.status_code if isinstance(error, HTTPException) else 500, request.url.path
    service.metrics.responses["other", status] += 1
    methods = ", ".join(method for method, route, _ in ROUTES if matches_route(path, route))
    error = {
        404: http.RejectedRequestError(404, describe_unknown(path, PATHS), "unknown_url"),
        405: http.RejectedRequestError(405, f"method not allowed for this path; use {methods}", "method_not_supported"),
    }.get(status) or http.RejectedRequestError(status, "the request was rejected")
    response = http.make_error_response(error, http.select_error_format(path))
    if status == 405:
        response.headers["Allow"] = methods
    return response


class AccessLog:
    """ASGI middleware that adds X-Request-Id and logs each response.

    A client's own X-Request-Id is kept. A line has time, client, method, path without query, status, bytes, seconds
    and id, but no prompts or answers.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], None] | None = None):
        """Wrap an app.

        write: called with each line; None: no log.
        """
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header_id = dict(scope["headers"]).get(REQUEST_ID.lower().encode(), b"").decode("latin-1")
        request_id = header_id if _ID.fullmatch(header_id) else secrets.token_hex(8)
        # 499: nginx' status for a client that disconnects before the response.
        begin, status, size = perf_counter(), 499, 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (REQUEST_ID.lower().encode(), request_id.encode())
                message = {**message, "headers": [*message.get("headers", []), header]}
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._write:
                client = (scope.get("client") or ("-",))[0] or "-"
                path = scope.get("raw_path", b"").decode("ascii", "replace").partition("?")[0][:MAX_PATH]
                timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                seconds = perf_counter() - begin
                self._write(
                    f"{timestamp} {client} {scope['method']} {path} {status} {size} bytes {seconds:.3f} s {request_id}"
                )


# ---- paths: extra slashes, a missing or doubled /v1, and other servers' names


def normalize_path(path: str, routes: Collection[str]) -> str:
    """Return the route for a path, or the path without extra slashes if no route matches.

    routes: the app's routes; {name} or {name:path} is a parameter.
    """
    path = re.sub("/{2,}", "/", path)
    path = re.sub(rf"^(?:{'|'.join(PROVIDER_PREFIXES)})+(?={PREFIX}(/|$))", "", path)
    path = re.sub(rf"^(?:{PREFIX})+(?={PREFIX}(/|$))", "", path).rstrip("/") or "/"
    path = ALIASES.get(path, path)
    for candidate in (path, PREFIX + path, path.removeprefix(PREFIX)):
        if any(matches_route(candidate, route) for route in routes):
            return candidate
    return path


def matches_route(path: str, route: str) -> bool:
    """Return whether a route matches a path."""
    begin, name, _ = route.partition("{")
    return path.startswith(begin) and len(path) > len(begin) if name else path == route


def describe_unknown(path: str, routes: Collection[str]) -> str:
    """Describe an unknown path and suggest the closest route."""
    similar = get_close_matches(path, routes, n=1, cutoff=0.75)
    suggestion = f"did you mean {similar[0]}? " if similar else ""
    return f"unknown path {path[:100]!r}; {suggestion}available: {', '.join(routes)}"
