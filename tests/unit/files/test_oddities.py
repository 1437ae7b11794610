"""Odd files that other programs load: they run, and one line says what is odd about them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invalid_models import GONE, Wrong
from tiny_model import HEADS, KV_HEADS, LAYERS, MERGES, WIDTH

import localllm
from localllm.arch.weights import find_module
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.metadata import MAX_NOTES as MOST
from localllm.files.gguf.metadata import Irregularities
from localllm.text.vocabulary import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, read_vocabulary
from tests.fuzz.test_malformed_models import ALL, PIECES, TYPES, L, T, sentence_piece, with_item
from tests.fuzz.test_malformed_models import arguments as usual_arguments

ODD = "localllm: warning: the file has irregularities that do not change its meaning: "
IDS = ("bos", "eos", "unknown", "padding", "separator", "seperator", "mask", "cls", "eot", "eom",
       "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")  # fmt: skip
ONES = np.ones((4, 64), np.float32)
NUMBERED = {"version": 1, "name": 7, "license": np.ones(2), "author": True, "tags": np.ones(2), "languages": 5,
            "file_type": "F32", "quantization_version": -1, "parameter_count": "1B", "url": 1.5}  # fmt: skip

METADATA: dict[str, tuple[dict[str, Any], str]] = {
    **{f"{name}: {value}": (T(f"{name}_token_id", value),
                            f"tokenizer.ggml.{name}_token_id is {value}, but there are only 268 tokens")
       for name in IDS for value in (268, 2560)},
    **{f"general.{name}": ({f"general.{name}": value}, f"general.{name} is not ") for name, value in NUMBERED.items()},
    "bos without one": (T("add_bos_token", True) | T("bos_token_id", GONE), "add_bos_token is true, but the "
    "vocabulary has no"),
    "eos without one": (T("add_eos_token", True) | T("eos_token_id", GONE), "add_eos_token is true, but the "
    "vocabulary has no"),
    "vocab_size, more": (L("vocab_size", 269), "llama.vocab_size is 269, but there are 268 tokens"),
    "vocab_size, less": (L("vocab_size", 267), "llama.vocab_size is 267"),
    "no type": (T("token_type", with_item(TYPES, 9, 0)), "1 tokens have the undefined type 0, the first is token 9"),
    "two normal ones": (T("tokens", [*PIECES[:-1], "a"]), "and 267 are both 'a'"),
    "an unused one": (T("tokens", [*PIECES[:-1], "a"]) | T("token_type", with_item(TYPES, 267, 5)), "are both 'a'"),
    "a control one": (T("tokens", [*PIECES[:-1], "a"]) | T("token_type", with_item(TYPES, 267, 3)), "are both 'a'"),
    "ends twice": (T("tokens", [*PIECES[:-1], "<|im_end|>"]), "tokens 2 and 267 are both '<|im_end|>'"),
    "in SentencePiece": (sentence_piece(tokens=["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)),
                                                *"abcdefgha"]), "tokens 259 and 267 are both 'a', which is "
                                                "encoded as 259"),
    "merge of strangers": (T("merges", [*MERGES, "h xyz"]), "a merge has an operand or a result that is not a "
    "token (xyz)"),
    "merge to a stranger": (T("merges", [*MERGES, "h h", "l h"]), "2 merges have an operand or a result that is "
    "not a token (hh)"),
    "a key with spaces": ({"my own key": 1}, "the metadata key 'my own key' has a space"),
}  # fmt: skip


def arguments(verb: str, path: Path) -> list[str]:
    return [*usual_arguments(verb, path), *(["--temp", "0"] if verb == "run" else [])]


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Wrong:
    return Wrong(tmp_path_factory.mktemp("odd"))


def require_runs(cli, path: Path, *expected: str) -> dict[str, str]:
    """Run all commands, which tell in one line what is odd, and the file that quantize wrote; return their output."""
    printed = {}
    for verb in ALL:
        code, printed[verb], err = cli(*arguments(verb, path))
        assert code == 0, f"{verb}: {err}"
        told = [line for line in err.splitlines() if line.startswith(ODD)]
        assert len(told) == 1 and all(text in told[0] for text in expected), f"{verb}: {err}"
        assert err.count("\n") == 1 or verb != "tokenize", err
    quantized = path.with_suffix(".out")
    assert cli("run", quantized, "-p", "Hi", "-n", "1", "--temp", "0")[0] == 0
    return printed


@pytest.mark.sampled
@pytest.mark.parametrize("case", METADATA)
def test_odd_metadata_is_told_and_ignored(odd: Wrong, cli, case: str):
    changes, expected = METADATA[case]
    require_runs(cli, odd.write(changes), expected)


@pytest.mark.parametrize("names", [["v.blk.0.attn_q.weight"], ["mm.0.weight", "v.patch_embd.weight"], ["a.conv.bias"],
                                   ["mtp.layers.0.weight", "a.x"]])  # fmt: skip
def test_tensors_of_other_parts_are_ignored_and_copied(odd: Wrong, cli, names: list[str]):
    """Take files as in Ollama's store; expect the tensors unchanged in the new file."""
    path = odd.write(tensors=dict.fromkeys(names, ONES))
    kinds = " and ".join(sorted({str(find_module(name)) for name in names}))
    printed = require_runs(cli, path, f"{len(names)} unused tensors of {kinds} ({names[0]})")
    assert printed["run"] == cli(*arguments("run", odd.valid))[1]
    copied = GGUFFile.open(path.with_suffix(".out"))
    assert all(copied.tensors[name].format.name == "F32" for name in names)
    assert copied.tensors["blk.0.attn_q.weight"].format.name == "Q8_0"


