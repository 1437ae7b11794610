"""Test HTTP errors by status, and limits of request bodies."""

import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")
from localllm.errors import ContextError, LocalllmError, MemoryLimitError, ModelError, UsageError
from localllm.server import model_pool as model_pool
from localllm.server.http import (
    ClientLimits,
    RejectedRequestError,
    RequestTimeoutError,
    format_anthropic_error,
    format_openai_error,
    get_status,
    make_error_response,
    parse_json,
)
from localllm.server.model_pool import UnknownModelError
from localllm.server.worker import StoppedError
from tests.unit.server.request_helpers import read_body


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "claude"),
    [
        (RejectedRequestError(401, "x"), 401, "authentication_error", "invalid_api_key", "authentication_error"),
        (RejectedRequestError(403, "x"), 403, "permission_error", None, "permission_error"),
        (RejectedRequestError(413, "x"), 413, "invalid_request_error", None, "request_too_large"),
        (UnknownModelError("x"), 404, "not_found_error", "model_not_found", "not_found_error"),
        (RequestTimeoutError("x"), 504, "server_error", None, "api_error"),
        (StoppedError("x"), 503, "overloaded_error", "overloaded", "overloaded_error"),
        (MemoryLimitError("x"), 503, "overloaded_error", "overloaded", "overloaded_error"),
        (UsageError("x"), 400, "invalid_request_error", None, "invalid_request_error"),
        (ContextError("x"), 400, "invalid_request_error", "context_length_exceeded", "invalid_request_error"),
        (ModelError("x"), 400, "invalid_request_error", None, "invalid_request_error"),
        (LocalllmError("x"), 500, "server_error", None, "api_error"),
        (RejectedRequestError(500, "x"), 500, "server_error", None, "api_error"),
    ],
)
def test_errors_have_their_status_and_body_in_each_api(
    error: Exception, status: int, kind: str, code: str | None, claude: str
):
    assert get_status(error) == status
    assert format_openai_error(error) == {"error": {"message": "x", "type": kind, "param": None, "code": code}}
    assert format_anthropic_error(error) == {"type": "error", "error": {"type": claude, "message": "x"}}
    response = make_error_response(error, format_openai_error)
    assert (response.status_code, response.headers.get("retry-after")) == (status, "5" if status == 503 else None)


def test_error_bodies_hide_internal_errors_and_name_the_parameter():
    assert format_openai_error(KeyError("secret"))["error"]["message"] == "internal error: KeyError"
    for message, param in (("top_k must be", "top_k"), ("a.b[3] is missing", "a.b[3]"), ("x is not supported", "x")):
        assert format_openai_error(UsageError(message))["error"]["param"] == param
    assert format_openai_error(ContextError("top_k must be"))["error"]["param"] is None


def test_bodies_are_read_up_to_their_limit():
    assert (
        read_body(b'{"a"', b":12}")
        == {"a": 12}
        == read_body(b'{"a":12}', length="8")
        == read_body(b'{"a":12}', length="x")
    )
    assert read_body(b"{}", kind=" Application/JSON ") == {}
    for status, more in ((413, {"length": "9"}), (415, {"kind": "text/json"}), (415, {"kind": ""})):
        with pytest.raises(RejectedRequestError) as refused:
            read_body(b"{}", **more)
        assert refused.value.status == status
    with pytest.raises(RejectedRequestError, match="larger than the limit of 8 bytes") as refused:
        read_body(b'{"a":1', b"23}")
    assert refused.value.status == 413
    with pytest.raises(RejectedRequestError, match=r"did not arrive within 0\.01 seconds") as refused:
        read_body(b"{}", limits=ClientLimits(seconds=0.01), wait=5)
    assert refused.value.status == 408


def test_invalid_json_bodies_are_refused():
    assert parse_json(b'{"a":[[]]}', 3) == {"a": [[]]}
    with pytest.raises(RejectedRequestError, match="nested deeper than the limit of 2 levels"):
        parse_json(b'{"a":[[]]}', 2)
    for body in (b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":NaN}', b"{", b"\xff"):
        with pytest.raises(RejectedRequestError, match="is not valid JSON"):
            parse_json(body, 9)
