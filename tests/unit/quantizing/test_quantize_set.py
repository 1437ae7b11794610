"""Test files of several types in one pass: the bytes are those of single runs, whatever interrupts it."""

import json
import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from checkpoint import write_checkpoint
from project import ROOT
from tiny_model import write_tiny_model

from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.files.imatrix_file import ImportanceMatrix, SquaredActivations, write_imatrix
from localllm.files.logits_file import LogitsWriter, compute_row_width
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.quantizing import quantize_set
from localllm.quantizing.plan import QuantizeRequest, make_plan
from localllm.quantizing.quantize import open_source
from localllm.quantizing.quantize_set import (
    DEFAULT_TYPES,
    IMPORTANCE_TYPES,
    QuantizeSet,
    SetMember,
    derive_set_output,
    parse_types,
)

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
KINDS = ("Q8_0", "Q5_0", "Q4_0", "F16")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf")


def single(cli, model: Path, folder: Path, *words: str) -> dict[str, bytes]:
    """Quantize to each type in a run of its own; return the files' bytes by name."""
    folder.mkdir()
    for name in KINDS:
        assert cli("quantize", model, folder / f"{model.stem}-{name}.gguf", name, *words)[0] == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("words", [(), ("--pure",), ("--split-max-tensors", "7"), ("--prune-layers", "0")])
def test_files_of_several_types_have_the_bytes_of_single_runs(model: Path, cli, words: tuple[str, ...]):
    expected = single(cli, model, model.parent / "single", *words)
    folder = model.parent / "ladder"
    folder.mkdir()
    code, out, _ = cli("quantize", model, folder, "--types", ",".join(KINDS), *words)
    assert code == 0 and read_files(folder) == expected
    sums = dict(re.findall(r"^([0-9a-f]{64})  (.+)$", out, re.MULTILINE))
    assert sums == {sha256(data).hexdigest(): str(folder / name) for name, data in expected.items()}


def test_files_with_importance_have_the_bytes_of_single_runs(model: Path, cli):
    tensors = GGUFFile.open(model).tensors
    random = np.random.default_rng(1)
    squares = {name: SquaredActivations(random.random((1, tensor.shape[-1])).astype(np.float32), np.ones(1, np.float32))
               for name, tensor in tensors.items() if len(tensor.shape) == 2}  # fmt: skip
    path = model.with_name("m.imatrix")
    write_imatrix(str(path), ImportanceMatrix(squares, ["text"], 1, 512))
    expected = single(cli, model, model.parent / "single", "--imatrix", str(path))
    folder = model.parent / "ladder"
    folder.mkdir()
    assert cli("quantize", model, folder, "--types", ",".join(KINDS), "--imatrix", path)[0] == 0
    assert read_files(folder) == expected


def test_a_checkpoint_is_quantized_to_several_types_with_a_markdown_table(tmp_path: Path, cli):
    folder = write_checkpoint(tmp_path / "My-Model")
    code, out, _ = cli("quantize", folder, "--types", "F16,Q8_0", "--md")
    assert code == 0
    assert out.splitlines()[0] == "| file | type | size | bits per weight | SHA-256 |"
    for name in ("F16", "Q8_0"):
        digest = sha256((tmp_path / f"My-Model-{name}.gguf").read_bytes()).hexdigest()
        assert f"| My-Model-{name}.gguf | {name} | " in out and f"`{digest}`" in out


def test_json_lists_the_files_sizes_and_digests_of_each_type(model: Path, cli):
    code, out, _ = cli("quantize", model, model.parent / "x-{type}.gguf", "--types", "Q8_0,q4_0,Q8_0", "--json")
    report = json.loads(out)
    assert code == 0 and [row["type"] for row in report["types"]] == ["Q8_0", "Q4_0"]
    for row in report["types"]:
        data = (model.parent / f"x-{row['type']}.gguf").read_bytes()
        expected = {"name": f"x-{row['type']}.gguf", "size": len(data), "sha256": sha256(data).hexdigest()}
        assert row["files"] == [expected] and row["size"] == len(data) and row["seconds"] >= 0
    assert sum(row["seconds"] for row in report["types"]) <= report["seconds"] + 0.02  # rounded to hundredths


