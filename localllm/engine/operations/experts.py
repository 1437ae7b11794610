"""Compute mixtures of experts, and per-head matrices, which are computed like experts."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from localllm.arch.verbs import Routing
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import Activation, RoutedActivation, RoutedRows, RowSet
from localllm.engine.lower.steps import RoutingBuffers, StepBuilder, Target, build_output_arguments, pad_vector
from localllm.engine.lower.tape import Buffer
from localllm.engine.operations.builders import (
    Array,
    RecorderBase,
    ReferenceBase,
    find_largest,
    require_format,
    softmax,
)
from localllm.engine.operations.operation import MatrixProduct, Operation, operation
from localllm.errors import ModelError, UnsupportedError
from localllm.kernels.table import EXPERT, PLAN_EXPERTS

ROUTING_FIELDS = ("experts", "used", "sigmoid", "rooted", "normalized", "scale", "groups", "groups_used", "together")


class SelectedExperts(NamedTuple):
    """The experts that tokens are routed to, and their weights: int64 and float32 [tokens, used]."""

    experts: np.ndarray
    weights: np.ndarray
    routing: Routing


class PlannedRouting(Operation):
    """A routing of tokens to experts, for which a run's rows are sorted by expert."""

    output: RoutedActivation

    def plan_experts(self, steps: StepBuilder, selected: Buffer | np.ndarray, weights: Buffer) -> None:
        """Append the step that sorts rows by expert.

        selected: experts of each token, int64. weights: float32.
        """
        choice = self.output
        routing = choice.routed.routing
        most_selections, rows = routing.used * steps.target.tokens, steps.compute_max_routed_rows(routing)
        active = Buffer(min(routing.matrices, most_selections), 8 * len(EXPERT))
        row_count, active_count = np.zeros(1, np.int64), np.zeros(1, np.int64)
        experts = RoutingBuffers(
            selected, weights, Buffer(most_selections, 8), Buffer(rows, 8), active, active_count, row_count
        )
        steps.experts[choice.routed], steps.counts[choice.routed] = experts, row_count
        next_rows, count = Buffer(routing.matrices, 8), steps.counts[choice.rows]
        plan = {name: getattr(experts, name) for name in PLAN_EXPERTS._fields if hasattr(experts, name)}
        plan |= {"count": count, "next_rows": next_rows, "used": routing.used, "experts": routing.matrices}
        reads = [selected] if isinstance(selected, Buffer) else []
        steps.append("plan_experts", plan, 1, reads, [experts.rows, experts.pairs, active, next_rows])


@operation
class Route(PlannedRouting):
    """The selection of experts by a router's logits.

    Attributes:
        bias: float32 [experts], affects the selection but not the weights.
        table: int64 [vocab, used], experts by token id, which replace the selection.
    """

    VERB = "route"

    output: RoutedActivation
    routing: Routing
    bias: np.ndarray | None
    table: np.ndarray | None

    def lower(self, steps: StepBuilder, target: Target) -> None:
        (logits,), routing = self.inputs, self.routing
        source = steps.buffers[logits]
        selected, weights = Buffer(target.tokens, 8 * routing.used), Buffer(target.tokens, 4 * routing.used)
        arguments = {"logits": source, "stride": source.stride, "ids": steps.header.ids}
        arguments |= {"bias": 0 if self.bias is None else self.bias, "table": 0 if self.table is None else self.table}
        arguments |= {name: getattr(routing, name) for name in ROUTING_FIELDS} | {
            "chosen": selected,
            "weights": weights,
        }
        arguments |= target.build_scratch_arguments(4 * (2 * routing.experts + routing.groups))
        steps.append_row_step("route", logits.rows, arguments, [source], [selected, weights])
        self.plan_experts(steps, selected, weights)

    @staticmethod
    def record(
        recorder: RecorderBase, logits: Activation, routing: Routing, bias: Weight | None = None,
        table: Weight | None = None,
    ) -> RoutedActivation:  # fmt: skip
        if logits.columns != routing.experts:
            raise ModelError(f"the router must have {routing.experts} columns, one per expert (found {logits.columns})")
        vector = recorder._load_vector(bias, routing.experts) if bias else None
        choice = RoutedActivation(logits.rows, routing.used, RoutedRows("routed", routing, logits.rows))
        recorder._add(
            Route((logits,), choice, routing, vector, load_expert_table(recorder, table, routing) if table else None)
        )
        return choice

    @staticmethod
    def reference(
        run: ReferenceBase, logits: Array, routing: Routing, bias: Weight | None = None, table: Weight | None = None
    ) -> SelectedExperts:
        scores = compute_router_scores(logits, routing)
        ranks = scores + (bias.read_vector() if bias else 0) if bias or routing.groups > 1 else logits
        size = routing.experts // routing.groups
        if routing.groups > 1:
            best_two = np.sort(ranks.reshape(len(ranks), routing.groups, size))[:, :, -2:].sum(axis=2)
            is_kept = np.zeros(best_two.shape, bool)
            np.put_along_axis(is_kept, find_largest(best_two, routing.groups_used), True, axis=1)
            ranks = np.where(np.repeat(is_kept, size, axis=1), ranks, -np.inf)
        selected = (
            find_largest(ranks, routing.used) // routing.together if table is None else table.read_integers()[run.ids]
        )
        weights = np.take_along_axis(scores, selected, axis=1)
        if routing.normalized:
            weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 2.0**-14)
        weights[~np.isfinite(logits).all(axis=1)] = np.nan
        return SelectedExperts(selected, (weights * routing.scale).astype(np.float32), routing)


