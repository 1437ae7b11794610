"""Operations become steps: one table from verb to function, the same for all targets but for what they do themselves.

A verb that treats rows one by one is a row in localllm.kernels.verbs and needs no function here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from localllm.engine.lower.attention import keep
from localllm.engine.lower.experts import EXPERTS
from localllm.engine.lower.recurrent import RECURRENT
from localllm.engine.lower.steps import StepPlaces, Steps, Target, shape, vector_of
from localllm.engine.lower.tape import Buffer
from localllm.engine.trace.operations import ALL, Activation, Operation, last_uses
from localllm.kernels.verbs import ROWWISE, where

NUMBERS = {"embed": "ids", "embed_positions": "positions", "embed_kinds": "kinds"}  # of a run's header
POOLINGS = "mean", "cls", "last"  # as the kernel numbers them
Lower = Callable[[Steps, Operation, Any], None]
Crossing = Mapping[Activation, np.ndarray]  # what goes from one target to another, float32 [BATCH, numbers of a row]


def lowered(
    operations: Sequence[Operation], target: Target, places: StepPlaces, taken: Crossing | None = None,
    given: Crossing | None = None,
) -> Steps:  # fmt: skip
    """The steps of some operations, one after the other.

    taken: activations that another target has made, and where they lie; given: those that another one goes on with, and
    where it wants them; without, the last operation makes the logits, which are handed out. Raises UnsupportedError.
    """
    steps = Steps(target, places, last_uses(operations))
    for x, rows in (taken or {}).items():
        take(steps, x, rows)
    for operation in operations:
        function_of(operation.verb, target)(steps, operation, target)
    for x, rows in (given or {}).items():
        give(steps, x, rows)
    if not given:
        hand_out(steps, operations[-1].output)
    return steps


def function_of(verb: str, target: Target) -> Lower:
    """What appends the steps of a verb. Raises NotImplementedError, which says what is missing where."""
    found = rowwise if verb in ROWWISE else target.verbs.get(verb) or VERBS.get(verb)
    if found is None:
        raise NotImplementedError(where(verb))
    return found


def rowwise(steps: Steps, operation: Operation, target: Target) -> None:
    """A verb that treats rows one by one, and may write over what it reads."""
    verb, x = ROWWISE[operation.verb], operation.inputs[0]
    inputs = [steps.buffers[x] for x in operation.inputs]
    y = steps.over(operation) if verb.in_place else steps.new(operation.output)
    arguments = dict(zip(verb.inputs, inputs, strict=True)) | shape(x, y)
    for name, source in verb.given.items():
        value = operation.given[source]
        arguments[name] = vector_of(value) if isinstance(value, np.ndarray) else value
    arguments |= {name: inputs[1].stride for name in verb.strides}
    steps.by_row(operation.verb, x.rows, arguments, inputs, [y])


def embed(steps: Steps, operation: Operation, target: Target) -> None:
    """Rows of a matrix, of the run's ids, positions or kinds."""
    made = [steps.buffers[x] for x in operation.inputs]
    ids = made[0] if made else getattr(steps.header, NUMBERS[operation.verb])
    look_up(steps, operation, target, ids, made)


def look_up(steps: Steps, operation: Operation, target: Target, ids: Any, made: list[Buffer]) -> None:
    """Rows of a matrix by their numbers, int64; made: the buffer of these, if they are in one."""
    weight, output = operation.given["weight"], operation.output
    x, (kind, row_bytes) = steps.new(output), target.layout_of(weight)
    arguments = {"weights": target.matrix(weight), "row_bytes": row_bytes, "columns": output.columns}
    steps.by_row(f"embed-{kind}", output.rows, arguments | {"ids": ids, "x": x, "stride": x.stride}, made, [x])


def replace_ids(steps: Steps, operation: Operation, target: Target) -> None:
    y = steps.buffers[operation.output] = Buffer(steps.target.tokens, 8)
    arguments = {"ids": steps.header.ids, "table": operation.given["table"], "y": y}
    steps.by_row("replace_ids", operation.output.rows, arguments, [], [y])