def test_divergences_of_all_types_are_those_of_perplexity(model: Path, cli, tmp_path: Path):
    """Check all three tables; logits of another vocabulary are refused before anything is written."""
    text, base = tmp_path / "t.txt", tmp_path / "base.logits"
    text.write_text("hello world, " * 40)
    assert cli("perplexity", model, text, "-c", 32, "--chunks", 3, "--save-logits", base)[0] == 0
    command = ("quantize", model, tmp_path / "{type}.gguf", "--types", "Q8_0,Q4_0", "--base", base)
    rows = json.loads(cli(*command, "--json")[1])["types"]
    lines = [cli(*command, *words)[1].splitlines() for words in ((), ("--md",))]
    assert all("KL divergence" in some[0] and "same top token" in some[0] for some in lines)
    for number, row in enumerate(rows):
        file = tmp_path / f"{row['type']}.gguf"
        alone = json.loads(cli("perplexity", file, "--kl-divergence", "--base", base, "--json")[1])
        expected = {"mean": alone["kld"]["mean"], "error": alone["kld"]["error"], "same_top": alone["same_top"]["mean"]}
        assert row["divergence"] == pytest.approx(expected) and expected["mean"] > 0
        assert all(f"{expected['mean']:.4f} ± " in some[number + at] for some, at in zip(lines, (1, 2), strict=True))
    base.unlink()
    with LogitsWriter(base, np.zeros((1, 8), np.int32), 10) as writer:
        writer.write(np.zeros((3, compute_row_width(10)), "<u2"))
    code, _, err = cli("quantize", model, tmp_path / "new-{type}.gguf", "--types", "Q5_0", "--base", base)
    assert (
        code == 2
        and "their vocabulary has 10 tokens, the model's 268" in err
        and err.count("\n") == 1
        and not list(tmp_path.glob("new*"))
    )


def test_equal_searches_run_once_for_all_types(model: Path, cli, monkeypatch):
    encoded = []
    encode = quantize_set.encode

    def counting(name, weights, importance):
        encoded.append((name, weights.shape, weights.tobytes()))
        return encode(name, weights, importance)

    monkeypatch.setattr(quantize_set, "encode", counting)
    assert cli("quantize", model, model.parent / "{type}.gguf", "--types", "Q3_K_S,Q2_K,Q4_0,Q5_K_S,Q5_1")[0] == 0
    assert len({*encoded}) == len(encoded) and {name for name, _, _ in encoded} >= {"Q4_0", "Q5_1", "Q8_0"}


def test_the_ladder_has_the_usual_types(model: Path, cli):
    code, out, _ = cli("quantize", model, "--ladder", "--dry-run")
    rows = [line.split()[0] for line in out.splitlines()[1:] if line][:-1]
    assert code == 0 and rows == [*DEFAULT_TYPES] and len(list(model.parent.iterdir())) == 1
    assert [recipe.name for recipe in parse_types(None, True)] == [*DEFAULT_TYPES, *IMPORTANCE_TYPES]


@pytest.mark.sampled
def test_calibrated_files_of_several_types_have_the_bytes_of_single_runs(model: Path, cli, tmp_path: Path):
    text = tmp_path / "t.txt"
    text.write_text("hello world " * 600)
    for name in ("Q8_0", "Q4_0"):
        assert cli("quantize", model, tmp_path / f"one-{name}.gguf", name, "--calibrate", text)[0] == 0
    out = tmp_path / "many-{type}.gguf"
    assert cli("quantize", model, out, text, "--types", "Q8_0,Q4_0", "--calibrate")[0] == 0
    for name in ("Q8_0", "Q4_0"):
        assert (tmp_path / f"one-{name}.gguf").read_bytes() == (tmp_path / f"many-{name}.gguf").read_bytes()
    assert not list(tmp_path.glob("*.ladder"))