@pytest.mark.parametrize("name", ["v", "w.blk.0.attn_q.weight", "mtpx.weight", "audio.weight", "blk.0.v.weight"])
def test_tensors_of_no_known_part_are_refused(odd: Wrong, cli, name: str):
    code, _, err = cli("run", odd.write(tensors={name: ONES}), "-p", "Hi", "-n", "1")
    assert code == 3 and f"tensor {name}" in err


@pytest.mark.parametrize("count", [1, 20, 33, 1000, 100_000])
def test_bytes_behind_the_last_tensor_are_dropped(odd: Wrong, cli, count: int):
    path = odd.write()
    path.write_bytes(path.read_bytes() + bytes([7]) * count)
    printed = require_runs(cli, path, f"{count} bytes after the last tensor")
    assert printed["run"] == cli(*arguments("run", odd.valid))[1]
    assert not GGUFFile.open(path.with_suffix(".out")).oddities.format_lines()


def test_ignored_metadata_is_not_written_again(odd: Wrong, cli):
    changes = T("padding_token_id", 999) | L("vocab_size", 7) | T("add_eos_token", True) | T("eos_token_id", GONE)
    path = odd.write(changes | {"general.version": 3})
    require_runs(cli, path, "padding", "vocab_size", "add_eos_token", "general.version")
    metadata = GGUFFile.open(path.with_suffix(".out")).metadata
    assert not {"tokenizer.ggml.padding_token_id", "llama.vocab_size", "tokenizer.ggml.add_eos_token"} & set(metadata)
    assert metadata["general.version"] == 3


def test_oddities_are_told_at_every_start(odd: Wrong, cli):
    """Tell them also where a check is remembered."""
    path = odd.write(T("merges", [*MERGES, "h h"]) | T("mask_token_id", 300))
    for _ in range(2):
        require_runs(cli, path, "not a token (hh)", "mask_token_id")


def test_values_shorter_than_keys_compute_as_padded_ones(odd: Wrong, cli):
    """Compare the reference with the compiled kernels, and a short value with a padded matrix."""
    keys, values = WIDTH // HEADS, 8
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        value, out = (odd.tensors[f"blk.{layer}.attn_{name}.weight"] for name in ("v", "output"))
        tensors[f"blk.{layer}.attn_v.weight"] = value.reshape(KV_HEADS, keys, -1)[:, :values].reshape(-1, WIDTH)
        tensors[f"blk.{layer}.attn_output.weight"] = (
            out.reshape(WIDTH, HEADS, keys)[:, :, :values].reshape(WIDTH, -1).copy()
        )
    padded = {name: padded_like(tensors[name], name, odd.tensors[name].shape, keys, values) for name in tensors}
    lengths = L("attention.key_length", keys) | L("attention.value_length", values)
    ids = list(range(3, 40))
    with localllm.open(odd.write(tensors=padded)) as model:
        expected = model.logits(ids)
    path = odd.write(lengths, tensors)
    with localllm.open(path) as model:
        assert np.abs(model.logits(ids) - expected).max() < 1e-3
    with localllm.open(path, backend="reference") as model:
        assert np.abs(model.logits(ids) - expected).max() < 1e-3
    require_runs(cli, path, f"keys of dimension {keys} and values of {values}, in a llama model")


def padded_like(weights: np.ndarray, name: str, shape: tuple[int, ...], keys: int, values: int) -> np.ndarray:
    """Return the matrix with zeros for the numbers that a value lacks."""
    whole = np.zeros(shape, np.float32)
    if "attn_v" in name:
        whole.reshape(KV_HEADS, keys, -1)[:, :values] = weights.reshape(KV_HEADS, values, -1)
    else:
        whole.reshape(shape[0], HEADS, keys)[:, :, :values] = weights.reshape(shape[0], HEADS, values)
    return whole


