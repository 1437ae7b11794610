"""Test localllm verify: broken and odd files are reported, and errors agree with NumPy."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from checkpoint import write_checkpoint
from tiny_model import damage, write_tiny_model

from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.kernels.reference import dequantize


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf")


def facts(cli, *words: object) -> dict:
    code, out, _ = cli("verify", *words, "--json")
    return json.loads(out) | {"code": code}


def test_a_whole_file_is_valid_and_its_digest_printed(model: Path, cli):
    code, out, err = cli("verify", model)
    assert code == 0 and err == ""
    assert out.splitlines()[0].split() == ["format", "tensors", "weights"]
    assert out.splitlines()[-1] == f"{sha256(model.read_bytes()).hexdigest()}  {model}"
    assert facts(cli, model)["valid"] is True


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "F16"])
def test_errors_against_the_source_agree_with_numpy(model: Path, cli, name: str):
    out = model.with_name("out.gguf")
    assert cli("quantize", model, out, name)[0] == 0
    report = facts(cli, out, "--against", model)
    assert report["code"] == 0 and report["odd"] == []
    ours, theirs = GGUFFile.open(out).tensors, GGUFFile.open(model).tensors
    for tensor in report["tensors"]:
        a, b = (dequantize(each[tensor["name"]]).astype(np.float64) for each in (ours, theirs))
        assert tensor["error"] == pytest.approx(np.sqrt(((a - b) ** 2).sum() / (b**2).sum()), rel=1e-6, abs=1e-12)
    row = next(row for row in report["formats"] if row["format"] == name)
    errors = [tensor["error"] for tensor in report["tensors"] if tensor["format"] == name]
    assert row["error"] == pytest.approx(np.median(errors)) and row["worst"] == max(errors)
    code, text, _ = cli("verify", out, "--against", model)
    assert code == 0 and text.splitlines()[0].split() == ["format", "tensors", "weights", "error", "worst", "of"]


def test_a_file_is_compared_with_its_checkpoint(tmp_path: Path, cli):
    folder = write_checkpoint(tmp_path / "folder")
    assert cli("quantize", folder, tmp_path / "out.gguf", "Q8_0")[0] == 0
    report = facts(cli, tmp_path / "out.gguf", "--against", folder)
    assert report["odd"] == [] and 0 < max(tensor["error"] for tensor in report["tensors"]) < 0.02


def test_infinite_weights_make_a_file_invalid(model: Path, cli):
    damage(model, "blk.1.attn_output.weight")
    code, _, err = cli("verify", model)
    assert code == 3 and "blk.1.attn_output.weight: the weight in row" in err and err.count("\n") == 1
    assert facts(cli, model)["valid"] is False


def test_a_truncated_file_is_invalid(model: Path, cli):
    model.write_bytes(model.read_bytes()[:-5000])
    code, out, err = cli("verify", model)
    assert code == 3 and out == "" and "download incomplete" in err


def written(path: Path, **changes: np.ndarray) -> Path:
    random = np.random.default_rng(0)
    arrays = {f"blk.{n}.ffn_up.weight": random.normal(size=(16, 256)).astype(np.float32) for n in range(6)}
    tensors = [OutputTensor.from_array(name, array) for name, array in (arrays | changes).items()]
    write_gguf(path, {"general.architecture": "made", "general.file_type": 0, "made.block_count": 6}, tensors)
    return path


def scale(row: np.ndarray) -> np.ndarray:
    row[3, :32] *= 1e6
    return row


def test_zeros_broken_scales_and_large_errors_warn(tmp_path: Path, cli):
    whole = written(tmp_path / "whole.gguf")
    weights = dequantize(GGUFFile.open(whole).tensors["blk.2.ffn_up.weight"]).copy()
    cases = {
        "all 4096 weights are zero": np.zeros((16, 256), np.float32),
        "a broken scale?": scale(weights.copy()),
        "the error is 1 of the weights": np.zeros((16, 256), np.float32),
    }
    for message, array in cases.items():
        path = written(tmp_path / "odd.gguf", **{"blk.2.ffn_up.weight": array})
        code, _, err = cli("verify", path, "--against", whole)
        assert code == 0 and "warning: tensor blk.2.ffn_up.weight: " in err and message in err, err
    assert cli("verify", whole, "--against", whole)[2] == ""


def test_tensors_that_only_one_file_has_are_reported(model: Path, cli, tmp_path: Path):
    whole = written(tmp_path / "whole.gguf")
    other = written(tmp_path / "other.gguf", extra=np.ones(3, np.float32))
    assert "the source has no extra, which the file has" in cli("verify", other, "--against", whole)[2]
    assert "the file has no extra, which the source has" in cli("verify", whole, "--against", other)[2]
    wide = written(tmp_path / "wide.gguf", **{"blk.0.ffn_up.weight": np.ones((8, 256), np.float32)})
    code, _, err = cli("verify", wide, "--against", whole)
    assert code == 3 and "the shape [8, 256]; the source has [16, 256]" in err


def test_a_file_type_that_no_matrix_has_warns(model: Path, cli):
    out = model.with_name("out.gguf")
    assert cli("edit", model, out, "--set-metadata", "general.file_type=7")[0] == 0
    code, _, err = cli("verify", out)
    assert code == 0 and "general.file_type says Q8_0, but no matrix is in Q8_0" in err


def test_a_tensor_that_differs_from_others_of_its_type_warns(tmp_path: Path, cli):
    whole = written(tmp_path / "whole.gguf")
    assert cli("quantize", whole, tmp_path / "q.gguf", "Q8_0", "--pure")[0] == 0
    swapped = written(tmp_path / "swapped.gguf", **{
        "blk.0.ffn_up.weight": dequantize(GGUFFile.open(whole).tensors["blk.1.ffn_up.weight"])})  # fmt: skip
    code, _, err = cli("verify", tmp_path / "q.gguf", "--against", swapped)
    assert code == 0 and "tensor blk.0.ffn_up.weight: the error is 1.4 of the weights; 0.0" in err
