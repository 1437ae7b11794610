"""Test attacks on localllm serve: foreign hosts and pages, excessive bodies, silent clients."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm.errors import UsageError
from localllm.server.guard import AccessRules, normalize_origin
from localllm.server.http import ClientLimits, measure_depth, parse_json
from localllm.server.listener import HEAD_BYTES, IdleTimeoutProtocol
from tests.integration.test_serve import SCRIPT, until

ASKED = {"messages": [{"role": "user", "content": "hello"}]}
KEY = "correct horse battery"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.fixture(scope="module")
def server(path: str):
    limits = ClientLimits(body=100_000, seconds=0.5)
    rules = AccessRules(hosts=["nice.example"], origins=["https://friend.example"])
    with serving({"scripted": lambda: scripted(path, SCRIPT)}, rules, limits) as served:
        yield served


def raw(served: Served, data: bytes, patience: float = 10) -> bytes:
    """Send bytes and return the reply until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=patience) as client:
        client.sendall(data)
        got = b""
        with suppress(ConnectionResetError):
            while piece := client.recv(1 << 16):
                got += piece
    return got


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:11435", "127.0.0.1@evil.example",
     "[::1].evil.example", "localhost/evil", "", "192.168.0.7", "0.0.0.0", "nice.example.evil.example"],
)  # fmt: skip
def test_foreign_host_names_are_refused(server: Served, host: str):
    """Prevent DNS rebinding, where a page sends its own name."""
    for ask in (server.get("/v1/models", Host=host), server.post("/v1/chat/completions", ASKED, Host=host)):
        assert ask.status == 403 and b"scripted" not in ask.body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80", "nice.example"])
def test_own_host_names_are_accepted(server: Served, host: str):
    assert server.get("/v1/models", Host=host).status == 200


def test_two_host_headers_are_refused(server: Served):
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert status(raw(server, head)) == 400


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost", "https://friend.example.evil.example"]
)
def test_pages_of_other_origins_are_refused(server: Served, origin: str):
    reply = server.post("/v1/chat/completions", ASKED, Origin=origin)
    assert reply.status == 403 and "access-control-allow-origin" not in reply.headers
    reply = server.ask(
        "OPTIONS", "/v1/chat/completions", None, {"Origin": origin, "Access-Control-Request-Method": "POST"}
    )
    assert reply.status == 403 and "access-control-allow-origin" not in reply.headers


def test_its_own_page_and_allowed_origins_are_served(server: Served):
    own = f"http://127.0.0.1:{server.port}"
    assert server.post("/v1/chat/completions", ASKED, Origin=own).status == 200
    friend = {"Origin": "https://friend.example", "Access-Control-Request-Method": "POST"}
    reply = server.ask("OPTIONS", "/v1/chat/completions", None, friend)
    assert reply.status == 204 and reply.headers["access-control-allow-origin"] == "https://friend.example"
    assert server.post("/v1/chat/completions", ASKED, Origin="https://friend.example").status == 200


