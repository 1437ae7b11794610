"""The verbs of mixtures of experts as steps: a part of localllm.engine.lowering."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.arch.experts import Routing
from localllm.engine.recorder import Activation, Choice, Operation, Rows
from localllm.engine.steps import Steps
from localllm.engine.tape import Buffer, Step
from localllm.kernels.arguments import EXPERT, PLAN_EXPERTS


@dataclass
class Experts:
    """What a mixture of experts has to do in a run, see localllm.kernels.cpu.routing."""

    chosen: Buffer | np.ndarray
    weights: Buffer
    rows: Buffer
    pairs: Buffer
    active: Buffer
    active_count: np.ndarray  # int64 [1], as the next one: at an address that no other step changes
    row_count: np.ndarray


class ExpertLowering(Steps):
    """What Lowering does for mixtures of experts, but for the products."""

    def __init__(self, *given: Any):
        """As of Steps."""
        super().__init__(*given)
        self._experts: dict[Rows, Experts] = {}

    def _route(self, operation: Operation, logits: Activation, routing: Routing, bias: np.ndarray | None) -> None:
        """Choose, and plan the experts' rows."""
        source = self._buffers[logits]
        chosen, weights = Buffer(self.tokens, 8 * routing.used), Buffer(self.tokens, 4 * routing.used)
        arguments = {"logits": source, "stride": source.stride, "bias": 0 if bias is None else bias}
        arguments |= {name: getattr(routing, name) for name in ("experts", "used", "sigmoid", "normalized")}
        arguments |= {name: getattr(routing, name) for name in ("scale", "groups", "groups_used")}
        arguments |= {"chosen": chosen, "weights": weights}
        arguments |= self._scratch_for(4 * (2 * routing.experts + routing.groups))
        self._by_row("route", logits.rows, arguments, [source], [chosen, weights])
        self._plan_experts(operation, chosen, weights)

    def _every_head(self, operation: Operation) -> None:
        heads = operation.output.columns
        self._plan_experts(operation, np.tile(np.arange(heads), (self.tokens, 1)), Buffer(0, 0))

    def _plan_experts(self, operation: Operation, chosen: Buffer | np.ndarray, weights: Buffer) -> None:
        """Give experts their rows."""
        choice = operation.output
        assert isinstance(choice, Choice)
        routing = choice.routed.routing
        most, rows = routing.used * self.tokens, self._most_routed(routing)
        active = Buffer(min(routing.experts, most), 8 * len(EXPERT))
        row_count, active_count = np.zeros(1, np.int64), np.zeros(1, np.int64)
        experts = Experts(chosen, weights, Buffer(most, 8), Buffer(rows, 8), active, active_count, row_count)
        self._experts[choice.routed], self._row_counts[choice.routed] = experts, row_count
        next_rows, count = Buffer(routing.experts, 8), self._count(choice.rows)
        plan = {name: getattr(experts, name) for name in PLAN_EXPERTS._fields if hasattr(experts, name)}
        plan |= {"count": count, "next_rows": next_rows, "used": routing.used, "experts": routing.experts}
        writes = [experts.rows, experts.pairs, active, next_rows]
        reads = [chosen] if isinstance(chosen, Buffer) else []
        self.tape.append(Step("plan_experts", plan, 1, None, reads, writes))

    def _gather(self, operation: Operation, x: Activation, choice: Choice) -> None:
        experts, source, y = self._experts[choice.routed], self._buffers[x], self._new(operation.output)
        weights = experts.weights if choice.routed.routing.weighs_inputs else 0
        arguments = {"pairs": experts.pairs, "used": choice.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": weights, "part_bytes": 0} | self._shape(x, y)
        reads = [source, experts.pairs, experts.weights]
        self._by_row("gather", operation.output.rows, arguments, reads, [y])

    def _deal(self, operation: Operation, x: Activation, every: Choice) -> None:
        """As _gather, but each expert gets other columns."""
        experts, source, y = self._experts[every.routed], self._buffers[x], self._new(operation.output)
        arguments = {"pairs": experts.pairs, "used": every.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": 0, "part_bytes": 4 * operation.output.columns} | self._shape(operation.output, y)
        self._by_row("gather", operation.output.rows, arguments, [source, experts.pairs], [y])

    def _collect(self, operation: Operation, x: Activation, every: Choice) -> None:
        """And back, side by side."""
        experts, source, y = self._experts[every.routed], self._buffers[x], self._new(operation.output)
        arguments = {"rows": experts.rows, "used": every.columns, "x": source, "x_stride": source.stride}
        self._by_row("collect", every.rows, arguments | self._shape(x, y), [source, experts.rows], [y])

    def _scatter(self, operation: Operation, x: Activation, choice: Choice) -> None:
        experts, source, y = self._experts[choice.routed], self._buffers[x], self._new(operation.output)
        weights = 0 if choice.routed.routing.weighs_inputs else experts.weights
        arguments = {"rows": experts.rows, "used": choice.columns, "x": source, "x_stride": source.stride}
        arguments |= {"weights": weights} | self._shape(x, y)
        reads = [source, experts.rows, experts.weights]
        self._by_row("scatter", operation.output.rows, arguments, reads, [y])

    def _add_by_expert(self, x: Activation, y: Buffer, experts: Experts, bias: np.ndarray) -> None:
        arguments = {"pairs": experts.pairs, "chosen": experts.chosen, "x": y, "z": bias, "z_stride": bias.strides[0]}
        reads = [y, experts.pairs, experts.chosen] if isinstance(experts.chosen, Buffer) else [y, experts.pairs]
        self._by_row("add_by_expert", x.rows, arguments | self._shape(x, y), reads, [y])
