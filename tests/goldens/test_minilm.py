"""The real all-MiniLM-L6-v2 against vectors that transformers 5.23 made of it in float32.

python scripts/real_models.py minilm brings it.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
from models.golden import FOLDER

import localllm
from localllm.convert import open_folder


@pytest.mark.slow
@pytest.mark.parametrize(("format", "least"), [("F32", 0.999999), ("F16", 0.999998), ("Q8_0", 0.9992)])
def test_vectors_agree_with_transformers(real_model, tmp_path, format, least):
    checkpoint = real_model("minilm")
    with np.load(FOLDER / "minilm.npz") as golden:
        texts, expected = json.loads(str(golden["texts"])), golden["vectors"]
    assert open_folder(checkpoint).metadata["bert.pooling_type"] == 1
    converted = tmp_path / "minilm.gguf"
    words = [sys.executable, "-m", "localllm", "quantize", checkpoint, converted, format]
    subprocess.run([*map(str, words)], check=True, capture_output=True)
    with localllm.open(converted, threads=2) as model:
        cosines = (model.embed(texts) * expected).sum(axis=1)
    assert cosines.min() > least
