"""Fields that a file need not have: llama.cpp opens the tiny models without each hyperparameter, and each tensor.

unsaid.json has by model which of them change nothing if they are missing ("idle"), which mean a number then ("as"), and
which are needed; there llama.cpp does the same (0.3.36), with the same logits. "without" are tensors that all layers
may lack, with some of its logits then. Where the two do not agree, there is nothing.
scripts/record/record_optional_fields.py makes it.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import write_model
from models.golden import Golden, kept

from localllm.arch import load_architecture
from localllm.arch.hyperparameters import Hyperparameters
from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile

READ, SOME = 12, slice(0, 50, 10)  # tokens, logits
NEAR = 0.01  # of logits: llama.cpp looks GELU up in a table
UNSAID = json.loads(Path(__file__).with_name("unsaid.json").read_text(encoding="utf-8"))


def read(file: GGUFFile, name: str, value: Any = None) -> Hyperparameters:
    """Read a model's hyperparameters, with another value of one, or without it for None."""
    metadata, key = file.metadata, f"{file.metadata['general.architecture']}.{name}"
    try:
        file.metadata = (
            {**metadata, key: value} if value is not None else {k: v for k, v in metadata.items() if k != key}
        )
        return load_architecture(file)[1]
    finally:
        file.metadata = metadata


def of_any_layer(tensor: str) -> str:
    """Return a tensor's name without the number of its layer."""
    return re.sub(r"^blk\.\d+\.", "blk.", tensor)


def last_logits(file: GGUFFile, lost: str, tokens: np.ndarray) -> np.ndarray:
    """Return some logits behind these tokens, by the reference, without a tensor of all layers."""
    tensors = file.tensors
    try:
        file.tensors = {name: tensor for name, tensor in tensors.items() if of_any_layer(name) != lost}
        engine = Engine(file, EngineOptions(1, 128, "f32", "reference"))
    finally:
        file.tensors = tensors
    rows = engine.sequence().append(tokens, "all")
    engine.close()
    return kept(rows)[-1][SOME]


@pytest.mark.parametrize("name", UNSAID)
def test_missing_fields_have_the_recorded_meaning(tmp_path: Path, name: str):
    file, recorded = GGUFFile.open(write_model(name, tmp_path / "model.gguf")), UNSAID[name]
    usual = load_architecture(file)[1]
    for key in recorded["idle"]:
        assert read(file, key) == usual, key
    for key, value in recorded["as"].items():
        assert read(file, key) == read(file, key, value) != usual, key
    for key in recorded["needed"]:
        with pytest.raises(ModelError):
            read(file, key)


@pytest.mark.parametrize("name", [name for name, found in UNSAID.items() if found["without"]])
def test_tensors_may_be_missing_where_recorded(tmp_path: Path, name: str):
    file, tokens = GGUFFile.open(write_model(name, tmp_path / "model.gguf")), Golden.load(name).tokens[:READ]
    for lost, expected in UNSAID[name]["without"].items():
        np.testing.assert_allclose(last_logits(file, lost, tokens), expected, atol=NEAR, err_msg=lost)


@pytest.mark.parametrize("tensor", ["ssm_dt_norm", "ssm_b_norm", "ssm_c_norm", "attn_norm", "ffn_norm"])
def test_jamba_needs_all_its_norms(model_path, tensor: str):
    file = GGUFFile.open(model_path("jamba"))
    file.tensors = {name: each for name, each in file.tensors.items() if of_any_layer(name) != f"blk.{tensor}.weight"}
    with pytest.raises(ModelError, match=tensor):
        Engine(file, EngineOptions(1, 128, "f32", "reference"))
