"""Test splitting a model into files and merging them: bytes are those of llama-gguf-split."""

import json
import struct
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from project import GOLDENS
from split_models import CASES, MODELS
from tiny_model import write_tiny_model

from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.quantizing.splitting import SplitLimits, divide_tensors, list_split_paths, parse_bytes

RECORDED = json.loads((GOLDENS / "gguf_split.json").read_text())  # by scripts/record/record_splits.py


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("case", CASES)
def test_splits_and_merged_files_have_the_bytes_of_gguf_split(tmp_path: Path, cli, case: str):
    kind, *words = case.split()
    model, out = MODELS[kind](tmp_path / "model.gguf"), tmp_path / "out"
    out.mkdir()
    assert cli("split", model, out / "x", *words)[0] == 0
    assert digests(out) == RECORDED["splits"][case]
    first = next(path for path in sorted(out.iterdir()) if "-00001-" in path.name)
    assert cli("merge", first, tmp_path / "merged.gguf")[0] == 0
    assert sha256((tmp_path / "merged.gguf").read_bytes()).hexdigest() == RECORDED["merged"][case]
    assert cli("merge", first)[0] == 0
    assert (out / "x.gguf").read_bytes() == (tmp_path / "merged.gguf").read_bytes()


def test_quantize_splits_as_split_does(model: Path, cli):
    one, two = model.parent / "one", model.parent / "two"
    one.mkdir(), two.mkdir()
    for words in (["--split-max-tensors", "4"], ["--split-max-size", "20K"],
                  ["--split-max-size", "20K", "--no-tensor-first-split"]):  # fmt: skip
        for folder in (one, two):
            for path in folder.iterdir():
                path.unlink()
        assert cli("quantize", model, one / "q.gguf", "Q8_0", *words)[0] == 0
        assert cli("quantize", model, two / "q.gguf", "Q8_0")[0] == 0
        assert cli("split", two / "q.gguf", *words)[0] == 0
        (two / "q.gguf").unlink()
        assert digests(one) == digests(two) and len(digests(one)) > 2
        assert cli("run", next(one.glob("*-00001-*")), "-p", "Hi", "-n", "1")[0] == 0


def test_a_split_model_is_split_again(model: Path, cli):
    assert cli("split", model, "--split-max-tensors", "3")[0] == 0
    part = next(model.parent.glob("model-00002-*"))
    assert cli("split", part, model.parent / "other", "--split-max-tensors", "8")[0] == 0
    whole, again = GGUFFile.open(model), GGUFFile.open(next(model.parent.glob("other-00001-*")))
    assert list(again.tensors) == list(whole.tensors) and len(again.parts) == 3


def test_a_dry_run_of_split_writes_nothing(model: Path, cli):
    code, out, _ = cli("split", model, "--split-max-tensors", "10", "--dry-run")
    assert code == 0 and len(list(model.parent.iterdir())) == 1
    assert [line.split(": ")[1].split(",")[0] for line in out.splitlines()] == ["10 tensors", "10 tensors", "1 tensors"]


def test_existing_files_are_kept_by_split_and_merge(model: Path, cli):
    kept = model.with_name("model-00002-of-00003.gguf")
    kept.write_text("mine")
    code, _, err = cli("split", model, "--split-max-tensors", "10")
    assert code == 2 and kept.read_text() == "mine" and len(list(model.parent.iterdir())) == 2
    assert err.count("\n") == 1 and "model-00002-of-00003.gguf" in err
    other = model.with_name("notes.gguf")
    other.write_text("mine")
    kept.unlink()
    assert cli("split", model, "--split-max-tensors", "10")[0] == 0
    first = model.with_name("model-00001-of-00003.gguf")
    assert cli("merge", first, other)[0] == 2 and other.read_text() == "mine"
    assert cli("merge", first, first)[0] == 2 and cli("merge", first, other, "--force")[0] == 0
    ours, theirs = GGUFFile.open(other).tensors, GGUFFile.open(model).tensors
    assert list(ours) == list(theirs) and all(np.array_equal(ours[name].data, theirs[name].data) for name in theirs)


@pytest.mark.parametrize(("words", "message"), [
    (["--split-max-size", "0"], "must be a size"), (["--split-max-size", "45X"], "must be a size"),
    (["--split-max-tensors", "0"], "1 or greater"), (["--split-max-size", "1G", "--split-max-tensors", "3"], "either"),
])  # fmt: skip
def test_invalid_split_limits_are_refused(model: Path, cli, words: list[str], message: str):
    code, _, err = cli("split", model, *words)
    assert code == 2 and message in err and err.count("\n") == 1
    assert cli("quantize", model, model.with_name("o.gguf"), "Q8_0", *words)[0] == 2


def test_keep_split_with_a_limit_is_refused(model: Path, cli):
    code, _, err = cli("quantize", model, model.with_name("o.gguf"), "Q8_0", "--keep-split", "--split-max-size", "1G")
    assert code == 2 and "either --keep-split or a limit" in err


def test_merging_an_unsplit_model_is_refused(model: Path, cli):
    code, _, err = cli("merge", model)
    assert code == 2 and "expected a file of a split model" in err


def test_a_tensor_larger_than_the_limit_warns(model: Path, cli):
    code, _, err = cli("split", model, "--split-max-size", "1K")
    assert code == 0 and "token_embd.weight and " in err and "alone is larger" in err


def test_a_custom_alignment_applies_to_the_first_split_only(tmp_path: Path, cli):
    """Each file is aligned by its own header, and only the first one has the key."""
    tensors = [OutputTensor.from_array(f"blk.{n}.x.weight", np.full((3, 5), n, np.float32)) for n in range(4)]
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "x", "general.alignment": 64}, tensors)
    assert cli("split", tmp_path / "m.gguf", "--split-max-tensors", "2")[0] == 0
    parts = sorted(tmp_path.glob("m-*"))
    whole = GGUFFile.open(parts[0])
    assert [float(whole.tensors[f"blk.{n}.x.weight"].data.view("<f4")[0, 0]) for n in range(4)] == [0, 1, 2, 3]


def test_split_sizes_are_parsed_and_outputs_numbered():
    assert [parse_bytes(text, "") for text in ("45G", "45GB", "3.5gb", "800M", "10k", "7")] == [
        45 * 10**9, 45 * 10**9, 3_500_000_000, 800_000_000, 10_000, 7]  # fmt: skip
    assert divide_tensors({"a": 10, "b": 10, "c": 10}, SplitLimits(nbytes=64)) == [["a", "b"], ["c"]]
    assert divide_tensors({"a": 99}, SplitLimits(nbytes=64, empty_first=True)) == [[], ["a"]]
    assert divide_tensors({}, SplitLimits(3)) == [[]]
    assert list_split_paths("a/b.gguf", 2) == ["a/b-00001-of-00002.gguf", "a/b-00002-of-00002.gguf"]
    assert list_split_paths("b-00001-of-00009.gguf", 2)[1] == "b-00002-of-00002.gguf"
    with pytest.raises(UsageError, match="at most 65535"):
        divide_tensors({str(n): 1 for n in range(70000)}, SplitLimits(1))


def test_split_metadata_have_the_types_of_gguf_split(model: Path, cli):
    cli("split", model, "--split-max-tensors", "10")
    packed = GGUFFile.open(next(model.parent.glob("*-00001-*"))).packed
    assert bytes(packed["split.count"]) == struct.pack("<IH", 2, 3)
    assert bytes(packed["split.tensors.count"]) == struct.pack("<Ii", 5, 21)
    assert list(packed)[-3:] == ["split.no", "split.tensors.count", "split.count"]
