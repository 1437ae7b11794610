"""Hosts and origins that may ask."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from localllm.server import model_pool as model_pool
from localllm.server.guard import Guard, Rules
from localllm.server.http import (
    ClientDisconnectedError,
    RejectedRequestError,
)


def may(path: str = "/v1/models", method: str = "GET", rules: Rules | None = None, **headers: str) -> int:
    """The status with which a request is refused, or 200."""
    try:
        (rules or Rules()).require(
            method, path, {"host": "localhost:80", **{k.replace("_", "-"): v for k, v in headers.items()}}
        )
    except RejectedRequestError as error:
        return error.status
    return 200


def test_pages_that_may_ask():
    friend = Rules(origins=["https://friend"])
    assert may(origin="http://localhost:80") == may(rules=friend, origin="https://friend") == 200
    assert may(origin="https://localhost:80") == may(origin="http://localhost") == may(origin="") == 403
    for path in ("/sessions", "/sessions/x"):  # conversations are not for other sites' pages
        assert may(path, rules=friend, origin="https://friend") == 403
        assert may(path, rules=friend) == may(path, rules=friend, origin="http://localhost:80") == 200


def test_what_needs_a_key():
    keyed = Rules(keys=["k", "l"])
    for path in ("/v1/models", "/props", "/metrics", "/sessions", "/health/"):
        assert may(path, rules=keyed) == 401 and may(path, rules=keyed, x_api_key="l") == 200
    assert may("/", rules=keyed) == may("/health", rules=keyed) == may("/props", "OPTIONS", keyed) == 200
    assert may(rules=keyed, authorization="bearer  k") == 200
    for wrong in ("Basic k", "k", "Bearer", "Bearer kl", ""):
        assert may(rules=keyed, authorization=wrong) == 401


def passed(rules: Rules, method: str = "GET", *headers: tuple[bytes, bytes]) -> tuple[list[int], dict[str, str], int]:
    """Through a guard: statuses, headers, and how often the app behind it was asked."""
    sent, asked = list[Any](), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        if scope["path"] == "/left":
            raise ClientDisconnectedError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/left", "headers": [*headers]}
    asyncio.run(Guard(app, rules, str)(scope, None, send))  # type: ignore[arg-type]
    starts = [message for message in sent if message["type"] == "http.response.start"]
    found = {name.decode(): value.decode() for name, value in starts[0]["headers"]}
    return [message["status"] for message in starts], found, len(asked)


def test_what_a_guard_adds():
    host, friend = (b"host", b"localhost"), (b"origin", b"https://friend")
    statuses, headers, asked = passed(Rules(), "GET", host)
    assert (statuses, asked, headers["x-own"], headers["cross-origin-resource-policy"]) == (
        [200],
        1,
        "1",
        "same-origin",
    )
    assert headers["referrer-policy"] == "no-referrer" and "vary" not in headers
    statuses, headers, asked = passed(Rules(origins=["https://friend"]), "OPTIONS", host, friend)
    assert (statuses, asked, headers["access-control-allow-origin"]) == ([204], 0, "https://friend")
    assert headers["vary"].startswith("Origin,") and headers["cross-origin-resource-policy"] == "cross-origin"
    assert (
        "DELETE" in headers["access-control-allow-methods"] and "x-api-key" in headers["access-control-allow-headers"]
    )
    assert passed(Rules(), "GET", host, friend)[::2] == ([403], 0) and passed(Rules(), "GET", host, host)[0] == [400]
