"""Upload a model's matrices to GPU memory, in the layout of localllm.kernels.cuda.matmul.planes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cuda.card import MAX_CHUNK_BYTES, Gpu, KernelLaunch
from localllm.files.gguf.file import Tensor
from localllm.kernels.build.objects import Progress
from localllm.kernels.cuda import compute_grid, list_parameters
from localllm.kernels.cuda.matmul.planes import PLANES, compute_row_bytes, get_storage_format
from localllm.quant.formats import BY_NAME

Key = tuple[str, int, tuple[int, ...]]


class GpuWeights:
    """Matrices in GPU memory, uploaded once and used by the programs of all sizes.

    Attributes:
        unpacked: the replacement of each format that has no GPU kernels.  capability: the GPU's compute capability.
    """

    def __init__(self, card: Gpu, matrices: Iterable[Weight], on_upload: Progress | None):
        """Prepare to upload `matrices` on first use.

        on_upload: called with the bytes uploaded so far and the total.
        """
        self.capability = card.capability
        self._card, self._on_upload, self._done = card, on_upload or (lambda done, total: None), 0
        self._size = sum(size for size in {create_key(weight): weight.tensor.nbytes for weight in matrices}.values())
        self._places: dict[Key, int] = {}
        self.unpacked: dict[str, str] = {}

    def get_address(self, weight: Weight) -> int:
        """Return the address of a matrix or stack, uploading it first if necessary. Raises LocalllmError."""
        key = create_key(weight)
        if key not in self._places:
            tensor, kind = weight.tensor, self.get_format(weight)
            if kind != tensor.format.name:
                self.unpacked[tensor.format.name] = kind
            rows, columns = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
            place = self._card.allocate(rows * compute_row_bytes(kind, columns))
            if kind in PLANES:
                self._upload_planes(tensor, kind, place)
            else:
                self._upload_rows(tensor, kind, place)
            self._places[key] = place
        return self._places[key]

    @staticmethod
    def get_format(weight: Weight) -> str:
        """Return the format of a matrix on the GPU."""
        return get_storage_format(weight.tensor.format.name)

    @classmethod
    def row_bytes(cls, weight: Weight) -> int:
        """Return the row stride on the GPU in bytes."""
        return compute_row_bytes(cls.get_format(weight), weight.shape[-1])

    def _upload_planes(self, tensor: Tensor, kind: str, place: int) -> None:
        """Upload blocks as they are in the file; a kernel rearranges them into planes."""
        columns = tensor.shape[-1]
        shared_arguments = {"columns": columns, "planes": place, "row_bytes": compute_row_bytes(kind, columns)}
        last = 0

        def take_apart(blocks: int, chunk: np.ndarray) -> KernelLaunch:
            nonlocal last
            first, last = last, last + chunk.nbytes // BY_NAME[kind].bytes * BY_NAME[kind].block
            arguments = shared_arguments | {"blocks": blocks, "first": first, "last": last}
            name = f"to_planes-{kind}"
            values = tuple(arguments[key] for key in list_parameters(name))
            return KernelLaunch(name, compute_grid(name, arguments, 0), values)

        self._card.prepare({f"to_planes-{kind}"}, None)
        self._card.upload_chunks(self._report_progress(iterate_chunks(tensor, kind)), take_apart, place)

    def _upload_rows(self, tensor: Tensor, kind: str, place: int) -> None:
        """Upload floats in rows padded to 16 bytes."""
        width = compute_row_bytes(kind, tensor.shape[-1])

        def padded(chunk: np.ndarray) -> np.ndarray:
            rows = chunk.reshape(-1, BY_NAME[kind].row_bytes(tensor.shape[-1]))
            return np.pad(rows, ((0, 0), (0, width - rows.shape[1]))).reshape(-1)

        self._card.upload_chunks(
            map(padded, self._report_progress(iterate_chunks(tensor, kind))), lambda address, chunk: None, place
        )

    def _report_progress(self, chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for chunk in chunks:
            yield chunk
            self._done += chunk.nbytes
            self._on_upload(min(self._done, self._size), self._size)


def create_key(weight: Weight) -> Key:
    """Return a key that is equal for the same rows of the same tensor."""
    return weight.name, weight.first_row, weight.shape


def iterate_chunks(tensor: Tensor, kind: str) -> Iterator[np.ndarray]:
    """Yield a tensor's rows in the format `kind`, uint8, in chunks of at most MAX_CHUNK_BYTES with row padding."""
    columns = tensor.shape[-1]
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(MAX_CHUNK_BYTES // max(compute_row_bytes(kind, columns), BY_NAME[kind].row_bytes(columns)), 1)
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        if kind != tensor.format.name:
            some = convert_weights(replace(tensor, data=some, shape=(len(some), columns)), kind)
        yield np.ascontiguousarray(some).reshape(-1).view(np.uint8)


def convert_weights(tensor: Tensor, kind: str) -> np.ndarray:
    """Convert weights of a format without GPU kernels to Q8_0 or float16."""
    from localllm.kernels.reference import dequantize  # rarely needed
    from localllm.quant.encode import encode

    numbers = dequantize(tensor)
    return numbers.astype(np.float16) if kind == "F16" else encode(kind, numbers)