class RouteToAllHeads(PlannedRouting):
    """The routing of every token to all heads, for per-head matrices that are computed like experts."""

    VERB = "every_head"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        heads = self.output.columns
        self.plan_experts(steps, np.tile(np.arange(heads), (target.tokens, 1)), Buffer(0, 0))


class RoutedOperation(Operation):
    """An operation on an activation and the selection of experts."""

    @property
    def choice(self) -> RoutedActivation:
        choice = self.inputs[1]
        assert isinstance(choice, RoutedActivation)
        return choice


class Gather(RoutedOperation):
    """A copy of a token's row for each of its experts."""

    VERB = "gather"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        x, choice, output = self.inputs[0], self.choice, self.output
        experts, source, y = steps.experts[choice.routed], steps.buffers[x], steps.allocate(output)
        arguments = {"pairs": experts.pairs, "used": choice.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": experts.weights if choice.routed.routing.weighs_inputs else 0, "part_bytes": 0}
        reads = [source, experts.pairs, experts.weights]
        steps.append_row_step("gather", output.rows, arguments | build_output_arguments(output, y), reads, [y])

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, choice: RoutedActivation) -> Activation:
        return recorder._add(Gather((x, choice), Activation(choice.routed, x.columns)))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, choice: SelectedExperts) -> Array:
        rows = np.repeat(x, choice.routing.used, axis=0)
        return rows * choice.weights.reshape(-1, 1) if choice.routing.weighs_inputs else rows


class ToHeads(RoutedOperation):
    """A row for each head, with the head's columns of a token's row."""

    VERB = "to_heads"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        x, choice, output = self.inputs[0], self.choice, self.output
        experts, source, y = steps.experts[choice.routed], steps.buffers[x], steps.allocate(output)
        arguments = {"pairs": experts.pairs, "used": choice.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": 0, "part_bytes": 4 * output.columns}
        steps.append_row_step(
            "gather", output.rows, arguments | build_output_arguments(output, y), [source, experts.pairs], [y]
        )


class FromHeads(RoutedOperation):
    """The concatenated rows of a token's heads."""

    VERB = "from_heads"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        x, choice = self.inputs[0], self.choice
        experts, source, y = steps.experts[choice.routed], steps.buffers[x], steps.allocate(self.output)
        arguments = {"rows": experts.rows, "used": choice.columns, "x": source, "x_stride": source.stride}
        steps.append_row_step(
            "from_heads", choice.rows, arguments | build_output_arguments(x, y), [source, experts.rows], [y]
        )


class Scatter(RoutedOperation):
    """The sum of a token's rows, weighted by the router."""

    VERB = "scatter"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        x, choice = self.inputs[0], self.choice
        experts, source, y = steps.experts[choice.routed], steps.buffers[x], steps.allocate(self.output)
        weights = 0 if choice.routed.routing.weighs_inputs else experts.weights
        arguments = {"rows": experts.rows, "used": choice.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": weights} | build_output_arguments(x, y)
        reads = [source, experts.rows, experts.weights]
        steps.append_row_step("scatter", self.output.rows, arguments, reads, [y])

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, choice: RoutedActivation) -> Activation:
        return recorder._add(Scatter((x, choice), Activation(choice.rows, x.columns)))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, choice: SelectedExperts) -> Array:
        rows = x.reshape(*choice.weights.shape, -1)
        weighted: Array = rows if choice.routing.weighs_inputs else rows * choice.weights[:, :, None]
        return weighted.sum(axis=1)