def test_official_clients_in_browsers_pass_the_preflight(server: Served):
    """Allow their dozens of headers, and expose ours."""
    friend = "https://friend.example"
    sdk = ("x-stainless-lang, X-Stainless-Retry-Count,anthropic-beta, anthropic-dangerous-direct-browser-access, "
           "openai-organization, user-agent, authorization, bad header, x\x7fy")  # fmt: skip
    asked = {"Origin": friend, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": sdk}
    reply = server.ask("OPTIONS", "/v1/messages", None, asked)
    allowed = reply.headers["access-control-allow-headers"].split(", ")
    wanted = {"x-stainless-lang", "x-stainless-retry-count", "anthropic-beta", "openai-organization", "user-agent",
              "anthropic-dangerous-direct-browser-access", "authorization", "content-type", "x-api-key"}  # fmt: skip
    assert reply.status == 204 and wanted <= {*allowed} and not any(" " in name for name in allowed)
    assert len(allowed) == len({*allowed})
    reply = server.post("/v1/chat/completions", {**ASKED, "crystal_ball": 1}, Origin=friend)
    assert "X-Localllm-Ignored" in reply.headers["access-control-expose-headers"]
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == friend


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://a.example/", "https://a.example"), ("https://a.example", "https://a.example"),
        ("HTTPS://A.Example:443/", "https://a.example"), ("http://a:80", "http://a"), ("http://a:8080", "http://a:8080"),
        ("http://[::1]:5173/", "http://[::1]:5173"), ("chrome-extension://abc", "chrome-extension://abc"),
        ("app://obsidian.md", "app://obsidian.md"), ("null", "null"), ("a.example", None), ("*", None), ("", None),
        ("https://a.example/page", None), ("https://a.example?x", None),
    ],
)  # fmt: skip
def test_allowed_origins_are_normalized_or_refused(text: str, origin: str | None):
    if origin is None:
        with pytest.raises(UsageError, match=r"^an origin must be a scheme and a host like https://example.com, not "):
            normalize_origin(text)
    else:
        assert normalize_origin(text) == origin


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonp"]
)
def test_form_content_types_are_refused(server: Served, kind: str):
    """Refuse what a page can send without a preflight."""
    reply = server.ask("POST", "/v1/chat/completions", json.dumps(ASKED).encode(), {"Content-Type": kind})
    assert reply.status == 415


def test_all_but_health_need_a_key(path: str):
    with serving({"scripted": lambda: scripted(path, SCRIPT)}, AccessRules(keys=[KEY, "another key"])) as served:
        assert served.get("/health").status == 200
        wrong = (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEY},
            {"x-api-key": KEY[:-1]},
            {"x-api-key": ""},
        )
        for headers in wrong:
            assert served.get("/v1/models", **headers).status == 401
            assert served.post("/v1/chat/completions", ASKED, **headers).status == 401
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": "another key"}):
            assert served.post("/v1/chat/completions", ASKED, **headers).status == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b'"x"', 400), (b'{"messages": NaN}', 400),
        (b'{"messages":' + b"[" * 40_000, 400), (b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400),
        (b'{"a":' * 150 + b"1" + b"}" * 150, 400), (b'{"max_tokens":' + b"9" * 5000 + b"}", 400), (b" " * 200_000, 413),
        (b'{"messages":[{"role":"user","content":"' + b"x" * 150_000 + b'"}]}', 413),
    ],
)  # fmt: skip
def test_invalid_bodies_are_refused(server: Served, body: bytes, code: int):
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == code and "error" in reply.json


def test_the_nesting_depth_of_json_is_measured():
    assert measure_depth(b'{"a": [1, {"b": "[[[\\"[["}]}') == 3
    assert measure_depth(b'["\\\\", [[]]]') == 3
    assert parse_json(b'{"text": "' + b"[{" * 500 + b'"}', 3) == {"text": "[{" * 500}


@pytest.mark.slow
def test_an_endless_chunked_body_is_cut_off(server: Served):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        piece, sent = b"10000\r\n" + b" " * 0x10000 + b"\r\n", 0
        client.settimeout(10)
        try:
            while sent < 10_000:
                client.sendall(piece)
                sent += 1
                time.sleep(0.001)
        except OSError:
            pass
        assert sent < 9000
    assert server.get("/health").status == 200


def test_a_slow_body_times_out(server: Served):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begin = time.monotonic()
    answer = raw(server, head + b"Content-Length: 50\r\nConnection: close\r\n\r\n{")
    assert status(answer) == 408 and time.monotonic() - begin < 30


