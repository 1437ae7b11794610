"""Test weights by name, and parts of them, without a model."""

from typing import Any

import numpy as np
import pytest

from localllm.arch.weights import Weight, Weights, collect_layer_names, stack_matrices
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import Tensor
from localllm.quant.formats import BY_NAME

NUMBERS = np.arange(24, dtype=np.float32) + 1


def tensor(name: str, *shape: int, format: str = "F32", numbers: np.ndarray | None = None) -> Tensor:
    """Return a tensor with the first of NUMBERS."""
    content = NUMBERS[: int(np.prod(shape))] if numbers is None else numbers
    data = content.reshape(shape).view(np.uint8) if len(shape) > 1 else content.view(np.uint8)
    return Tensor(name, BY_NAME[format], shape, data)


def numbers(weight: Weight) -> Any:
    return np.ascontiguousarray(weight.tensor.data).view(np.float32).reshape(weight.shape).tolist()


# ---- numbers


@pytest.mark.parametrize(("format", "kind"), [("F32", np.float32), ("F16", np.float16), ("F64", np.float64)])
def test_plain_values_become_float32(format: str, kind: Any):
    vector = Weight(tensor("v", 3, format=format, numbers=np.array([1.5, -2, 0.25], kind))).read_vector()
    assert vector.dtype == np.float32 and vector.tolist() == [1.5, -2, 0.25]


