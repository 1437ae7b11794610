"""Logits against llama.cpp's: every architecture and every block format; see tests/support/models."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import FAITHFUL, SingleEngine, open_engine
from kernel_calls import by_format, compiled_for, wanted
from models import DECLARATIONS, PARTLY, QUANTIZED, model
from models.dense2 import GELU as GELU2
from models.experts2 import GELU as GELU3
from models.golden import Golden, check_digest, context_for, kept
from models.quantized import PURE
from models.qwen4 import RIGHT
from models.unusual import GELU as GELU4

from localllm.arch import rowwise_verbs
from localllm.engine.cpu import lowering
from localllm.kernels import cpu
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.machine import has_tiles

GELU = {  # looked up in a table of float16 by llama.cpp
    "falcon", "falcon_40b", "gemma", "gemma2", "gemma3", "gemma3_ropescale", "gemma4", "gemma4_experts",
    "gemma4_shared", "gemma4_values_are_keys", "gpt2", "gptneox",
    "gptneox_seqres", "mpt", "phi2", "starcoder2",
    *GELU2,
    *GELU3,
    *GELU4,
}  # fmt: skip
COMMON = {  # formats that people use
    f"llama-{name}" for name in ("F16", "BF16", "Q4_0", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K")
}
OTHERS = [name for name in [*PURE, "Q3_K_M"] if f"llama-{name}" not in COMMON]
FLOATS = ("F16", "BF16")  # multiplied in float32


def family(name: str) -> str:
    """Return the name of the model that a quantized one was made of."""
    return name.partition("-")[0]


def opened(path: Path, backend: str, **options) -> SingleEngine:
    return open_engine(path, **{"context": 128, "kv_type": "f32", "backend": backend, **options})


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the normalized mean square error."""
    assert got.shape == expected.shape
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


def runs(path: Path, backend: str, tokens: np.ndarray, then: np.ndarray) -> dict[str, np.ndarray]:
    """Return our logits of a prompt, of tokens behind it one by one, and of the prompt one by one."""
    engine = opened(path, backend, context=context_for(len(tokens)))
    prefill = engine.forward(tokens, 0, "all")
    decode = [engine.forward([token], len(tokens) + i) for i, token in enumerate(then)]
    steps = [engine.forward([token], i) for i, token in enumerate(tokens)]
    engine.close()
    return {"prefill": prefill, "decode": np.concatenate(decode), "steps": np.concatenate(steps)}


def check_golden(name: str, path: Path, backend: str, most: float, right: slice = slice(None)) -> dict[str, np.ndarray]:
    """Check that our logits are no farther than that from llama.cpp's, in the rows where these are right.

    The most likely token must be the same one, where it is ahead by more than a little.
    """
    golden = Golden.load(name)
    check_digest(name, model(name), golden)
    ours = runs(path, backend, golden.tokens, golden.greedy)
    expected = {"prefill": golden.prefill, "decode": golden.decode, "steps": golden.prefill}
    errors = {kind: nmse(kept(ours[kind])[right], rows[right]) for kind, rows in expected.items()}
    assert max(errors.values()) < most, errors
    if golden.native is not None and family(name) not in GELU:  # never farther from exact weights than llama.cpp is
        assert errors["prefill"] <= 1.1 * golden.native[0] and errors["decode"] <= 1.1 * golden.native[1]
    rows = np.concatenate((ours["prefill"][-1:], ours["decode"][:-1]))
    second, first = np.sort(rows, axis=1)[:, -2:].T
    clear = (first - second > 0.02) & (right == slice(None))
    np.testing.assert_array_equal(rows.argmax(axis=1)[clear], golden.greedy[clear])
    return ours


def looked_up(exact: Callable) -> Callable:
    """Return GELU as in llama.cpp, from a table of float16 for all numbers between -10 and 10."""

    def gelu(x):
        halves = exact(x.astype(np.float16)).astype(np.float16).astype(np.float32)
        return np.where(x <= -10, np.float32(0), np.where(x >= 10, x, halves))

    return gelu


def rounding(name: str) -> float:
    """Return how much more is lost in many layers than in a few."""
    return max(1, DECLARATIONS[name].dims.get("layers", 2) / 16)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", [*DECLARATIONS, *QUANTIZED])
def test_the_reference_agrees_with_llama_cpp(model_path, name, monkeypatch):
    """Compare prefill, decode after it, and the prompt token by token: 3e-12 measured, without GELU.

    The error is 1.5e-11 where NumPy adds up in another order. Kernels meet the same numbers at every commit.
    """
    monkeypatch.setattr(rowwise_verbs, "gelu", looked_up(rowwise_verbs.gelu))
    check_golden(name, model_path(name), "reference", 2e-7 if family(name) in GELU else 3e-11 * rounding(family(name)))


