"""Writes down what an architecture's verbs say: a list of operations on activations, every shape checked.

The list is the same for all targets (localllm.engine.lower makes steps of it). What each verb means is written in
localllm.arch.verbs.
"""

from collections.abc import Callable, Collection
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import Latent, Paged
from localllm.arch.other_parts import without_other_parts
from localllm.arch.rope import Rope
from localllm.arch.routing import Routing
from localllm.arch.verbs import Scores
from localllm.arch.weights import Weight, Weights
from localllm.engine.trace.hashing import HashingVerbs
from localllm.engine.trace.operations import ALL, WANTED, Activation, Operation, Routed, RoutedActivation, Rows
from localllm.engine.trace.recurrent import RecurrentVerbs
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import printable
from localllm.files.oddities import Oddities

LEAST_DIVISOR = 1e-3  # of a rotation's speeds; known ones are from 0.9 up
NO_MATRICES = ("I8", "I16", "I32", "I64", "F64")
# Tensors that no verb needs and whose absence or presence changes nothing.
HARMLESS = (".attn_rot_embd.weight", ".attn.rope_freqs")  # rotation speeds, which follow from the metadata


def require_divisors(name: str, divisors: np.ndarray) -> None:
    """Raise ModelError for factors of a rotation's speeds that no model has."""
    if divisors.min() < LEAST_DIVISOR:
        raise ModelError(f"tensor {name} should have positive numbers, has {divisors.min()}")


def require_format(weight: Weight) -> None:
    """Raise ModelError for a matrix in a format of numbers that no matrix has."""
    if weight.tensor.format.name in NO_MATRICES:
        raise ModelError(f"tensor {weight.name}: format {weight.tensor.format.name} is not supported for matrices")


class HiddenStateTap(NamedTuple):
    """What others go on with, and where runs lay it down: float32 [BATCH, columns or more].

    Attributes:
        layers: what goes into these, joined; if there are none, what the model makes of tokens.
    """

    memory: np.ndarray
    layers: tuple[int, ...] = ()