@pytest.mark.slow
def test_silent_clients_are_disconnected(server: Served, monkeypatch):
    """Try no request, half of one, and half of a second one."""
    monkeypatch.setattr(IdleTimeoutProtocol, "seconds", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for data in (b"", b"GET /health HTT", whole + b"GET /health HTTP/1.1\r\nHo"):
        assert raw(server, data, patience=8).count(b"HTTP/1.1 200") == data.count(b"localhost")


def test_a_flood_of_headers_is_refused(server: Served):
    many = b"".join(b"X-%d: y\r\n" % number for number in range(20_000))
    assert len(many) > HEAD_BYTES
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + many + b"\r\n")
    assert answer == b"" or status(answer) == 400
    assert server.get("/health").status == 200


def test_connections_beyond_the_limit_are_refused(path: str):
    with serving({"scripted": lambda: scripted(path, SCRIPT)}, limits=ClientLimits(connections=8)) as served:
        held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
        until(lambda: served.get("/health").status == 503)
        for client in held:
            client.close()
        until(lambda: served.get("/health").status == 200)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_disconnected(path: str):
    script = {"long": "abcdefghijklmnop" * 1000}
    with serving({"scripted": lambda: scripted(path, script, 10**6)}, limits=ClientLimits(seconds=0.5)) as served:
        asked = {
            "messages": [{"role": "user", "content": "long"}],
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
        body = json.dumps(asked).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", served.port))
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: served.service.pool.count_requests()[0] == 1)
            until(lambda: served.service.pool.count_requests() == (0, 0))
            assert served.model().engine.steps[-1:] and len(served.model().engine.steps) < 15_000


@pytest.mark.parametrize(
    "address",
    ["/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd", "/v1/models/../../etc/passwd",
     "//etc/passwd", "/v1/models/%00", "/page.html/../../app.py", "/static/app.py"],
)  # fmt: skip
def test_paths_reach_no_files(server: Served, address: str):
    reply = server.get(address)
    assert reply.status == 404 and b"root:" not in reply.body and b"import" not in reply.body


@pytest.mark.parametrize("method", ["TRACE", "PUT", "DELETE", "CONNECT", "PATCH"])
def test_unexpected_methods_are_refused(server: Served, method: str):
    assert server.ask(method, "/v1/chat/completions", None, {}).status in (400, 404, 405)


