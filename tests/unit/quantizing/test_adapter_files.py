"""Merging adapters into quantized files, and writing them as files."""

from pathlib import Path

import numpy as np
import pytest
from adapters import merge, random_adapter, supported_names, write_adapter
from models import write_model

from localllm.engine.adapter_file import read_adapter
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.reference import dequantize


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_merging_adds_the_scaled_product_to_each_matrix(family, tmp_path, cli):
    base, output = GGUFFile.open(write_model(family, tmp_path / "base.gguf")), tmp_path / "merged.gguf"
    adapter = random_adapter(base, supported_names(base))
    arch = base.metadata["general.architecture"]
    path = write_adapter(adapter, tmp_path / "a.gguf", alpha=3.0, **{"general.architecture": arch})
    assert cli("quantize", base.path, output, "F32", "--lora", f"{path}:0.5")[0] == 0
    expected, merged = merge(base, adapter, 0.5), GGUFFile.open(output)
    assert merged.tensors.keys() == expected.keys()
    for name, tensor in merged.tensors.items():
        np.testing.assert_allclose(dequantize(tensor), dequantize(expected[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("type", "error"), [("F32", 0), ("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 1e-2)])
def test_an_adapter_is_written_in_another_type(type, error, tmp_path, cli):
    base = GGUFFile.open(write_model("llama", tmp_path / "base.gguf"))
    adapter = random_adapter(base, supported_names(base), 32)
    path, output = write_adapter(adapter, tmp_path / "a.gguf", alpha=24.0), tmp_path / "b.gguf"
    assert cli("quantize", path, output, type, "--adapter")[0] == 0
    written = read_adapter(output)
    assert {each.factor for each in written.low_ranks.values()} == {0.75}
    for name, each in adapter.low_ranks.items():
        for before, after in ((each.a, written.low_ranks[name].a), (each.b, written.low_ranks[name].b)):
            assert after.format.name == type
            np.testing.assert_allclose(dequantize(after), dequantize(before), atol=error)


def test_an_adapter_is_not_written_over_its_base_or_itself(tmp_path, refused):
    base = GGUFFile.open(write_model("llama", tmp_path / "base.gguf"))
    path = write_adapter(random_adapter(base, supported_names(base)), tmp_path / "a.gguf", alpha=3.0)
    for target in (Path(base.path), path):
        before = target.read_bytes()
        refused(["quantize", path, target, "--adapter", "--base", base.path], "input")
        assert target.read_bytes() == before