class Recorder(HashingVerbs, RecurrentVerbs):
    """A builder (localllm.arch.verbs) whose verbs write operations down.

    Attributes:
        operations: in the order in which they were said.
        encoding: those of the encoder, if there is one.
        begins: whether an image's rows can stand for tokens.
    """

    ids = positions = kinds = ALL
    wanted = WANTED

    def __init__(self, hyperparameters: Hyperparameters, context: int, shown: HiddenStateTap | None = None):
        """context: the most tokens of a sequence.  shown: what others go on with."""
        self._shown, self.begins, self._entered = shown, False, dict[int, Activation]()
        self.reveals = shown is not None and not shown.layers
        self.operations, self.encoding = list[Operation](), list[Operation]()
        self._vocab_size, self._width, self._context = hyperparameters.vocab_size, hyperparameters.width, context
        self._used: set[str] = set()
        self._heads: dict[tuple[int, Rows], RoutedActivation] = {}

    # ---- the verbs ----

    def begin(self, embedded: Callable[[], Activation], parts: int = 1) -> Activation:
        self.begins = True
        return embedded()

    def deepen(self, x: Activation, part: int) -> Activation:
        return x

    def embed(self, weight: Weight, ids: Rows | Activation) -> Activation:
        rows, columns = self._matrix(weight)
        if rows != self._vocab_size:
            raise ModelError(f"tensor {weight.name} has {rows} rows for {self._vocab_size} tokens")
        return self._embedded("embed", ids, columns, weight)

    def replace_ids(self, ids: Rows, table: np.ndarray) -> Activation:
        if table.shape != (self._vocab_size,):
            raise ModelError(f"{table.size} numbers for {self._vocab_size} tokens")
        return self._record("replace_ids", (), ids, 2, table=np.ascontiguousarray(table, np.int64))

    def embed_positions(self, weight: Weight, positions: Rows) -> Activation:
        rows, columns = self._matrix(weight)
        if rows < self._context:
            raise ModelError(f"the model has only {rows} positions, too few for a context of {self._context}")
        if columns != self._width:
            raise ModelError(f"tensor {weight.name} should have {self._width} columns, has {columns}")
        return self._record("embed_positions", (), positions, columns, weight=weight)

    def embed_kinds(self, weight: Weight, kinds: Rows | Activation) -> Activation:
        _, columns = self._matrix(weight)
        return self._embedded("embed_kinds", kinds, columns, weight)

    def reveal(self, x: Activation) -> Activation:
        assert self._shown
        self.operations.append(Operation("show", (x,), Activation(ALL, x.columns), {"memory": self._shown.memory}))
        return x

    def enter(self, x: Activation, layer: int) -> Activation:
        if self._shown and layer in self._shown.layers:
            self._entered[layer] = x
            if len(self._entered) == len(set(self._shown.layers)):
                first, *others = (self._entered[layer] for layer in self._shown.layers)
                self.reveal(reduce(lambda some, more: self.join(some, more, 1), others, first))
        return x

    def given(self, rows: np.ndarray, columns: int) -> Activation:
        """What whoever runs this has laid down before: float32 [BATCH, columns or more]."""
        return self._record("given", (), ALL, columns, memory=rows)

    def select(self, x: Activation, which: Rows) -> Activation:
        return self._record("select", (x,), which, x.columns)

    def columns(self, x: Activation, first: int, end: int, period: int | None = None) -> Activation:
        period = period or x.columns
        if not 0 <= first < end <= period or x.columns % period:
            raise ModelError(f"the model's tensors do not fit together: columns {first} to {end} of {x.columns}")
        groups = x.columns // period
        return self._record("columns", (x,), x.rows, groups * (end - first), first=first, groups=groups)

    def join(self, x: Activation, y: Activation, heads: int, shared: bool = False) -> Activation:
        if x.columns % heads or (y.columns % heads and not shared):
            raise ModelError(
                f"the model's tensors do not fit together: {x.columns}, {y.columns} columns, {heads} heads"
            )
        columns = x.columns + y.columns * (heads if shared else 1)
        return self._record("join", (x, y), x.rows, columns, heads=heads, shared=shared)

    def head_linear(self, x: Activation, weight: Weight) -> Activation:
        heads = weight.shape[0]
        if x.columns % heads or weight.bias or weight.scale:
            raise ModelError(f"tensor {weight.name} does not fit {x.columns} columns, or has a bias or a scale")
        every = self._every_head(heads, x.rows)
        rows = self._record("deal", (x, every), every.routed, x.columns // heads)
        y = self.expert_linear(rows, weight, every)
        return self._record("collect", (y, every), x.rows, heads * y.columns)

    def _every_head(self, heads: int, rows: Rows) -> RoutedActivation:
        """Heads as experts, to all of which every token goes: planned once."""
        if (heads, rows) not in self._heads:
            choice = RoutedActivation(rows, heads, Routed("heads", Routing(heads, heads), rows))
            self.operations.append(Operation("every_head", (), choice))
            self._heads[heads, rows] = choice
        return self._heads[heads, rows]

    def rms_norm(self, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None) -> Activation:
        given = {"vector": self._factors(weight, x.columns, group), "group": group or x.columns, "epsilon": epsilon}
        given["norm"] = weight
        return self._record("rms_norm", (x,), x.rows, x.columns, **given)

    def layer_norm(self, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None) -> Activation:
        given = {"vector": self._factors(weight, x.columns, group), "group": group or x.columns, "epsilon": epsilon}
        given["norm"] = weight
        bias = self._vector(weight.bias, x.columns) if weight and weight.bias else np.zeros(x.columns, np.float32)
        return self._record("layer_norm", (x,), x.rows, x.columns, bias=bias, **given)

    def linear(self, x: Activation, weight: Weight) -> Activation:
        rows, columns = self._matrix(weight)
        if columns != x.columns:
            raise ModelError(f"tensor {weight.name} should have {x.columns} columns, has {columns}")
        bias = self._vector(weight.bias, rows) if weight.bias else None
        if weight.scale and weight.bias:
            raise UnsupportedError(f"tensor {weight.name}: a scale and a bias together are not supported")
        y = self._record("linear", (x,), x.rows, rows, weight=weight, bias=bias)
        return self.scale(y, weight.scale) if weight.scale else y

    def rope(self, x: Activation, rope: Rope, positions: Rows, factors: Weight | None = None) -> Activation:
        if x.columns % rope.head_dim:
            raise ModelError(f"{x.columns} columns are no whole number of heads of {rope.head_dim}")
        divisors = None if factors is None else self._vector(factors, rope.dims // 2)
        if factors and divisors is not None:
            require_divisors(factors.name, divisors)
        given = {"rope": rope, "factors": factors, "divisors": divisors, "table": self._angles(rope, divisors)}
        return self._record("rope", (x,), positions, x.columns, **given)

    def _angles(self, rope: Rope, divisors: np.ndarray | None) -> np.ndarray | None:
        """Where cosines and sines lie that whoever runs this lays down, float32 [tokens, 2, pairs]; None: a run's
        positions say them."""
        return None

    def by_context(self, short: Weight, long: Weight, original: int) -> Weight:
        self.ignore(short, long)
        for weight in (short, long):
            require_divisors(weight.name, weight.vector())
        return long if self._context > original else short

    def ignore(self, *weights: Weight | None) -> None:
        self._used |= {weight.name for weight in weights if weight}

    def attend(
        self, q: Activation, k: Activation | None, v: Activation | None, state: Paged | Latent, scores: Scores
    ) -> Activation:
        heads = scores.heads
        expected = {"q": (q, heads * state.key_dim), "k": (k, state.kv_heads * state.key_dim)}
        for name, (x, columns) in {**expected, "v": (v, state.kv_heads * state.value_dim)}.items():
            if x is not None and x.columns != columns:
                raise ModelError(f"layer {state.layer}: {name} should have {columns} columns, has {x.columns}")
        inputs = tuple(x for x in (q, k, v) if x is not None)
        given: dict[str, Any] = {"state": state, "heads": heads, "scale": scores.scale, "softcap": scores.softcap}
        given |= {"slopes": scores.slopes, "sinks": self._vector(scores.sinks, heads) if scores.sinks else None}
        given |= {
            "ahead": scores.ahead,
            "biases": scores.biases,
            "crosses": scores.crosses,
            "windowed": scores.windowed,
            "logs": scores.logs,
        }
        if scores.biases is not None and (len(scores.biases) != heads or scores.biases.shape[1] % 2 == 0):
            raise ModelError(f"layer {state.layer}: biases of the shape {scores.biases.shape} for {heads} heads")
        inputs, given["choices"] = (*inputs, *([scores.chosen] if scores.chosen else [])), 0
        if scores.chosen:
            given["choices"] = scores.chosen.columns // self._words
            if given["choices"] not in (1, state.kv_heads):
                raise ModelError(f"layer {state.layer}: {given['choices']} choices of keys for {state.kv_heads} groups")
        return self._record("attend", inputs, q.rows, heads * (state.value_dim + scores.logs), **given)

    def keep(self, k: Activation, v: Activation, state: Paged) -> None:
        if (k.columns, v.columns) != (state.kv_heads * state.key_dim, state.kv_heads * state.value_dim):
            raise ModelError(f"layer {state.layer}: keys and values of {k.columns} and {v.columns} columns")
        self._record("keep", (k, v), k.rows, 0, state=state)

    def pool(self, x: Activation, kind: str) -> Activation:
        return self._record("pool", (x,), WANTED, x.columns, kind=kind)

    def choose(
        self, q: Activation, k: Activation, weights: Activation | None, index: Latent, count: int, block: int = 1
    ) -> Activation:
        heads, rest = divmod(q.columns, index.key_dim)
        if k.columns != index.key_dim or rest or (weights and weights.columns != heads):
            raise ModelError(f"layer {index.layer}: an indexer of {q.columns} and {k.columns} columns")
        given = {"state": index, "most": count, "block": block, "heads": heads}
        return self._record("choose", (q, k, *([weights] if weights else [])), q.rows, self._words, **given)

    def choose_blocks(
        self, q: Activation, k: Activation, index: Latent, count: int, block: int, local: int
    ) -> Activation:
        groups, rest = divmod(q.columns, index.key_dim)
        if k.columns != index.key_dim or rest:
            raise ModelError(f"layer {index.layer}: an indexer of {q.columns} and {k.columns} columns")
        given = {"state": index, "most": count, "block": block, "local": local, "heads": groups}
        return self._record("choose_blocks", (q, k), q.rows, groups * self._words, **given)

    @property
    def _words(self) -> int:
        """Numbers of 32 bits that have one for each position."""
        return -(-self._context // 32)

    def route(
        self, logits: Activation, routing: Routing, bias: Weight | None = None, table: Weight | None = None
    ) -> RoutedActivation:
        if logits.columns != routing.experts:
            raise ModelError(f"a router for {logits.columns} of {routing.experts} experts")
        vector = self._vector(bias, routing.experts) if bias else None
        choice = RoutedActivation(logits.rows, routing.used, Routed("routed", routing, logits.rows))
        experts = self._experts(table, routing) if table else None
        given = {"routing": routing, "bias": vector, "table": experts}
        self.operations.append(Operation("route", (logits,), choice, given))
        return choice

    def _experts(self, table: Weight, routing: Routing) -> np.ndarray:
        """Where tokens go by their ids, int64 [vocab, used]; it is used now."""
        self._used.add(table.name)
        experts = table.shaped(self._vocab_size, routing.used).whole()
        if experts.min() < 0 or experts.max() >= routing.experts:
            raise ModelError(f"tensor {table.name} should have numbers of {routing.experts} experts")
        return experts

    def gather(self, x: Activation, choice: RoutedActivation) -> Activation:
        return self._record("gather", (x, choice), choice.routed, x.columns)

    def expert_linear(self, x: Activation, weight: Weight, choice: RoutedActivation) -> Activation:
        self._used.add(weight.name)
        expected = choice.routed.routing.matrices, x.columns
        if len(weight.shape) != 3 or (weight.shape[0], weight.shape[2]) != expected:
            raise ModelError(
                f"tensor {weight.name} should have matrices of {expected[1]} columns for {expected[0]} experts,"
                f" has the shape {list(weight.shape)}"
            )
        require_format(weight)
        bias = self._vectors(weight.bias, expected[0], weight.shape[1]) if weight.bias else None
        if weight.scale:
            raise UnsupportedError(f"tensor {weight.scale.name}: scales of experts are not supported")
        return self._record("expert_linear", (x, choice), x.rows, weight.shape[1], weight=weight, bias=bias)

    def scatter(self, x: Activation, choice: RoutedActivation) -> Activation:
        return self._record("scatter", (x, choice), choice.rows, x.columns)

    def rowwise(self, verb: str, formula: Callable[..., Any], *inputs: Activation, **given: float) -> Activation:
        for x in inputs[1:]:
            same_columns(inputs[0], x)
        numbers = {name: float(number) for name, number in given.items()}  # kernels get the bits of a float
        return self._record(verb, inputs, inputs[-1].rows, inputs[0].columns, **numbers)

    def sigmoid_gate(self, x: Activation, gate: Activation) -> Activation:
        if gate.columns != 1:
            raise ModelError(f"the model's tensors do not fit together: a gate of {gate.columns} columns")
        return self._record("sigmoid_gate", (x, gate), x.rows, x.columns)

    def scale(self, x: Activation, factor: float | Weight) -> Activation:
        if isinstance(factor, Weight):
            self._used.add(factor.name)
            factor = factor.number()
        return self._record("scale", (x,), x.rows, x.columns, factor=float(factor))

    def scale_columns(self, x: Activation, weight: Weight) -> Activation:
        return self._record("scale_columns", (x,), x.rows, x.columns, vector=self._vector(weight.flat(), x.columns))

    def lerp(self, x: Activation, z: Activation, weight: Weight) -> Activation:
        vector = self._vector(weight.flat(), same_columns(x, z))
        return self._record("lerp", (x, z), x.rows, x.columns, vector=vector)

    def multiply_heads(self, x: Activation, gates: Activation) -> Activation:
        if x.columns % gates.columns:
            raise ModelError(f"the model's tensors do not fit together: {gates.columns} gates of {x.columns} columns")
        return self._record("multiply_heads", (x, gates), x.rows, x.columns, heads=gates.columns)

    def softmax(self, x: Activation) -> Activation:
        return self._record("softmax", (x,), x.rows, x.columns)

    def sinkhorn(self, x: Activation, size: int, iterations: int, epsilon: float) -> Activation:
        if x.columns != size * size:
            raise ModelError(f"the model's tensors do not fit together: {x.columns} columns, {size} streams")
        return self._record("sinkhorn", (x,), x.rows, x.columns, size=size, iterations=iterations, epsilon=epsilon)

    def head_dots(self, x: Activation, z: Activation, heads: int) -> Activation:
        if same_columns(x, z) % heads:
            raise ModelError(f"the model's tensors do not fit together: {x.columns} columns, {heads} heads")
        return self._record("head_dots", (x, z), x.rows, heads, heads=heads)

    def mix(self, x: Activation, weights: Activation, streams: int) -> Activation:
        if x.columns % streams or weights.columns % streams:
            problem = f"{x.columns} columns, {weights.columns} weights, {streams} streams"
            raise ModelError(f"the model's tensors do not fit together: {problem}")
        columns = x.columns // streams * (weights.columns // streams)
        return self._record("mix", (x, weights), x.rows, columns, streams=streams)

    def add_vector(self, x: Activation, vector: Weight | np.ndarray) -> Activation:
        numbers = self._vector(vector, x.columns) if isinstance(vector, Weight) else np.float32(vector)
        if numbers.shape != (x.columns,):
            raise ModelError(f"the model's tensors do not fit together: {numbers.size} numbers for {x.columns} columns")
        return self._record("add_vector", (x,), x.rows, x.columns, vector=numbers)

    def temper(self, x: Activation, positions: Rows, slope: float, length: int, offset: int = 0) -> Activation:
        return self._record("temper", (x,), positions, x.columns, slope=slope, length=length, offset=offset)

    # ---- helpers ----

    def _embedded(self, verb: str, ids: Rows | Activation, columns: int, weight: Weight) -> Activation:
        """Rows of a table, by numbers of the run or such that were made of them."""
        inputs, rows = ((ids,), ids.rows) if isinstance(ids, Activation) else ((), ids)
        return self._record(verb, inputs, rows, columns, weight=weight)

    def _record(self, verb: str, inputs: tuple[Activation, ...], rows: Rows, columns: int, **given: Any) -> Activation:
        output = Activation(rows, columns)
        self.operations.append(Operation(verb, inputs, output, given))
        return output

    def _matrix(self, weight: Weight) -> tuple[int, int]:
        """Rows and columns of a matrix, which is used now."""
        self._used.add(weight.name)
        if len(weight.shape) != 2:
            raise ModelError(f"tensor {weight.name} should be a matrix, has the shape {list(weight.shape)}")
        require_format(weight)
        return weight.shape[0], weight.shape[1]

    def _vector(self, weight: Weight, columns: int) -> Any:
        """A norm's or bias's numbers, float32 [columns]; it is used now."""
        self._used.add(weight.name)
        vector = weight.vector()
        if len(vector) != columns:
            raise ModelError(f"tensor {weight.name} should have {columns} weights, has {len(vector)}")
        return vector

    def _vectors(self, weight: Weight, experts: int, columns: int) -> np.ndarray:
        """A bias for each expert, float32 [experts, columns]; it is used now."""
        if weight.shape != (experts, columns):
            raise ModelError(f"tensor {weight.name} should have the shape {[experts, columns]}")
        return self._vector(weight.flat(), experts * columns).reshape(experts, columns)

    def _factors(self, weight: Weight | None, columns: int, group: int | None) -> Any:
        """What a norm multiplies with, float32 [columns]; the weight has the numbers of a row or of a group."""
        if columns % (group or columns):
            raise ModelError(f"{columns} columns are no whole number of groups of {group}")
        if weight is None:
            return np.ones(columns, np.float32)
        wanted = columns if group is None or weight.shape == (columns,) else group
        return np.tile(self._vector(weight, wanted), columns // wanted)

    def use(self, other: "Recorder") -> None:
        """The tensors of another part of the model are used, too."""
        self._used |= other._used

    def require_all_used(self, names: Collection[str], oddities: Oddities | None = None) -> None:
        """Raise ModelError for a tensor that no verb has used. oddities: get those of parts beside a language model."""
        unused = [name for name in names if name not in self._used and not name.endswith(HARMLESS)]
        if unused := unused if oddities is None else without_other_parts(unused, oddities):
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelError(f"tensor {printable(unused[0])}{more}: not part of this architecture as it is supported")


def same_columns(x: Activation, y: Activation) -> int:
    """Refuse to combine activations of different widths."""
    if x.columns != y.columns:
        raise ModelError(f"the model's tensors do not fit together: {x.columns} columns meet {y.columns}")
    return x.columns


def recorded(
    file: GGUFFile,
    forward: Callable[[Any, Weights, Any], Activation],
    weights: Weights,
    hyperparameters: Hyperparameters,
    context: int,
    shown: HiddenStateTap | None = None,
) -> Recorder:
    """What an architecture says of a file; shown: as of Recorder.

    Raises ModelError, which names the file, for what does not fit or is not used.
    """
    recorder = Recorder(hyperparameters, context, shown)
    try:
        if hyperparameters.encode:
            encoder = Recorder(hyperparameters, context)
            hyperparameters.encode(encoder, weights, hyperparameters)
            recorder.encoding = encoder.operations
            recorder.use(encoder)
        logits = forward(recorder, weights, hyperparameters)
        recorder.require_all_used(file.tensors, file.oddities)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from None
    if not hyperparameters.pooling and logits.columns != hyperparameters.vocab_size:
        raise ModelError(f"{file.path}: logits for {logits.columns} tokens of {hyperparameters.vocab_size}")
    return recorder
