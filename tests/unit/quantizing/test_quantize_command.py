"""Test the command `quantize`: its options, errors and table."""

import mmap
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from localllm.cli.commands import quantize as quantize_command
from localllm.cli.options.quantizing import CalibrationFlags
from localllm.cli.terminal import quantize_progress
from localllm.cli.terminal.output import ProgressLine
from localllm.cli.terminal.quantize_progress import StageEstimator
from localllm.errors import ModelError
from localllm.files.gguf import tensor_source as source
from localllm.files.gguf.file import GGUFFile, get_map
from localllm.files.gguf.tensor_source import GGUFTensor
from localllm.quant.formats import BY_NAME, FORMATS, RECIPES
from localllm.quant.recipes import RecipeOptions
from localllm.quantizing import quantize as service
from localllm.quantizing import scale_folding as folding
from localllm.quantizing.mixed_precision import plan as by_need
from localllm.quantizing.plan import QuantizeRequest
from localllm.quantizing.quantize import open_source
from localllm.services.inspection import validate as finite
from tests.unit.quantizing.quantize_parts import write_model


@pytest.mark.parametrize("arguments", [["q8_0"], ["7"], ["OUT", "Q8_0"], ["OUT", "Q8_0", "1"], ["Q8_0", "2"]])
def test_arguments_may_have_the_order_of_llama_quantize(arguments: list[str], model: Path, tmp_path: Path, command):
    shutil.copy(model, tmp_path / "m.gguf")
    target = tmp_path / ("out.gguf" if "OUT" in arguments else "m-Q8_0.gguf")
    code, out, err = command(tmp_path / "m.gguf", *[target if word == "OUT" else word for word in arguments])
    assert (code, err) == (0, "") and out.startswith(f"{target}: ") and "bits per weight" in out
    assert GGUFFile.open(target).metadata["general.file_type"] == 7


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["x"], "unknown quantization type x"),
        (["Q8_0", "x", "1", "2"], "expected 2 or 3 arguments, IN [OUT] TYPE, found 5"),
        ([], "expected 2 or 3 arguments, IN [OUT] TYPE, found 1"),
        (["Q8_0", "--tensor-type", "ffn"], "expected REGEX=FORMAT"),
        (["Q8_0", "--tensor-type", "(=Q8_0"], "--tensor-type (=Q8_0:"),
        (["Q8_0", "--output-tensor-type", "Q4_K_M"], "Q4_K_M is a type of whole files, not a tensor format"),
        (["Q8_0", "--output-tensor-type", "Q4_Z"], "Q4_Z must be a tensor format"),
        (["Q8_0", "--override-kv", "a"], "expected KEY=TYPE:VALUE"),
        (["Q8_0", "-t", "0"], "-t must be from 1 to 1024"),
        (["Q8_0", "--include-weights", "a"], "need --imatrix"),
        (["/nowhere/x.gguf", "Q8_0"], "the folder /nowhere does not exist; create it first"),
    ],
)
def test_invalid_quantize_arguments_are_refused_in_one_line(arguments: list[str], problem: str, model: Path, command):
    code, out, err = command(model, *arguments)
    assert (code, out) == (2, "") and problem in err and err.count("\n") == 1 and err.startswith("localllm: error:")
    assert [path.name for path in model.parent.iterdir()] == [model.name]


def test_a_dry_run_prints_the_plan_and_writes_nothing(model: Path, command):
    code, out, err = command(
        model, "q4_k_m", "--dry-run", "--output-tensor-type", "f16", "--tensor-type", "ffn_DOWN=q8_0"
    )
    assert code == 0 and "fallback format: blk.0.ffn_up.weight: Q5_0 instead of Q4_K" in err
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert " F16 " in rows["output.weight"] and "Q8_0" in rows["blk.0.ffn_down.weight"]
    assert "Q5_0 (fallback)" in rows["blk.0.ffn_up.weight"] and "bits per weight" in rows["size"] and "free" in rows
    assert [path.name for path in model.parent.iterdir()] == [model.name]