def as_column(steps: Steps, operation: Operation, target: Target) -> None:
    y = steps.new(operation.output)
    arguments = {"ids": steps.header.ids, "y": y, "stride": y.stride}
    steps.by_row("as_column", operation.output.rows, arguments, [], [y])


def embed_hashed(steps: Steps, operation: Operation, target: Target) -> None:
    (x,), hashing = operation.inputs, operation.given["hashing"]
    source, ids = steps.buffers[x], Buffer(steps.target.tokens, 8)
    factors = np.array(hashing.factors, np.int64)
    arguments = {"x": source, "stride": source.stride, "factors": factors, "length": len(factors), "y": ids}
    arguments |= {"size": hashing.size, "first": hashing.first, "end": hashing.end}
    steps.by_row("hash", x.rows, arguments, [source], [ids])
    look_up(steps, operation, target, ids, [ids])


def select(steps: Steps, operation: Operation, target: Target) -> None:
    (x,) = operation.inputs
    source, y = steps.buffers[x], steps.new(operation.output)
    arguments = {"x": source, "rows": steps.header.wanted} | shape(x, y)
    steps.by_row("select", operation.output.rows, arguments, [source], [y])


def pool(steps: Steps, operation: Operation, target: Target) -> None:
    (x,) = operation.inputs
    source, y = steps.buffers[x], steps.new(operation.output)
    arguments = {"sequences": steps.header.sequences, "kind": POOLINGS.index(operation.given["kind"]), "x": source}
    steps.by_row("pool", operation.output.rows, arguments | shape(x, y), [source], [y])


