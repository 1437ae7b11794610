"""Test CLIP's embeddings of images and texts against transformers, and the embed command."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import bound
from models import pairs
from models.golden import FOLDER
from PIL import Image

from localllm.engine.clip_encoder import ClipEncoder
from localllm.engine.options import EngineOptions
from localllm.errors import ContextError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.embedding import clip_embedder as pair_embedding
from localllm.generation.embedding.clip_embedder import ClipEmbedder
from localllm.generation.embedding.embedder import EmbedOptions, ShownImage
from localllm.services.inspection.validate import check_validity
from localllm.text.clip_words import END, START, ClipTokenizer, derive_merges


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """Convert the checkpoint to GGUF and write its images beside it."""
    folder = tmp_path_factory.mktemp("pairs")
    paths = [str(path) for path in (pairs.write_pair(folder / "clip"), folder / "clip.gguf")]
    subprocess.run([sys.executable, "-m", "localllm", "quantize", *paths, "F32", "--force"], check=True)
    for number, pixels in enumerate(pairs.pictures()):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder / "clip.gguf"


@pytest.fixture
def golden() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "pair_clip.npz") as file:
        assert str(file["digest"]) == pairs.digest()
        return {**file}


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float((x.astype(np.float64) @ y) / np.linalg.norm(x.astype(np.float64)) / np.linalg.norm(y))


@pytest.mark.sampled
def test_clip_embeddings_equal_those_of_transformers(clip, golden):
    """Compare token ids, texts, images of all shapes, and their similarities."""
    embedder = ClipEmbedder(GGUFFile.open(str(clip)), EngineOptions(threads=2))
    texts = embedder.embed(pairs.TEXTS, EmbedOptions(normalize=False, overflow="cut"))
    shown = embedder.embed([ShownImage(pixels) for pixels in pairs.pictures()], EmbedOptions(normalize=False))
    words = ClipTokenizer(GGUFFile.open(str(clip)).metadata)
    for number, (text, row) in enumerate(zip(pairs.TEXTS, texts, strict=True)):
        assert words.encode(text)[:23] == golden[f"ids{number}"].tolist()[:23]
        if len(words.encode(text)) <= 24:
            assert 1 - cosine(row, golden[f"text{number}"]) < bound(1e-9, 1e-6)
    for number, row in enumerate(shown):
        assert 1 - cosine(row, golden[f"picture{number}"]) < bound(1e-9, 1e-6)
    assert np.allclose(texts[0], golden["text0"], atol=bound(1e-4, 1e-2))
    assert len({tuple(row) for row in texts.tolist()}) == len(texts)
    embedder.close()


def test_merges_are_derived_from_the_order_of_tokens(clip):
    """Read clip.cpp's files, which have no merges."""
    metadata: dict[str, Any] = dict(GGUFFile.open(str(clip)).metadata)
    pieces, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert [" ".join(pair) for pair in derive_merges(list(pieces))] == list(merges)
    whole = ClipTokenizer(metadata)
    del metadata["tokenizer.ggml.merges"]
    without = ClipTokenizer(metadata)
    assert all(without.encode(text) == whole.encode(text) for text in pairs.TEXTS)
    assert whole.encode("")[0] == whole.pieces.index(START) and whole.encode("")[1:] == [whole.pieces.index(END)]
    with pytest.raises(ModelError, match="no merge of earlier tokens yields"):
        derive_merges(["a", "b", "abc"])
    with pytest.raises(ModelError, match="must be distinct"):
        ClipTokenizer(metadata | {"tokenizer.ggml.tokens": ["a", "a"]})


NOT_TOKENS = "every merge must join two tokens into a token"
NOT_TWO = "a merge must be two tokens separated by a space, not "


@pytest.mark.parametrize(("merges", "problem"), [
    ([], None), (["a b</w>"], None), (["b</w> a"], NOT_TOKENS), (["a x"], NOT_TOKENS),
    (["x a"], NOT_TOKENS), (["ab</w>"], NOT_TWO),
    ([" a"], NOT_TWO), (["a "], NOT_TWO),
])  # fmt: skip
def test_invalid_merges_are_refused(merges: list[str], problem: str | None):
    pieces = [START, END, "a", "b</w>", "ab</w>"]
    with nullcontext() if problem is None else pytest.raises(ModelError, match=f"tokenizer.ggml.merges: {problem}"):
        ClipTokenizer({"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.merges": merges}, "x.gguf")


@pytest.mark.parametrize("pieces", [4, 5])
def test_the_token_matrix_must_match_the_vocabulary(pieces: int, monkeypatch):
    reader = SimpleNamespace(width=8, context=9, vocab_size=4)
    monkeypatch.setattr(pair_embedding, "ClipEncoder", lambda file, options: reader)
    monkeypatch.setattr(pair_embedding, "ClipTokenizer", lambda metadata, path: SimpleNamespace(pieces=["x"] * pieces))
    with nullcontext() if pieces == 4 else pytest.raises(ModelError, match=r"^x.gguf: 5 tokens, but 4 embeddings$"):
        embedder = ClipEmbedder(SimpleNamespace(metadata={}, path="x.gguf"), None)
        assert (embedder.width, embedder.context, embedder.tokens, embedder.warnings) == (8, 9, 0, [])