# ---- from Python and over HTTP, and what stays refused


def test_oddities_are_warnings_of_the_model(odd: Wrong):
    with localllm.open(odd.write(T("mask_token_id", 300))) as model:
        assert [line for line in model.warnings if "mask_token_id is 300" in line]


def test_inspect_lists_oddities_in_json(odd: Wrong, cli):
    path = odd.write(T("mask_token_id", 300))
    (line,) = json.loads(cli("inspect", path, "--json")[1])["warnings"]
    assert "mask_token_id is 300, but there are only 268 tokens: ignored" in line
    assert json.loads(cli("inspect", odd.valid, "--json")[1])["warnings"] == []


def test_a_table_of_too_few_tensors_is_refused(odd: Wrong, cli):
    """With one row less than there are, all weights would be read from a wrong place."""
    data = odd.valid.read_bytes()
    (count,) = struct.unpack_from("<Q", data, 8)
    for lost in range(1, 4):
        odd.path.write_bytes(data[:8] + struct.pack("<Q", count - lost) + data[16:])
        code, _, err = cli("inspect", odd.path)
        assert code == 3 and "tensor count: the data of" in err


def test_the_line_of_oddities_is_cut_short():
    oddities = Irregularities()
    for number in range(10):
        oddities.note(f"thing {number}")
        oddities.note("thing 0")
    (line,) = oddities.format_lines()
    assert line.endswith("; thing 5; and 4 more") and line.count(";") == MOST
    assert Irregularities().format_lines() == []


# ---- which of two tokens a text becomes


def vocabulary_of(pieces: list[tuple[str, int]], **more: Any) -> Any:
    tokens = [*PIECES[:259], *(piece for piece, _ in pieces)]
    types = np.array([3] * 3 + [1] * 256 + [kind for _, kind in pieces], np.int32)
    keys = {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "merges": [], "token_type": types, **more}
    return read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


@pytest.mark.parametrize(("kinds", "chosen"), [
    ([NORMAL, NORMAL], 0), ([UNUSED, NORMAL], 1), ([CONTROL, NORMAL, UNUSED], 1), ([CONTROL, UNUSED], 1),
    ([CONTROL, USER_DEFINED, NORMAL], 1), ([CONTROL, CONTROL], None),
])  # fmt: skip
def test_a_text_becomes_its_plainest_token(kinds: list[int], chosen: int | None):
    vocabulary = vocabulary_of([("<same>", kind) for kind in kinds])
    assert vocabulary.ids.get("<same>") == (None if chosen is None else 259 + chosen)
    assert [vocabulary.pieces[259 + place] for place in range(len(kinds))] == ["<same>"] * len(kinds)


def test_all_tokens_of_an_end_end_an_answer():
    vocabulary = vocabulary_of(
        [("<end_of_turn>", NORMAL), ("<end_of_turn>", CONTROL), ("</s>", NORMAL), ("</s>", CONTROL)]
    )
    assert {259, 260, 262} <= vocabulary.end_ids and 261 not in vocabulary.end_ids
    assert vocabulary.ids["</s>"] == 261 and "<end_of_turn>" not in vocabulary.ids


def test_a_control_token_with_a_plain_text_needs_special(odd: Wrong, cli):
    path = odd.write(T("tokens", [*PIECES[:-1], "hello"]) | T("token_type", with_item(TYPES, 267, CONTROL)))
    tokenizer = localllm.open(path).tokenizer
    assert tokenizer.encode("hello") == [PIECES.index("hello")] and tokenizer.encode("hello", special=True) == [267]


def test_bytes_written_twice_become_the_first_token():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "<0x41>"]
    types = np.array([2, 3, 3, *[BYTE] * 256, NORMAL, NORMAL], np.int32)
    keys = {"model": "llama", "tokens": pieces, "token_type": types, "scores": np.zeros(261, np.float32)}
    vocabulary = read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    assert vocabulary.ids["<0x41>"] == 3 + 0x41


def test_an_end_token_id_beyond_the_vocabulary_is_ignored():
    """Fall back to SentencePiece's usual one, as without the key."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    types = np.array([2, 3, 3, *[BYTE] * 256, NORMAL], np.int32)
    keys = {"model": "llama", "tokens": pieces, "token_type": types, "scores": np.zeros(260, np.float32)}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert read_vocabulary(metadata | T("eos_token_id", 5000)).eos_id == 2
    assert read_vocabulary(metadata | T("eos_token_id", -1)).eos_id is None
    with pytest.raises(ModelError, match="eos_token_id must be a number from 0 to 259"):
        read_vocabulary(metadata | T("eos_token_id", -2))
