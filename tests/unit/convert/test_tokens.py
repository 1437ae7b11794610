"""Tokenizers of checkpoints beyond GGUF: more than two ends, ends without a row, composed texts."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import CONFIG, added_token, edit_json, tokenizer, write_checkpoint, write_json
from tiny_model import byte_pieces
from tokenizers import Tokenizer as Original

import localllm
from localllm.convert import open_folder
from localllm.files.gguf.file import GGUFFile
from localllm.text.pretokenize import to_nfc, uses_nfc
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import read_vocabulary

ROWS = CONFIG["vocab_size"]
DECOMPOSED = unicodedata.normalize("NFD", "Größe, naïve café: Ấ 각 ﬁ Å") + " a\u0301\u0316 \u0344"


def converted(cli, folder: Path) -> tuple[Path, str]:
    path = folder.parent / "made.gguf"
    code, _, err = cli("quantize", folder, path, "F32", "--force")
    assert code == 0, err
    return path, err


# ---- ends


@pytest.mark.parametrize("ends", [[2, 60, 61], [2, 60, 61, 62], [2, 60, 61, 62, 63, 64, 65]])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_a_converted_file_keeps_all_ends(tmp_path: Path, cli, ends: list[int], file: str):
    """Give two keys of their own; list more in Ollama's way."""
    folder = write_checkpoint(tmp_path / "model")
    path = folder / f"{file}.json"
    write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | {"eos_token_id": ends})
    path_made, err = converted(cli, folder)
    metadata = GGUFFile.open(path_made).metadata
    assert [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == ends[:3] and err == ""
    listed = metadata.get("tokenizer.ggml.eos_token_ids")
    assert (listed is None) if len(ends) == 3 else (listed.tolist() == ends and listed.dtype == np.int32)
    assert set(ends) <= Tokenizer.from_file(path_made).end_ids


def test_ends_listed_by_ollama_end_answers():
    metadata = open_tiny_metadata() | {"tokenizer.ggml.eos_token_ids": np.array([7, 8, 9000], np.uint32)}
    assert {7, 8} <= read_vocabulary(metadata).end_ids and 9000 not in read_vocabulary(metadata).end_ids


def open_tiny_metadata() -> dict[str, Any]:
    pieces = byte_pieces()
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": pieces, "merges": []}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def without_row(folder: Path) -> Path:
    """Write a checkpoint whose end was added behind the rows of its embedding."""
    write_checkpoint(folder)
    content = tokenizer()
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] != "<|im_end|>"]
    content["model"]["vocab"] = {("<|old|>" if text == "<|im_end|>" else text): number
                                 for text, number in content["model"]["vocab"].items()}  # fmt: skip
    content["added_tokens"] += [added_token(2, "<|old|>"), added_token(ROWS + 1, "<|im_end|>")]
    write_json(folder / "tokenizer.json", content)
    edit_json(folder / "config.json", eos_token_id=ROWS + 1)
    return folder


def test_an_end_without_a_row_is_named_and_ends_as_text(tmp_path: Path, cli):
    """Name it, and end an answer at its text, because the template writes it."""
    made, err = converted(cli, without_row(tmp_path / "model"))
    assert f"1 token from id {ROWS + 1} on is dropped: the model has {ROWS}; among them <|im_end|>" in err
    with localllm.open(made) as model:
        assert model.tokenizer.end_texts == ("<|im_end|>",) and "<|im_end|>" in model.session.template.stops
        answer = model.chat([{"role": "user", "content": "Hi"}], max_tokens=3, temperature=0)
        assert "<|im_end|>" not in "".join(answer)


def test_an_end_without_a_row_ends_outside_the_template_too(tmp_path: Path):
    folder = without_row(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokens = Tokenizer.from_metadata(opened := open_folder(folder).metadata)
    assert tokens.end_texts == ("<|im_end|>",) and opened["localllm.end_texts"] == ["<|im_end|>"]
    from localllm.text.templates import ChatTemplate

    assert ChatTemplate.from_tokenizer(tokens).stops == ()


def test_an_end_with_an_unknown_id_is_left_out(tmp_path: Path):
    folder = write_checkpoint(tmp_path / "model", {"eos_token_id": [2, 5000]})
    assert open_folder(folder).warnings == ["eos_token_id 5000: ignored, because the vocabulary has no such token"]


# ---- composed texts


@pytest.mark.parametrize("normalizer", [{"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]}, None])
def test_decomposed_texts_are_composed_as_by_the_original(tmp_path: Path, cli, normalizer: Any):
    """Tell it by a key, since the name of this pre-tokenizer does not."""
    folder = write_checkpoint(tmp_path / "model")
    content = tokenizer() | {"normalizer": normalizer}
    write_json(folder / "tokenizer.json", content)
    made, err = converted(cli, folder)
    original = Original.from_str(json.dumps(content))
    file = GGUFFile.open(made)
    assert file.metadata.get("localllm.normalizer") == ("nfc" if normalizer else None) and err == ""
    ours = Tokenizer.from_file(made)
    for text in (DECOMPOSED, DECOMPOSED * 300, "plain", f"a<|im_end|>{DECOMPOSED}", "<|im_end|>\u0301e\u0301"):
        assert ours.encode(text, special=True) == original.encode(text, add_special_tokens=False).ids
    code, out, _ = cli("tokenize", made, "cafe\u0301", "--ids")
    assert code == 0 and (json.loads(out) == ours.encode("caf\u00e9")) is bool(normalizer)


@pytest.mark.parametrize(("metadata", "expected"), [
    ({"tokenizer.ggml.pre": "qwen2"}, True), ({"tokenizer.ggml.pre": "command-r"}, True),
    ({"tokenizer.ggml.pre": "olmo"}, True), ({"tokenizer.ggml.pre": "llama-bpe"}, False), ({}, False),
    ({"general.architecture": "gptneox", "tokenizer.ggml.pre": "gpt-2"}, True),
    ({"tokenizer.ggml.pre": "qwen2", "localllm.normalizer": "none"}, False),
    ({"tokenizer.ggml.pre": "gpt-2", "localllm.normalizer": "nfc"}, True),
    ({"tokenizer.ggml.pre": "qwen2", "localllm.normalizer": 7}, True),
])  # fmt: skip
def test_nfc_is_used_by_key_name_or_architecture(metadata: dict[str, Any], expected: bool):
    assert uses_nfc(metadata) is expected


@pytest.mark.parametrize("count", [1, 4096, 200_000])
def test_composing_takes_linear_time(count: int):
    """Include marks in the wrong order, without an end."""
    marks = "a" + "\u0301\u0316" * (count // 2)
    assert to_nfc(marks) == (unicodedata.normalize("NFC", marks) if count < 5000 else to_nfc(marks))
    assert len(to_nfc(marks)) <= len(marks) and to_nfc("é" * count) == "é" * count
    assert to_nfc("e\u0301" * count) == "é" * count