def columns(steps: Steps, operation: Operation, target: Target) -> None:
    (x,), groups = operation.inputs, operation.given["groups"]
    source, y = steps.buffers[x], steps.new(operation.output)
    arguments = {"x": source, "x_stride": source.stride, "first": operation.given["first"], "groups": groups}
    arguments |= {"period": x.columns // groups} | shape(operation.output, y)
    steps.by_row("columns", x.rows, arguments, [source], [y])


def join(steps: Steps, operation: Operation, target: Target) -> None:
    (x, z), heads, shared = operation.inputs, operation.given["heads"], operation.given["shared"]
    first, second, y = steps.buffers[x], steps.buffers[z], steps.new(operation.output)
    arguments: dict[str, Any] = {"x": first, "x_stride": first.stride, "x_columns": x.columns // heads}
    arguments |= {"z": second, "z_stride": second.stride, "z_columns": z.columns // (1 if shared else heads)}
    arguments |= {"heads": heads, "shared": shared, "y": y, "stride": y.stride}
    steps.by_row("join", x.rows, arguments, [first, second], [y])


def head_dots(steps: Steps, operation: Operation, target: Target) -> None:
    (x, z), heads = operation.inputs, operation.given["heads"]
    first, second, y = steps.buffers[x], steps.buffers[z], steps.new(operation.output)
    arguments: dict[str, Any] = {"x": first, "x_stride": first.stride, "z": second, "y": y, "stride": y.stride}
    arguments |= {"heads": heads, "head_dim": x.columns // heads}
    steps.by_row("head_dots", x.rows, arguments, [first, second], [y])


def mix(steps: Steps, operation: Operation, target: Target) -> None:
    (x, weights), streams = operation.inputs, operation.given["streams"]
    source, by, y = steps.buffers[x], steps.buffers[weights], steps.new(operation.output)
    arguments = {"x": source, "x_stride": source.stride, "streams": streams, "width": x.columns // streams}
    arguments |= {"weights": by, "weights_stride": by.stride} | shape(operation.output, y)
    steps.by_row("mix", x.rows, arguments, [source, by], [y])


def add_vector(steps: Steps, operation: Operation, target: Target) -> None:
    (x,) = operation.inputs
    source, y = steps.buffers[x], steps.over(operation)
    arguments = {"x": source, "z": vector_of(operation.given["vector"]), "z_stride": 0} | shape(x, y)
    steps.by_row("add", x.rows, arguments, [source], [y])


def temper(steps: Steps, operation: Operation, target: Target) -> None:
    (x,) = operation.inputs
    source, y = steps.buffers[x], steps.new(operation.output)
    arguments = {"x": source, "positions": steps.header.positions, **operation.given}
    steps.by_row("temper", x.rows, arguments | shape(x, y), [source], [y])


def rope(steps: Steps, operation: Operation, target: Target) -> None:
    (x,), rope = operation.inputs, operation.given["rope"]
    source, y, pairs = steps.buffers[x], steps.over(operation), rope.dims // 2
    table = operation.given["table"]
    table = angle_table(steps, operation.given) if table is None else table
    arguments = {"x": source, "y": y, "stride": y.stride, "heads": x.columns // rope.head_dim}
    arguments |= {"head_dim": rope.head_dim, "table": table, "pairs": pairs}
    step, apart = (2, 1) if rope.interleaved else (1, pairs)
    reads = [source, table] if isinstance(table, Buffer) else [source]
    steps.by_row("rope", x.rows, arguments | {"step": step, "apart": apart}, reads, [y])


def angle_table(steps: Steps, given: Mapping[str, Any]) -> Buffer:
    """Cosines and sines of the run's positions, made once for all layers that turn alike."""
    rope, factors, divisors = given["rope"], given["factors"], given["divisors"]

    def make() -> Buffer:
        pairs = rope.dims // 2
        frequencies = rope.frequencies(None if divisors is None else divisors.astype(np.float64))
        table = Buffer(steps.target.tokens, pairs * 8)
        arguments: dict[str, Any] = {"positions": steps.header.turns, "before": rope.before}
        arguments |= {"frequencies": frequencies, "pairs": pairs}
        steps.by_row("angles", ALL, arguments | {"table": table, "factor": rope.magnitude}, [], [table])
        return table

    return steps.once(("angles", rope, factors.name if factors else ""), make)


def add_squares(steps: Steps, operation: Operation, target: Target) -> None:
    (x,) = operation.inputs
    parts = min(-(-x.columns // 64), 4 * target.threads)
    steps.in_parts("add_squares", x, {"sums": operation.given["sums"]}, parts)


def take(steps: Steps, x: Activation, rows: np.ndarray) -> None:
    """Begin with an activation that another target has made, float32 [tokens, numbers of a buffer's row]."""
    y = steps.new(x)
    steps.append("fetch", {"source": int(rows.ctypes.data), "target": y, "words": y.size // 8}, 0, [], [y])


def given(steps: Steps, operation: Operation, target: Target) -> None:
    """Rows that lie ready."""
    rows, x, y = operation.given["memory"], operation.output, steps.new(operation.output)
    arguments = {"x": rows, "x_stride": rows.strides[0], "first": 0, "groups": 1, "period": x.columns}
    steps.by_row("columns", x.rows, arguments | shape(x, y), [], [y])


def show(steps: Steps, operation: Operation, target: Target) -> None:
    give(steps, operation.inputs[0], operation.given["memory"])


def give(steps: Steps, x: Activation, rows: np.ndarray) -> None:
    """An activation to another target, or to whoever runs this."""
    source = steps.buffers[x]
    arguments = {"x": source, "x_stride": source.stride, "first": 0, "groups": 1, "period": x.columns}
    arguments |= {"y": rows, "stride": rows.strides[0], "columns": x.columns}
    steps.by_row("columns", x.rows, arguments, [source], [Buffer(0, 0)])


def hand_out(steps: Steps, x: Activation) -> None:
    """The logits to whoever wants them."""
    header = steps.header
    steps.in_parts("logits", x, {"y": header.logits, "flaws": header.flaws}, 4 * steps.target.threads)


VERBS: dict[str, Lower] = {
    "embed": embed,
    "keep": keep,
    "replace_ids": replace_ids,
    "as_column": as_column,
    "embed_hashed": embed_hashed,
    "embed_positions": embed,
    "embed_kinds": embed,
    "given": given,
    "show": show,
    "select": select,
    "pool": pool,
    "columns": columns,
    "join": join,
    "head_dots": head_dots,
    "mix": mix,
    "add_vector": add_vector,
    "temper": temper,
    "rope": rope,
    "add_squares": add_squares,
    **EXPERTS,
    **RECURRENT,
}
