"""Turn steps into a tape, a flat list of kernel calls with planned memory.

Operations append steps on virtual buffers. `Tape.finish` then works like a compiler:
"""

from bisect import insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np

from localllm.engine.memory.cache import ReservedMemory
from localllm.frozen import frozen
from localllm.kernels.table import order_arguments

LINE = 64  # bytes of a cache line
MAX_SLICE_BYTES = 1 << 25  # maximum bytes of weights in a slice, unless a stage has more
FLOAT, FLOAT_BITS = Struct("<f"), Struct("<i")


@dataclass(eq=False)
class Buffer:
    """Memory that steps write and read, `rows` times `stride` bytes; `Tape.finish` sets its address.

    A buffer without rows occupies no memory: it represents other memory in the reads and writes of steps.
    """

    rows: int
    stride: int
    address: int = 0
    first: int = -1  # the first and the last stage that use it
    last: int = -1

    @property
    def size(self) -> int:
        return -(-self.rows * self.stride // LINE) * LINE


@dataclass
class KernelStep:
    """A kernel call.

    arguments: by name; scalars, arrays, buffers (for their addresses), KernelAddress and ScratchAddress.
    """

    kernel: str
    arguments: dict[str, object]
    parts: int  # maximum number of parts that threads divide the work into
    count: np.ndarray | None  # int64 [1]; its value when the step's stage begins limits the parts
    reads: list[Buffer]
    writes: list[Buffer]
    stage: int = field(default=0)


@frozen
class KernelAddress:
    """An argument that becomes the address of a kernel."""

    kernel: str


@frozen
class KernelCall:
    """An argument that becomes the address of an array, which has a kernel's address and its arguments."""

    kernel: str
    arguments: dict[str, object]


@frozen
class ScratchAddress:
    """An argument that becomes the address of scratch memory, at least `size` bytes per thread."""

    size: int


SCRATCH_BYTES = object()  # an argument that becomes the scratch bytes of a thread


class Tape:
    """A list of steps, which `finish` turns into the array that threads execute."""

    def __init__(self, steps: list[KernelStep] | None = None) -> None:
        self.steps: list[KernelStep] = steps or []
        self.memory: list[object] = []  # keeps alive the memory that the tape has addresses of
        self._kernels: dict[str, int] = {}
        self._scratch, self._scratch_bytes = 0, 0
        self._addresses: dict[int, int] = {}  # addresses of arrays, by id

    def append(self, step: KernelStep) -> None:
        self.steps.append(step)

    @property
    def kernels(self) -> set[str]:
        named = {value.kernel for value in self._iterate_values() if isinstance(value, KernelAddress)}
        return named | {step.kernel for step in self.steps}

    def _iterate_values(self) -> Iterator[object]:
        """Yield all arguments but integers, which most are, including those of kernel calls among them."""
        values = [value for step in self.steps for value in step.arguments.values() if type(value) is not int]
        for value in values:
            yield value
            if isinstance(value, KernelCall):
                values += [KernelAddress(value.kernel), *value.arguments.values()]

    def finish(self, addresses: dict[str, int], threads: int = 1) -> np.ndarray:
        """Plan the memory and return the tape, int64 [steps, 5], for localllm.kernels.cpu.tape_runner.

        addresses: of kernels, by name. threads: number of threads that will execute it.
        """
        assign_stages(self.steps)
        size = max((value.size for value in self._iterate_values() if isinstance(value, ScratchAddress)), default=0)
        self._kernels, self._scratch_bytes = addresses, -(-size // 4096) * 4096
        scratch = ReservedMemory(max(self._scratch_bytes * threads, 1))
        self._scratch = scratch.address
        self.memory += [scratch, allocate_buffers(self.steps)]
        encode = self._encode
        values = [
            # Most of ten thousand arguments are integers.
            [value if type(value) is int else encode(value) for value in order_arguments(step.kernel, step.arguments)]
            for step in self.steps
        ]
        arguments = np.array([value for some in values for value in some], np.int64)
        self.memory.append(arguments)
        rows, address, previous = list[tuple[int, int, int, int, bool]](), get_address(arguments), -1
        for step, some in zip(self.steps, values, strict=True):
            count = 0 if step.count is None else self._encode(step.count)
            rows.append((addresses[step.kernel], address, step.parts, count, step.stage != previous))
            address, previous = address + 8 * len(some), step.stage
        return np.array(rows, np.int64).reshape(len(rows), 5)

    def _encode(self, value: object) -> int:
        """Encode an argument as an int64: an integer, the bits of a float32, or an address."""
        if isinstance(value, Buffer):
            return value.address
        if isinstance(value, np.ndarray):
            if id(value) not in self._addresses:
                self.memory.append(value)
                self._addresses[id(value)] = get_address(value)
            return self._addresses[id(value)]
        if isinstance(value, float):
            return FLOAT_BITS.unpack(FLOAT.pack(value))[0]
        if isinstance(value, KernelAddress):
            return self._kernels[value.kernel]
        if isinstance(value, KernelCall):
            values = [self._encode(each) for each in order_arguments(value.kernel, value.arguments)]
            self.memory.append(array := np.array([self._kernels[value.kernel], *values], np.int64))
            return get_address(array)
        if isinstance(value, ScratchAddress):
            return self._scratch
        if value is SCRATCH_BYTES:
            return self._scratch_bytes
        return int(value)  # type: ignore[call-overload]  # isinstance with SupportsInt would take 5 us


def assign_stages(steps: list[KernelStep]) -> None:
    """Assign steps to stages.

    A stage ends before a step that touches its outputs or writes its inputs.
    """
    stage, read, writes_of_stage = 0, set[Buffer](), set[Buffer]()
    for step in steps:
        reads, writes = set(step.reads), set(step.writes)
        if (reads | writes) & writes_of_stage or writes & read:
            stage, read, writes_of_stage = stage + 1, set(), set()
        read |= reads
        writes_of_stage |= writes
        step.stage = stage
        for buffer in reads | writes:
            buffer.first = stage if buffer.first < 0 else buffer.first
            buffer.last = stage


class StepRunner(Protocol):
    """Runs whole stages of a tape."""

    def run_steps(self, first: int, end: int) -> None: ...


class TapeSlice(NamedTuple):
    """Whole stages of a tape, and the weights that they read."""

    end: int  # index of the first step after the slice
    weights: list[np.ndarray]


def slice_steps(steps: Sequence[KernelStep], stages: Collection[int] = ()) -> list[TapeSlice]:
    """Slice steps at the ends of stages, with at most MAX_SLICE_BYTES of weights per slice where possible.

    stages: those that begin a slice in any case.
    """
    pieces, weights, size = list[TapeSlice](), list[np.ndarray](), 0
    for number, step in enumerate(steps):
        some = get_product_arguments(step).get("weights")
        nbytes = some.nbytes if isinstance(some, np.ndarray) else 0
        is_full = size + nbytes > MAX_SLICE_BYTES or step.stage in stages
        if is_full and number and step.stage != steps[number - 1].stage:
            pieces.append(TapeSlice(number, weights))
            weights, size = [], 0
        if isinstance(some, np.ndarray):
            weights.append(some)
            size += nbytes
    return [*pieces, TapeSlice(len(steps), weights)]


def get_product_arguments(step: KernelStep) -> dict[str, object]:
    """Return the arguments of a step, or of the matrix product within it."""
    product = step.arguments.get("product")
    return product.arguments if isinstance(product, KernelCall) else step.arguments


def allocate_buffers(steps: list[KernelStep]) -> ReservedMemory:
    """Allocate memory for all buffers, set their addresses, and return the memory."""
    memory = ReservedMemory(max(plan_offsets(steps), 1))
    for buffer in {buffer for step in steps for buffer in step.reads + step.writes if buffer.rows}:
        buffer.address += memory.address
    return memory


def plan_offsets(steps: list[KernelStep]) -> int:
    """Set each buffer's address to the lowest offset that overlaps no live buffer; return the total bytes."""
    buffers = {buffer: None for step in steps for buffer in step.reads + step.writes if buffer.rows}
    placed: list[tuple[int, int, int]] = []  # (first byte, last + 1, last stage) of live buffers, in order
    end = 0
    for buffer in sorted(buffers, key=lambda b: b.first):
        placed = [place for place in placed if place[2] >= buffer.first]
        offset, size = 0, buffer.size
        for start, stop, _ in placed:
            if offset + size <= start:
                break
            offset = max(offset, stop)
        insort(placed, (offset, offset + size, buffer.last))
        buffer.address, end = offset, max(end, offset + size)
    return end


def compute_row_bytes(columns: int) -> int:
    """Return the row stride of an activation in bytes: an odd number of cache lines.

    Rows at powers of two would share a few sets of every cache: matrix products of 512 tokens took 14 % longer.
    """
    return (-(-columns // 16) | 1) * LINE


def get_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]  # array.ctypes.data takes five times as long


def pad_columns(numbers: np.ndarray) -> np.ndarray:
    """Pad the last dimension with zeros to a multiple of 16, the vector length of kernels."""
    columns = numbers.shape[-1]
    return np.pad(np.ascontiguousarray(numbers), [(0, 0)] * (numbers.ndim - 1) + [(0, -columns % 16)])
