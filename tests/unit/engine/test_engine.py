"""Test the engine on a tiny model: refusals, state between calls, and cost."""

import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from engines import SingleEngine, bound, open_engine
from guarded import model as small_model
from tiny_model import HEADS, HIDDEN, KV_HEADS, WIDTH, write_tiny_model

from localllm.arch.layer_state import KVType, PagedState
from localllm.engine.memory import cache
from localllm.engine.options import EngineOptions
from localllm.errors import ContextError, MemoryLimitError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.quant.formats import BY_NAME

BACKENDS = ["cpu", "reference"]
TOKENS = np.random.default_rng(0).integers(0, 260, 700)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", context=1024)


@pytest.fixture
def file(path):
    with GGUFFile.open(path) as file:
        yield file


@pytest.fixture
def opened(file):
    """Return a function that opens engines on `file`, which tests may have changed, and closes them after the test."""
    engines = []

    def open_it(**options) -> SingleEngine:
        engines.append(open_engine(file, **options))
        return engines[-1]

    yield open_it
    for engine in engines:
        engine.close()


def test_the_reference_reserves_no_cache_and_has_no_limit(opened):
    engine = opened(backend="reference")
    engine.forward(TOKENS[:3], 0)
    used, count = engine.get_cache_usage()
    assert used == 0 and count > 2**40


def nmse(got: np.ndarray, exact: np.ndarray) -> float:
    return float(((got - exact) ** 2).sum() / (exact.astype(np.float64) ** 2).sum())


def change(file: GGUFFile, name: str, values: np.ndarray, format: str = "F32") -> None:
    """Replace a tensor, or add one."""
    data = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType[format]).view(np.uint8)
    data = data.reshape(*values.shape[:-1], -1) if values.ndim > 1 else data.reshape(-1)
    file.tensors[name] = Tensor(name, BY_NAME[format], values.shape, data)


