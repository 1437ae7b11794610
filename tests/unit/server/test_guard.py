"""Test which hosts and origins may send requests."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from localllm.server import model_pool as model_pool
from localllm.server.guard import AccessGuard, AccessRules
from localllm.server.http import ClientDisconnectedError, RejectedRequestError


def status_for(path: str = "/v1/models", method: str = "GET", rules: AccessRules | None = None, **headers: str) -> int:
    """Return the status with which a request is refused, or 200."""
    try:
        (rules or AccessRules()).require(
            method, path, {"host": "localhost:80", **{k.replace("_", "-"): v for k, v in headers.items()}}
        )
    except RejectedRequestError as error:
        return error.status
    return 200


def test_only_allowed_origins_may_call_the_api():
    friend = AccessRules(origins=["https://friend"])
    assert status_for(origin="http://localhost:80") == status_for(rules=friend, origin="https://friend") == 200
    assert (
        status_for(origin="https://localhost:80")
        == status_for(origin="http://localhost")
        == status_for(origin="")
        == 403
    )
    for path in ("/sessions", "/sessions/x"):  # conversations are not for other sites' pages
        assert status_for(path, rules=friend, origin="https://friend") == 403
        assert status_for(path, rules=friend) == status_for(path, rules=friend, origin="http://localhost:80") == 200


def test_all_paths_but_the_page_and_health_need_the_key():
    keyed = AccessRules(keys=["k", "l"])
    for path in ("/v1/models", "/props", "/metrics", "/sessions", "/health/"):
        assert status_for(path, rules=keyed) == 401 and status_for(path, rules=keyed, x_api_key="l") == 200
    assert (
        status_for("/", rules=keyed)
        == status_for("/health", rules=keyed)
        == status_for("/props", "OPTIONS", keyed)
        == 200
    )
    assert status_for(rules=keyed, authorization="bearer  k") == 200
    for wrong in ("Basic k", "k", "Bearer", "Bearer kl", ""):
        assert status_for(rules=keyed, authorization=wrong) == 401


def pass_guard(
    rules: AccessRules, method: str = "GET", *headers: tuple[bytes, bytes]
) -> tuple[list[int], dict[str, str], int]:
    """Send a request through a guard; return statuses, headers, and the number of calls of the app."""
    sent, asked = list[Any](), list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        if scope["path"] == "/left":
            raise ClientDisconnectedError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/left", "headers": [*headers]}
    asyncio.run(AccessGuard(app, rules, str)(scope, None, send))
    starts = [message for message in sent if message["type"] == "http.response.start"]
    headers_sent = {name.decode(): value.decode() for name, value in starts[0]["headers"]}
    return [message["status"] for message in starts], headers_sent, len(asked)


def test_the_guard_adds_security_headers():
    host, friend = (b"host", b"localhost"), (b"origin", b"https://friend")
    statuses, headers, asked = pass_guard(AccessRules(), "GET", host)
    assert (statuses, asked, headers["x-own"], headers["cross-origin-resource-policy"]) == (
        [200],
        1,
        "1",
        "same-origin",
    )
    assert headers["referrer-policy"] == "no-referrer" and "vary" not in headers
    statuses, headers, asked = pass_guard(AccessRules(origins=["https://friend"]), "OPTIONS", host, friend)
    assert (statuses, asked, headers["access-control-allow-origin"]) == ([204], 0, "https://friend")
    assert headers["vary"].startswith("Origin,") and headers["cross-origin-resource-policy"] == "cross-origin"
    assert (
        "DELETE" in headers["access-control-allow-methods"] and "x-api-key" in headers["access-control-allow-headers"]
    )
    assert pass_guard(AccessRules(), "GET", host, friend)[::2] == ([403], 0) and pass_guard(
        AccessRules(), "GET", host, host
    )[0] == [400]
