"""Add the updates of low-rank adapters (LoRA) to matrix products; see localllm.engine.adapters."""

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.lower.activation import WANTED, Activation, RoutedActivation, RoutedRows
from localllm.engine.lower.steps import StepBuilder, Target, build_output_arguments
from localllm.engine.lower.tape import Buffer, compute_row_bytes
from localllm.engine.operations.builders import Array, RecorderBase, ReferenceBase, require_same_columns
from localllm.engine.operations.experts import SelectedExperts
from localllm.engine.operations.operation import MatrixOperation, Operation, operation

MAX_ROWS = 12  # of x, which a kernel scales at once


@operation
class LowRankUpdate(Operation):
    """y + factor * scale * x, computed in place; the scale is the adapter's for the token of each row."""

    adapter: int
    factor: float

    def append(self, steps: StepBuilder, target: Target, kernel: str, arguments: dict[str, object]) -> None:
        """Append the step that adds to the first input's buffer, which no other operation may read later."""
        total = self.inputs[0]
        assert steps.last_uses[total] is self
        y = steps.buffers[self.output] = steps.buffers[total]
        rows, reads = self.list_rows(steps, y)
        vectors = -(-self.output.columns // 16)
        parts = target.parts(min(-(-vectors // 8), 4 * target.threads), steps.max_rows(total.rows))
        steps.append(kernel, arguments | rows, parts, [y, *reads], [y])

    def list_rows(self, steps: StepBuilder, y: Buffer) -> tuple[dict[str, object], list[Buffer]]:
        """Return the arguments that locate x, y and scales, and the buffers that they read besides y."""
        rows, source = self.output.rows, steps.buffers[self.inputs[1]]
        reads, pairs, used, count = [source], None, 1, steps.counts[rows]
        if isinstance(rows, RoutedRows):
            experts = steps.experts[rows]
            pairs, used, rows = experts.pairs, rows.routing.used, rows.of
            reads.append(experts.pairs)
        arguments: dict[str, object] = {"scales": steps.header.adapter_scales, "adapter": self.adapter}
        arguments |= {"pairs": pairs or 0, "used": used, "rows": steps.header.wanted if rows is WANTED else 0}
        arguments |= {"x": source, "x_stride": source.stride, "factor": self.factor, "count": count}
        return arguments | build_output_arguments(self.output, y), reads


@operation
class AddLowRank(LowRankUpdate, MatrixOperation):
    """y + factor * scale * x W, where the weight W is [rank, columns] with padded rows."""

    VERB = "add_low_rank"

    def lower(self, steps: StepBuilder, target: Target) -> None:
        scratch = target.build_scratch_arguments(MAX_ROWS * compute_row_bytes(self.inputs[1].columns))
        self.append(steps, target, self.find_kernel(target), self.list_weights(target) | scratch)

    def find_kernel(self, target: Target) -> str:
        """Return the name of the kernel for the weight's format."""
        return f"add_low_rank-{target.get_layout(self.weight)[0]}"

    def list_weights(self, target: Target) -> dict[str, object]:
        """Return the arguments that describe the weight."""
        row_bytes = target.get_layout(self.weight)[1]
        return {"weights": target.matrix(self.weight), "row_bytes": row_bytes, "rank": self.inputs[1].columns}

    @staticmethod
    def record(
        recorder: RecorderBase, y: Activation, x: Activation, weight: Weight, adapter: int, factor: float
    ) -> Activation:
        rank, columns = recorder._matrix(weight)
        assert rank == x.columns and columns >= y.columns
        return recorder._add(AddLowRank((y, x), Activation(y.rows, y.columns), weight, adapter, factor))

    @staticmethod
    def reference(run: ReferenceBase, y: Array, x: Array, weight: Weight, adapter: int, factor: float) -> Array:
        return y + np.float32(factor) * select_scales(run, adapter, len(y)) * (x @ run.matrix(weight)[:, : y.shape[1]])


class AddScaled(LowRankUpdate):
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
    """Return the adapter's scale for each row, float32 [rows, 1], also if only rows of requested logits exist."""
    scales = run.adapter_scales[:, adapter]
    return (scales if rows == len(scales) else scales[run.wanted])[:, None]
