"""Test that grammars and schemas are compiled outside the event loop, in all APIs."""

import threading
from pathlib import Path
from typing import Any

import pytest
from served import scripted, serving
from tiny_model import write_tiny_model

from localllm.generation.constraints.constraint import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TALK = {"messages": [{"role": "user", "content": "x"}]}
FORM = {"type": "json_schema", "schema": SCHEMA, "name": "n"}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**TALK, "response_format": {"type": "json_schema", "json_schema": FORM}}),
    ("/v1/chat/completions", {**TALK, "grammar": 'root ::= "a"'}),
    ("/v1/completions", {"prompt": "x", "grammar": 'root ::= "a"'}),
    ("/v1/responses", {"input": "x", "text": {"format": FORM}}),
    ("/v1/messages", {**TALK, "max_tokens": 9, "output_config": {"format": FORM}}),
    ("/api/chat", {**TALK, "model": "m", "format": SCHEMA}),
    ("/api/generate", {"prompt": "x", "model": "m", "format": SCHEMA}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_constraint_is_compiled_in_a_worker_thread(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names, check = list[str](), Constraint.__post_init__
    monkeypatch.setattr(
        Constraint, "__post_init__", lambda self: names.append(threading.current_thread().name) or check(self)
    )
    file = str(write_tiny_model(tmp_path / "tiny.gguf"))
    with serving({"m": lambda: scripted(file, {})}) as served:
        served.post(path, body)
    assert names and all(name.startswith("asyncio_") for name in names)