@pytest.fixture(params=["vectors", pytest.param("tiles", marks=pytest.mark.sampled)])
def lane(request, monkeypatch) -> str:
    """Choose how several tokens are multiplied: where a CPU has tiles, its vectors have to be right as well."""
    if request.param == "vectors":
        monkeypatch.setattr(lowering, "has_tiles", lambda: False)
    elif not has_tiles():
        pytest.skip("this CPU has no tiles, or may not use them")
    return request.param


@pytest.mark.parametrize("name", DECLARATIONS)
def test_architectures_agree_with_llama_cpp(model_path, name, lane):
    check_architecture(name, model_path(name), FAITHFUL if lane == "tiles" else 1e-9)


def check_architecture(name: str, path: Path, most: float) -> None:
    """Compare with the reference where llama.cpp's GELU is not exact."""
    ours = check_golden(name, path, "cpu", 1e-4 if name in GELU else most)
    if name in GELU:
        golden = Golden.load(name)
        exact = runs(path, "reference", golden.tokens, golden.greedy)
        assert all(nmse(ours[kind], exact[kind]) < most for kind in ours)


@pytest.mark.parametrize("name", PARTLY)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_qwen4_agrees_where_llama_cpp_chooses_as_many(model_path, name, backend):
    check_golden(name, model_path(name), backend, FAITHFUL, RIGHT)


@pytest.mark.parametrize("name", sorted(COMMON))
@pytest.mark.usefixtures("lane")
def test_common_formats_agree_with_llama_cpp(model_path, name):
    """Expect short batches practically exact by both planes of activations: 7e-9 measured, llama.cpp 4e-4 and more."""
    check_golden(name, model_path(name), "cpu", 1e-8 if name.endswith(FLOATS) else 2e-8)


@pytest.mark.sampled("format")
@pytest.mark.parametrize(("architecture", "format"), [name.split("-") for name in QUANTIZED if family(name) != "llama"])
@pytest.mark.usefixtures("lane")
def test_formats_of_other_architectures_agree_with_llama_cpp(model_path, architecture, format):
    name = f"{architecture}-{format}"
    check_golden(name, model_path(name), "cpu", 1e-6 if family(name) in GELU else 3e-8)


@pytest.fixture(scope="module")
def kernels(request) -> KernelLibrary:
    """Compile kernels together, on all cores, rather than one by one."""
    names = wanted(request, [f"{kind}-{name}" for kind in ("linear_quantized", "embed") for name in cpu.SUB_BLOCK])
    return KernelLibrary(compiled_for(names))


@by_format
@pytest.mark.usefixtures("kernels", "lane")
@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_agree_with_llama_cpp(model_path, name):
    check_golden(f"llama-{name}", model_path(f"llama-{name}"), "cpu", 2e-8)


# ---- batches --------------------------------------------------------------------------------------------------------

LENGTHS = [1, 2, 15, 16, 17, 511, 512, 513, 600]


def prefill_against_steps(path: Path, lengths: list[int], context: int, token_count: int) -> float:
    """Return the largest error of prompts of all lengths against the same tokens one by one."""
    tokens = np.random.default_rng(0).integers(0, token_count, max(lengths))
    engine = opened(path, "cpu", context=context)
    steps = np.concatenate([engine.forward([token], i) for i, token in enumerate(tokens)])
    errors = [nmse(engine.forward(tokens[:length], 0, "all"), steps[:length]) for length in lengths]
    engine.close()
    return max(errors)


@pytest.mark.parametrize(
    "name", ["llama", "mamba", "mamba2", "lfm2", "qwen35", "qwen4exp_blocks", "rwkv6", "rwkv7", "deepseek4"]
)
def test_prefill_equals_decode(model_path, name):
    assert prefill_against_steps(model_path(name), LENGTHS, 640, 272) < 1e-8


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K_M", "Q6_K"])
def test_prefill_of_small_batches_equals_decode_with_quantized_weights(model_path, name):
    """Read up to 128 tokens; activations are rounded, and the order of additions changes the numbers rounded."""
    path = model_path(f"llama-{name}")
    assert prefill_against_steps(path, [1, 2, 7, 8, 9, 15, 16, 17, 127, 128], 640, 320) < 1e-6


@pytest.mark.parametrize(("name", "most"), [("Q4_0", 4e-4), ("Q8_0", 4e-4), ("Q6_K", 7e-4), ("Q4_K_M", 7e-4)])
def test_large_batches_lose_no_more_than_llama_cpp(model_path, name, most):
    """Round activations to int8 from 129 tokens on, as llama.cpp always does: 3.1e-4, 3.1e-4, 6.9e-4, 6.8e-4 there."""
    path = model_path(f"llama-{name}")
    assert prefill_against_steps(path, [129, 600], 640, 320) < most