@pytest.mark.parametrize(("words", "message"), [
    (["--types", "Q8_0,Q9"], "Q9 must be a type"), (["--types", ","], "expected types"),
    (["--types", "Q8_0", "--ladder"], "either"), (["Q8_0", "--json"], "need --types"),
    (["--types", "Q8_0", "--json", "--md"], "either"), (["--types", "Q8_0", "--calibrate", "--size", "1M"], "one TYPE"),
    (["out.gguf", "--types", "Q8_0,Q4_0"], "expected a folder"), (["Q8_0", "--types", "Q4_0"], "either TYPE"),
    (["x-{type}.gguf", "y", "--types", "Q4_0"], "expected IN [OUT]"),
    (["Q8_0", "--base", "x"], "--base needs --types"), (["--types", "Q4_0", "--base", "nowhere"], "nowhere"),
])  # fmt: skip
def test_invalid_arguments_for_several_types_are_refused(model: Path, cli, words: list[str], message: str):
    code, _, err = cli("quantize", model, *words)
    assert code == 2 and message in err and err.count("\n") == 1 and len(list(model.parent.iterdir())) == 1


def test_output_names_need_the_type_or_a_folder(model: Path, cli):
    assert derive_set_output("m.gguf", "a-{type}-{type}.gguf", parse_types("Q8_0", False)[0]) == "a-Q8_0-Q8_0.gguf"
    with pytest.raises(UsageError, match="expected a folder"):
        derive_set_output("m.gguf", "a.gguf", parse_types("Q8_0", False)[0])


def test_existing_files_are_kept_without_force(model: Path, cli):
    mine = model.with_name("model-Q4_0.gguf")
    mine.write_bytes(b"mine")
    for words in ([], ["--types"]):
        code, _, err = cli("quantize", model, *(words or ["--types"]), "Q8_0,Q4_0")
        assert code == 2 and mine.read_bytes() == b"mine" and "model-Q4_0.gguf" in err
    assert cli("quantize", model, "--types", "Q8_0,Q4_0", "--force")[0] == 0
    assert cli("quantize", model, "--types", "Q8_0,Q4_0")[0] == 2
    code, _, err = cli("quantize", mine, "--types", "Q8_0", "--allow-requantize")
    assert code == 2 and "larger than the old one" in err


def members(model: Path, folder: Path, names: str = "Q8_0,Q4_0") -> list[SetMember]:
    source = open_source(str(model))
    plans = [(recipe, make_plan(source, QuantizeRequest(recipe))) for recipe in parse_types(names, False)]
    return [SetMember(recipe, plan, [str(folder / f"{recipe.name}.gguf")]) for recipe, plan in plans]


def write_made(path: Path, weights: dict[str, np.ndarray]) -> Path:
    """Write a file of an unknown architecture, which is not checked."""
    write_gguf(path, {"general.architecture": "made", "made.block_count": 6},
               [OutputTensor.from_array(name, array) for name, array in weights.items()])  # fmt: skip
    return path


class StopError(Exception):
    pass


def stopped(model: Path, folder: Path, at: int, monkeypatch=None) -> None:
    """Run until `at` ranges of rows are encoded, then stop."""
    calls = 0

    def on_progress(done: int, name: str) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise StopError

    read_files = members(model, folder)
    with pytest.raises(StopError):
        QuantizeSet(read_files, [], 1, on_progress).run(
            RowDequantizer({job.tensor.format for job in read_files[0].plan.jobs})
        )


