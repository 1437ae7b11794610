"""The verbs of mixtures of experts as steps, but for the products."""

import numpy as np

from localllm.engine.lower.steps import Experts, Steps, Target, shape, vector_of
from localllm.engine.lower.tape import Buffer
from localllm.engine.trace.operations import Activation, Operation, RoutedActivation
from localllm.kernels.arguments import EXPERT, PLAN_EXPERTS

OF_ROUTING = ("experts", "used", "sigmoid", "rooted", "normalized", "scale", "groups", "groups_used", "together")


def route(steps: Steps, operation: Operation, target: Target) -> None:
    """Choose, and plan the experts' rows."""
    (logits,), routing, given = operation.inputs, operation.given["routing"], operation.given
    source = steps.buffers[logits]
    chosen, weights = Buffer(target.tokens, 8 * routing.used), Buffer(target.tokens, 4 * routing.used)
    arguments = {"logits": source, "stride": source.stride, "ids": steps.header.ids}
    arguments |= {name: 0 if given[name] is None else given[name] for name in ("bias", "table")}
    arguments |= {name: getattr(routing, name) for name in OF_ROUTING} | {"chosen": chosen, "weights": weights}
    arguments |= target.scratch(4 * (2 * routing.experts + routing.groups))
    steps.by_row("route", logits.rows, arguments, [source], [chosen, weights])
    plan_experts(steps, operation, chosen, weights)


def every_head(steps: Steps, operation: Operation, target: Target) -> None:
    """Heads as experts, to all of which every token goes."""
    heads = operation.output.columns
    plan_experts(steps, operation, np.tile(np.arange(heads), (target.tokens, 1)), Buffer(0, 0))


def plan_experts(steps: Steps, operation: Operation, chosen: Buffer | np.ndarray, weights: Buffer) -> None:
    """Give experts their rows."""
    choice = operation.output
    assert isinstance(choice, RoutedActivation)
    routing = choice.routed.routing
    most, rows = routing.used * steps.target.tokens, steps.most_routed(routing)
    active = Buffer(min(routing.matrices, most), 8 * len(EXPERT))
    row_count, active_count = np.zeros(1, np.int64), np.zeros(1, np.int64)
    experts = Experts(chosen, weights, Buffer(most, 8), Buffer(rows, 8), active, active_count, row_count)
    steps.experts[choice.routed], steps.counts[choice.routed] = experts, row_count
    next_rows, count = Buffer(routing.matrices, 8), steps.counts[choice.rows]
    plan = {name: getattr(experts, name) for name in PLAN_EXPERTS._fields if hasattr(experts, name)}
    plan |= {"count": count, "next_rows": next_rows, "used": routing.used, "experts": routing.matrices}
    reads = [chosen] if isinstance(chosen, Buffer) else []
    steps.append("plan_experts", plan, 1, reads, [experts.rows, experts.pairs, active, next_rows])


def gather(steps: Steps, operation: Operation, target: Target) -> None:
    """A row for each expert of a token; dealt, each expert gets other columns of it."""
    (x, choice), output, is_dealt = operation.inputs, operation.output, operation.verb == "deal"
    assert isinstance(choice, RoutedActivation)
    experts, source, y = steps.experts[choice.routed], steps.buffers[x], steps.new(output)
    weighs = choice.routed.routing.weighs_inputs and not is_dealt
    arguments = {"pairs": experts.pairs, "used": choice.columns, "x": source, "x_stride": source.stride}
    arguments |= {"weights": experts.weights if weighs else 0, "part_bytes": 4 * output.columns if is_dealt else 0}
    reads = [source, experts.pairs] if is_dealt else [source, experts.pairs, experts.weights]
    steps.by_row("gather", output.rows, arguments | shape(output, y), reads, [y])


def collect(steps: Steps, operation: Operation, target: Target) -> None:
    """And back, side by side."""
    x, every = operation.inputs
    assert isinstance(every, RoutedActivation)
    experts, source, y = steps.experts[every.routed], steps.buffers[x], steps.new(operation.output)
    arguments = {"rows": experts.rows, "used": every.columns, "x": source, "x_stride": source.stride}
    steps.by_row("collect", every.rows, arguments | shape(x, y), [source, experts.rows], [y])


def scatter(steps: Steps, operation: Operation, target: Target) -> None:
    """What its experts make of a token, added up."""
    x, choice = operation.inputs
    assert isinstance(choice, RoutedActivation)
    experts, source, y = steps.experts[choice.routed], steps.buffers[x], steps.new(operation.output)
    weights = 0 if choice.routed.routing.weighs_inputs else experts.weights
    arguments = {"rows": experts.rows, "used": choice.columns, "x": source, "x_stride": source.stride}
    arguments |= {"weights": weights} | shape(x, y)
    reads = [source, experts.rows, experts.weights]
    steps.by_row("scatter", operation.output.rows, arguments, reads, [y])


def add_by_expert(steps: Steps, x: Activation, experts: Experts, bias: np.ndarray) -> None:
    """To every row of an activation the bias of its expert, where it is."""
    y, vectors = steps.buffers[x], vector_of(bias)
    arguments = {"pairs": experts.pairs, "chosen": experts.chosen, "x": y, "z": vectors, "z_stride": vectors.strides[0]}
    reads = [y, experts.pairs, experts.chosen] if isinstance(experts.chosen, Buffer) else [y, experts.pairs]
    steps.by_row("add_by_expert", x.rows, arguments | shape(x, y), reads, [y])


EXPERTS = {
    "route": route, "every_head": every_head, "gather": gather, "deal": gather, "collect": collect, "scatter": scatter,
}  # fmt: skip
