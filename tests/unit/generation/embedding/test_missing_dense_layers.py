"""Test embedding models with missing tensors, and those that normalize before they cut."""

import json
from pathlib import Path

import numpy as np
import pytest
from models import model, write

import localllm
from localllm.engine.options import EngineOptions
from localllm.generation.embedding.embedder import EmbedOptions, layer_norm, normalizes_before_cut
from localllm.services.inspection.inspect import inspect_model
from localllm.services.search.embed import EmbedJob, compute_fingerprint
from tests.unit.text.test_wordpiece import PIECES, metadata

MISSING = "dense_2.weight and dense_3.weight are missing: this file's embeddings differ from the model's"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return paths of EmbeddingGemma with and without its two dense layers."""
    folder, paths = tmp_path_factory.mktemp("gemma"), {}
    for name in ("whole", "bare"):
        tiny = model("gemma_embedding", vocab=len(PIECES), context=64)
        tiny.metadata.update(metadata())
        width = tiny.tensors["token_embd.weight"].shape[-1]
        if name == "whole":
            random = np.random.default_rng(1)
            for tensor, shape in (("dense_2.weight", (96, width)), ("dense_3.weight", (width, 96))):
                tiny.tensors[tensor] = random.normal(size=shape).astype(np.float32) / 8
        paths[name] = str(write(tiny, folder / f"{name}.gguf"))
    return paths


@pytest.mark.parametrize("words", [("embed", "{}", "TEXT"), ("inspect", "{}"), ("verify", "{}")])
def test_commands_warn_of_missing_dense_layers_in_one_line(gemma: dict[str, str], tmp_path: Path, cli, words):
    (tmp_path / "t.txt").write_text("a\n")
    for name, count in (("bare", 1), ("whole", 0)):
        typed = [word.format(gemma[name]).replace("TEXT", str(tmp_path / "t.txt")) for word in words]
        code, _, err = cli(*typed)
        assert (code, err.count(MISSING), err.count("localllm: warning: ")) == (0, count, count), err


def test_search_warns_of_missing_dense_layers(gemma: dict[str, str], tmp_path: Path, cli):
    (tmp_path / "t.txt").write_text("some words\n")
    assert MISSING in cli("search", tmp_path, "words", "-m", gemma["bare"])[2]
    assert MISSING not in cli("search", tmp_path, "words", "-m", gemma["whole"])[2]


def test_opening_in_python_warns_of_missing_dense_layers(gemma: dict[str, str]):
    with pytest.warns(UserWarning, match=MISSING), localllm.open(gemma["bare"]) as opened:
        assert [MISSING in warning for warning in opened.warnings] == [True]
    with localllm.open(gemma["whole"]) as opened:
        assert opened.warnings == []
    assert inspect_model(gemma["bare"])["warnings"] and not inspect_model(gemma["whole"])["warnings"]


def test_a_model_without_dense_layers_gets_its_own_search_index(gemma: dict[str, str]):
    assert len({compute_fingerprint(EmbedJob(path, EmbedOptions(), EngineOptions())) for path in gemma.values()}) == 2


def test_a_single_missing_matrix_is_named(gemma: dict[str, str], tmp_path: Path):
    tiny = model("gemma_embedding", vocab=len(PIECES), context=64)
    tiny.metadata.update(metadata())
    width = tiny.tensors["token_embd.weight"].shape[-1]
    tiny.tensors["dense_2.weight"] = np.zeros((width, width), np.float32)
    (warning,) = inspect_model(write(tiny, tmp_path / "half.gguf"))["warnings"]
    assert warning.startswith("dense_3.weight is missing: ")


def test_metadata_that_declare_a_dense_layer_require_it(tmp_path: Path):
    tiny = model("bert", vocab=len(PIECES), context=64)
    tiny.metadata.update(metadata() | {"bert.dense_2_feat_in": 64, "bert.dense_2_feat_out": 96})
    assert "dense_2.weight is missing" in inspect_model(write(tiny, tmp_path / "b.gguf"))["warnings"][0]


def test_rerank_refuses_a_model_without_a_head_and_names_the_tensor(tiny: str, cli):
    code, _, err = cli("rerank", tiny, "-q", "x", stdin=b"a\n")
    assert code == 3 and "not a reranker: it must have the tensor cls.output.weight" in err


@pytest.mark.parametrize(
    ("arch", "name", "expected"),
    [
        ("nomic-bert", {"general.name": "nomic-embed-text-v1.5"}, True),
        ("nomic-bert", {"general.name": "Nomic Embed Text v1.5"}, True),
        ("nomic-bert", {"general.basename": "nomic-embed-text", "general.version": "v1.5"}, True),
        ("nomic-bert", {"general.name": "nomic-embed-text-v1"}, False),
        ("nomic-bert", {"general.name": "nomic-embed-vision-v1.5"}, False),
        ("nomic-bert-moe", {"general.name": "nomic-embed-text-v2-moe"}, False),
        ("bert", {"general.name": "nomic-embed-text-v1.5"}, False),
        ("nomic-bert", {}, False),
    ],
)
def test_only_nomic_text_1_5_normalizes_before_the_cut(arch: str, name: dict[str, str], expected: bool):
    assert normalizes_before_cut({"general.architecture": arch, **name}) is expected


def test_nomic_vectors_are_normalized_then_cut_then_scaled(tmp_path: Path):
    tiny = model("nomic_bert", vocab=len(PIECES), context=64)
    tiny.metadata.update(metadata() | {"general.name": "nomic-embed-text-v1.5"})
    with localllm.open(write(tiny, tmp_path / "n.gguf")) as opened:
        whole = opened.embed(["a b", "b"], normalize=False).astype(np.float64)
        centered = whole - whole.mean(axis=1, keepdims=True)
        expected = (centered / np.sqrt(whole.var(axis=1, keepdims=True) + 1e-5))[:, :7]
        np.testing.assert_allclose(opened.embed(["a b", "b"], 7, normalize=False), expected, rtol=1e-5)
        unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(opened.embed(["a b", "b"], 7), unit, atol=1e-6)
        np.testing.assert_allclose(layer_norm(whole)[:, :7], expected, atol=1e-6)


def test_chat_in_python_warns_of_a_missing_chat_template(tmp_path: Path, tiny: str):
    bare = model("llama", vocab=len(PIECES), context=64)
    bare.metadata.update(metadata())
    with localllm.open(write(bare, tmp_path / "bare.gguf"), cache=False) as opened:
        assert opened.warnings == []
        with pytest.warns(UserWarning, match="no chat template") as caught:
            opened.chat([{"role": "user", "content": "a"}], max_tokens=1).close()
        assert caught[0].filename == __file__
        opened.chat([{"role": "user", "content": "a"}], max_tokens=1).close()
        assert opened.warnings == ["the file has no chat template: using 'plain'"]
    with localllm.open(tiny) as opened:
        opened.chat([{"role": "user", "content": "a"}], max_tokens=1).close()
        assert opened.warnings == []


def test_eval_refuses_a_model_without_a_chat_template_by_name(tmp_path: Path, tiny: str, cli):
    bare = model("llama", vocab=len(PIECES), context=64)
    bare.metadata.update(metadata())
    path = write(bare, tmp_path / "bare.gguf")
    (tmp_path / "q.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    for _ in range(2):  # the second time, answers are there already
        code, out, err = cli("eval", tiny, path, tmp_path / "q.jsonl", "-n", "1", "--json", "-o", tmp_path / "a.jsonl")
        assert code == 0, err
        models = json.loads(out)["models"]
        assert [each["warnings"] for each in models] == [
            [], ["the file has no chat template: using 'plain'"],
        ]  # fmt: skip
        assert f"localllm: warning: {path}: the file has no chat template" in err and f"warning: {tiny}" not in err
