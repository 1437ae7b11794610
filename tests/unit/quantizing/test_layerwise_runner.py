"""Test prompts that run again with another matrix: earlier layers are reused, and nothing else changes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from models import DECLARATIONS

from localllm.arch import load_architecture
from localllm.arch.weights import Weights
from localllm.engine.trace.recorder import trace_model
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.reference import dequantize
from localllm.quantizing.calibrate import find_shared_states
from localllm.quantizing.layerwise_runner import LastUseRecorder, LayerwiseRunner, MatrixRows, plan_reuse

# Experts, recurrent layers, shared keys and values, latent ones, what the first layer makes for all others.
FAMILIES = [
    "llama", "gemma3", "gemma4_shared", "llama_moe", "mamba2", "deepseek2_v3", "lfm2", "rwkv7", "qwen35", "gpt2",
]  # fmt: skip


class Matrices:
    """Matrices of a file, one of which is doubled."""

    def __init__(self, doubled: str = ""):
        self.doubled, self.read = doubled, list[str]()

    def read_rows(self, weight, ids):
        return dequantize(weight.tensor)[ids] * np.float32(1 + (weight.name == self.doubled))

    def resolve(self, weight, inputs):
        self.read.append(weight.name)
        matrices = dequantize(weight.tensor).reshape(-1, *weight.shape[-2:]) * np.float32(
            1 + (weight.name == self.doubled)
        )
        return MatrixRows(weight.shape, lambda n, first, end: matrices[n, first:end])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", FAMILIES)
def test_running_again_from_a_matrix_changes_nothing_and_computes_less(kind: str, model_path: Callable[[str], Path]):
    file = GGUFFile.open(model_path(kind))
    module, h = load_architecture(file)
    weights = Weights(file.tensors)
    texts = [np.random.default_rng(n).integers(0, file.tensors["token_embd.weight"].shape[0], 9 + n) for n in range(2)]
    last = LastUseRecorder()
    shared = find_shared_states(trace_model(file, last.record(module.forward), weights, h, 20).operations)

    def read(matrices, past=None):
        builder = LayerwiseRunner(texts, shared, matrices, 2, last, past)
        try:
            return module.forward(builder, weights, h)
        finally:
            builder.close()

    read(everything := Matrices())
    products, computed, possible = everything.read, 0, 0
    groups = [[name] for name in ("token_embd.weight", *products[:: max(1, len(products) // 7)])]
    filled, afterwards = plan_reuse(last, shared, groups)
    read(Matrices(), filled)
    for [name], past in zip(groups, afterwards, strict=True):
        again, whole = Matrices(name), Matrices(name)
        for logits, expected in zip(read(again, past), read(whole), strict=True):
            np.testing.assert_array_equal(logits, expected)
        computed, possible = computed + len(again.read), possible + len(whole.read)
    assert afterwards[0].first <= 1 and (shared or computed < possible * 0.7)


def test_every_tested_family_is_declared():
    assert set(FAMILIES) <= DECLARATIONS.keys()
