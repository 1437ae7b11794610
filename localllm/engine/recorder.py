"""Writes down what an architecture's verbs say: a list of operations on activations, every shape checked.

The list is the same for all targets (localllm.engine.cpu makes a program of it). What each verb means is written in
localllm.kernels.reference.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.rope import Rope
from localllm.arch.states import Paged
from localllm.arch.weights import Weight
from localllm.errors import ModelError
from localllm.files.gguf_header import shown

# Tensors that no verb needs and whose absence or presence changes nothing.
HARMLESS = (".attn_rot_embd.weight", ".attn.rope_freqs")  # rotation speeds, which follow from the metadata


@dataclass(frozen=True, eq=False)
class Rows:
    """Which tokens of a run an activation has a row for."""

    name: str


ALL, WANTED = Rows("all"), Rows("wanted")


@dataclass(frozen=True, eq=False)
class Activation:
    """Float32 [rows, columns], somewhere."""

    rows: Rows
    columns: int


@dataclass(frozen=True, eq=False)
class Operation:
    """One verb, with everything that it was given."""

    verb: str
    inputs: tuple[Activation, ...]
    output: Activation
    given: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """A builder (localllm.arch.verbs) whose verbs write operations down.

    Attributes:
        operations: in the order in which they were said.
    """

    ids = positions = ALL
    wanted = WANTED

    def __init__(self, hyperparameters: Hyperparameters):
        self.operations: list[Operation] = []
        self._vocab_size = hyperparameters.vocab_size
        self._used: set[str] = set()

    # ---- the verbs ----

    def embed(self, weight: Weight, ids: Rows) -> Activation:
        rows, columns = self._matrix(weight)
        if rows != self._vocab_size:
            raise ModelError(f"tensor {weight.name} has {rows} rows for {self._vocab_size} tokens")
        return self._record("embed", (), ids, columns, weight=weight)

    def select(self, x: Activation, which: Rows) -> Activation:
        return self._record("select", (x,), which, x.columns)

    def rms_norm(self, x: Activation, weight: Weight, epsilon: float) -> Activation:
        vector = self._vector(weight, x.columns)
        return self._record("rms_norm", (x,), x.rows, x.columns, vector=vector, epsilon=epsilon)

    def linear(self, x: Activation, weight: Weight) -> Activation:
        rows, columns = self._matrix(weight)
        if columns != x.columns:
            raise ModelError(f"tensor {weight.name} should have {x.columns} columns, has {columns}")
        bias = self._vector(weight.bias, rows) if weight.bias else None
        return self._record("linear", (x,), x.rows, rows, weight=weight, bias=bias)

    def rope(self, x: Activation, rope: Rope, positions: Rows, factors: Weight | None = None) -> Activation:
        if x.columns % rope.head_dim:
            raise ModelError(f"{x.columns} columns are no whole number of heads of {rope.head_dim}")
        divisors = None if factors is None else self._vector(factors, rope.dims // 2)
        return self._record("rope", (x,), positions, x.columns, rope=rope, factors=factors, divisors=divisors)

    def attend(
        self, q: Activation, k: Activation, v: Activation, state: Paged, heads: int, scale: float, softcap: float = 0.0
    ) -> Activation:
        expected = {"q": (q, heads * state.key_dim), "k": (k, state.kv_heads * state.key_dim)}
        for name, (x, columns) in {**expected, "v": (v, state.kv_heads * state.value_dim)}.items():
            if x.columns != columns:
                raise ModelError(f"layer {state.layer}: {name} should have {columns} columns, has {x.columns}")
        given = {"state": state, "heads": heads, "scale": scale, "softcap": softcap}
        return self._record("attend", (q, k, v), q.rows, heads * state.value_dim, **given)

    def add(self, x: Activation, y: Activation) -> Activation:
        return self._record("add", (x, y), x.rows, same_columns(x, y))

    def swiglu(self, gate: Activation, up: Activation) -> Activation:
        return self._record("swiglu", (gate, up), up.rows, same_columns(gate, up))

    def geglu(self, gate: Activation, up: Activation) -> Activation:
        return self._record("geglu", (gate, up), up.rows, same_columns(gate, up))

    def scale(self, x: Activation, factor: float) -> Activation:
        return self._record("scale", (x,), x.rows, x.columns, factor=factor)

    def softcap(self, x: Activation, cap: float) -> Activation:
        return self._record("softcap", (x,), x.rows, x.columns, cap=cap)

    # ---- helpers ----

    def _record(self, verb: str, inputs: tuple[Activation, ...], rows: Rows, columns: int, **given: Any) -> Activation:
        output = Activation(rows, columns)
        self.operations.append(Operation(verb, inputs, output, given))
        return output

    def _matrix(self, weight: Weight) -> tuple[int, int]:
        """Rows and columns of a matrix, which is used now."""
        self._used.add(weight.name)
        if len(weight.shape) != 2:
            raise ModelError(f"tensor {weight.name} should be a matrix, has the shape {list(weight.shape)}")
        return weight.shape[0], weight.shape[1]

    def _vector(self, weight: Weight, columns: int) -> Any:
        """A norm's or bias's numbers, float32 [columns]; it is used now."""
        self._used.add(weight.name)
        vector = weight.vector()
        if len(vector) != columns:
            raise ModelError(f"tensor {weight.name} should have {columns} weights, has {len(vector)}")
        return vector

    def require_all_used(self, names: Collection[str]) -> None:
        """Raise ModelError if the file has a tensor that no verb has used: it would mean something that is not done."""
        unused = [name for name in names if name not in self._used and not name.endswith(HARMLESS)]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelError(f"tensor {shown(unused[0])}{more}: not part of this architecture as it is supported")


def same_columns(x: Activation, y: Activation) -> int:
    """Refuse to combine activations of different widths."""
    if x.columns != y.columns:
        raise ModelError(f"the model's tensors do not fit together: {x.columns} columns meet {y.columns}")
    return x.columns


def stored(operations: list[Operation]) -> set[Activation]:
    """Activations from which a cache is filled: keys, values, and what they are made of between matrix products."""
    found: set[Activation] = set()
    for operation in reversed(operations):
        if operation.verb == "attend":
            found |= set(operation.inputs[1:])
        elif operation.output in found and operation.verb != "linear":
            found |= set(operation.inputs)
    return found


def last_uses(operations: list[Operation]) -> dict[Activation, Operation]:
    """The operation after which an activation is not needed any more."""
    return {x: operation for operation in operations for x in operation.inputs}
