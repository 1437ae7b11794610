"""All addresses of the server, as one ASGI application."""

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
from localllm.server.addresses import canonical, matches, nothing_at
from localllm.server.anthropic_messages import count_tokens, messages
from localllm.server.embeddings import embeddings, rerank
from localllm.server.guard import Guard, Rules
from localllm.server.http import ClientDisconnectedError, RejectedRequestError, failed, json_response, shape_of
from localllm.server.openai_chat import chat_completions, models, one_model
from localllm.server.openai_completions import completions
from localllm.server.openai_responses import responses
from localllm.server.page import all_sessions, page, session, write_session
from localllm.server.service import Service
from localllm.server.worker import STOPPING, StoppedError

Endpoint = Callable[[Service, Request], Awaitable[Response]]


async def health(service: Service, request: Request) -> Response:
    """That it is there, and what it has to do."""
    running, waiting = service.shelf.counts()
    return json_response({"status": "ok", "running": running, "waiting": waiting})


async def props(service: Service, request: Request) -> Response:
    """What there is to know of each model that is open; of the others, that they are not."""
    told = []
    for book in service.shelf.books.values():
        model = book.model
        facts = {"name": book.name, "open": model is not None}
        if model:
            facts |= {
                "architecture": model.arch,
                "format": model.format,
                "context": model.context,
                "trained_context": model.trained_context,
                "device": model.engine.device,
                "modalities": {"vision": model.sight.nbytes > 0},
                "chat_template": model.session.template.source,
            }
        told.append(facts)
    first = next(iter(service.shelf.books.values())).model
    return json_response({"models": told, "n_ctx": first and first.context})


async def metrics(service: Service, request: Request) -> Response:
    """In Prometheus' text format."""
    running, waiting = service.shelf.counts()
    text = service.metrics.text(running, waiting, await service.shelf.measures())
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


ADDRESSES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/", page),
    ("GET", "/sessions", all_sessions),
    ("GET", "/sessions/{name}", session),
    ("PUT", "/sessions/{name}", write_session),
    ("GET", "/health", health),
    ("GET", "/props", props),
    ("GET", "/metrics", metrics),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", one_model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
)


PATHS = tuple(dict.fromkeys(path for _, path, _ in ADDRESSES))


def application(service: Service, rules: Rules) -> ASGIApp:
    """What uvicorn runs."""
    routes = [
        Route(path, partial(answered, service, path, endpoint), methods=[method])
        for method, path, endpoint in ADDRESSES
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: partial(no_such, service)})
    app.router.redirect_slashes = False
    return Guard(app, rules, lambda path: canonical(path, PATHS))


async def answered(service: Service, path: str, endpoint: Endpoint, request: Request) -> Response:
    """An endpoint's response, or its error's in the shape that the client knows."""
    try:
        response = await endpoint(service, request)
    except LocalllmError as error:
        response = failed(error, shape_of(path))
    except ClientDisconnectedError:
        service.metrics.answered[path, 499] += 1
        raise
    except asyncio.CancelledError:  # by the listener, which ends
        response = failed(StoppedError(STOPPING), shape_of(path))
    except Exception as error:
        response = failed(error, shape_of(path))
    service.metrics.answered[path, response.status_code] += 1
    return response


async def no_such(service: Service, request: Request, error: Exception) -> Response:
    """An address that does not exist, or another method."""
    status, path = error.status_code if isinstance(error, HTTPException) else 500, request.url.path
    service.metrics.answered["other", status] += 1
    methods = ", ".join(method for method, known, _ in ADDRESSES if matches(path, known))
    refused = {
        404: RejectedRequestError(404, nothing_at(path, PATHS), "unknown_url"),
        405: RejectedRequestError(405, f"this address knows another method: {methods}", "method_not_supported"),
    }.get(status) or RejectedRequestError(status, "refused")
    response = failed(refused, shape_of(path))
    if status == 405:
        response.headers["Allow"] = methods
    return response
