"""Give the layer-wise runner a model's matrices as they are in the source."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from localllm.arch.weights import Weight
from localllm.errors import UnsupportedError
from localllm.files.gguf.header import printable
from localllm.files.gguf.tensor_source import SourceTensor
from localllm.kernels.dequantize_rows import RowDequantizer
from localllm.quantizing.layerwise_runner import MatrixInputs, MatrixRows
from localllm.quantizing.plan import TensorJob
from localllm.services.inspection.validate import dequantize_finite

ENCODED_WEIGHTS = 1 << 24  # weights of a matrix that are encoded at once: 64 MB each for weights, errors and targets


class OriginalWeights:
    """The matrices of a model as they are in the source."""

    def __init__(self, jobs: Mapping[str, TensorJob], widener: RowDequantizer):
        self.jobs, self._widener = jobs, widener

    def read_rows(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        unique, places = np.unique(ids, return_inverse=True)
        tensor = self.jobs[weight.name].tensor
        return np.concatenate([self.dequantize_finite(tensor, row, row + 1) for row in unique + weight.first_row])[
            places
        ]

    def resolve(self, weight: Weight, inputs: MatrixInputs) -> MatrixRows:
        return self.build_matrix_rows(weight, partial(self.read, self.jobs[weight.name].tensor))

    def build_matrix_rows(self, weight: Weight, rows: Callable[[int, int], np.ndarray]) -> MatrixRows:
        """Return a weight's matrices as ranges of the rows of its tensor. Raises UnsupportedError.

        rows: reads rows first to end - 1 of the whole tensor.
        """
        tensor, (*stack, _, _) = self.jobs[weight.name].tensor, weight.shape
        if len(stack) != len(tensor.shape[:-2]):
            raise UnsupportedError(f"tensor {printable(tensor.name)}: experts in separate tensors cannot be calibrated")
        every, first = (1, *tensor.shape)[-2], weight.first_row
        return MatrixRows(weight.shape, lambda n, begin, end: rows(n * every + first + begin, n * every + first + end))

    def sample_rows(self, tensor: SourceTensor, n: int, limit: int) -> np.ndarray:
        """Read evenly spaced rows of matrix n: float32 [at most `limit`, columns]."""
        rows = (1, *tensor.shape)[-2]
        places = np.unique(np.linspace(0, rows - 1, min(rows, limit)).astype(int)) + n * rows
        some = np.concatenate([self.dequantize_finite(tensor, row, row + 1) for row in places])
        tensor.release_rows(n * rows, (n + 1) * rows)
        return some

    def iterate_rows(self, tensor: SourceTensor, n: int) -> Iterator[np.ndarray]:
        """Yield all rows of matrix n in chunks of at most ENCODED_WEIGHTS weights, float32 [rows, columns]."""
        rows, columns = (1, *tensor.shape)[-2:]
        for first in range(n * rows, (n + 1) * rows, step := max(ENCODED_WEIGHTS // columns, 1)):
            end = min(first + step, (n + 1) * rows)
            yield self.dequantize_finite(tensor, first, end)
            tensor.release_rows(first, end)

    def read(self, tensor: SourceTensor, first: int, end: int) -> np.ndarray:
        """Read rows and release the file's pages: float32, valid until this thread's next call."""
        rows = dequantize_finite(self._widener, tensor, first, end)
        tensor.release_rows(first, end)
        return rows

    def dequantize_finite(self, tensor: SourceTensor, first: int, end: int) -> np.ndarray:
        return dequantize_finite(self._widener, tensor, first, end).copy()
