"""Control vectors against llama.cpp's logits: the layers have the same numbers."""

import numpy as np
import pytest
from adapters import CONTROL_CASES, CONTROL_IDS, random_directions
from models import write_model
from project import ROOT

from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import GGUFFile
from localllm.services.control_vectors import write_control_vector


def compute_logits(file: GGUFFile, **options) -> np.ndarray:
    engine = Engine(file, EngineOptions(1, kv_type="f32", backend="reference", **options))
    try:
        return engine.sequence().append(CONTROL_IDS, "all")
    finally:
        engine.close()


@pytest.mark.parametrize(("family", "first", "last"), CONTROL_CASES)
def test_a_control_vector_changes_the_layers_that_llama_cpp_changes(family, first, last, tmp_path):
    file = GGUFFile.open(write_model(family, tmp_path / "model.gguf"))
    write_control_vector(tmp_path / "v.gguf", family, random_directions(file))
    expected = np.load(ROOT / "tests" / "goldens" / "control_vectors.npz")[f"{family} {first} {last}"]

    def error(layers: tuple[int, int]) -> float:
        logits = compute_logits(file, control_vectors=((str(tmp_path / "v.gguf"), 1.0),), control_layers=layers)
        return float(((logits - expected) ** 2).sum() / (expected**2).sum())

    assert error((first, last)) < 1e-6
    if family == "gemma3":  # with other layers, the logits differ
        assert error((1, last - 1) if last > 2 else (3, 3)) > 1e-4
