"""Define the Gpu protocol (memory, kernels, graphs), and implement it with NVIDIA's packages.

CudaGpu imports them only if there is a driver: the driver allocates memory, cuda.core launches kernels and graphs, and
cuBLAS multiplies on tensor cores. Tests use Numba's simulator.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from localllm.errors import LocalllmError, MemoryLimitError
from localllm.kernels.build.objects import Progress
from localllm.kernels.cuda import LaunchGrid
from localllm.system.processes import has_driver

if TYPE_CHECKING:
    from cuda.core import Device, DeviceProperties, Event, GraphBuilder, Stream


MAX_CHUNK_BYTES = 32 << 20  # maximum bytes of an upload


class KernelLaunch(NamedTuple):
    kernel: str
    grid: LaunchGrid
    arguments: tuple[int, ...]


class CublasProduct(NamedTuple):
    """A matrix product by cuBLAS: c = b a^T, with c float32 [n, m], b [n, k], a [m, k], row-major.

    kind: the type of a and b, f16, bf16 or f32; sums are float32. a, b, c: addresses. Strides are between rows, in
    elements.
    """

    kind: str
    a: int
    b: int
    c: int
    m: int
    n: int
    k: int
    a_stride: int
    b_stride: int
    c_stride: int
    adds: bool  # whether the product is added to c


Work = KernelLaunch | CublasProduct


class Gpu(Protocol):
    """A GPU. Addresses are in its memory, int64; calls take effect in the order in which they are made.

    Attributes:
        name: the device's, for users.  capability: compute capability, major and minor version.
        warning: one line for the user about its kernels, or None.
        bandwidth: memory bytes per second.  peak: dense float16 operations per second.  0: unknown.
    """

    name: str
    warning: str | None
    bandwidth: float
    peak: float
    capability: tuple[int, int]

    def use(self) -> None: ...

    def allocate(self, size: int) -> int:
        """Allocate memory at a multiple of 256 bytes and return its address. Raises MemoryLimitError."""
        ...

    def free(self, address: int) -> None:
        """Free memory, unless the GPU has been closed."""
        ...

    def release(self, address: int) -> None:
        """Queue memory to be freed before the next allocation.

        This calls no driver, so that finalizers may call it anywhere.
        """
        ...

    def allocate_pinned(self, size: int) -> np.ndarray:
        """Allocate pinned host memory, uint8 [size], which the GPU accesses at the same address.

        Raises MemoryLimitError.
        """
        ...

    def upload(self, address: int, data: np.ndarray) -> None:
        """Copy contiguous host bytes to GPU memory."""
        ...

    def upload_chunks(
        self, chunks: Iterable[np.ndarray], work: Callable[[int, np.ndarray], Work | None], place: int
    ) -> None:
        """Upload chunks of at most MAX_CHUNK_BYTES, uint8.

        work(address, chunk): returns the work that processes an uploaded chunk, or None to store the chunk at `place`,
        after the previous one.
        """
        ...

    def download(self, address: int, size: int) -> np.ndarray:
        """Copy GPU memory to the host, uint8 [size]."""
        ...

    def copy(self, target: int, source: int, size: int) -> None: ...

    def prepare(self, kernels: set[str], progress: Progress | None) -> None:
        """Load these kernels, compiling those that are not cached. Raises LocalllmError."""
        ...

    def record(self, works: Sequence[Work]) -> Callable[[], None]:
        """Record work as a graph; return a function that launches it, any number of times."""
        ...

    def launch(self, works: Sequence[Work]) -> None: ...

    def synchronize(self) -> None:
        """Wait until all work is done. Raises LocalllmError if a call has failed."""
        ...

    def get_free_bytes(self) -> int: ...

    def close(self) -> None: ...


WORKSPACE = 32 << 20  # bytes that cuBLAS may use
MIN_CAPABILITY = (7, 5)  # the first compute capability whose tensor cores support these float16 products


class NoGpuError(LocalllmError):
    """There is no usable GPU; the message says why."""


def open_card(number: int) -> "CudaGpu":
    """Open a GPU by its index. Raises NoGpuError if it or its software is missing."""
    if not has_driver():
        raise NoGpuError("no NVIDIA driver found: install it, or use --device cpu")
    try:
        from cuda.bindings import driver
        from cuda.core import Device
        from nvmath.bindings import cublas
    except ImportError as error:
        raise NoGpuError(f"no {error.name}: pip install 'localllm[cuda]'") from None
    try:
        check_call(driver, driver.cuInit(0))
        count = check_call(driver, driver.cuDeviceGetCount())
        if number >= count:
            raise NoGpuError(f"GPU {number} does not exist; found {count}")
        device = Device(number)
        capability = tuple(device.compute_capability)
        if capability < MIN_CAPABILITY:
            raise NoGpuError(
                f"{device.name} is of compute capability {capability[0]}.{capability[1]}; 7.5 or greater is needed"
            )
        device.set_current()
        return CudaGpu(device, driver, cublas)
    except NoGpuError:
        raise
    except Exception as error:  # from the driver or cuda.core: too old, busy, broken
        raise NoGpuError(f"GPU {number} cannot be used: {format_error(error)}") from None


def check_call(driver: ModuleType, result: tuple[Any, ...]) -> Any:
    """Return the first result of a driver call after its status. Raises LocalllmError, MemoryLimitError."""
    status, *values = result
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryLimitError("not enough GPU memory: use fewer --gpu-layers, or a shorter context")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LocalllmError(f"the GPU failed: {status.name}")
    return values[0] if values else None


@contextmanager
def report_failures() -> Iterator[None]:
    """Convert exceptions of cuda.core and cuBLAS to LocalllmError, like failed driver calls."""
    try:
        yield
    except (LocalllmError, MemoryError):
        raise
    except Exception as error:
        raise LocalllmError(f"the GPU failed: {format_error(error)}") from error


def format_error(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Dense float16 operations with float32 sums per cycle of a multiprocessor's tensor cores, by compute capability
# (NVIDIA's white papers of these generations).
OPERATIONS_PER_CYCLE = {
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 512,
    (8, 7): 2048,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
}


def compute_limits(properties: "DeviceProperties", capability: tuple[int, ...]) -> tuple[float, float]:
    """Return memory bytes per second and tensor core operations per second; 0 for an unknown capability."""
    bandwidth = 2 * 1e3 * properties.memory_clock_rate * properties.global_memory_bus_width / 8
    cycles = 1e3 * properties.clock_rate * properties.multiprocessor_count
    return bandwidth, cycles * OPERATIONS_PER_CYCLE.get((capability[0], capability[1]), 0)


class CudaGpu:
    """The Gpu protocol on an NVIDIA device.

    All threads may call it: each call makes the device current in its thread.

    Attributes:
        name: name of the device.  capability: major and minor version.
    """

    def __init__(self, device: "Device", driver: ModuleType, cublas: ModuleType):
        self.bandwidth, self.peak = compute_limits(device.properties, tuple(device.compute_capability))
        self.name, self.capability = device.name, tuple(device.compute_capability)
        self._device, self._driver, self._cublas = device, driver, cublas
        self.warning: str | None = None
        self._stream, self._copies = device.create_stream(), device.create_stream()
        self._handle = cublas.create()
        self._kernels: dict[str, object] = {}
        self._allocated, self._pinned, self._released = set[int](), list[int](), deque[int]()
        self._workspace = self.allocate(WORKSPACE)  # cuBLAS must not allocate while a graph is recorded
        self._staging = [self.allocate_pinned(MAX_CHUNK_BYTES) for _ in range(2)]
        self._one, self._zero = (np.array([value], np.float32) for value in (1, 0))

    def use(self) -> None:
        self._device.set_current()

    # ---- memory ----

    def allocate(self, size: int) -> int:
        self._free_released()
        self.use()
        address = int(check_call(self._driver, self._driver.cuMemAlloc(max(size, 1))))
        self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        if address not in self._allocated:
            return
        self._allocated.discard(address)
        self.use()
        check_call(self._driver, self._driver.cuMemFree(address))

    def release(self, address: int) -> None:
        self._released.append(address)

    def _free_released(self) -> None:
        while self._released:
            self.free(self._released.popleft())

    def allocate_pinned(self, size: int) -> np.ndarray:
        self.use()
        address = int(check_call(self._driver, self._driver.cuMemHostAlloc(max(size, 1), 0)))
        self._pinned.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def upload(self, address: int, data: np.ndarray) -> None:
        self.use()
        # cuMemcpyHtoD is not used: it may return before the bytes have arrived, and streams do not wait for it.
        handle = self._stream.handle
        check_call(self._driver, self._driver.cuMemcpyHtoDAsync(address, data.ctypes.data, data.nbytes, handle))
        self.synchronize()

    def download(self, address: int, size: int) -> np.ndarray:
        self.use()
        self.synchronize()
        data = np.empty(size, np.uint8)
        check_call(self._driver, self._driver.cuMemcpyDtoH(data.ctypes.data, address, size))
        return data

    def copy(self, target: int, source: int, size: int) -> None:
        self.use()
        check_call(self._driver, self._driver.cuMemcpyDtoDAsync(target, source, size, self._stream.handle))

    @report_failures()
    def upload_chunks(
        self, chunks: Iterable[np.ndarray], work: Callable[[int, np.ndarray], Work | None], place: int
    ) -> None:
        """Upload chunks through pinned memory, see Gpu.upload_chunks.

        While one chunk is transferred, the next is read from the file and the previous one is processed.
        """
        room = [self.allocate(MAX_CHUNK_BYTES) for _ in range(2)]
        events: list[Event | None] = [None, None]
        for turn, chunk in zip(cycle((0, 1)), chunks, strict=False):
            if (event := events[turn]) is not None:
                event.sync()
            self._staging[turn][: chunk.nbytes] = chunk
            to_do = work(room[turn], chunk)
            target = room[turn] if to_do else place
            source = self._staging[turn].ctypes.data
            handle = self._copies.handle
            check_call(self._driver, self._driver.cuMemcpyHtoDAsync(target, source, chunk.nbytes, handle))
            place += chunk.nbytes
            self._stream.wait(self._copies)
            if to_do:
                self._start(self._stream, to_do)
            events[turn] = self._stream.record()
        self.synchronize()
        for address in room:
            self.free(address)

    def get_free_bytes(self) -> int:
        self._free_released()
        status, free, _ = self._driver.cuMemGetInfo()
        check_call(self._driver, (status,))
        return int(free)

    # ---- work ----

    @report_failures()
    def prepare(self, kernels: set[str], progress: Progress | None) -> None:
        from cuda.core import ObjectCode

        from localllm.kernels.cuda.build import build_machine_code

        missing = {name for name in kernels if name not in self._kernels}
        for name, (code, entry) in build_machine_code(missing, self.capability, progress, self._set_warning).items():
            self._kernels[name] = ObjectCode.from_cubin(code).get_kernel(entry)

    def _set_warning(self, line: str) -> None:
        self.warning = line

    @report_failures()
    def record(self, works: Sequence[Work]) -> Callable[[], None]:
        builder = self._stream.create_graph_builder().begin_building()
        for work in works:
            self._start(builder, work)
        graph = builder.end_building().complete()
        graph.upload(self._stream)
        return report_failures()(lambda: graph.launch(self._stream))

    @report_failures()
    def launch(self, works: Sequence[Work]) -> None:
        for work in works:
            self._start(self._stream, work)

    def _start(self, stream: "Stream | GraphBuilder", work: Work) -> None:
        """Enqueue work on a stream, or add it to a graph that is being recorded."""
        from cuda.core import LaunchConfig, launch

        if isinstance(work, CublasProduct):
            self._multiply(stream, work)
            return
        assert isinstance(work, KernelLaunch)
        config = LaunchConfig(grid=(work.grid.x, work.grid.y), block=work.grid.threads)
        launch(stream, config, self._kernels[work.kernel], *(np.int64(value) for value in work.arguments))

    def _multiply(self, stream: "Stream | GraphBuilder", work: CublasProduct) -> None:
        """Compute c = b a^T, row-major; for cuBLAS, which is column-major, that is c = a^T b."""
        names = self._cublas
        _, handle = stream.__cuda_stream__()
        names.set_stream(self._handle, int(handle))
        names.set_workspace(self._handle, self._workspace, WORKSPACE)  # setting a stream resets it
        kind = {"f16": 2, "bf16": 14, "f32": 0}[work.kind]  # cudaDataType
        beta = (self._one if work.adds else self._zero).ctypes.data
        names.gemm_ex(
            self._handle, int(names.Operation.T), int(names.Operation.N), work.m, work.n, work.k,
            self._one.ctypes.data, work.a, kind, work.a_stride, work.b, kind, work.b_stride, beta, work.c, 0,
            work.c_stride, int(names.ComputeType.COMPUTE_32F), int(names.GemmAlgo.DEFAULT),
        )  # fmt: skip

    @report_failures()
    def synchronize(self) -> None:
        self._copies.sync()
        self._stream.sync()

    def close(self) -> None:
        """Free all memory.

        A failed GPU refuses calls, but its failure was already reported.
        """
        allocated, self._allocated, pinned, self._pinned = self._allocated, set(), self._pinned, []
        with suppress(LocalllmError), report_failures():
            self.use()
            self.synchronize()
            handle, self._handle = self._handle, None
            if handle is not None:
                self._cublas.destroy(handle)
        for address in allocated:
            self._driver.cuMemFree(address)
        for address in pinned:
            self._driver.cuMemFreeHost(address)
