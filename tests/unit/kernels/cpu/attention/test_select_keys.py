"""Compare kernels that select keys, and attention to the selected ones, with NumPy."""

from collections.abc import Iterator

import numpy as np
import pytest
from kernel_calls import Scratch, caller, count, for_any_parts
from models import model, write
from simulated import launch

from localllm.engine.cpu.lowering import count_selection_scratch
from localllm.engine.engine import Engine
from localllm.engine.operations.builders import find_largest
from localllm.engine.operations.key_selection import unpack_bits
from localllm.engine.options import EngineOptions
from localllm.engine.trace.rope_shift import find_key_rotations
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from tests.unit.kernels.cuda.test_attention import (
    Cache,
    FewTokenAttention,
    Shape,
    attend_few,
    content,
    error,
    places,
    run,
)

CONTEXT = 512
random = np.random.default_rng(0)


@pytest.fixture(scope="module")
def call():
    return caller(
        ["select_keys-F32", "select_keys-F16", "select_keys-Q8_0", "select_key_blocks-F32", "select_key_blocks-F16"]
    )


class Question:
    """Queries, weights and keys of some sequences, all integers: sums are exact, and some are equal."""

    def __init__(self, kind: str, spans: list[tuple[int, int]], heads: int, dim: int):
        self.tokens = run(spans)
        self.index = Cache(kind, 1, dim, sum(map(len, self.tokens.tables)))
        for table, (_, length) in zip(self.tokens.tables, spans, strict=True):
            self.index.put(places(table, length), random.integers(-3, 4, (length, 1, dim)).astype(np.float32))
        self.heads, self.dim = heads, dim
        self.q = random.integers(-3, 4, (len(self.tokens.owners), heads * dim)).astype(np.float32)
        self.weights = random.integers(-2, 3, (len(self.q), heads)).astype(np.float32)

    def arguments(self, most: int, y: np.ndarray, block: int = 1, local: int | None = None) -> dict:
        """Return the kernel's arguments; `local` is for select_key_blocks only."""
        keys = self.index.bytes
        arguments = {"count": count(len(self.q)), "positions": self.tokens.positions, "owners": self.tokens.owners}
        arguments |= {"sequences": self.tokens.sequences, "q": self.q, "q_stride": self.q.strides[0], "keys": keys}
        arguments |= {
            "key_bytes": keys.shape[2],
            "key_dim": self.dim,
            "heads": self.heads,
            "most": most,
            "block": block,
        }
        arguments |= {"y": y, "y_stride": y.strides[0]}
        if local is None:
            return arguments | {"weights": self.weights, "weights_stride": self.weights.strides[0]}
        return arguments | {"local": local, "choice_stride": y.strides[0] // self.heads}

    def products(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each token's index and its products with all keys, [heads, keys]."""
        for token, (owner, position) in enumerate(zip(self.tokens.owners, self.tokens.positions, strict=True)):
            keys = self.index.kept[0, places(self.tokens.tables[owner], position + 1)]
            yield token, self.q[token].reshape(self.heads, self.dim) @ keys.T

    def answer(self, most: int, block: int = 1) -> list[np.ndarray]:
        """Return the keys that each token sees, as bool."""
        visible = []
        for token, products in self.products():
            scores = (self.weights[token] @ np.maximum(products, 0))[block - 1 :: block]
            at = np.arange(products.shape[1]) // block
            visible.append(np.isin(at, find_largest(scores[None], most)[0]) | (at >= len(scores)))
        return visible

    def answer_of_blocks(self, most: int, block: int, local: int) -> list[np.ndarray]:
        """Return the keys that each head of each token sees, as bool."""
        visible = []
        for _, products in self.products():
            for row in products:
                scores = np.array([row[first : first + block].max() for first in range(0, len(row), block)])
                scores[max(len(scores) - local, 0) :] = np.inf
                visible.append(np.isin(np.arange(len(row)) // block, find_largest(scores[None], most)[0]))
        return visible

    def check(self, words: np.ndarray, expected: list[np.ndarray]) -> None:
        for row, bits in zip(words, expected, strict=False):
            np.testing.assert_array_equal(unpack_bits(row[None], len(bits))[0], bits)
        assert (words[len(expected) :] == 7).all()


@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize(("heads", "dim", "block"), [(5, 24, 1), (3, 16, 5), (1, 7, 64)])
def test_selected_keys_agree_with_numpy(call, kind, heads, dim, block):
    question, most = Question(kind, [(3, 130), (1, 12), (2, 300), (1, 33)], heads, dim), max(32 // block, 2)

    def compute(parts: int) -> np.ndarray:
        y, scratch = (
            np.full((len(question.q) + 1, CONTEXT // 32), 7, np.uint32),
            Scratch(count_selection_scratch(heads, dim, CONTEXT)),
        )
        call(f"select_keys-{kind}", parts, **question.arguments(most, y, block), **scratch.arguments)
        scratch.check()
        question.check(y, question.answer(most, block))
        return y[:, 0].view(np.float32)

    for_any_parts(compute)


@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize(("heads", "dim", "block", "local"), [(4, 24, 16, 1), (3, 16, 5, 2), (1, 7, 100, 1)])
def test_selected_blocks_agree_with_numpy(call, kind, heads, dim, block, local):
    """Score a block by its best key; the last blocks are always visible."""
    question, most = Question(kind, [(3, 130), (1, 12), (2, 300), (1, 33)], heads, dim), 3

    def compute(parts: int) -> np.ndarray:
        y = np.full((len(question.q) + 1, heads * CONTEXT // 32), 7, np.uint32)
        scratch = Scratch(count_selection_scratch(heads, dim, heads * CONTEXT))
        call(f"select_key_blocks-{kind}", parts, **question.arguments(most, y, block, local), **scratch.arguments)
        scratch.check()
        question.check(y.reshape(-1, CONTEXT // 32), question.answer_of_blocks(most, block, local))
        return y[:, 0].view(np.float32)

    for_any_parts(compute)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block", "local"), [("F32", 1, None), ("Q8_0", 4, None), ("F32", 8, 1), ("Q8_0", 5, 2)]
)
def test_selected_keys_on_a_gpu_agree_with_numpy(kind, block, local):
    question, most = Question(kind, [(2, 70), (1, 9), (1, 40)], 3, 32), 12 if block == 1 else 3
    groups = 1 if local is None else 3
    y = np.full((len(question.q) + 1, groups * CONTEXT // 32), 7, np.uint32)
    scores = np.full((64, CONTEXT), np.nan, np.float32)
    scratch = {"scratch": scores, "scratch_bytes": scores.strides[0]}
    kernel = f"select_keys-{kind}" if local is None else f"select_key_blocks-{kind}"
    launch(kernel, len(question.q) + 1, **question.arguments(most, y, block, local), **scratch)
    expected = question.answer(most, block) if local is None else question.answer_of_blocks(most, block, local)
    question.check(y.reshape(-1, CONTEXT // 32), expected)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_token_with_infinite_weights_selects_no_key(call, wrong):
    """Expect no selected key, so that attention gives NaN."""
    question = Question("F32", [(2, 64)], 2, 16)
    question.weights[1] = wrong
    y, scratch = np.full((3, CONTEXT // 32), 7, np.uint32), Scratch(count_selection_scratch(2, 16, CONTEXT))
    call("select_keys-F32", 1, **question.arguments(12, y), **scratch.arguments)
    assert unpack_bits(y[:1], 63).sum() == 12
    assert not unpack_bits(y[1:2], 64).any()
    on_card, scores = np.full((3, CONTEXT // 32), 7, np.uint32), np.full((64, CONTEXT), np.nan, np.float32)
    with np.errstate(invalid="ignore"):
        launch("select_keys-F32", 3, **question.arguments(12, on_card), scratch=scores, scratch_bytes=scores.strides[0])
    np.testing.assert_array_equal(on_card[:, :2], y[:, :2])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_token_with_infinite_queries_selects_no_block(call, wrong):
    question = Question("F32", [(2, 64)], 2, 16)
    question.q[1, 3] = wrong
    y, scratch = np.full((3, 2 * CONTEXT // 32), 7, np.uint32), Scratch(count_selection_scratch(2, 16, 2 * CONTEXT))
    call("select_key_blocks-F32", 1, **question.arguments(3, y, 8, 1), **scratch.arguments)
    of_heads = y.reshape(3, 2, -1)
    assert unpack_bits(of_heads[0], 63).sum() == 2 * 23
    assert not unpack_bits(of_heads[1], 64).any()


@pytest.mark.slow
def test_attention_on_a_gpu_sees_selected_keys_only():
    shape, tokens = Shape(48, 32, 1, 3), run([(2, 70), (1, 20)])
    q, keys, values = content(shape, tokens, ("F16", "F16"))
    bits = np.zeros((len(q), CONTEXT), bool)
    expected = np.empty((len(q), shape.group, shape.value_dim))
    for token, (owner, position) in enumerate(zip(tokens.owners, tokens.positions, strict=True)):
        seen = np.sort(random.choice(position + 1, 7, replace=False))
        bits[token, seen] = True
        at = places(tokens.tables[owner], position + 1)[seen]
        scores = q[token].reshape(shape.group, -1).astype(np.float64) @ keys.kept[0, at].T / np.sqrt(shape.key_dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected[token] = weights / weights.sum(axis=1, keepdims=True) @ values.kept[0, at]
    chosen = np.packbits(bits, axis=1, bitorder="little")
    got = attend_few(shape, tokens, q, keys, values, chosen=chosen)
    assert FewTokenAttention(shape.key_dim, shape.value_dim, shape.group).bundle == shape.group
    assert error(got, expected.reshape(len(q), -1)) < 1e-11
    chosen[1] = 0  # as if a sum had not been a number
    with np.errstate(invalid="ignore"):
        got = attend_few(shape, tokens, q, keys, values, chosen=chosen, sinks=np.float32([0, 1, 2]))
    assert (np.isnan(got).all(axis=1) == [False, True, False]).all()


def test_keys_of_an_indexer_are_rotated_when_tokens_move(model_path):
    engine = Engine(GGUFFile.open(model_path("glm_dsa")), EngineOptions(1, 64, "f32", "reference"))
    states = engine.hyperparameters.list_states()
    rotated = find_key_rotations(engine.operations, states)
    engine.close()
    assert rotated.keys() == set(states)
    indexes = [rotated[state] for state in states if state.is_index]
    assert [(turn.step, turn.apart, len(turn.frequencies)) for turn in indexes] == [(2, 1, 8)] * 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["deepseek4", "hy_v4"])
def test_an_indexer_with_nan_is_refused_despite_sinks(tmp_path, name, backend):
    declared = model(name)
    name_of_tensor = next(tensor for tensor in declared.tensors if tensor.endswith("indexer.proj.weight"))
    declared.tensors[name_of_tensor] = np.full_like(declared.tensors[name_of_tensor], np.nan)
    engine = Engine(GGUFFile.open(write(declared, tmp_path / "model.gguf")), EngineOptions(1, 128, "f32", backend))
    with np.errstate(invalid="ignore"), pytest.raises(ModelError, match="not finite"):
        engine.sequence().append([*range(40)])
    engine.close()
