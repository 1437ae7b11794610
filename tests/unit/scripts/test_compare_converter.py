"""Test that all keys and tensors that differ between two files are listed."""

from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert import open_folder
from localllm.files.gguf.writer import OutputTensor, write_gguf
from scripts.record.compare_converter import differences, write_published


def write_file(path: Path, metadata: dict[str, Any], **weights: np.ndarray) -> Path:
    """Write a file of these keys and tensors."""
    write_gguf(path, {"general.architecture": "made", **metadata},
               [OutputTensor.from_array(name, array) for name, array in weights.items()])  # fmt: skip
    return path


def test_differing_keys_and_tensors_are_listed(tmp_path: Path):
    zeros, ones = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    a = write_file(tmp_path / "a.gguf", {"x": np.float32(1), "same": "s", "theirs": 1}, w=zeros, v=ones)
    b = write_file(tmp_path / "b.gguf", {"x": np.int32(1), "same": "s", "ours": [1, 2]}, w=ones, v=ones, u=ones)
    assert not differences(a, a)
    lines = [line.partition(": ") for line in differences(a, b)]
    assert {(name, description.split()[0]) for name, _, description in lines} == {
        ("key x", "theirs"), ("key theirs", "theirs"), ("key ours", "ours"), ("tensor w", "theirs"),
        ("tensor u", "ours"),
    }  # fmt: skip


def test_a_published_checkpoint_has_a_card_and_sampling(tmp_path: Path):
    checkpoint = open_folder(write_published(tmp_path / "Tiny-1B", "llama"))
    assert checkpoint.metadata["general.license"] == "apache-2.0" and not checkpoint.warnings
    assert checkpoint.metadata["general.languages"] == ["en", "de", "no"]
    assert checkpoint.metadata["general.sampling.temp"] == np.float32(0.6)
