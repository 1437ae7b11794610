"""The updates that low-rank adapters (LoRA) add to matrix products; see localllm.engine.trace.adapted_builder."""

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.lower.activation import WANTED, Activation, RoutedActivation, RoutedRows
from localllm.engine.lower.steps import StepBuilder, Target, output_arguments
from localllm.engine.operations.builders import Array, RecorderBase, ReferenceBase, require_same_columns
from localllm.engine.operations.experts import SelectedExperts
from localllm.engine.operations.operation import MatrixOperation, Operation, operation


@operation
class Update(Operation):
    """y + factor * scale * x, computed in place; the scale is the adapter's for the token of each row."""

    adapter: int
    factor: float

    def append(self, steps: StepBuilder, target: Target, kernel: str, arguments: dict[str, object]) -> None:
        """Append the step that adds to the first input's buffer, which no other operation may read later."""
        total, x = self.inputs[:2]
        assert steps.last_uses[total] is self
        y = steps.buffers[self.output] = steps.buffers[total]
        rows, source = total.rows, steps.buffers[x]
        reads, pairs, used = [y, source], None, 1
        if isinstance(rows, RoutedRows):
            experts = steps.experts[rows]
            pairs, used, rows = experts.pairs, rows.routing.used, rows.of
            reads.append(experts.pairs)
        arguments |= {"scales": steps.header.adapter_scales, "adapter": self.adapter, "pairs": pairs or 0, "used": used}
        arguments |= {"rows": steps.header.wanted if rows is WANTED else 0, "x": source, "x_stride": source.stride}
        arguments |= {"factor": self.factor, "count": steps.counts[total.rows]} | output_arguments(self.output, y)
        vectors = -(-self.output.columns // 16)
        wanted = min(-(-vectors // 8), 4 * target.threads)
        steps.append(kernel, arguments, target.parts(wanted, steps.max_rows(total.rows)), reads, [y])


@operation
class AddLowRank(Update, MatrixOperation):
    """y + factor * scale * x W; the weight is [rank, columns]."""

    VERB = "add_low_rank"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        rank, (kind, _) = self.inputs[1].columns, target.layout_of(self.weight)
        arguments: dict[str, object] = {"weights": target.matrix(self.weight), "rank": rank}
        self.append(steps, target, f"add_low_rank-{kind}", arguments)

    @staticmethod
    def record(
        recorder: RecorderBase, y: Activation, x: Activation, weight: Weight, adapter: int, factor: float
    ) -> Activation:
        rank, columns = recorder._matrix(weight)
        assert (rank, columns) == (x.columns, y.columns)
        return recorder._add(AddLowRank((y, x), Activation(y.rows, columns), weight, adapter, factor))

    @staticmethod
    def reference(run: ReferenceBase, y: Array, x: Array, weight: Weight, adapter: int, factor: float) -> Array:
        return y + np.float32(factor) * select_scales(run, adapter, len(y)) * (x @ run.matrix(weight))


class AddScaled(Update):
    """y + factor * scale * x, where x is the product of an adapter's matrices for experts or heads."""

    VERB = "add_scaled"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        self.append(steps, target, "add_scaled", {})

    @staticmethod
    def record(
        recorder: RecorderBase, y: Activation, x: Activation, adapter: int, factor: float,
        choice: RoutedActivation | None = None,
    ) -> Activation:  # fmt: skip
        return recorder._add(AddScaled((y, x), Activation(y.rows, require_same_columns(y, x)), adapter, factor))

    @staticmethod
    def reference(
        run: ReferenceBase, y: Array, x: Array, adapter: int, factor: float, choice: SelectedExperts | None = None
    ) -> Array:
        tokens = len(y) if choice is None else len(choice.experts)
        scales = np.float32(factor) * select_scales(run, adapter, tokens)
        return y + np.repeat(scales, len(y) // tokens, axis=0) * x


def select_scales(run: ReferenceBase, adapter: int, rows: int) -> Array:
    """Return the adapter's scale for each row, float32 [rows, 1]; rows of requested logits are fewer than tokens."""
    scales = run.adapter_scales[:, adapter]
    return (scales if rows == len(scales) else scales[run.wanted])[:, None]
