"""Test converting embedding models and rerankers: files of sentence-transformers, and model cards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import edit_json, random_tensor, write_json, write_safetensors

from localllm.convert import Checkpoint, open_folder
from localllm.convert.tokens import read_tokens
from localllm.errors import ModelError
from tests.unit.convert.convert_parts import refused
from tests.unit.convert.families.test_families import shapes_of, written

MODULES = "Transformer", "Pooling", "Dense", "Dense", "Normalize"
IDENTITY = {"in_features": 64, "out_features": 96, "bias": False, "activation_function": "torch.nn.Identity"}
POOLING = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def gemma(folder: Path, dense: dict[str, Any] = IDENTITY, pooling: dict[str, Any] = POOLING) -> Path:
    """Write EmbeddingGemma, with two matrices behind the mean."""
    written(folder, "gemma-embedding")
    places = ["", *(f"{number}_{kind}" for number, kind in enumerate(MODULES) if number)]
    kinds = [f"sentence_transformers.models.{kind}" for kind in MODULES]
    both = zip(kinds, places, strict=True)
    write_json(folder / "modules.json", [{"idx": 0, "type": kind, "path": place} for kind, place in both])
    for place in places[1:4]:
        (folder / place).mkdir()
    write_json(folder / "1_Pooling" / "config.json", pooling)
    for place, (rows, columns) in (("2_Dense", (96, 64)), ("3_Dense", (64, 96))):
        sizes = {"in_features": columns, "out_features": rows}
        write_json(folder / place / "config.json", dense | sizes)
        write_safetensors(
            folder / place / "model.safetensors", [("linear.weight", "F32", values(place, rows, columns))]
        )
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "Q: ", "passage": "P: "}})
    return folder


def values(name: str, *shape: int) -> np.ndarray:
    return random_tensor(name, shape)[1]


def numbers(checkpoint: Checkpoint, name: str) -> np.ndarray:
    tensor = next(tensor for tensor in checkpoint.tensors if tensor.name == name)
    return tensor.read_rows(0, tensor.shape[0]).view(np.float32)


def test_modules_of_sentence_transformers_become_metadata_and_tensors(tmp_path: Path):
    checkpoint = open_folder(gemma(tmp_path / "model"))
    metadata = {key.removeprefix("gemma-embedding."): value for key, value in checkpoint.metadata.items()}
    assert (metadata["pooling_type"], metadata["dense_2_feat_out"], metadata["dense_2_feat_in"]) == (1, 96, 64)
    assert (metadata["localllm.prompt.query"], metadata["localllm.prompt.document"]) == ("Q: ", "P: ")
    np.testing.assert_array_equal(numbers(checkpoint, "dense_2.weight"), values("2_Dense", 96, 64))
    np.testing.assert_array_equal(numbers(checkpoint, "dense_3.weight"), values("3_Dense", 64, 96))
    assert not [line for line in checkpoint.warnings if "module" in line]


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        ("a Dense module must have no bias", {"dense": IDENTITY | {"bias": True}}),
        ("a Dense module must have no bias", {"dense": IDENTITY | {"activation_function": "torch.nn.Tanh"}}),
        ("the pooling must be", {"pooling": {"pooling_mode_max_tokens": True}}),
        ("the pooling must be", {"pooling": POOLING | {"pooling_mode_cls_token": True}}),
    ],
)
def test_modules_that_gguf_cannot_represent_are_refused(tmp_path: Path, problem: str, changes: dict[str, Any]):
    assert problem in refused(gemma(tmp_path / "model", **changes))


def test_dense_modules_of_bert_are_refused(tmp_path: Path):
    folder = gemma(tmp_path / "model")
    written(folder, "bert")
    assert "a Dense module must have no bias" in refused(folder)


def test_unknown_modules_warn_and_odd_folders_are_refused(tmp_path: Path):
    folder = gemma(tmp_path / "model")
    content = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*content[:2], {"type": "a.WordWeights", "path": "5"}])
    assert "the module WordWeights of modules.json is ignored" in open_folder(folder).warnings
    for place in ("x/../../1_Pooling", "..", f"{tmp_path}/model/1_Pooling"):
        write_json(folder / "modules.json", [*content[:1], {"type": "a.Pooling", "path": place}])
        assert f"modules.json: the folder of a module must be relative (found {place}" in refused(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_qwen_reranker_is_recognized_by_its_model_card(tmp_path: Path, tied: bool):
    """Expect a head with the rows of two tokens."""
    folder = written(tmp_path, "qwen3")
    edit_json(folder / "config.json", tie_word_embeddings=tied)
    assert "qwen3.pooling_type" not in open_folder(folder).metadata
    (folder / "README.md").write_text("# Qwen3-Reranker-0.6B\n")
    assert "tokenizer.json: has unexpected content: no 'yes'" in refused(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = list(content["model"]["vocab"])
    vocabulary[-1], vocabulary[-4] = "yes", "no"  # merges made them
    content["model"] |= {"vocab": {piece: token for token, piece in enumerate(vocabulary)}, "merges": []}
    write_json(folder / "tokenizer.json", content)
    checkpoint = open_folder(folder)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    np.testing.assert_array_equal(
        numbers(checkpoint, "cls.output.weight"),
        values(name, *shapes_of("qwen3")[name])[[len(vocabulary) - 1, len(vocabulary) - 4]],
    )
    assert "output.weight" not in {tensor.name for tensor in checkpoint.tensors}
    assert checkpoint.metadata["qwen3.classifier.output_labels"] == ["yes", "no"]
    assert checkpoint.metadata["qwen3.pooling_type"] == 4
    assert checkpoint.metadata["tokenizer.chat_template.rerank"].startswith("<|im_start|>system\nJudge whether")


@pytest.mark.parametrize("kind", ["RobertaProcessing", "BertProcessing"])
def test_bert_processors_add_tokens_at_both_ends(tmp_path: Path, kind: str):
    folder = written(tmp_path, "bert")
    first, last = (json.loads((folder / "tokenizer.json").read_text())["added_tokens"][n]["content"] for n in (0, 2))
    edit_json(folder / "tokenizer.json", post_processor={"type": kind, "cls": [first, 0], "sep": [last, 2]})
    metadata = open_folder(folder).metadata
    assert metadata["tokenizer.ggml.add_bos_token"] and metadata["tokenizer.ggml.add_eos_token"]


def wordpiece(**changes: Any) -> dict[str, Any]:
    """Return the tokenizer.json of a BERT."""
    pieces = ["[UNK]", "[CLS]", "##", "##ab", "ab", "<x>"]
    added = [{"id": 1, "content": "[CLS]", "special": True}, {"id": 5, "content": "<x>", "special": False}]
    model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {piece: token for token, piece in enumerate(pieces)}}
    normalizer = {"type": "BertNormalizer", **changes.pop("normalizer", {})}
    return {
        "model": model | changes.pop("model", {}), "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"}, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(("normalizer", "pre", "more"), [
    ({}, "bert-bge", {}), ({"strip_accents": None, "clean_text": True}, "bert-bge", {}),
    ({"strip_accents": True}, "bert-bge", {}),
    ({"strip_accents": False}, "bert-bge", {"normalizer.strip_accents": False}),
    ({"lowercase": False}, "default", {"normalizer.lowercase": False}),
    ({"lowercase": False, "strip_accents": False}, "default", {"normalizer.lowercase": False}),
    ({"lowercase": False, "strip_accents": True}, "default",
     {"normalizer.lowercase": False, "normalizer.strip_accents": True}),
])  # fmt: skip
def test_wordpieces_are_marked_at_the_beginning_of_words(
    tmp_path: Path, normalizer: dict[str, Any], pre: str, more: dict[str, Any]
):
    """Treat added tokens that are not special as ordinary word pieces."""
    tokens = read_tokens(tmp_path, wordpiece(normalizer=normalizer), 7)
    assert tokens.pieces == ["[UNK]", "[CLS]", "▁##", "ab", "▁ab", "▁<x>", "[PAD6]"]
    assert (tokens.types, tokens.model, tokens.pre, tokens.more) == ([3, 3, 1, 1, 1, 1, 5], "bert", pre, more)


@pytest.mark.parametrize(("problem", "changes"), [
    ("must have BERT's normalizer and pre-tokenizer", {"pre_tokenizer": {"type": "Whitespace"}}),
    ("must have BERT's normalizer and pre-tokenizer", {"normalizer": {"type": "NFC"}}),
    ("continuing_subword_prefix must be ## \\(found @", {"model": {"continuing_subword_prefix": "@"}}),
    ("max_input_chars_per_word must be 100", {"model": {"max_input_chars_per_word": 99}}),
    ("clean_text and handle_chinese_chars of the normalizer must be true", {"normalizer": {"clean_text": False}}),
    ("handle_chinese_chars of the normalizer must be true", {"normalizer": {"handle_chinese_chars": False}}),
])  # fmt: skip
def test_wordpiece_tokenizers_that_gguf_cannot_represent_are_refused(
    tmp_path: Path, problem: str, changes: dict[str, Any]
):
    with pytest.raises(ModelError, match=problem):
        read_tokens(tmp_path, wordpiece(**changes), 7)
    same = {"model": {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}}
    assert read_tokens(tmp_path, wordpiece(**same), 7).left_out == {}


SPACES = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Metaspace"}]}


def unigram(**changes: Any) -> dict[str, Any]:
    vocab = [["<s>", 0.0], ["<unk>", -1.0], ["▁a", -2.5], ["<x>", -3.0]]
    added = [
        {"id": 0, "content": "<s>", "special": True}, {"id": 1, "content": "<unk>", "special": True},
        {"id": 3, "content": "<x>", "special": False}, {"id": 4, "content": "<far>", "special": True},
    ]  # fmt: skip
    whole = {"model": {"type": "Unigram", "unk_id": 1, "vocab": vocab}, "added_tokens": added, "normalizer": None}
    return whole | {"pre_tokenizer": SPACES} | changes


MAP = {"type": "Precompiled", "precompiled_charsmap": "AQL/"}
MERGES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}


@pytest.mark.parametrize(("changes", "adds", "merges", "charsmap"), [
    ({}, True, True, None), ({"normalizer": MAP}, True, True, [1, 2, 255]),
    ({"pre_tokenizer": {"type": "Metaspace"}}, True, False, None),
    ({"pre_tokenizer": {"type": "Metaspace"}, "normalizer": MERGES}, True, True, None),
    ({"pre_tokenizer": {"type": "Metaspace", "add_prefix_space": False}}, False, False, None),
    ({"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "never", "add_prefix_space": True}}, False, False, None),
    ({"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}}, True, False, None),
])  # fmt: skip
def test_unigram_pieces_keep_their_scores_and_normalizer(
    tmp_path: Path, changes: dict[str, Any], adds: bool, merges: bool, charsmap: list[int] | None
):
    tokens = read_tokens(tmp_path, unigram(**changes), 6)
    assert tokens.pieces == ["<s>", "<unk>", "▁a", "<x>", "<far>", "[PAD5]"] and tokens.types == [3, 2, 1, 4, 3, 5]
    assert tokens.scores == [0.0, -1.0, -2.5, -3.0, 0.0, -10000.0]
    assert (tokens.model, tokens.pre, tokens.adds_space, tokens.more["remove_extra_whitespaces"]) == (
        "t5", "default", adds, merges,
    )  # fmt: skip
    assert ("precompiled_charsmap" in tokens.more) == (charsmap is not None)
    assert charsmap is None or tokens.more["precompiled_charsmap"].tolist() == charsmap


@pytest.mark.parametrize(("problem", "changes"), [
    ("normalizer must be Precompiled, or Replace of repeated spaces", {"normalizer": {"type": "Lowercase"}}),
    ("must be Precompiled, or Replace of repeated spaces", {"normalizer": MERGES | {"pattern": {"Regex": " +"}}}),
    ("pre-tokenizer of a unigram model must be Metaspace", {"pre_tokenizer": {"type": "WhitespaceSplit"}}),
    ("pre-tokenizer of a unigram model must be Metaspace", {"pre_tokenizer": {"type": "Digits"}}),
    ("pre-tokenizer of a unigram model must be Metaspace", {"pre_tokenizer": None}),
])  # fmt: skip
def test_unigram_tokenizers_that_gguf_cannot_represent_are_refused(
    tmp_path: Path, problem: str, changes: dict[str, Any]
):
    with pytest.raises(ModelError, match=problem):
        read_tokens(tmp_path, unigram(**changes), 6)