# ---- what append does -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_returned_for_all_the_last_or_no_tokens(opened, backend):
    engine = opened(backend=backend)
    every = engine.forward(TOKENS[:20], 0, "all")
    assert every.shape == (20, engine.vocab_size)
    assert every.dtype == np.float32
    assert np.isfinite(every).all()
    np.testing.assert_allclose(engine.forward(TOKENS[:20], 0), every[-1:], rtol=1e-4, atol=1e-5)
    assert engine.forward(TOKENS[:20], 0, "none").shape == (0, engine.vocab_size)
    assert engine.forward(TOKENS[:600], 0, "all").shape == (600, engine.vocab_size)  # two batches
    assert engine.forward(TOKENS[:600], 0, "last").shape == (1, engine.vocab_size)
    assert engine.forward(TOKENS[:600], 0, "none").shape == (0, engine.vocab_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_ids_may_be_a_list_a_tuple_or_an_array(opened, backend):
    engine = opened(backend=backend)
    expected = engine.forward([5, 6, 7], 0)
    np.testing.assert_array_equal(engine.forward(np.array([5, 6, 7], np.int32), 0), expected)
    np.testing.assert_array_equal(engine.forward((5, 6, 7), 0), expected)


def test_returned_logits_are_copies(opened):
    engine = opened()
    first = engine.forward(TOKENS[:3], 0, "all")
    kept = first.copy()
    engine.forward(TOKENS[50:53], 0, "all")
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_from_an_earlier_position_overwrites_later_ones(opened, backend):
    used, fresh = opened(backend=backend, context=700), opened(backend=backend, context=700)
    used.forward(TOKENS[:600], 0)
    other = [*TOKENS[:37], *TOKENS[100:120]]
    got = used.forward(other[37:], 37, "all")
    assert nmse(got, fresh.forward(other, 0, "all")[37:]) < 1e-10
    assert nmse(used.forward([3], len(other)), fresh.forward([3], len(other))) < 1e-10


@pytest.mark.parametrize(
    "splits", [(1,), (16,), (17, 18, 19), (64, 128), (1, 2, 3, 4, 5, 6, 7, 8, 9), (511, 512), (513, 599)]
)
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(opened, splits):
    whole, pieces = opened(kv_type="f32"), opened(kv_type="f32")
    expected = whole.forward(TOKENS[:600], 0, "all")
    ends = [0, *splits, 600]
    got = [pieces.forward(TOKENS[a:b], a, "all") for a, b in pairwise(ends)]
    assert nmse(np.concatenate(got), expected) < 1e-10


def test_a_prompt_divided_anywhere_gives_the_same_logits(opened):
    engine = opened(kv_type="f32")
    expected = engine.forward(TOKENS[:40], 0, "all")
    for cut in range(1, 40):
        engine.forward(TOKENS[:cut], 0, "none")
        assert nmse(engine.forward(TOKENS[cut:40], cut, "all"), expected[cut:]) < bound(1e-10, in_tiles=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_position_of_the_context_can_be_used(opened, backend):
    engine, roomy = opened(backend=backend, context=37), opened(backend=backend, context=512)
    assert engine.context == 37
    np.testing.assert_allclose(engine.forward(TOKENS[:37], 0), roomy.forward(TOKENS[:37], 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(engine.forward([9], 36), roomy.forward([9], 36), rtol=1e-5, atol=1e-6)


def test_the_context_defaults_to_the_trained_one(opened):
    assert opened().context == 1024
    assert opened(context=4096).context == 4096


# ---- precision ------------------------------------------------------------------------------------------------------


def test_cpu_agrees_with_reference(opened):
    cpu, reference = opened(kv_type="f32"), opened(kv_type="f32", backend="reference")
    assert nmse(cpu.forward(TOKENS[:600], 0, "all"), reference.forward(TOKENS[:600], 0, "all")) < bound(
        1e-10, in_tiles=2e-9
    )


@pytest.mark.parametrize(
    ("kv_type", "error"),
    [
        ("f16", 1e-6),
        ("q8_0", 1e-3),
        ("q4_0", 0.1),
        ("q4_1", 0.1),
        ("k=q8_0,v=q4_1", 0.1),
        ("bf16", 1e-4),
        ("q5_0", 0.05),
        ("q5_1", 0.05),
        ("iq4_nl", 0.1),
    ],
)
def test_smaller_cache_types_are_close_to_f32(opened, kv_type, error):
    cpu, reference = opened(kv_type=kv_type), opened(kv_type=kv_type, backend="reference")
    exact, rounded = opened(kv_type="f32").forward(TOKENS[:300], 0, "all"), cpu.forward(TOKENS[:300], 0, "all")
    assert 1e-12 < nmse(rounded, exact) < error
    assert nmse(rounded, reference.forward(TOKENS[:300], 0, "all")) < bound(error / 1000, in_tiles=error / 20)


def test_less_precision_rounds_activations_to_8_bits(opened, file):
    """Check few tokens, not one, and quantized weights only."""
    for layer in range(2):
        for name in ("gate", "up"):
            values = np.random.default_rng(layer).normal(0, 0.1, file.tensors[f"blk.{layer}.ffn_{name}.weight"].shape)
            change(file, f"blk.{layer}.ffn_{name}.weight", values, "Q4_0")
    engine = opened()
    precise = engine.forward(TOKENS[:4], 0, "all")
    assert 1e-9 < nmse(engine.forward(TOKENS[:4], 0, "all", precise=False), precise) < 1e-4
    np.testing.assert_array_equal(engine.forward(TOKENS[:4], 0, "all"), precise)
    np.testing.assert_array_equal(engine.forward(TOKENS[:1], 0, precise=False), engine.forward(TOKENS[:1], 0))


@pytest.mark.parametrize("format", ["F16", "BF16", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("width", [64, 96])
def test_every_type_agrees_with_the_reference(opened, file, format, width):
    """Check also columns that are no multiple of 64, which the int8 kernels do not take."""
    generator = np.random.default_rng(0)
    file.metadata["llama.feed_forward_length"] = width
    for layer in range(2):
        for name, shape in (("gate", (width, WIDTH)), ("up", (width, WIDTH)), ("down", (WIDTH, width))):
            change(file, f"blk.{layer}.ffn_{name}.weight", generator.normal(0, 0.1, shape), format)
    change(file, "token_embd.weight", generator.normal(0, 1, file.tensors["token_embd.weight"].shape), format)
    cpu, reference = opened(kv_type="f32"), opened(kv_type="f32", backend="reference")
    exact = reference.forward(TOKENS[:300], 0, "all")
    most = {"F16": bound(1e-7, in_tiles=1e-5), "BF16": 1e-5}.get(format, 1e-4)  # large batches round activations
    assert nmse(cpu.forward(TOKENS[:300], 0, "all"), exact) < most
    precise = np.concatenate([cpu.forward(TOKENS[i : i + 60], i, "all") for i in range(0, 300, 60)])
    assert nmse(precise, exact) < (1e-7 if format.startswith("Q") else 1e-10)


def test_threads_do_not_change_a_bit(opened):
    results = []
    for threads in (1, 2, 3, 5):
        engine = opened(threads=threads, kv_type="f32")
        prompt = engine.forward(TOKENS[:600], 0, "all")
        steps = [engine.forward([token], 600 + i) for i, token in enumerate(TOKENS[600:650])]
        results.append(np.concatenate([prompt, *steps]))
        engine.close()
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


# ---- what append refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ids", [[], [-1], [1, 268], [2**31], [2**70], [[1, 2]], [1.5], 5], ids=repr)
def test_invalid_token_ids_are_refused(opened, backend, ids):
    engine = opened(backend=backend)
    with pytest.raises(UsageError, match="token ids"):
        engine.forward(ids, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "position"), [(1025, 0), (1, 1024), (2, 1023)])
def test_tokens_beyond_the_context_are_refused(opened, backend, tokens, position):
    sequence = opened(backend=backend).sequence()
    if position:
        sequence.append([1] * position, "none")
    with pytest.raises(ContextError, match="1024"):
        sequence.append([1] * tokens)
    assert len(sequence.tokens) == position


def test_unknown_choices_of_logits_are_refused(opened):
    with pytest.raises(UsageError):
        opened().forward([1], 0, "first")


@pytest.mark.parametrize(
    "options",
    [
        {"kv_type": "f64"}, {"kv_type": "F16"}, {"backend": "gpu"}, {"context": -1}, {"context": 0}, {"threads": -1},
        {"threads": 0}, {"threads": 100000}, {"backend": "reference", "context": -5},
    ],
    ids=repr,
)  # fmt: skip
def test_invalid_engine_options_are_refused_in_one_line(opened, options):
    with pytest.raises(UsageError) as error:
        opened(**options)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("context", [1 << 45, 1 << 70])
def test_a_context_larger_than_memory_is_refused(opened, context):
    with pytest.raises(MemoryLimitError, match="context"):
        opened(context=context)


@pytest.mark.parametrize(("room", "sequences"), [(sys.maxsize, 16), (1 << 22, 4), (1 << 18, 1)])
def test_a_limited_address_space_reserves_fewer_sequences(monkeypatch, room: int, sequences: int):
    """Under `ulimit -v`: 2 MB are 16 contexts of 128 tokens."""
    monkeypatch.setattr(cache, "get_address_room", lambda: room)
    states = [PagedState(layer, kv_heads=2, key_dim=64, value_dim=64) for layer in range(2)]
    assert cache.KVCache(states, 128, KVType.parse("f16")).sequences == (sequences,)


# ---- models that are refused ----------------------------------------------------------------------------------------


def refusal(opened, backend: str = "cpu") -> str:
    """Return the one printable line with which the model is refused, when it is opened or first used."""
    with pytest.raises(ModelError) as error:
        opened(backend=backend).forward([1, 2, 3], 0)
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 500
    return message


EVERY_TENSOR = [
    "token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_q.weight", "blk.0.attn_k.weight",
    "blk.1.attn_v.weight", "blk.0.attn_output.weight", "blk.1.ffn_norm.weight", "blk.0.ffn_gate.weight",
    "blk.1.ffn_up.weight", "blk.0.ffn_down.weight",
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_a_missing_tensor_is_named(opened, file, backend, name):
    del file.tensors[name]
    assert name in refusal(opened, backend)


def test_a_missing_output_matrix_is_the_embedding(opened, file):
    del file.tensors["output.weight"]
    got = opened(kv_type="f32").forward(TOKENS[:5], 0, "all")
    assert nmse(got, opened(kv_type="f32", backend="reference").forward(TOKENS[:5], 0, "all")) < 1e-10


@pytest.mark.parametrize("grow", [64, -16])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("name", [*EVERY_TENSOR, "output.weight"])
def test_tensors_of_wrong_shapes_are_refused(opened, file, name, axis, grow):
    """Check shapes before the kernels, which check nothing and would read other memory."""
    shape = list(file.tensors[name].shape)
    shape[axis] += grow
    change(file, name, np.ones(shape))
    refusal(opened)


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_tensors_of_wrong_dimensions_are_refused(opened, file, name):
    shape = file.tensors[name].shape
    change(file, name, np.ones((*shape, 32) if len(shape) == 1 else (1, *shape)))
    assert name in refusal(opened)


def test_a_residual_stream_of_another_width_is_refused(opened, file):
    """Write matrices that fit each other, but not the stream to which their result is added."""
    change(file, "blk.1.attn_output.weight", np.ones((2 * WIDTH, WIDTH)))
    change(file, "blk.1.ffn_norm.weight", np.ones(2 * WIDTH))
    for name in ("gate", "up"):
        change(file, f"blk.1.ffn_{name}.weight", np.ones((HIDDEN, 2 * WIDTH)))
    change(file, "blk.1.ffn_down.weight", np.ones((2 * WIDTH, HIDDEN)))
    change(file, "output_norm.weight", np.ones(2 * WIDTH))
    change(file, "output.weight", np.ones((file.tensors["output.weight"].shape[0], 2 * WIDTH)))
    refusal(opened)


@pytest.mark.parametrize("gate", [HIDDEN // 2, 2 * HIDDEN])
def test_gate_and_up_of_different_widths_are_refused(opened, file, gate):
    change(file, "blk.0.ffn_gate.weight", np.ones((gate, WIDTH)))
    refusal(opened)


@pytest.mark.parametrize("size", [WIDTH - 1, 2 * WIDTH, 1])
def test_a_bias_of_a_wrong_length_is_refused(opened, file, size):
    change(file, "blk.0.attn_q.bias", np.ones(size))
    assert "blk.0.attn_q.bias" in refusal(opened)


@pytest.mark.parametrize("size", [7, 9, 1, 16])
def test_rope_factors_of_a_wrong_length_are_refused(opened, file, size):
    change(file, "rope_freqs.weight", np.ones(size))
    assert "rope_freqs.weight" in refusal(opened)


def test_types_that_are_not_for_weights_are_refused(opened, file):
    tensor = file.tensors["blk.0.attn_q.weight"]
    for name in ("I32", "F64", "I8"):
        data = np.zeros((WIDTH, WIDTH * BY_NAME[name].bytes), np.uint8)
        file.tensors[tensor.name] = Tensor(tensor.name, BY_NAME[name], tensor.shape, data)
        assert name in refusal(opened)


def test_a_norm_in_a_block_format_is_refused(opened, file):
    change(file, "output_norm.weight", np.ones((1, WIDTH)), "Q8_0")
    tensor = file.tensors["output_norm.weight"]
    file.tensors[tensor.name] = Tensor(tensor.name, tensor.format, (WIDTH,), tensor.data.reshape(-1))
    assert "output_norm.weight" in refusal(opened)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.vocab_size": 10**7, "tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a"] * 300},
        {"llama.block_count": 3},
        {"llama.block_count": 1 << 20},
        {"llama.embedding_length": 128},
        {"llama.embedding_length": 1 << 24},
        {"llama.attention.head_count": 2 * HEADS},
        {"llama.attention.head_count": 1 << 24, "llama.attention.head_count_kv": 1 << 24},
        {"llama.attention.head_count": HEADS, "llama.attention.head_count_kv": 2 * KV_HEADS},
        {"llama.attention.head_count_kv": 1},
        {"llama.attention.key_length": 32, "llama.attention.value_length": 32},
        {"llama.attention.key_length": 8, "llama.attention.value_length": 8, "llama.rope.dimension_count": 8},
        {"llama.expert_count": 4},
        {"general.architecture": "clip", "clip.block_count": 1},
    ],
    ids=repr,
)
def test_metadata_that_do_not_fit_the_tensors_are_refused(opened, file, changes):
    file.metadata.update(changes)
    refusal(opened)


def test_the_vocabulary_size_must_match_the_embedding(opened, file):
    """State it in two metadata keys, in one or in none."""
    del file.metadata["llama.vocab_size"]
    assert opened().vocab_size == 268
    tokens, file.metadata["tokenizer.ggml.tokens"] = file.metadata["tokenizer.ggml.tokens"], ["a"] * 300
    assert "token_embd.weight" in refusal(opened)
    change(file, "token_embd.weight", np.ones((300, WIDTH)))
    refusal(opened)  # of which the output matrix knows nothing
    file.metadata["tokenizer.ggml.tokens"] = tokens
    assert "token_embd.weight" in refusal(opened)


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_norm.bias", "output_norm.bias", "token_embd.bias", "blk.1.attn_q_norm.weight",
        "blk.2.attn_q.weight", "rope_freqs.bias", "cls.weight", "x\x1b[2J\n",
    ],
    ids=repr,
)  # fmt: skip
def test_an_unknown_tensor_is_refused(opened, file, name):
    """Ignore no tensor, because the model would then compute something else than was trained."""
    change(file, name, np.ones(WIDTH))
    if name == "blk.0.attn_norm.bias":  # or it is another layer's that is missing
        change(file, "blk.1.attn_norm.bias", np.ones(WIDTH))
    assert name.partition("\x1b")[0] in refusal(opened)


@pytest.mark.parametrize("name", ["blk.0.attn_rot_embd.weight", "blk.1.attn.rope_freqs"])
def test_tensors_that_repeat_metadata_are_accepted(opened, file, name):
    change(file, name, np.ones(8))
    opened().forward([1], 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "token_embd.weight", "output.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(opened, file, backend, name, value):
    """Check also that the sequence keeps its tokens."""
    values = np.ones(file.tensors[name].shape, np.float32)
    values[..., -1] = value
    change(file, name, values)
    sequence = opened(backend=backend).sequence()
    for logits in ("last", "all"):
        with pytest.raises(ModelError, match="not finite"):
            sequence.append([1, 2, 3], logits)
        assert sequence.tokens == []


# ---- what an engine costs -------------------------------------------------------------------------------------------

MEMORY = """
import sys
from pathlib import Path
from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import GGUFFile

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

file = GGUFFile.open(sys.argv[1])
first = Engine(file, EngineOptions(threads=2, context=64))
first.sequence().append([1, 2, 3])
before = resident()
engine = Engine(file, EngineOptions(threads=2, context=131072))
after_opening = resident()
sequence = engine.sequence()
sequence.append([1, 2, 3])
after_use = resident()
for _ in range(8):
    sequence.append([5] * 512)
print(after_opening - before, after_use - before, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_long_context_uses_memory_as_it_fills(path):
    """131072 tokens are 16 MiB of cache per layer and side here; 4096 of them are used, 0.5 MiB of each."""
    output = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True).stdout
    opening, use, filled = (int(number) / 2**20 for number in output.split())
    assert opening < 4
    assert use < 8
    assert filled < 24


def test_closed_engines_leave_no_threads(opened):
    before = threading.active_count()
    for threads in (2, 3, 5) * 7:
        engine = opened(threads=threads, context=64)
        engine.forward([1, 2], 0)
        engine.close()
        engine.close()
    assert threading.active_count() == before


def test_several_engines_at_once_keep_apart(opened):
    engines = [opened(kv_type="f32") for _ in range(3)]
    expected = [opened(kv_type="f32").forward(TOKENS[start : start + 20], 0) for start in (0, 100, 200)]
    for engine, start in zip(engines, (0, 100, 200), strict=True):
        engine.forward(TOKENS[start : start + 19], 0, "none")
    got = [engine.forward([TOKENS[start + 19]], 19) for engine, start in zip(engines, (0, 100, 200), strict=True)]
    assert nmse(np.array(got), np.array(expected)) < bound(1e-10, in_tiles=1e-9)


@pytest.mark.parametrize("format", ["F16", "BF16"])
def test_wide_float_rows_in_large_batches_agree_with_the_reference(format):
    """Activations in 16 bits, made once for all matrices, have room for scales behind each row."""
    ids, rows = [number % 200 for number in range(140)], {}
    for backend in ("reference", "cpu"):
        file = small_model((1088, 17, 1, 64, 1120, 203), format, False, 0)
        engine = SingleEngine(file, EngineOptions(2, 256, "f32", backend))
        rows[backend] = engine.forward(ids, 0, "all", precise=False)
        engine.close()
    assert nmse(rows["cpu"], rows["reference"]) < 1e-4


def test_both_ends_of_a_long_prompt_are_computed_exactly(model_path):
    """Run them before and after the fast runs; with all logits, only the beginning."""
    engine, exact = (
        open_engine(model_path("llama-Q8_0"), context=1024),
        open_engine(model_path("llama-Q8_0"), backend="reference"),
    )
    tokens, (first, second) = TOKENS[:300] % 250, (engine.sequence() for _ in range(2))
    last = first.append(tokens)
    second.append(tokens[:292], "none")
    assert np.array_equal(second.append(tokens[292:]), last)
    third = engine.sequence()
    third.append(tokens[:8], "none")
    third.append(tokens[8:292], "none", precise=False)
    assert np.array_equal(third.append(tokens[292:]), last)
    whole = engine.sequence().append(tokens, "all")[-1:]
    assert not np.array_equal(whole, last)
    right = exact.sequence().append(tokens)
    assert nmse(last, right) < nmse(whole, right)
    for each in (engine, exact):
        each.close()


def test_long_prompts_run_together_agree_with_each_alone(model_path):
    """Check also a short prompt beside them."""
    engine = open_engine(model_path("llama-Q8_0"), context=1024)
    prompts: list[Any] = [TOKENS[:200] % 250, TOKENS[200:203] % 250, TOKENS[203:500] % 250]
    rows = engine.step([(engine.sequence(), prompt) for prompt in prompts])
    for prompt, row in zip(prompts, rows, strict=True):
        assert nmse(row, engine.sequence().append(prompt)) < 1e-4
    assert np.array_equal(rows[1].argmax(), engine.sequence().append(prompts[1]).argmax())
    engine.close()


def test_float_weights_need_no_exact_ends(opened):
    assert opened().runs.exact == 0
