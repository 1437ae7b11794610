"""Dequantize rows of weights of any format to float32, with the kernels that look up embeddings."""

import ctypes
import threading
from collections.abc import Iterable

import numpy as np

from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.build.objects import Progress
from localllm.kernels.table import order_arguments
from localllm.quant.formats import Format

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
UNQUANTIZED_TYPES = ("F32", "I8", "I16", "I32", "I64", "F64")  # F32 needs no kernel, the others have none


def can_dequantize(format: Format) -> bool:
    """Return whether weights of the format can be dequantized to float32."""
    return format.name == "F32" or format.name not in UNQUANTIZED_TYPES


class RowDequantizer:
    """A dequantizer of rows to float32, with the compiled kernels of some formats.

    Threads may share it; it computes without holding the GIL.

    Attributes:
        warning: one line that says why the compiled kernels could not be cached, or None.
    """

    def __init__(self, formats: Iterable[Format], progress: Progress | None = None):
        names = {format: f"embed-{format.name}" for format in formats if format.name not in UNQUANTIZED_TYPES}
        self._local = threading.local()
        self._library = KernelLibrary(sorted(names.values()), progress) if names else None
        self.warning = self._library.warning if self._library else None
        self._kernels = {
            format: KERNEL(self._library.addresses[name]) for format, name in names.items() if self._library
        }

    def dequantize(self, format: Format, rows: np.ndarray, columns: int) -> np.ndarray:
        """Dequantize rows as stored in a file, uint8 [rows, bytes], to float32 [rows, columns].

        The result may be a view of `rows`. It is valid until the same thread calls this method again.
        """
        if format.name == "F32":
            return rows.view(np.float32) if rows.ctypes.data % 4 == 0 else rows.copy().view(np.float32)
        weights = self._get_buffer(len(rows) * columns).reshape(len(rows), columns)
        numbers = np.arange(len(rows), dtype=np.int64)
        count = np.array([len(rows)], np.int64)
        values = {
            "count": count.ctypes.data,
            "weights": rows.ctypes.data,
            "row_bytes": rows.shape[1],
            "columns": columns,
            "ids": numbers.ctypes.data,
            "x": weights.ctypes.data,
            "stride": weights.strides[0],
        }
        arguments = np.array(order_arguments("embed", values), np.int64)
        self._kernels[format](arguments.ctypes.data, 0, 1, 0)
        return weights

    def _get_buffer(self, size: int) -> np.ndarray:
        """Return this thread's buffer, float32 [size].

        Allocating for every call would take longer than the conversion.
        """
        if getattr(self._local, "buffer", np.empty(0)).size < size:
            self._local.buffer = np.empty(size, np.float32)
        return self._local.buffer[:size]
