"""Test warnings for weights that are too large for the new type."""

from pathlib import Path

import numpy as np
import pytest
from tiny_model import write_tiny_model

from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.reference import dequantize
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME
from localllm.quantizing.quantize import ClampedWeights

NAME = "blk.1.ffn_up.weight"


def with_weights(path: Path, *values: float) -> Path:
    """Write the tiny model with these as the first weights of a matrix."""
    write_tiny_model(path)
    data = bytearray(path.read_bytes())
    place = data.index(GGUFFile.open(path).tensors[NAME].data.tobytes())
    data[place : place + 4 * len(values)] = np.array(values, "<f4").tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("type", "format", "values", "count", "largest"),
    [
        ("F16", "F16", (65504, -65521, 1e6), 2, "1e+06"),
        ("F16", "F16", (-70000,), 1, "70000"),
        ("BF16", "BF16", (3.4e38, 1e38), 1, "3.4e+38"),
        ("Q8_0", "Q8_0", (1e8,), 1, "1e+08"),
        ("Q4_0", "Q4_0", (1e7, 9e6), 2, "1e+07"),
    ],
)
def test_clamped_weights_are_named_or_refused_with_strict(
    tmp_path: Path, cli, type: str, format: str, values: tuple[float, ...], count: int, largest
):
    """Check a single file and several types at once."""
    model = with_weights(tmp_path / "m.gguf", *values)
    is_are = f"{count} weights are" if count > 1 else "1 weight is"
    message = f"tensor {NAME}: {is_are} too large for {format} and became its largest number (the largest is {largest})"
    code, _, err = cli("quantize", model, tmp_path / "out.gguf", type)
    assert code == 0 and f"localllm: warning: {message}: use BF16 or F32 for this tensor\n" in err
    weights = dequantize(GGUFFile.open(tmp_path / "out.gguf").tensors[NAME])
    assert np.isfinite(weights).all()
    code, _, err = cli("quantize", model, tmp_path / "{type}.gguf", "--types", type)
    assert code == 0 and f"localllm: warning: {message}" in err
    for out in ("strict.gguf", "strict-{type}.gguf"):
        words = ["--pure", *(["--types", type] if "{" in out else [type])]
        code, _, err = cli("quantize", model, tmp_path / out, *words, "--strict")
        assert code != 0 and f"--strict: {message}" in err
        assert not list(tmp_path.glob("strict*gguf"))


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q4_0"])
def test_weights_that_fit_are_not_named(tmp_path: Path, cli, type: str):
    model = with_weights(tmp_path / "m.gguf", 65504, -65519)
    code, _, err = cli("quantize", model, tmp_path / "out.gguf", type)
    assert code == 0 and "too large" not in err


@pytest.mark.sampled("name", always=("Q4_K", "Q6_K"))  # to compile another search takes three seconds
@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "Q5_1"])
def test_rounded_blocks_of_large_weights_are_not_clamped(name: str):
    """A float16 scale represents some 100,000."""
    weights = np.random.default_rng(0).normal(0, 3e4, (4, 256)).astype(np.float32)
    clamped = ClampedWeights(is_strict=True)
    clamped.check("w", BY_NAME[name], weights, encode(name, weights))
    assert np.abs(weights).max() > 65504 and not clamped.format_lines()
    with pytest.raises(ModelError, match="too large"):
        clamped.check("w", BY_NAME[name], weights * 1e4, encode(name, weights * 1e4))