def test_request_smuggling_is_refused(server: Served):
    """Refuse a body with two lengths."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = raw(
        server, head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\nGET /x"
    )
    assert answer == b"" or status(answer) >= 400
    answer = raw(server, head + b"Content-Length: 4\r\nContent-Length: 9\r\nConnection: close\r\n\r\n{}  ")
    assert status(answer) == 400


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("/v1/completions", {"prompt": [10**6]}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": [0, 10**30]}),
        ("/v1/chat/completions", {**ASKED, "temperature": 1e308}),
        ("/v1/chat/completions", {**ASKED, "temperature": 1e-308}),
        ("/v1/chat/completions", {**ASKED, "temperature": 2, "dynatemp_range": 1e308, "dynatemp_exponent": -1e308}),
        ("/v1/chat/completions", {**ASKED, "top_k": 10**30}),
        ("/v1/chat/completions", {**ASKED, "frequency_penalty": 1e308, "presence_penalty": -1e308}),
        ("/v1/chat/completions", {**ASKED, "repeat_penalty": 1e-300, "repeat_last_n": -1}),
        ("/v1/chat/completions", {**ASKED, "dry_multiplier": 1e308, "dry_base": 1e308, "dry_allowed_length": 0}),
        ("/v1/chat/completions", {**ASKED, "mirostat": 2, "mirostat_tau": 1e308, "mirostat_eta": 1e308}),
        ("/v1/chat/completions", {**ASKED, "logit_bias": {str(token): -1e999 for token in range(268)}}),
        ("/v1/chat/completions", {**ASKED, "logit_bias": {"5": 1e308, "6": 1e308}}),
        ("/v1/chat/completions", {**ASKED, "regex": "(a{1000}){1000}"}),
        ("/v1/chat/completions", {**ASKED, "chat_template_kwargs": {"messages": 5, "self": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 90_000}]}),
    ],
)  # fmt: skip
def test_a_nonsense_request_does_not_disturb_another_answer(server: Served, address: str, asked: dict):
    """Answer or refuse it while the other answer continues."""
    with ThreadPoolExecutor(1) as pool:
        server.chat("x")
        engine = server.model().engine
        engine.gate.clear()
        other = pool.submit(server.chat, "stop")
        until(lambda: server.service.pool.count_requests()[0] == 1)
        mad = ThreadPoolExecutor(1).submit(server.post, address, {"max_tokens": 3, **asked})
        time.sleep(0.1)
        engine.gate.set()
        assert other.result().json["choices"][0]["message"]["content"] == SCRIPT["stop"]
        reply = mad.result()
        assert reply.status in (200, 400, 500) and reply.json, reply.body
    assert server.chat("hello").json["choices"][0]["message"]["content"] == "HELLO"


def test_prompts_are_never_logged(server: Served, capfd):
    secret = "xyzzy-my-secret"
    server.chat(secret)
    server.chat(secret, temperature=secret)
    server.chat(secret, stream=True)
    server.post("/v1/chat/completions", b'{"messages": "' + secret.encode())
    server.model().engine.fail = RuntimeError(secret)
    assert secret not in server.chat("x").body.decode()
    assert secret not in server.get("/metrics").body.decode()
    out, err = capfd.readouterr()
    assert secret not in out + err


def test_every_response_has_security_headers(server: Served):
    for reply in (server.get("/health"), server.get("/nothing"), server.get("/health", Host="evil.example")):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-frame-options"] == "DENY"
        assert "server" not in reply.headers


def test_garbage_and_disconnects_leave_nothing_running(server: Served):
    """Answer others correctly afterwards."""
    server.chat("hello")

    def torment(seed: int) -> None:
        for turn in range(6):
            kind = (seed + turn) % 3
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
                if kind == 0:
                    client.sendall(bytes(range(256)))
                else:
                    body = json.dumps({"messages": [{"role": "user", "content": "long"}], "stream": kind == 1}).encode()
                    head = (
                        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    )
                    client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                    if kind == 1:
                        client.recv(100)

    threads = [threading.Thread(target=torment, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    assert server.chat("hello").json["choices"][0]["message"]["content"] == "HELLO"
    for thread in threads:
        thread.join()
    until(lambda: server.service.pool.count_requests() == (0, 0))
    worker = server.service.pool.resolve(None).worker
    assert not worker._subscribers and not worker._token_times
    assert len(worker.model.engine.open_sequences) <= 17  # those that are kept for the next turn


@pytest.mark.parametrize(("header", "value", "reason"), [
    ("Host", "host.docker.internal:11435", "the Host header names host.docker.internal, which this server does not "
     "allow; start it with --allow-host host.docker.internal"),
    ("Host", "a b", "the Host header is missing or is not a host name"),
    ("Origin", "http://localhost:3000", "this server does not allow requests from pages of http://localhost:3000; "
     "start it with --allow-origin http://localhost:3000"),
    ("Origin", "null", "this server does not allow requests from pages of null; start it with --allow-origin null"),
    ("Origin", "<script>", "the Origin header is not a scheme and a host like https://example.com"),
])  # fmt: skip
def test_a_refusal_names_the_option_that_would_allow_it(server: Served, header: str, value: str, reason: str):
    reply = server.get("/v1/models", **{header: value})
    assert reply.status == 403 and reply.json["error"]["message"] == reason
    assert server.get("/api/tags", **{header: value}).json["error"] == reason


def test_saved_conversations_are_refused_to_allowed_pages_with_the_reason(server: Served):
    reply = server.get("/sessions", Origin="https://friend.example")
    assert reply.json["error"]["message"] == "/sessions is not for pages of other sites"
