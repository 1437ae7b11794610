"""Weights larger than memory: some matrices are held, others are read from the disk ahead of the steps that use them.

A run needs every matrix once, in the order of the tape, so the order of reads is known. The system's file cache evicts
what is needed next, and reads only after a thread has waited for a page. Here the tape is divided into slices: whole
stages with their matrices. A slice is held, in memory of its own from the first run on, or streamed: read into one of a
few slots, which a later slice uses when the steps are done. Threads read slices ahead, past the end of a run to the
beginning of the next one, so that the disk reads while the CPU computes. Held and streamed slices alternate for the
same reason. Files are read past the system's cache (O_DIRECT) where that is possible: the cache would need the memory
that the held matrices use.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from localllm.engine.cpu.expert_cache import ExpertCache, Mixture, find_mixtures
from localllm.engine.cpu.memory_watch import MemoryWatch
from localllm.engine.cpu.read_ahead import (
    CHUNK_BYTES,
    Locate,
    Read,
    ReadAhead,
    Slice,
    list_reads,
    round_to_blocks,
)
from localllm.engine.lower.tape import (
    KernelStep,
    StepRunner,
    TapeSlice,
    assign_stages,
    get_product_arguments,
    slice_steps,
)
from localllm.errors import MemoryLimitError, ModelError
from localllm.system.direct_reads import BLOCK
from localllm.system.memory import MemoryRegion, get_private_memory

SLOTS = 4  # slices that are read ahead or in use, at most
MEASURED_BYTES = 1 << 26  # bytes that are read to measure the disk
MIN_STREAMED_BYTES = 1 << 16  # smaller matrices stay mapped


class StreamPlan(NamedTuple):
    """The division of a model's matrices between memory and disk, in bytes.

    Attributes:
        held: always in memory.  streamed: read in each run.
        cached: the memory for experts.  experts: the size of all experts.
    """

    held: int
    streamed: int
    cached: int = 0
    experts: int = 0


class PlacedWeights(NamedTuple):
    """The matrices of a tape, and the memory for them.

    Attributes:
        memory: what the reads of slices write to; held slices begin after the slots.
        mixtures: those whose experts are cached.
        chosen: for each slice, the mixtures whose experts are chosen when it begins.
        stacks: for each slice, the stacks of experts that it computes: their mixture and index.
        limit: bytes that this process may use; None: as many as are available.
    """

    slices: list[Slice]
    plan: StreamPlan
    memory: MemoryRegion
    mixtures: list[Mixture]
    chosen: list[list[Mixture]]
    stacks: list[list[tuple[Mixture, int]]]
    limit: int | None = None

    def make_stream(self, threads: StepRunner) -> "WeightStream":
        return WeightStream(threads, self)


class WeightStream:
    """Runs a tape slice by slice, each when its matrices are in memory.

    Attributes:
        plan: bytes of matrices that are held and streamed.
        cache: the experts in memory.
    """

    def __init__(self, threads: StepRunner, placed: PlacedWeights):
        """Begin to load slices."""
        self.plan, self._threads, self._placed = placed.plan, threads, placed
        self._ahead, self._is_whole = ReadAhead(placed.slices, placed.memory.give_back), True
        self._watch, self._returned, self._was_run = MemoryWatch(placed.limit), 0, False
        self.cache = ExpertCache(placed.mixtures, placed.plan.cached, self._ahead)
        self._end = weakref.finalize(self, self._ahead.close)

    def run(self) -> None:
        """Run the tape once. Raises ModelError if the file cannot be read."""
        if not self._is_whole:
            self._ahead.restart()
            self.cache.restart()
        self._is_whole, first = False, 0
        slices, chosen, stacks = self._placed.slices, self._placed.chosen, self._placed.stacks
        for index, (each, mixtures, products) in enumerate(zip(slices, chosen, stacks, strict=True)):
            for mixture in mixtures:
                self.cache.request(mixture)
            self._ahead.wait(index)
            for mixture, stack in products:
                self._ahead.wait_until_read(mixture.left, stack)
            self._threads.run_steps(first, each.end)
            self._ahead.release(index)
            first = each.end
            if self._was_run:
                self._follow_memory(index + 1)
        self._is_whole = self._was_run = True

    def _follow_memory(self, position: int) -> None:
        """Give memory back when the system is short of it, and take it back later; position: the next slice."""
        nbytes = self._watch.measure(self._returned)
        if nbytes > 0:
            released = self.cache.shrink(nbytes)
            if released < nbytes:
                released += self._ahead.stop_holding(nbytes - released, position)
            self._returned += released
        elif nbytes < 0:
            taken = self.cache.grow(-nbytes)
            self._returned -= taken + self._ahead.hold_again(-nbytes - taken)

    def get_statistics(self) -> dict[str, float]:
        """Return bytes read and seconds waited so far, bytes given back now, and hits and misses of experts."""
        read, experts = self._ahead, {"expert_hits": self.cache.hits, "expert_misses": self.cache.misses}
        numbers = {"read_bytes": read.bytes_read, "waited_s": read.waited, "returned_bytes": self._returned}
        return numbers | (experts if self.plan.cached else {})

    def close(self) -> None:
        """End the reading threads."""
        self._end()
        self._ahead.join()


@dataclass(eq=False)
class Matrix:
    """A matrix of a step, in a mapped file.

    Attributes:
        arguments: the kernel's arguments, whose "weights" it is.
        size: bytes of the whole blocks of the file that it is in.
    """

    arguments: dict[str, object]
    view: np.ndarray
    path: str
    offset: int

    @property
    def size(self) -> int:
        return round_to_blocks(self.offset % BLOCK + self.view.nbytes)

    def move(self, memory: np.ndarray, position: int) -> list[Read]:
        """Replace the matrix by one at a position in memory; return the reads that fill it."""
        margin = self.offset % BLOCK
        moved = memory[position + margin : position + margin + self.view.nbytes]
        self.arguments["weights"] = moved.view(self.view.dtype).reshape(self.view.shape)
        return [*list_reads(self.path, self.offset, self.view.nbytes, memory[position : position + self.size])]


@dataclass
class WeightStorage:
    """The memory for a model's matrices.

    Attributes:
        locate: finds a matrix in its file.
        budget: bytes for matrices.
        limit: see PlacedWeights.
        plan: what is held and streamed; None before `place`, and if all matrices fit.
        disk_rate: bytes per second; 0 if it was not measured.
    """

    locate: Locate
    budget: int
    limit: int | None = None
    plan: StreamPlan | None = None
    disk_rate: float = 0.0

    def place(self, steps: Sequence[KernelStep]) -> PlacedWeights | None:
        """Replace the matrices of steps by views of new memory, or return None if all matrices fit.

        Raises MemoryLimitError.
        """
        assign_stages(list(steps))
        if (placed := place_weights(steps, self.locate, self.budget)) is not None:
            reads = [read for each in placed.slices for read in each.reads]
            self.plan, self.disk_rate = placed.plan, measure_reads(reads[: MEASURED_BYTES // CHUNK_BYTES])
            placed = placed._replace(limit=self.limit)
        return placed

    def reserve_cache(self, nbytes: int) -> None:
        """Leave memory for a KV cache of `nbytes` bytes, at most a sixteenth: when it grows, weights are given back.

        Where the use of a limited process is not known, it gets a quarter at most, once.
        """
        share = 16 if self.limit is None or get_private_memory() is not None else 4
        self.budget -= min(nbytes, self.budget // share)

    def describe(self, nbytes: int) -> str:
        """Return one line for the user about the weights, of `nbytes` bytes."""
        text = f"the weights take {nbytes / 1e9:.2f} GB, and only {self.budget / 1e9:.2f} GB of memory are available"
        if self.plan is None:
            return f"{text}: some are read from the disk again and again"
        if self.plan.cached:
            text += f": {self.plan.cached / self.plan.experts:.0%} of the experts are in memory"
        if self.plan.streamed:
            text += f": {self.plan.streamed / 1e9:.2f} GB are read for each token"
        return f"{text}; the disk reads {self.disk_rate / 1e9:.1f} GB/s"


def measure_file(path: str, size: int) -> float:
    """Return the bytes per second of reading a part of a file of `size` bytes, past the system's cache."""
    nbytes = min(MEASURED_BYTES, size)
    memory = np.frombuffer(memoryview(allocate(nbytes + 2 * BLOCK).buffer), np.uint8)
    return measure_reads([*list_reads(path, (size - nbytes) // 2, nbytes, memory)])


def measure_reads(reads: list[Read]) -> float:
    """Return the bytes per second of some reads; 0 if they fail."""
    start, ahead = perf_counter(), ReadAhead([Slice(0, reads, None)])
    try:
        ahead.wait(0)
        return ahead.bytes_read / (perf_counter() - start)
    except ModelError:  # the first run reports it
        return 0.0
    finally:
        ahead.close()
        ahead.join()


def place_weights(steps: Sequence[KernelStep], locate: Locate, budget: int) -> PlacedWeights | None:
    """Place matrices in at most `budget` bytes: replace those of the steps by views of new memory.

    steps: with stages; locate: finds a matrix in its file. Returns None if all fit in the budget. Raises
    MemoryLimitError.
    """
    mixtures = find_mixtures(steps, locate)
    begins = {stack.step.stage for each in mixtures for stack in each.stacks} | {each.stage + 1 for each in mixtures}
    pieces, first, matrices = slice_steps(steps, begins), 0, list[list[Matrix]]()
    for piece in pieces:
        matrices.append([each for step in steps[first : piece.end] if (each := find_matrix(step, locate))])
        first = piece.end
    sizes = [sum(each.size for each in some) for some in matrices]
    experts = sum(each.experts * each.nbytes for each in mixtures)
    if sum(sizes) + experts <= budget:
        return None
    cached = divide_budget(budget, sum(sizes), max((each.experts * each.nbytes for each in mixtures), default=0))
    slices, held, memory = place_slices(pieces, matrices, sizes, budget - cached)
    mixtures = mixtures if cached else []
    for mixture in mixtures:
        for stack in mixture.stacks:
            stack.move()
    plan = StreamPlan(held, sum(sizes) - held, cached, experts)
    return PlacedWeights(slices, plan, memory, mixtures, *list_experts(pieces, steps, mixtures))


def divide_budget(budget: int, dense: int, largest: int) -> int:
    """Return the bytes for experts: what the other matrices leave, which each token needs, or else half of all.

    largest: bytes of the largest layer's experts, of which a long prompt needs all; 0 if they do not fit.
    """
    room = budget - dense if budget - dense >= largest else budget // 2
    return room if 0 < largest <= room else 0


def list_experts(
    pieces: Sequence[TapeSlice], steps: Sequence[KernelStep], mixtures: Sequence[Mixture]
) -> tuple[list[list[Mixture]], list[list[tuple[Mixture, int]]]]:
    """Return `chosen` and `stacks` of PlacedWeights."""
    of_step = {id(stack.step): (each, index) for each in mixtures for index, stack in enumerate(each.stacks)}
    first, chosen, stacks = 0, list[list[Mixture]](), list[list[tuple[Mixture, int]]]()
    for piece in pieces:
        of_slice = steps[first : piece.end]
        stages = {step.stage for step in of_slice}
        chosen.append([each for each in mixtures if each.stage + 1 in stages])
        stacks.append([of_step[id(step)] for step in of_slice if id(step) in of_step])
        first = piece.end
    return chosen, stacks


def place_slices(
    pieces: Sequence[TapeSlice], matrices: Sequence[Sequence[Matrix]], sizes: Sequence[int], budget: int
) -> tuple[list[Slice], int, MemoryRegion]:
    """Place the matrices of slices; return the slices, the bytes that are held, and the memory."""
    slot_bytes, held = 0, [True] * len(sizes)
    if sum(sizes) > budget:
        slot_bytes = choose_slot_bytes(sizes)
        held = choose_held(sizes, budget - SLOTS * slot_bytes, slot_bytes)
    room = SLOTS * slot_bytes
    region = allocate(max(room + sum(size for size, stays in zip(sizes, held, strict=True) if stays), 1))
    memory = np.frombuffer(memoryview(region.buffer), np.uint8)
    slices, end_of_held, streamed = list[Slice](), room, 0
    for piece, some, stays in zip(pieces, matrices, held, strict=True):
        slot = None if stays or not some else streamed % SLOTS
        position, reads = end_of_held if slot is None else slot * slot_bytes, list[Read]()
        for each in some:
            reads += each.move(memory, position)
            position += each.size
        slices.append(Slice(piece.end, reads, slot, (end_of_held, position) if slot is None and some else (0, 0)))
        end_of_held, streamed = (position, streamed) if slot is None else (end_of_held, streamed + 1)
    return slices, end_of_held - room, region


def choose_slot_bytes(sizes: Sequence[int]) -> int:
    """Return the size of a slot that takes least memory, together with the larger slices, which are held.

    An output matrix may be ten times as large as the next slice: slots of its size would leave no memory for others.
    """
    return min(sorted(set(sizes)), key=lambda slot: SLOTS * slot + sum(size for size in sizes if size > slot))


def choose_held(sizes: Sequence[int], room: int, slot_bytes: int) -> list[bool]:
    """Return which slices are held in `room` bytes: the larger ones than a slot, and an even share of the others."""
    large = sum(size for size in sizes if size > slot_bytes)
    room, total, held, seen, chosen = max(room - large, 0), sum(sizes) - large, 0, 0, list[bool]()
    for size in sizes:
        is_large = size > slot_bytes
        seen += 0 if is_large else size
        chosen.append(is_large or held + size <= room * seen // max(total, 1))
        held += size if chosen[-1] and not is_large else 0
    return chosen


def allocate(size: int) -> MemoryRegion:
    """Allocate memory for matrices. Raises MemoryLimitError."""
    try:
        return MemoryRegion(size, huge=True)
    except (OSError, ValueError, OverflowError):
        raise MemoryLimitError(f"{size / 1e9:.2f} GB of memory for weights cannot be allocated") from None


def find_matrix(step: KernelStep, locate: Locate) -> Matrix | None:
    """Return the matrix of a step that is a dense product; None for other steps and for small matrices."""
    if not step.kernel.startswith(("linear", "adapted_linear")):
        return None
    arguments = get_product_arguments(step)
    weights = arguments["weights"]
    if not isinstance(weights, np.ndarray) or weights.nbytes < MIN_STREAMED_BYTES:
        return None
    place = locate(weights)
    return Matrix(arguments, weights, *place) if place else None
