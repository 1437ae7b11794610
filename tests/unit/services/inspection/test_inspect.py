"""Test what `inspect` reports of a file, fact by fact."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_model import write_tiny_model

from localllm.arch.decoder import NONE
from localllm.arch.layer_state import KVType
from localllm.errors import ModelError, UsageError
from localllm.quant.formats import BY_NAME
from localllm.services.inspection import inspect
from localllm.services.inspection.inspect import inspect_model
from localllm.services.inspection.validate import ValidationResult


def test_inspect_reports_all_facts_of_a_model(tmp_path: Path):
    path = str(write_tiny_model(tmp_path / "t.gguf", context=5000, metadata={"general.sampling.temp": 0.5}))
    facts = inspect_model(path, check=True, with_metadata=True)
    tensors, metadata = facts.pop("tensors"), facts.pop("metadata")
    per_token = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads of 16 float16
    assert facts == {
        "path": path, "name": "Tiny Test", "architecture": "llama", "supported": True, "reason": None, "valid": True,
            "warnings": [],
        "parameters": 108352, "weight_bytes": 433408, "bits_per_weight": 32.0, "layers": 2, "width": 64, "heads": 4,
        "kv_heads": 2, "context": 5000, "vocabulary": {"size": 268, "kind": "gpt2, gpt-2"}, "reads": None, "sees": None,
        "projector": None, "adapter": None, "guessing": {"layers": 0, "bytes": 0, "used": False}, "chat_template": True,
        "sampling": {"temperature": 0.5}, "made_with": None,
        "formats": {"F32": {"tensors": 21, "parameters": 108352, "bytes": 433408}},
        "memory": [
            {"context": context, "cache_bytes": size * per_token, "total_bytes": 433408 + size * per_token}
            for context, size in ((2048, 2048), (4096, 4096), (5000, 5000))
        ],
    }  # fmt: skip
    assert len(tensors) == 21
    assert tensors[0] == {"name": "token_embd.weight", "format": "F32", "shape": [268, 64], "bytes": 68608}
    assert metadata["general.name"] == "Tiny Test" and len(metadata["tokenizer.ggml.tokens"]) == 268
    assert metadata["tokenizer.ggml.merges"][:2] == ["h e", "l l"] and metadata["llama.context_length"] == 5000
    assert "metadata" not in inspect_model(path)


def test_check_finds_a_template_that_does_not_compile(tmp_path: Path):
    """Skip the check of a file that cannot run anyway."""
    path = write_tiny_model(tmp_path / "t.gguf", chat_template="{% if %}")
    usual, checked = inspect_model(path), inspect_model(path, check=True)
    assert (usual["valid"], usual["supported"], usual["reason"]) == (True, True, None)
    assert (checked["valid"], checked["supported"]) == (False, False) and "template" in checked["reason"]
    assert checked["layers"] == 2 and not checked["reason"].startswith(str(path))


@pytest.mark.parametrize("fails", ["require_finite_weights", "require_template"])
def test_each_step_of_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, fails: str):
    looked = list[str]()

    def look(name: str, file: Any) -> None:
        looked.append(name)
        if name == fails:
            raise ModelError("it is not")

    for name in ("require_finite_weights", "require_template"):
        monkeypatch.setattr(inspect, name, lambda file, name=name: look(name, file))
    h: Any = SimpleNamespace()
    checked = inspect.check_thoroughly(SimpleNamespace(), ValidationResult(h, None))
    assert (checked.hyperparameters, str(checked.problem)) == (h, "it is not") and looked[-1] == fails


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.array([1, 2], np.uint8), [1, 2]), ([np.float32(0.5), "a", [True]], [0.5, "a", [True]]), ((1,), [1]),
        (np.int64(3), 3), (0.25, 0.25), (float("nan"), "nan"), (np.float32("-inf"), "-inf"), ("x", "x"), (True, True),
        (np.array([float("inf"), 1]), ["inf", 1.0]),
    ],
)  # fmt: skip
def test_metadata_values_are_converted_for_json(value: Any, plain: Any):
    converted = inspect.to_json(value)
    assert converted == plain and type(converted) is type(plain)


@pytest.mark.parametrize(
    ("problem", "tensors", "reason"),
    [
        (None, {"a": 1}, None), (None, {}, "the file contains a vocabulary only"),
        (ModelError("a.gguf: odd"), {}, "odd"),
        (ModelError("it is a.gguf: odd"), {"a": 1}, "it is a.gguf: odd"),
    ],
)  # fmt: skip
def test_inspect_explains_why_a_file_cannot_run(
    problem: ModelError | None, tensors: dict[str, int], reason: str | None
):
    file: Any = SimpleNamespace(path="a.gguf", tensors=tensors)
    assert inspect.describe_problem(file, ValidationResult(None, problem)) == reason


@pytest.mark.parametrize(
    ("bidirectional", "fills", "pooling", "expected"),
    [
        (True, False, "mean", "vectors by the mean of all tokens"), (True, False, "cls", "vectors by the first token"),
        (True, False, "rank", "scores"), (True, False, NONE, None), (True, True, "mean", "vectors by the last token"),
        (False, False, "mean", "vectors by the last token"),
    ],
)  # fmt: skip
def test_inspect_tells_what_a_model_computes_of_a_text(
    monkeypatch: pytest.MonkeyPatch, bidirectional: bool, fills: bool, pooling: str, expected: str
):
    """Generative models may compute embeddings, too, if the file says so."""
    monkeypatch.setattr(inspect, "HyperparameterReader", SimpleNamespace(from_file=lambda file: file))
    monkeypatch.setattr(inspect, "read_pooling", lambda fields: {"file": "last", "bare": None}[fields])
    h: Any = SimpleNamespace(bidirectional=bidirectional, is_diffusion=fills, pooling=pooling)
    assert inspect.describe_reader("file", h) == expected and inspect.describe_reader("file", None) is None
    assert inspect.is_embedding_model(h) == (bidirectional and not fills)
    if not inspect.is_embedding_model(h):
        assert inspect.describe_reader("bare", h) is None


def test_the_maximum_of_heads_over_the_layers_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspect, "TransformerHyperparameters", SimpleNamespace)
    h: Any = SimpleNamespace(attention=SimpleNamespace(heads=[8, 16, 4], kv_heads=[1, 2]))
    assert (
        inspect.count_heads(h, "heads"),
        inspect.count_heads(h, "kv_heads"),
        inspect.count_heads(None, "heads"),
    ) == (16, 2, None)


def test_inspect_describes_the_projector_and_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    vision: Any = SimpleNamespace(kind="clip", side=336, patch=14, out=4096)
    assert inspect.describe_projector(vision) == {"type": "clip", "side": 336, "patch": 14, "width": 4096}
    (tmp_path / "mmproj.gguf").write_bytes(b"12345")
    places: Iterator[str | UsageError] = iter(
        [str(tmp_path / "mmproj.gguf"), str(tmp_path / "gone.gguf"), UsageError("there are two")]
    )

    def beside(path: str) -> str:
        if isinstance(projector_path := next(places), UsageError):
            raise projector_path
        return projector_path

    monkeypatch.setattr(inspect, "find_projector", beside)
    described = [inspect.describe_projector_file("m.gguf") for _ in range(3)]
    assert described == [{"path": os.path.join(tmp_path, "mmproj.gguf"), "bytes": 5}, None, None]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"size": 0, "kind": ""}), ({"tokenizer.ggml.pre": "x"}, {"size": 0, "kind": "x"}),
        ({"tokenizer.ggml.model": 5, "tokenizer.ggml.tokens": ["a"]}, {"size": 1, "kind": ""}),
        ({"tokenizer.ggml.model": "bpe", "tokenizer.ggml.pre": "y"}, {"size": 0, "kind": "bpe, y"}),
    ],
)  # fmt: skip
def test_inspect_describes_the_vocabulary(metadata: dict[str, Any], expected: dict[str, Any]):
    assert inspect.describe_vocabulary(metadata) == expected


def test_formats_are_sorted_by_their_bytes():
    listed = [("F32", (4,), 16), ("Q4_0", (2, 32), 36), ("F32", (2, 3), 24), ("Q8_0", (3, 32), 102)]
    tensors = {
        str(number): SimpleNamespace(format=BY_NAME[name], shape=shape, nbytes=size)
        for number, (name, shape, size) in enumerate(listed)
    }
    sizes = inspect.count_formats(SimpleNamespace(tensors=tensors))
    assert list(sizes.items()) == [
        ("Q8_0", {"tensors": 1, "parameters": 96, "bytes": 102}),
        ("F32", {"tensors": 2, "parameters": 10, "bytes": 40}),
        ("Q4_0", {"tensors": 1, "parameters": 64, "bytes": 36}),
    ]


@pytest.mark.parametrize(
    ("trained", "asked", "lengths"),
    [
        (2047, None, [2047]), (2048, None, [2048]), (2049, None, [2048, 2049]),
        (8192, None, [2048, 4096, 8192]), (8193, None, [2048, 4096, 8192, 8193]), (8192, 7, [7]),
        (1 << 40, None, [2048 << n for n in range(24)] + [1 << 40]),
    ],
)  # fmt: skip
def test_memory_is_listed_for_doubling_contexts(
    monkeypatch: pytest.MonkeyPatch, trained: int, asked: int | None, lengths: list[int]
):
    heard = list[Any]()
    monkeypatch.setattr(inspect, "count_cache_bytes", lambda *arguments: heard.append(arguments) or 3 * arguments[1])
    h: Any = SimpleNamespace(context=trained, list_states=lambda: "states")
    rows = inspect.list_memory(h, 1000, KVType(), asked)
    assert rows == [{"context": n, "cache_bytes": 3 * n, "total_bytes": 1000 + 3 * n} for n in lengths]
    assert heard == [("states", n, KVType()) for n in lengths]


@pytest.mark.parametrize("has_guess", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(("guessing", "there"), [(0, []), (1, [2]), (3, [2, 4])])
def test_mtp_layers_are_reported_with_their_bytes(
    monkeypatch: pytest.MonkeyPatch, has_guess: bool, is_whole: bool, guessing: int, there: list[int]
):
    """Count those after the other layers that the file has."""
    blocks = {layer: [SimpleNamespace(tensor=SimpleNamespace(nbytes=10 * layer))] * 2 for layer in (0, 1, 2, 4)}

    class Weights:
        def __init__(self, tensors: Any):
            assert tensors == "tensors"

        def get_layer(self, layer: int) -> Any:
            return SimpleNamespace(list_weights=lambda: blocks.get(layer, []))

    functions = {"read": print, "forward": print} | ({"draft": print} if has_guess else {})
    module = SimpleNamespace(**functions)
    monkeypatch.setattr(inspect, "Weights", Weights)
    monkeypatch.setattr(inspect, "load_architecture", lambda file: (module, None))
    monkeypatch.setattr(inspect, "has_mtp_layer", lambda weights, h: isinstance(weights, Weights) and is_whole)
    file, h = SimpleNamespace(tensors="tensors"), SimpleNamespace(layers=2, mtp_layers=guessing)
    size, is_used = sum(20 * layer for layer in there), bool(there) and has_guess and is_whole
    assert inspect.describe_mtp(file, h) == {"layers": len(there), "bytes": size, "used": is_used}
    assert inspect.describe_mtp(file, None) == {"layers": 0, "bytes": 0, "used": False}