def test_options_reach_the_quantizer(model: Path, tmp_path: Path, command):
    code, _, err = command(
        model, tmp_path / "x.gguf", "Q4_0", "--leave-output-tensor", "--pure", "--override-kv", "a=int:1"
    )
    file = GGUFFile.open(tmp_path / "x.gguf")
    assert (code, err, file.metadata["a"], file.tensors["output.weight"].format.name) == (0, "", 1, "F32")
    assert {t.format.name for t in file.tensors.values()} == {"F32", "Q4_0"}
    assert command(model, tmp_path / "y.gguf", "Q4_K_M", "--strict")[0] == 3
    assert not (tmp_path / "y.gguf").exists()


def test_tensor_types_have_the_numbers_of_gguf():
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert all(known.get(number, format.name) == format.name for number, format in FORMATS.items())
    assert {number for number in FORMATS if number not in known} <= {42}, "Q2_0, which gguf does not know yet"
    assert service.parse_patterns(["a=q8_0"])[0][1] == "Q8_0" and RecipeOptions().patterns == ()


def test_arrays_are_traced_to_their_memory_map(tmp_path: Path):
    """Check views of views, and arrays that are not mapped."""
    (tmp_path / "x").write_bytes(bytes(10_000))
    with open(tmp_path / "x", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole = np.frombuffer(mapped, np.uint8)
    for array, start in ((whole, 0), (whole[5000:], 5000), (whole[4096:][10:].view("<u2"), 4106)):
        assert get_map(array) == (mapped, start)
    for array in (np.zeros(5, np.uint8), np.frombuffer(bytes(5), np.uint8), np.zeros(5, np.uint8)[2:]):
        assert get_map(array) is None


def test_releasing_rows_releases_their_pages_in_the_file(tmp_path: Path, monkeypatch):
    """Accept arrays outside a file, which have no such pages."""
    released = []
    monkeypatch.setattr(source.memory, "release_pages", lambda *place: released.append(place))
    file = GGUFFile.open(write_model(tmp_path / "m.gguf"))
    tensor, data = GGUFTensor(file.tensors["blk.1.ffn_gate_exps.weight"]), (tmp_path / "m.gguf").read_bytes()
    tensor.release_rows(3, 5)
    ((mapped, begin, end),) = released
    assert data[begin:end] == tensor.read_rows(3, 5).tobytes() == mapped[begin:end] and end - begin == 2 * 1024
    assert tensor.read_rows(3, 5).shape == (2, 1024)
    GGUFTensor(replace(file.tensors["output.weight"], data=np.zeros((40, 1024), np.uint8))).release_rows(0, 40)
    assert len(released) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_infinite_weight_is_named_by_row_and_column(bad: float):
    weights = np.zeros((3, 4), np.float32)
    tensor = SimpleNamespace(name="w", format=BY_NAME["F32"], shape=(9, 4), read_rows=lambda first, last: (first, last))
    widener = SimpleNamespace(
        dequantize=lambda format, rows, columns: weights if (rows, columns) == ((5, 8), 4) else None
    )
    assert finite.dequantize_finite(widener, tensor, 5, 8) is weights
    finite.check_finite(tensor, weights, 5)
    weights[1, 2] = weights[2, 0] = bad
    with pytest.raises(ModelError, match=rf"^tensor w: the weight in row 6, column 2 is {bad}$"):
        finite.dequantize_finite(widener, tensor, 5, 8)


def test_one_progress_covers_scales_types_and_checks(model: Path, monkeypatch, capsys):
    monkeypatch.setattr(quantize_progress, "EVERY", 0.0)

    def folded(source, request, threads, on_matrix, compiling):
        on_matrix(0, 3, "blk.0.attn_q.weight")
        return source

    def formats(source, request, size, threads, on_matrix, on_check, compiling):
        on_matrix(0, 0, "two\nlines")
        on_check(1, 2, "output.weight")
        return by_need.MixedPrecision({"output.weight": "Q8_0"}, found=0.75, predicted=0.5, usual=0.25)

    monkeypatch.setattr(folding, "fold_scales", folded)
    monkeypatch.setattr(by_need, "choose_formats", formats)
    asked = QuantizeRequest(RECIPES["Q4_K_M"], texts=())
    sized = CalibrationFlags(calibrate=True, file_size="own")
    _, sized_request = quantize_command.plan_by_sensitivity(
        open_source(str(model)), asked, lambda plan: 1 << 30, None, 1, False, quantize_command.PhaseTimer(sized)
    )
    assert sized_request.options.formats == {"output.weight": "Q8_0"}
    expected = "predicted KL divergence 0.5000 (0.2500 with the formats of Q4_K_M)"
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first == "localllm: 0 %: measuring scales: blk.0.attn_q.weight"
    for line, name in zip(others, ("measuring formats: two lines", "checking formats: output.weight"), strict=True):
        assert re.fullmatch(rf"localllm: \d+ %, about \d+ s left: {name}", line)
    assert last == f"localllm: {expected}; measured on held-out texts, weights only: 0.7500"


def test_the_time_left_follows_the_pace_of_each_stage():
    """Assume each stage's share at first; ignore skipped stages."""
    now = [100.0]
    stages = StageEstimator({"scales": 1.0, "matrices": 6.0, "writing": 1.0}, lambda: now[0])
    stages.update("scales", 0, 4)
    assert stages.left is None and stages.fraction == 0
    now[0] = 110.0
    stages.update("scales", 2, 4)
    assert stages.left == pytest.approx(10 + 6 * 20 + 20) and stages.fraction == pytest.approx(10 / 160)
    now[0] = 120.0
    stages.update("scales", 4, 4)
    stages.update("matrices", 0, 100)
    assert stages.left == pytest.approx(7 * 20)
    now[0] = 180.0
    stages.update("matrices", 25, 100)  # twice as slow as expected
    assert stages.left == pytest.approx(180 + 80 / 2.5) and stages.fraction == pytest.approx(80 / 292)
    now[0] = 360.0
    stages.update("matrices", 100, 100)
    now[0] = 370.0
    stages.update("writing", 50, 100)
    assert stages.left == pytest.approx(10)
    stages.update("writing", 100, 100)
    assert stages.left == 0 and stages.fraction == 1


def test_no_time_is_estimated_before_the_pace_is_known():
    """Time before the first part, and parts of an earlier run, do not count."""
    now = [0.0]
    resumed = StageEstimator({"scales": 1.0, "matrices": 6.0, "writing": 1.0}, lambda: now[0])
    now[0] = 30.0
    resumed.update("matrices", 50, 100)
    assert resumed.left is None and resumed.fraction == pytest.approx((1 + 3) / 8)
    now[0] = 31.0
    resumed.update("matrices", 52, 100)
    assert resumed.left is None
    now[0] = 60.0
    resumed.update("matrices", 75, 100)
    assert resumed.left == pytest.approx(30 + 20)
    encoding = StageEstimator({"encoding": 1.0}, lambda: now[0])
    now[0] = 90.0  # kernels were compiled
    encoding.update("encoding", 1, 1000)
    now[0] = 91.0
    encoding.update("encoding", 11, 1000)
    assert encoding.left is None and encoding.fraction == pytest.approx(0.011)
    now[0] = 96.0
    encoding.update("encoding", 61, 1000)
    assert encoding.left == pytest.approx(6 / 60 * 939)


def test_the_progress_bar_stops_with_the_work():
    progress = quantize_progress.StageProgress({"encoding": 1.0}, ProgressLine())
    bar = progress._display = quantize_progress._ProgressBar(ProgressLine())
    with progress as show:
        show("encoding", 5, 10, "blk.0.attn_q.weight")
        assert bar._progress and bar._progress.live.is_started
        drawn = bar._progress
    assert not drawn.live.is_started, "or it would draw over the next line"
