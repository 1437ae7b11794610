"""Test compressed request bodies: decoded within the limit, or refused by the name of their coding."""

import gzip
import json
import sys
import zlib
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")

from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm.server import http
from localllm.server.http import ClientLimits, CodingError, decode_body, load_decompressors, parse_codings

LIMIT = 100_000
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
has_zstd = pytest.mark.skipif("zstd" not in load_decompressors(), reason="needs backports.zstd, or Python 3.14")
CODINGS = ["gzip", pytest.param("zstd", marks=has_zstd)]


def encode(body: bytes, coding: str) -> bytes:
    if coding == "gzip":
        return gzip.compress(body)
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd.compress(body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    path = str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))
    with serving({"scripted": lambda: scripted(path, {})}, limits=ClientLimits(body=LIMIT)) as server:
        yield server


def post(served: Served, body: bytes, coding: str, path: str = "/v1/chat/completions") -> Any:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return served.ask("POST", path, body, headers)


@pytest.mark.parametrize("coding", CODINGS)
def test_a_compressed_body_is_decoded(served: Served, coding: str):
    for name in (coding, coding.upper(), f"identity, {coding}"):
        reply = post(served, encode(BODY, coding), name)
        assert reply.json["choices"][0]["message"]["content"] == "HELLO"
    halves = encode(BODY[:20], coding) + encode(BODY[20:], coding)
    assert post(served, halves, coding).status == 200, "several streams in a row"


def test_identity_is_accepted_as_a_coding(served: Served):
    assert post(served, BODY, "identity").status == 200 and post(served, BODY, "").status == 200
    assert post(served, gzip.compress(BODY), "x-gzip").status == 200
    assert post(served, gzip.compress(gzip.compress(BODY)), "gzip, gzip").status == 200


@pytest.mark.parametrize("coding", CODINGS)
def test_a_decompression_bomb_stops_at_the_limit(served: Served, coding: str):
    fits, exceeds = BODY + b" " * (LIMIT - len(BODY)), BODY + b" " * (LIMIT - len(BODY) + 1)
    assert post(served, encode(fits, coding), coding).status == 200
    reply = post(served, encode(exceeds, coding), coding)
    assert reply.status == 413 and "the decoded body is larger than the limit" in reply.json["error"]["message"]
    assert post(served, encode(encode(b" " * 10**8, coding), coding), f"{coding}, {coding}").status == 413


@pytest.mark.parametrize("coding", CODINGS)
def test_a_broken_compressed_body_is_refused_by_its_coding(served: Served, coding: str):
    whole = encode(BODY, coding)
    torn = whole[:8] + b"~~~" + whole[11:]
    for body, reason in ((BODY, "not a valid"), (whole[:-9], "ends within its"), (whole + b"more", ""), (torn, "")):
        reply = post(served, body, coding)
        message = reply.json["error"]["message"]
        assert reply.status == 400 and reason in message and f"{coding} stream (Content-Encoding)" in message


@pytest.mark.parametrize("coding", ["br", "deflate", "compress", "gzip, br", "x" * 500])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat", "/infill"])
def test_an_unsupported_coding_is_refused_by_name(served: Served, coding: str, path: str):
    reply = post(served, zlib.compress(BODY), coding, path)
    name = coding.rpartition(" ")[2][:60]
    assert reply.status == 415 and f"found '{name}'" in reply.body.decode()


def test_too_many_codings_are_refused():
    with pytest.raises(CodingError, match="at most 2 codings, found 3"):
        parse_codings("gzip,gzip,gzip")


def test_zstd_is_refused_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    known = {"gzip": load_decompressors()["gzip"]}
    monkeypatch.setattr(http, "load_decompressors", lambda: known)
    with pytest.raises(CodingError, match="must be gzip or identity, found 'zstd'") as failure:
        parse_codings("zstd")
    assert failure.value.status == 415
    assert decode_body(gzip.compress(b""), ["gzip"], 10) == b""