def test_an_interrupted_set_continues_to_the_same_bytes(model: Path, tmp_path: Path, monkeypatch):
    """Stop at every tensor: no half files appear, and what is on the disk is not encoded again."""
    monkeypatch.setattr(quantize_set, "SAVE_EVERY", -1)
    whole = tmp_path / "whole"
    whole.mkdir()
    made_of = members(model, whole)
    widener = RowDequantizer({job.tensor.format for job in made_of[0].plan.jobs})
    QuantizeSet(made_of, [], 1, lambda done, name: None).run(widener)
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert len(expected) == 2
    for at in range(1, 21, 3):
        folder = tmp_path / str(at)
        folder.mkdir()
        stopped(model, folder, at)
        assert not list(folder.glob("*.gguf"))
        again = QuantizeSet(members(model, folder), [], 1, lambda done, name: None)
        assert again.resumes is (at > 1)
        seen: list[str] = []

        def hear(done: int, name: str, seen: list[str] = seen) -> None:
            seen.append(name)

        again._on_progress = hear
        again.check()
        again.run(widener)
        assert len(seen) <= 21 - at + 1 and {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def test_a_set_of_other_types_or_sources_starts_anew(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(quantize_set, "SAVE_EVERY", -1)
    stopped(model, tmp_path, 9)
    assert QuantizeSet(members(model, tmp_path), [], 1, print).resumes
    assert not QuantizeSet(members(model, tmp_path, "Q8_0,Q5_0"), [], 1, print).resumes
    shutil.copy(tmp_path / "Q4_0.gguf.part", tmp_path / "other.gguf.part")
    first, second = members(model, tmp_path)
    renamed = SetMember(second.recipe, second.plan, [str(tmp_path / "other.gguf")])
    assert not QuantizeSet([first, renamed], [], 1, print).resumes
    os.truncate(tmp_path / "Q4_0.gguf.part", 100)
    assert not QuantizeSet(members(model, tmp_path), [], 1, print).resumes
    os.utime(model, ns=(1, 1))
    assert not QuantizeSet(members(model, tmp_path), [], 1, print).resumes


def test_an_interruption_between_two_renames_is_finished_later(model: Path, tmp_path: Path, monkeypatch):
    kept = quantize_set.replace_file
    monkeypatch.setattr(quantize_set, "replace_file", lambda old, new: kept(old, new) if "Q8_0" in new else stop())

    def stop() -> None:
        raise StopError

    made_of = members(model, tmp_path)
    widener = RowDequantizer({job.tensor.format for job in made_of[0].plan.jobs})
    with pytest.raises(StopError):
        QuantizeSet(made_of, [], 1, lambda done, name: None).run(widener)
    monkeypatch.setattr(quantize_set, "replace_file", kept)
    again = QuantizeSet(members(model, tmp_path), [], 1, lambda done, name: None)
    again.check()
    results = again.run(widener)
    for result in results:
        data = Path(result.files[0].path).read_bytes()
        assert result.files[0].sha256 == sha256(data).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Q4_0.gguf", "Q8_0.gguf", "model.gguf"]


def test_a_source_that_changes_during_a_set_is_refused(model: Path, tmp_path: Path):
    made_of = members(model, tmp_path)

    def change(done: int, name: str) -> None:
        os.utime(model, ns=(5, 5))

    with pytest.raises(ModelError, match="changed while it was read"):
        QuantizeSet(made_of, [], 1, change).run(RowDequantizer({job.tensor.format for job in made_of[0].plan.jobs}))
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_weight_that_is_not_finite_stops_a_set(tmp_path: Path, cli):
    weights = np.ones((8, 64), np.float32)
    weights[3, 4] = np.nan
    model = write_made(tmp_path / "bad.gguf", {"blk.0.attn_v.weight": weights})
    code, _, err = cli("quantize", model, "--types", "Q8_0,Q4_0")
    assert code == 3 and "row 3, column 4 is nan" in err and [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@pytest.mark.sampled
@posix
@pytest.mark.slow
def test_killed_sets_leave_no_half_files():
    """Kill at random moments: no file has its name before all are whole, and the next run ends with the same bytes."""
    command = [sys.executable, ROOT / "scripts" / "fuzz" / "kill_test.py", "ladder", "--times", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "4 times" in done.stdout, done.stderr
