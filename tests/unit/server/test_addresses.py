"""Addresses and names as clients of other servers send them, and what is told of those that are none."""

import json

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm.server.app import PATHS, normalize_path
from localllm.server.guard import Rules

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(scope="module")
def told(path: str):
    with serving({"scripted": lambda: scripted(path, {})}) as served:
        yield served


@pytest.mark.parametrize(
    "address",
    ["/v1//chat/completions", "//v1/chat/completions", "/v1/chat/completions/", "/chat/completions",
     "/chat/completions//", "/v1/v1/chat/completions", "/v1/v1/v1//chat/completions/", "/v1/chat//completions"],
)  # fmt: skip
def test_chat_by_other_addresses(told: Served, address: str):
    reply = told.post(address, {"messages": HI})
    assert reply.status == 200 and reply.json["choices"][0]["message"]["content"] == "HI"


@pytest.mark.parametrize("address", ["/models", "/v1/models/", "/v1//models", "/models/", "/v1/v1/models"])
def test_models_by_other_addresses(told: Served, address: str):
    assert [each["id"] for each in told.get(address).json["data"]] == ["scripted"]


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("/", "/"), ("//", "/"), ("/v1/health", "/health"), ("/health/", "/health"), ("/v1/props", "/props"),
        ("/rerank", "/v1/rerank"), ("/reranking", "/v1/rerank"), ("/v1/reranking", "/v1/rerank"),
        ("/v2/rerank", "/v1/rerank"), ("/v1/rerank/", "/v1/rerank"), ("/embeddings", "/v1/embeddings"),
        ("/responses", "/v1/responses"), ("/messages", "/v1/messages"), ("/v1/v1/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"), ("/completions", "/v1/completions"),
        ("/models/a/b", "/v1/models/a/b"), ("/v1/models/v1/x", "/v1/models/v1/x"), ("//sessions", "/sessions"),
        ("/sessions//a", "/sessions/a"), ("/v1/sessions", "/sessions"), ("/v1", "/v1"), ("/v1/nothing", "/v1/nothing"),
        ("/nothing/", "/nothing"), ("/v1chat/completions", "/v1chat/completions"),
    ],
)  # fmt: skip
def test_which_address_is_meant(address: str, meant: str):
    assert normalize_path(address, PATHS) == meant


def test_rules_judge_what_is_meant(path: str):
    """Another way to write an address is no way around a key, or to sessions of other pages."""
    rules = Rules(keys=["12345678"], origins=["https://a.example"])
    with serving({"scripted": lambda: scripted(path, {})}, rules) as served:
        assert served.get("/v1/health").status == served.get("/health/").status == 200
        for address in ("//v1/models", "/models", "/v1/v1/models", "//sessions"):
            assert served.get(address).status == 401
        key = {"x-api-key": "12345678", "Origin": "https://a.example"}
        for address in ("/sessions", "//sessions", "/v1/sessions", "/sessions/"):
            assert served.get(address, **key).status == 403


@pytest.mark.parametrize("address", ["/v1/nothing", "/v1/chat", "/v1/messages/nothing", "/generate", "/v1"])
def test_an_address_that_is_none(told: Served, address: str):
    reply = told.post(address, {"messages": HI})
    error = reply.json["error"]
    assert reply.status == 404 and "/v1/chat/completions" in error["message"] and "/v1/models" in error["message"]
    if not address.startswith("/v1/messages"):
        assert (error["code"], error["type"]) == ("unknown_url", "not_found_error")
    assert "did you mean /v1/chat/completions?" in told.get("/v1/chat/completion").json["error"]["message"]


@pytest.mark.parametrize(
    ("method", "address", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"), ("GET", "/chat/completions/", "POST"), ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/messages", "POST"), ("POST", "/sessions/x", "GET, PUT"), ("PUT", "/", "GET"),
        ("DELETE", "/v1/models/scripted", "GET"),
    ],
)  # fmt: skip
def test_another_method(told: Served, method: str, address: str, allowed: str):
    reply = told.ask(method, address, None, {})
    assert (reply.status, reply.headers.get("allow") or reply.headers.get("Allow")) == (405, allowed)
    assert allowed in reply.json["error"]["message"]


@pytest.mark.parametrize("model", ["gpt-4o-mini", "", "claude-haiku-4-5", None, "scripted"])
def test_names_of_other_models(told: Served, model: str | None):
    """Where one is served, it answers; the answer tells by what name."""
    for address, more in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 9})):
        reply = told.post(address, {"messages": HI, "model": model, **more})
        assert (reply.status, reply.json["model"]) == (200, "scripted")
    assert told.post("/v1/completions", {"prompt": "a", "model": model}).json["model"] == "scripted"
    counted = told.post("/v1/messages/count_tokens", {"messages": HI, "model": model})
    assert counted.json["input_tokens"] > 0
    assert told.get("/v1/models/gpt-4o-mini").status == 404


def test_names_that_have_to_be_right(path: str):
    make = lambda: scripted(path, {})  # noqa: E731
    with serving({"one": make}, is_strict=True) as strict, serving({"one": make, "two": make}) as several:
        for served in (strict, several):
            assert served.chat("x", model="gpt").json["error"]["code"] == "model_not_found"
            assert served.chat("x", model="one").status == served.chat("x", model="").status == 200
            assert served.chat("x").json["model"] == "one"


def test_reranking_as_other_servers_have_it(told: Served, monkeypatch):
    told.chat("x")
    monkeypatch.setattr(told.model(), "rerank", lambda query, texts, cut: __import__("numpy").array([0.1, 0.9, 0.5]))
    asked = {"query": "q", "documents": ["a", {"text": "b"}, "c"], "model": "rerank-v3.5"}
    whole = told.post("/v2/rerank", asked).json
    assert whole["object"] == "list" and whole["id"].startswith("rerank-") and whole["model"] == "scripted"
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] > 3
    assert [each["index"] for each in whole["results"]] == [1, 2, 0]
    for fields in ({"top_n": 2}, {"top_k": 2}, {"top_n": 2, "top_k": 1}):
        reply = told.post("/rerank", {**asked, **fields})
        assert [each["index"] for each in reply.json["results"]] == [1, 2]
    reply = told.post("/reranking", {"query": "q", "texts": ["a", "b", "c"]})
    assert len(json.loads(reply.body)["results"]) == 3 and "x-localllm-ignored" not in reply.headers
