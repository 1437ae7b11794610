"""All routes of the server, as one ASGI application."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from localllm.errors import LocalllmError
from localllm.server.access_log import AccessLog
from localllm.server.addresses import describe_unknown, matches_route, normalize_path
from localllm.server.anthropic_messages import count_tokens, create_message
from localllm.server.embeddings import embeddings, rerank
from localllm.server.guard import Guard, Rules
from localllm.server.http import (
    ClientDisconnectedError,
    RejectedRequestError,
    error_format_of,
    error_response,
    json_response,
)
from localllm.server.infill import infill
from localllm.server.ollama_chat import chat, generate
from localllm.server.ollama_models import (
    embed,
    embed_prompt,
    list_running,
    list_tags,
    pull_model,
    refuse_change,
    show_model,
    version,
)
from localllm.server.openai_chat import chat_completions, list_models, retrieve_model
from localllm.server.openai_completions import completions
from localllm.server.openai_responses import create_response
from localllm.server.page import list_sessions, read_session, serve_page, write_session
from localllm.server.service import Service
from localllm.server.tokens import apply_template, detokenize, tokenize
from localllm.server.worker import STOPPING, StoppedError

Endpoint = Callable[[Service, Request], Awaitable[Response]]


async def health(service: Service, request: Request) -> Response:
    """Report that the server is up, and its load."""
    running, waiting = service.pool.count_requests()
    return json_response({"status": "ok", "running": running, "waiting": waiting})


async def props(service: Service, request: Request) -> Response:
    """Describe the models; details only for open ones."""
    service.pool.refresh()
    descriptions = []
    for entry in service.pool.entries.values():
        model = entry.model
        facts = {"name": entry.name, "open": model is not None}
        if model:
            facts |= {
                "architecture": model.arch,
                "format": model.format,
                "context": model.context,
                "trained_context": model.trained_context,
                "device": model.engine.device,
                "modalities": {"vision": model.vision.nbytes > 0},
                "chat_template": model.session.template.source,
            }
        descriptions.append(facts)
    first = next(iter(service.pool.entries.values())).model
    return json_response({"models": descriptions, "n_ctx": first and first.context})


async def metrics(service: Service, request: Request) -> Response:
    """Return metrics in Prometheus' text format."""
    running, waiting = service.pool.count_requests()
    text = service.metrics.text(running, waiting, await service.pool.measure_memory())
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


REFUSED = (("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete"))  # Ollama's
ADDRESSES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/", serve_page),
    ("GET", "/sessions", list_sessions),
    ("GET", "/sessions/{name}", read_session),
    ("PUT", "/sessions/{name}", write_session),
    ("GET", "/health", health),
    ("GET", "/props", props),
    ("GET", "/metrics", metrics),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name:path}", retrieve_model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", create_response),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/v1/messages", create_message),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/infill", infill),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("POST", "/apply-template", apply_template),
    ("POST", "/api/chat", chat),
    ("POST", "/api/generate", generate),
    ("POST", "/api/embed", embed),
    ("POST", "/api/embeddings", embed_prompt),
    ("GET", "/api/tags", list_tags),
    ("POST", "/api/show", show_model),
    ("GET", "/api/ps", list_running),
    ("GET", "/api/version", version),
    ("POST", "/api/pull", pull_model),
    *((method, f"/api/{name}", refuse_change) for method, name in REFUSED),
)


PATHS = tuple(dict.fromkeys(path for _, path, _ in ADDRESSES))


def application(service: Service, rules: Rules, log: Callable[[str], None] | None = None) -> ASGIApp:
    """Build the ASGI application; log: called with a line for each request, None for no log."""
    routes = [
        Route(path, partial(call_endpoint, service, path, endpoint), methods=[method])
        for method, path, endpoint in ADDRESSES
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: partial(respond_not_found, service)})
    app.router.redirect_slashes = False
    return AccessLog(Guard(app, rules, lambda path: normalize_path(path, PATHS)), log)


async def call_endpoint(service: Service, path: str, endpoint: Endpoint, request: Request) -> Response:
    """Call an endpoint, format its errors for the client, and count the response."""
    try:
        response = await endpoint(service, request)
    except LocalllmError as error:
        response = error_response(error, error_format_of(path))
    except ClientDisconnectedError:
        service.metrics.responses[path, 499] += 1
        raise
    except asyncio.CancelledError:  # by the listener at shutdown
        response = error_response(StoppedError(STOPPING), error_format_of(path))
    except Exception as error:
        response = error_response(error, error_format_of(path))
    service.metrics.responses[path, response.status_code] += 1
    return response


async def respond_not_found(service: Service, request: Request, error: Exception) -> Response:
    """Respond to an unknown address or method."""
    status, path = error.status_code if isinstance(error, HTTPException) else 500, request.url.path
    service.metrics.responses["other", status] += 1
    methods = ", ".join(method for method, route, _ in ADDRESSES if matches_route(path, route))
    error = {
        404: RejectedRequestError(404, describe_unknown(path, PATHS), "unknown_url"),
        405: RejectedRequestError(405, f"method not allowed at this address; use {methods}", "method_not_supported"),
    }.get(status) or RejectedRequestError(status, "the request was rejected")
    response = error_response(error, error_format_of(path))
    if status == 405:
        response.headers["Allow"] = methods
    return response
