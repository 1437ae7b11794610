"""Test paths and model names as clients of other servers send them, and the errors for unknown ones."""

import json

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm.server.app import PATHS, normalize_path
from localllm.server.guard import AccessRules

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(scope="module")
def server(path: str):
    with serving({"scripted": lambda: scripted(path, {})}) as served:
        yield served


@pytest.mark.parametrize(
    "address",
    ["/v1//chat/completions", "//v1/chat/completions", "/v1/chat/completions/", "/chat/completions",
     "/chat/completions//", "/v1/v1/chat/completions", "/v1/v1/v1//chat/completions/", "/v1/chat//completions"],
)  # fmt: skip
def test_chat_is_served_at_other_paths(server: Served, address: str):
    reply = server.post(address, {"messages": HI})
    assert reply.status == 200 and reply.json["choices"][0]["message"]["content"] == "HI"


@pytest.mark.parametrize("address", ["/models", "/v1/models/", "/v1//models", "/models/", "/v1/v1/models"])
def test_models_are_listed_at_other_paths(server: Served, address: str):
    assert [each["id"] for each in server.get(address).json["data"]] == ["scripted"]


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
def test_variants_of_a_path_are_normalized(address: str, meant: str):
    assert normalize_path(address, PATHS) == meant


def test_rules_apply_to_the_normalized_path(path: str):
    """Let no spelling bypass an API key, or reach another page's sessions."""
    rules = AccessRules(keys=["12345678"], origins=["https://a.example"])
    with serving({"scripted": lambda: scripted(path, {})}, rules) as served:
        assert served.get("/v1/health").status == served.get("/health/").status == 200
        for address in ("//v1/models", "/models", "/v1/v1/models", "//sessions"):
            assert served.get(address).status == 401
        key = {"x-api-key": "12345678", "Origin": "https://a.example"}
        for address in ("/sessions", "//sessions", "/v1/sessions", "/sessions/"):
            assert served.get(address, **key).status == 403


@pytest.mark.parametrize("address", ["/v1/nothing", "/v1/chat", "/v1/messages/nothing", "/generate", "/v1"])
def test_an_unknown_path_gets_a_suggestion(server: Served, address: str):
    reply = server.post(address, {"messages": HI})
    error = reply.json["error"]
    assert reply.status == 404 and "/v1/chat/completions" in error["message"] and "/v1/models" in error["message"]
    if not address.startswith("/v1/messages"):
        assert (error["code"], error["type"]) == ("unknown_url", "not_found_error")
    assert "did you mean /v1/chat/completions?" in server.get("/v1/chat/completion").json["error"]["message"]


@pytest.mark.parametrize(
    ("method", "address", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"), ("GET", "/chat/completions/", "POST"), ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/messages", "POST"), ("POST", "/sessions/x", "GET, PUT, PATCH, DELETE"), ("PUT", "/", "GET"),
        ("DELETE", "/v1/models/scripted", "GET"),
    ],
)  # fmt: skip
def test_a_wrong_method_is_refused_with_the_allowed_ones(server: Served, method: str, address: str, allowed: str):
    reply = server.ask(method, address, None, {})
    assert (reply.status, reply.headers.get("allow") or reply.headers.get("Allow")) == (405, allowed)
    assert allowed in reply.json["error"]["message"]


@pytest.mark.parametrize("model", ["gpt-4o-mini", "", "claude-haiku-4-5", None, "scripted"])
def test_a_single_model_answers_to_any_name(server: Served, model: str | None):
    """Report the model's own name."""
    for address, more in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 9})):
        reply = server.post(address, {"messages": HI, "model": model, **more})
        assert (reply.status, reply.json["model"]) == (200, "scripted")
    assert server.post("/v1/completions", {"prompt": "a", "model": model}).json["model"] == "scripted"
    counted = server.post("/v1/messages/count_tokens", {"messages": HI, "model": model})
    assert counted.json["input_tokens"] > 0
    assert server.get("/v1/models/gpt-4o-mini").status == 404


def test_strict_names_or_two_models_need_the_right_name(path: str):
    make = lambda: scripted(path, {})  # noqa: E731
    with serving({"one": make}, is_strict=True) as strict, serving({"one": make, "two": make}) as several:
        for served in (strict, several):
            assert served.chat("x", model="gpt").json["error"]["code"] == "model_not_found"
            assert served.chat("x", model="one").status == served.chat("x", model="").status == 200
            assert served.chat("x").json["model"] == "one"


def test_rerank_takes_and_returns_the_fields_of_other_servers(server: Served, monkeypatch):
    server.chat("x")
    monkeypatch.setattr(server.model(), "rerank", lambda query, texts, cut: __import__("numpy").array([0.1, 0.9, 0.5]))
    asked = {"query": "q", "documents": ["a", {"text": "b"}, "c"], "model": "rerank-v3.5"}
    whole = server.post("/v2/rerank", asked).json
    assert whole["object"] == "list" and whole["id"].startswith("rerank-") and whole["model"] == "scripted"
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] > 3
    assert [each["index"] for each in whole["results"]] == [1, 2, 0]
    for fields in ({"top_n": 2}, {"top_k": 2}, {"top_n": 2, "top_k": 1}):
        reply = server.post("/rerank", {**asked, **fields})
        assert [each["index"] for each in reply.json["results"]] == [1, 2]
    reply = server.post("/reranking", {"query": "q", "texts": ["a", "b", "c"]})
    assert len(json.loads(reply.body)["results"]) == 3 and "x-localllm-ignored" not in reply.headers