def test_bf16_and_integer_tensors_are_read():
    upper = (np.array([1.5, -2, 0.25], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    vector = Weight(tensor("v", 3, format="BF16", numbers=upper)).read_vector()
    assert vector.dtype == np.float32 and vector.tolist() == [1.5, -2, 0.25]
    whole = Weight(tensor("v", 2, 2, format="I32", numbers=np.array([1, -2, 3, 1 << 30], np.int32))).read_integers()
    assert whole.dtype == np.int64 and whole.tolist() == [[1, -2], [3, 1 << 30]]
    assert Weight(tensor("v", 1)).read_number() == 1.0


@pytest.mark.parametrize(("read", "weight", "message"), [
    (Weight.read_vector, tensor("v", 2, 2), r"v must be a vector of F32 \(found F32 \(2, 2\)\)"),
    (Weight.read_vector, tensor("v", 3, format="I32"), r"v must be a vector of F32 \(found I32 \(3,\)\)"),
    (Weight.read_vector, tensor("v", 2, numbers=np.array([1, np.inf], np.float32)), "v must have finite values only"),
    (Weight.read_vector, tensor("v", 2, numbers=np.array([np.nan, 1], np.float32)), "v must have finite values only"),
    (Weight.read_integers, tensor("v", 3), r"v must have integers, I32 \(found F32\)"),
    (Weight.read_number, tensor("v", 2), r"v must have one element \(found the shape \[2\]\)"),
    (lambda weight: weight.require_shape(3, 2), tensor("v", 2, 3),
    r"v must have the shape \[3, 2\] \(found \[2, 3\]\)"),
    (lambda weight: weight.split_stacks(2), tensor("v", 3, 2), r"v must be 2 matrices \(found the shape \[3, 2\]\)"),
    (lambda weight: weight.split_stacks(2), tensor("v", 4), r"v must be 2 matrices \(found the shape \[4\]\)"),
    (lambda weight: weight.split(1, 1), tensor("v", 3, 2), r"v must have 2 rows \(found 3\)"),
    (lambda weight: weight.split(2, 2), tensor("v", 3, 2), r"v must have 4 rows \(found 3\)"),
])  # fmt: skip
def test_tensors_of_another_shape_or_type_are_refused(read: Any, weight: Tensor, message: str):
    with pytest.raises(ModelError, match=message):
        read(Weight(weight))


# ---- other shapes


def test_weights_are_reshaped_to_vectors_rows_and_stacks():
    matrix = Weight(tensor("m", 3, 2))
    assert matrix.require_shape(3, 2) is matrix
    assert matrix.flatten().shape == (6,) and matrix.flatten().read_vector().tolist() == [1, 2, 3, 4, 5, 6]
    assert numbers(matrix.flatten().to_row()) == [[1, 2, 3, 4, 5, 6]]
    assert numbers(Weight(tensor("v", 3)).repeat(2)) == [1, 1, 2, 2, 3, 3]
    stack = Weight(tensor("m", 6, 2)).split_stacks(2)
    assert numbers(stack) == [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]
    assert stack.tensor.data.shape == (2, 3, 8)
    with pytest.raises(ModelError, match="m must be 2 matrices"):
        Weight(tensor("m", 4, 2), bias=matrix).split_stacks(2)


def test_split_rows_know_their_offset_and_bias():
    fused = Weight(tensor("m", 5, 2), bias=Weight(tensor("m.bias", 5)))
    first, second = fused.split(2, 3)
    assert numbers(first) == [[1, 2], [3, 4]] and numbers(second) == [[5, 6], [7, 8], [9, 10]]
    assert (first.tensor.data.shape, second.tensor.data.shape) == ((2, 8), (3, 8))
    assert (first.first_row, second.first_row, second.split_halves()[1].first_row) == (0, 2, 3)
    assert first.bias and second.bias and numbers(first.bias) == [1, 2] and numbers(second.bias) == [3, 4, 5]
    assert first.bias.tensor.data.shape == (8,)
    assert [numbers(part) for part in Weight(tensor("v", 5)).split(1, 4)] == [[1], [2, 3, 4, 5]]
    assert [numbers(part) for part in Weight(tensor("m", 2, 2)).split(1, 1)] == [[[1, 2]], [[3, 4]]]
    upper, lower = fused.split_halves()
    assert (upper.shape, lower.shape) == ((2, 2), (3, 2))
    with pytest.raises(ModelError, match=r"m\.bias must have the shape \[5\] \(found \[4\]\)"):
        Weight(tensor("m", 5, 2), bias=Weight(tensor("m.bias", 4))).split(2, 3)


def test_rows_of_every_expert_are_split():
    experts = Weight(tensor("m", 2, 3, 2))
    first, second = experts.split(1, 2)
    assert numbers(first) == [[[1, 2]], [[7, 8]]] and numbers(second) == [[[3, 4], [5, 6]], [[9, 10], [11, 12]]]
    assert (first.first_row, second.first_row, second.split(1, 1)[1].first_row) == (0, 1, 2)
    with pytest.raises(UnsupportedError, match=r"m\.bias: biases of fused experts are not supported"):
        Weight(experts.tensor, bias=Weight(tensor("m.bias", 2, 3))).split(1, 2)


def test_equally_spaced_experts_are_stacked_without_copying():
    whole = NUMBERS.reshape(3, 2, 4)
    apart = [Weight(Tensor(f"e.{n}", BY_NAME["F32"], (2, 4), whole[n].view(np.uint8))) for n in range(3)]
    stack = stack_matrices(apart)
    assert stack.shape == (3, 2, 4) and numbers(stack) == whole.tolist() and not stack.tensor.data.flags.writeable
    assert np.shares_memory(stack.tensor.data, whole)
    assert numbers(stack_matrices(apart[1:2])) == whole[1:2].tolist()
    elsewhere = Weight(Tensor("e.9", BY_NAME["F32"], (2, 4), whole[1].copy().view(np.uint8)))
    other = Weight(Tensor("e.9", BY_NAME["I32"], (2, 4), whole[2].view(np.uint8)))
    for wrong in (
        [*apart[:2], elsewhere], [*apart[:2], other], [Weight(apart[0].tensor, bias=other), *apart[1:]],
        [Weight(apart[0].tensor, scale=other)], [Weight(tensor("v", 4))],
    ):  # fmt: skip
        with pytest.raises(ModelError, match="separate expert tensors must be alike and equally spaced"):
            stack_matrices(wrong)


# ---- names

NAMES = (
    "token_embd.weight", "blk.0.a.weight", "blk.0.a.bias", "blk.0.a.scale", "blk.1.a.weight", "blk.1.b.weight",
    "blk.1.c.bias", "blk.1.d", "v.blk.0.b.weight", "alone.bias", "bare",
)  # fmt: skip


@pytest.fixture
def weights() -> Weights:
    return Weights({name: tensor(name, 2) for name in NAMES})


def names(*found: Weight | None) -> list[str | None]:
    return [None if weight is None else weight.name for weight in found]


def test_weights_are_found_by_name_in_a_layer_or_outside(weights: Weights):
    first, second = weights.get_layer(0), weights.get_layer(1)
    whole = first.a
    assert names(whole, whole.bias, whole.scale) == ["blk.0.a.weight", "blk.0.a.bias", "blk.0.a.scale"]
    values = weights.token_embd, weights.get_bias("alone"), weights.get_exact("bare"), weights.require_exact("bare")
    assert names(*values) == [
        "token_embd.weight", "alone.bias", "bare", "bare",
    ]  # fmt: skip
    assert names(second.get_bias("c"), second.get_exact("d"), second.require_exact("d"), second.b) == [
        "blk.1.c.bias", "blk.1.d", "blk.1.d", "blk.1.b.weight",
    ]  # fmt: skip
    assert names(weights.get("x"), weights.get_bias("x"), weights.get_exact("x"), weights.get("b")) == [None] * 4
    assert names(*first.list_weights()) == ["blk.0.a.weight", "blk.0.a.bias", "blk.0.a.scale"]
    assert len(weights.list_weights()) == len(NAMES)
    weights.require_biases("alone")
    assert collect_layer_names(NAMES) == {"a.weight", "a.bias", "a.scale", "b.weight", "c.bias", "d"}


def test_a_tensor_that_only_other_layers_have_is_refused(weights: Weights):
    """A family may allow it by layer; a prefix has its own layers."""
    first, second = weights.get_layer(0), weights.get_layer(1)
    for ask, name in (
        (lambda: first.get("b"), "blk.0.b.weight"), (lambda: first.get_bias("c"), "blk.0.c.bias"),
        (lambda: first.get_exact("d"), "blk.0.d"), (lambda: second.get("a"), "blk.1.a.bias"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=f"the model has no tensor {name}, but other layers have it"):
            ask()
    assert first.get("b", by_layer=True) is None
    weight = second.get("a", by_layer=True)
    assert weight and names(weight, weight.bias, weight.scale) == ["blk.1.a.weight", None, None]
    part = weights.get_submodel("v.")
    assert names(part.get_layer(0).b, part.get_layer(0).get("a"), part.get_layer(0).get_bias("c")) == [
        "v.blk.0.b.weight",
        None,
        None,
    ]


def test_a_missing_weight_is_named(weights: Weights):
    for ask, name in (
        (lambda: weights.require("x"), "x.weight"), (lambda: weights.x, "x.weight"),
        (lambda: weights.get_layer(2).x, "blk.2.x.weight"),
        (lambda: weights.get_layer(2).require_exact("x"), "blk.2.x"),
        (lambda: weights.require_biases("alone", "y"), "y.bias"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=f"^the model has no tensor {name}$"):
            ask()