def test_long_texts_are_refused_cut_or_split(clip):
    embedder = ClipEmbedder(GGUFFile.open(str(clip)), EngineOptions(threads=1))
    long = "the people of the city " * 9
    with pytest.raises(ContextError, match=r"text 2 has .* tokens, the model's context is 24"):
        embedder.embed(["a", long])
    cut, split = (embedder.embed([long], EmbedOptions(overflow=how)) for how in ("cut", "split"))
    assert cut.shape == split.shape == (1, pairs.OUT) and not np.array_equal(cut, split)
    assert abs(np.linalg.norm(split) - 1) < 1e-6
    for options, message in (
        (EmbedOptions(dims=99), "dims must be 32"),
        (EmbedOptions(role="query"), "no prompts for roles"),
    ):
        with pytest.raises(UsageError, match=message):
            embedder.embed(["a"], options)
    embedder.close()


def test_embed_prints_vectors_of_texts_and_images_and_the_nearest(clip, cli):
    names = [str(clip.with_name(f"{number}.png")) for number in range(3)]
    shown = [word for name in names for word in ("--image", name)]
    code, out, err = cli("embed", str(clip), "a cat", *shown)
    printed = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and not err and [each["id"] for each in printed] == ["a cat", *names]
    rows = np.array([each["embedding"] for each in printed])
    assert rows.shape == (4, pairs.OUT) and np.allclose((rows**2).sum(axis=1), 1)
    code, out, _ = cli("embed", str(clip), *shown, "--near", "a cat", "--top", "2")
    order = np.argsort(-(rows[1:] @ rows[0]))
    assert [line.split("\t")[1] for line in out.splitlines()] == [names[number] for number in order[:2]]
    assert cli("embed", str(clip), *shown, "--near", "a cat", "--top", "2", "--stats")[2].startswith("3 of 3")
    records = [{"id": 1, "image": names[0]}, {"id": 2, "text": "a cat"}, {"id": 3, "image": "none.png"},
               {"id": 4, "image": __file__}]  # fmt: skip
    code, out, _ = cli("embed", str(clip), stdin="\n".join(map(json.dumps, records)).encode())
    printed = [json.loads(line) for line in out.splitlines()]
    assert code == 6 and np.allclose([each["embedding"] for each in printed[:2]], [rows[1], rows[0]], atol=1e-6)
    assert "cannot read the image none.png" in printed[2]["error"] and "expected an image file" in printed[3]["error"]


def test_embed_reports_unsuitable_models_and_options_in_one_line(clip, cli, model_path):
    picture = str(clip.with_name("0.png"))
    for arguments, message in (
        ([str(model_path("bert")), "--image", picture], "cannot embed images"),
        ([str(clip), "a", "--image", picture, "--pooling", "mean"], "--pooling"),
        ([str(clip), "a", "--image", "none.png"], None),
    ):
        code, _, err = cli("embed", *arguments)
        assert code != 0 and "Traceback" not in err and len(err.splitlines()) <= 2
        assert message is None or message in err
    code, _, err = cli("run", str(clip), "-p", "Hi")
    assert code != 0 and len(err.splitlines()) == 1 and "localllm embed" in err


def test_a_quantized_clip_embeds_nearly_the_same(clip, cli, tmp_path, golden):
    path = tmp_path / "clip-Q8_0.gguf"
    assert cli("quantize", str(clip), str(path), "Q8_0")[0] == 0
    file = GGUFFile.open(str(path))
    assert check_validity(file).problem is None
    embedder = ClipEmbedder(file, EngineOptions(threads=2))
    assert 1 - cosine(embedder.embed(["a cat"])[0], golden["text0"]) < 1e-3
    assert 1 - cosine(embedder.embed([ShownImage(pairs.pictures()[0])])[0], golden["picture0"]) < 1e-3
    embedder.close()


@pytest.mark.parametrize("missing", ["visual_projection.weight", "text_model.final_layer_norm.bias", "merges.txt"])
def test_quantize_names_what_a_checkpoint_lacks(tmp_path, cli, missing):
    folder = pairs.write_pair(tmp_path / "clip")
    if missing == "merges.txt":
        (folder / missing).unlink()
    else:
        from checkpoint import write_safetensors

        kept = {name: array for name, array in pairs.tensors(len(pairs.vocabulary()[0])).items() if name != missing}
        write_safetensors(folder / "model.safetensors", [(name, "F32", array) for name, array in kept.items()])
    code, _, err = cli("quantize", str(folder), str(tmp_path / "out.gguf"), "F16")
    assert code != 0 and missing.removesuffix(".txt") in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out.gguf").exists()


UNREAD = "layer_norm_epsilon", "feed_forward_length"  # the one may be any number, the other nobody needs


def test_wrong_metadata_and_missing_tensors_of_clip_are_refused(clip):
    """Change every number of the metadata, and remove every tensor."""
    file = GGUFFile.open(str(clip))
    for key in [key for key in file.metadata if key.startswith("clip.") and key.rpartition(".")[2] not in UNREAD]:
        damaged = GGUFFile.open(str(clip))
        value = damaged.metadata[key]
        if isinstance(value, bool | np.bool_) or not np.isscalar(value):
            continue
        damaged.metadata = dict(damaged.metadata) | {key: int(value) * 3 + 1}
        with pytest.raises(ModelError):
            ClipEncoder(damaged, EngineOptions())
    for name in file.tensors:
        damaged = GGUFFile.open(str(clip))
        damaged.tensors = {other: tensor for other, tensor in damaged.tensors.items() if other != name}
        with pytest.raises(ModelError):
            ClipEncoder(damaged, EngineOptions())