class ExpertLinear(MatrixProduct, RoutedOperation):
    """The product of each row with its expert's matrix, which each target lowers itself."""

    VERB = "expert_linear"

    def add_bias(self, steps: StepBuilder) -> None:
        if self.bias is None:
            return
        x, experts, vectors = self.output, steps.experts[self.choice.routed], pad_vector(self.bias)
        y = steps.buffers[x]
        arguments: dict[str, object] = {"pairs": experts.pairs, "chosen": experts.chosen, "x": y, "z": vectors}
        arguments["z_stride"] = vectors.strides[0]
        reads = [y, experts.pairs, experts.chosen] if isinstance(experts.chosen, Buffer) else [y, experts.pairs]
        steps.append_row_step("add_by_expert", x.rows, arguments | build_output_arguments(x, y), reads, [y])

    @staticmethod
    def record(recorder: RecorderBase, x: Activation, weight: Weight, choice: RoutedActivation) -> Activation:
        recorder._used.add(weight.name)
        expected = choice.routed.routing.matrices, x.columns
        if len(weight.shape) != 3 or (weight.shape[0], weight.shape[2]) != expected:
            raise ModelError(
                f"tensor {weight.name} must have matrices of {expected[1]} columns for {expected[0]} experts"
                f" (found the shape {list(weight.shape)})"
            )
        require_format(weight)
        bias = recorder._use_vectors(weight.bias, expected[0], weight.shape[1]) if weight.bias else None
        if weight.scale:
            raise UnsupportedError(f"tensor {weight.scale.name}: scales of experts are not supported")
        return recorder._add(ExpertLinear((x, choice), Activation(x.rows, weight.shape[1]), weight, bias))

    @staticmethod
    def reference(run: ReferenceBase, x: Array, weight: Weight, choice: SelectedExperts) -> Array:
        matrices, experts = run.matrix(weight), choice.experts.reshape(-1)
        if run._observer:
            run._observer.add_experts(weight.name, x, experts, len(matrices))
        y = np.empty((len(x), matrices.shape[1]), np.float32)
        for expert in np.unique(experts):
            y[experts == expert] = x[experts == expert] @ matrices[expert].T
        return y + run.matrix(weight.bias)[experts] if weight.bias else y


@operation
class AddExpertSquares(RoutedOperation):
    """The sums of the squares of each expert's input rows, and the number of these rows, added up over runs.

    Attributes:
        sums: float32 [matrices, columns padded to 16].  counts: int64 [matrices].
    """

    VERB = "add_expert_squares"

    sums: np.ndarray
    counts: np.ndarray

    def lower(self, steps: StepBuilder, target: Target) -> None:
        x, experts = self.inputs[0], steps.experts[self.choice.routed]
        source = steps.buffers[x]
        arguments = {"active": experts.active, "active_count": experts.active_count, "x": source}
        arguments |= {"stride": source.stride, "columns": x.columns, "sums": self.sums}
        arguments |= {"sums_stride": self.sums.strides[0], "counts": self.counts}
        parts = min(-(-x.columns // 64), 4 * target.threads)
        steps.append("add_expert_squares", arguments, target.parts(parts, parts), [source, experts.active], [])


class ExpertVerbs(RecorderBase):
    """The recorder's verbs of experts."""

    @cached_property
    def _heads(self) -> dict[tuple[int, RowSet], RoutedActivation]:
        """The routing to heads with a matrix each, by the number of heads and the rows."""
        return {}

    def head_linear(self, x: Activation, weight: Weight) -> Activation:
        """Record the product of each head's columns with the head's matrix, computed like an expert's product."""
        heads = weight.shape[0]
        if x.columns % heads or weight.bias or weight.scale:
            raise ModelError(f"tensor {weight.name} must fit {x.columns} columns, and have neither bias nor scale")
        every = self._route_to_heads(heads, x.rows)
        rows = self._add(ToHeads((x, every), Activation(every.routed, x.columns // heads)))
        y = self.expert_linear(rows, weight, every)
        return self._add(FromHeads((y, every), Activation(x.rows, heads * y.columns)))

    def _route_to_heads(self, heads: int, rows: RowSet) -> RoutedActivation:
        """Return the routing of every token to all heads, recorded once per number of heads."""
        if (heads, rows) not in self._heads:
            choice = RoutedActivation(rows, heads, RoutedRows("heads", Routing(heads, heads), rows))
            self._add(RouteToAllHeads((), choice))
            self._heads[heads, rows] = choice
        return self._heads[heads, rows]


class ExpertReference(ReferenceBase):
    """The verbs of experts in NumPy, with rows sorted by token, not by expert."""

    def head_linear(self, x: Array, weight: Weight) -> Array:
        matrices = self.matrix(weight)
        count, rows, columns = matrices.shape
        heads = x.reshape(len(x), count, columns)
        if self._observer:
            every = np.tile(np.arange(count), len(x))
            self._observer.add_experts(weight.name, heads.reshape(-1, columns), every, count)
        return np.einsum("thc,hrc->thr", heads, matrices, optimize=True).reshape(len(x), count * rows)


def compute_router_scores(logits: np.ndarray, routing: Routing) -> np.ndarray:
    """Return a router's scores, float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        if routing.rooted:
            return np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
        return 1 / (1 + np.exp(-logits.astype(np.float64))) if routing.sigmoid else softmax(logits)


def load_expert_table(recorder: RecorderBase, table: Weight, routing: Routing) -> np.ndarray:
    """Return the table of experts by token id, int64 [vocab, used], and mark the tensor as used. Raises ModelError."""
    recorder._used.add(table.name)
    experts = table.require_shape(recorder._vocab_size, routing.used).read_integers()
    if experts.min() < 0 or experts.max() >= routing.experts:
        raise ModelError(f"tensor {table.name} must have expert indices below {routing.experts}")
    return experts
