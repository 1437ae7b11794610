"""A cache of experts, for mixtures whose experts are larger than memory.

Each stack of experts' matrices gets addresses for all of them, and memory only for those in the cache, so that kernels
find an expert where they find it in the file. As soon as a run has chosen a mixture's experts, those that the cache
lacks are read, before any other matrix; while the first of their products are computed, the later ones are read. And
then those that the next mixture may choose: its router is applied to the input of this one's.

An expert that was used gets a point, and all points decay with the mixtures that are computed (least frequently used,
with aging); those with the fewest points make room.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from localllm.engine.cpu.read_ahead import Locate, Read, ReadAhead, ReadRequest, list_reads, round_to_blocks
from localllm.engine.lower.tape import Buffer, KernelStep
from localllm.errors import MemoryLimitError
from localllm.kernels.table import EXPERT
from localllm.system.direct_reads import BLOCK
from localllm.system.memory import MemoryRegion

MAX_GUESSED_TOKENS = 4  # in a run; the choices of more tokens are not guessed one by one
HALF_LIFE = 64  # runs after which a point counts half


@dataclass(eq=False)
class ExpertStack:
    """The matrices of all experts, for one product.

    Attributes:
        step: the product's; its argument "weights" is the stack.
        view: the stack in the mapped file, uint8 [experts, rows, bytes of a row].
    """

    step: KernelStep
    view: np.ndarray
    path: str
    offset: int

    def __post_init__(self) -> None:
        self.stride, self.nbytes = self.view.strides[0], self.view[0].nbytes

    def move(self) -> None:
        """Reserve addresses, and replace the stack by one there. Raises MemoryLimitError."""
        size = self.offset % BLOCK + self.stride * (len(self.view) - 1) + self.nbytes
        try:
            self._region = MemoryRegion(round_to_blocks(size), whole=False)
        except (OSError, ValueError, OverflowError):
            raise MemoryLimitError(f"the addresses of {size / 1e9:.2f} GB of experts cannot be reserved") from None
        self._memory = np.frombuffer(memoryview(self._region.buffer), np.uint8)
        shape, strides = self.view.shape, self.view.strides
        moved = np.ndarray(shape, self.view.dtype, self._memory.data, self.offset % BLOCK, strides)
        self.step.arguments["weights"] = moved

    def list_reads(self, number: int) -> Iterator[Read]:
        """Return the reads of an expert's matrix. Raises MemoryLimitError."""
        start = self.offset % BLOCK + number * self.stride
        first, end = start - start % BLOCK, round_to_blocks(start + self.nbytes)
        try:
            self._region.use(first, end)
        except OSError:  # on Windows; other systems need no commitment
            raise MemoryLimitError("no memory is left for an expert: close programs, or lower --memory") from None
        return list_reads(self.path, self.offset + number * self.stride, self.nbytes, self._memory[first:end])

    def give_back(self, number: int) -> None:
        """Release the memory of an expert, but for blocks that it shares with its neighbours."""
        start = self.offset % BLOCK + number * self.stride
        self._region.give_back(round_to_blocks(start), (start + self.nbytes) // BLOCK * BLOCK)


@dataclass(eq=False)
class Mixture:
    """The stacks of experts that a routing chooses from.

    Attributes:
        active: the records (EXPERT) of the chosen experts.  count: how many, int64 [1].
        stacks: in the order of the tape.
        router: None if it is not known how experts are chosen.
        stage: of the tape, in which they are chosen.
        experts: how many there are.  nbytes: of one.
        is_cached: for each expert, whether it is in the cache or requested.  points: see the module.
        left: for each stack, the number of reads that are not done.
    """

    active: Buffer
    count: np.ndarray
    stacks: list[ExpertStack]
    router: "Router | None"
    stage: int

    def __post_init__(self) -> None:
        self.experts, self.nbytes = len(self.stacks[0].view), sum(stack.nbytes for stack in self.stacks)
        self.is_cached, self.points = np.zeros(self.experts, bool), np.zeros(self.experts)
        self.left = [0] * len(self.stacks)

    def read_chosen_experts(self) -> np.ndarray:
        """Return the indices of the experts that the current run has chosen."""
        count = int(self.count[0])
        words = (ctypes.c_int64 * (count * len(EXPERT))).from_address(self.active.address)
        return np.array(words).reshape(count, len(EXPERT))[:, EXPERT.number]


@dataclass(eq=False)
class Router:
    """The matrix that experts are chosen by.

    Attributes:
        x: its input, float32.  count: of tokens, int64 [1].
        weights: float32 [experts, columns].
        used: experts of a token.
    """

    x: Buffer
    count: np.ndarray
    weights: np.ndarray
    used: int

    def guess(self, after: "Router") -> np.ndarray:
        """Return the experts that this layer may choose, from the input of an earlier layer's router.

        A layer changes the residual stream little, so that most guesses are right. Long prompts need nearly all.
        """
        tokens, (experts, columns) = int(after.count[0]), self.weights.shape
        if tokens > MAX_GUESSED_TOKENS:
            return np.arange(experts if tokens * self.used >= 2 * experts else 0)
        floats = (ctypes.c_float * (tokens * after.x.stride // 4)).from_address(after.x.address)
        logits = np.array(floats).reshape(tokens, -1)[:, :columns] @ self.weights.T
        return np.unique(np.argsort(logits, axis=1)[:, -self.used :])


class ExpertCache:
    """The experts in memory, of all mixtures.

    Attributes:
        hits, misses: the experts that were in memory or guessed when they were chosen, and those that were not.
    """

    def __init__(self, mixtures: Sequence[Mixture], budget: int, ahead: ReadAhead):
        """Divide `budget` bytes among the experts of all mixtures, in the order of the tape."""
        self._free, self._point, self._ahead = budget, 1.0, ahead
        self._whole = self._budget = budget
        self._least = max((each.experts * each.nbytes for each in mixtures), default=0)
        self._used = set[tuple[Mixture, int]]()  # experts that must stay
        self._growth = 2 ** (1 / (HALF_LIFE * max(len(mixtures), 1)))
        self._following = dict(pairwise(mixtures))
        self.mixtures, self.hits, self.misses = mixtures, 0, 0

    def request(self, mixture: Mixture) -> None:
        """Request the chosen experts that the cache lacks, and then those that the next mixture may choose."""
        chosen, (withdrawn, partial) = mixture.read_chosen_experts(), self._ahead.withdraw_guesses()
        needed = {(mixture, number) for number in chosen.tolist()}
        for owner, number in {request.key for request in withdrawn if request.key} - needed - partial:
            self._release(owner, number)
        missing = chosen[~mixture.is_cached[chosen]]
        self.hits, self.misses = self.hits + len(chosen) - len(missing), self.misses + len(missing)
        self._point *= self._growth  # in place of a decay of all points
        mixture.points[chosen] += self._point
        self._used = needed | partial
        self._make_room(len(missing) * mixture.nbytes)
        urgent = [request for request in withdrawn if request.key in needed]
        self._ahead.request([*urgent, *self._list_requests(mixture, missing)])
        # The memory of an expert that is partly read cannot be released, so its other reads follow.
        self._ahead.request((each for each in withdrawn if each.key in partial - needed), is_guess=True)
        following = self._following.get(mixture)
        if following and following.router and mixture.router:
            self._guess(following, following.router.guess(mixture.router))

    def shrink(self, nbytes: int) -> int:
        """Release experts of at most `nbytes` bytes, but none that the current layer uses; return the bytes released.

        The largest layer's experts must fit, since a long prompt may need all of them.
        """
        nbytes = max(min(nbytes, self._budget - self._least), 0)
        self._budget -= nbytes
        if nbytes:
            self._make_room(nbytes)
        return nbytes

    def grow(self, nbytes: int) -> int:
        """Take at most `nbytes` bytes more, up to what it had at first; return how many."""
        nbytes = min(nbytes, self._whole - self._budget)
        self._free, self._budget = self._free + nbytes, self._budget + nbytes
        return nbytes

    def _guess(self, mixture: Mixture, numbers: np.ndarray) -> None:
        """Read experts that may be chosen next, where there is room without those that are used."""
        self._used |= {(mixture, number) for number in numbers.tolist()}
        missing = numbers[~mixture.is_cached[numbers]]
        if self._make_room(len(missing) * mixture.nbytes):
            self._ahead.request(self._list_requests(mixture, missing), is_guess=True)
        else:
            self._free += len(missing) * mixture.nbytes

    def _list_requests(self, mixture: Mixture, numbers: np.ndarray) -> list[ReadRequest]:
        requests = [
            ReadRequest(mixture.left, index, read, (mixture, number))
            for index, stack in enumerate(mixture.stacks)
            for number in numbers.tolist()
            for read in stack.list_reads(number)
        ]
        mixture.is_cached[numbers] = True
        return requests

    def _make_room(self, nbytes: int) -> bool:
        """Take `nbytes` bytes, and release the experts with the fewest points for them, but no used ones.

        Return whether there was enough to release.
        """
        self._free -= nbytes
        if self._free >= 0:
            return True
        owners, numbers, points = list[Mixture](), list[int](), list[float]()
        for each in self.mixtures:
            is_free = each.is_cached.copy()
            is_free[[number for owner, number in self._used if owner is each]] = False
            cached = np.flatnonzero(is_free)
            owners += [each] * len(cached)
            numbers += cached.tolist()
            points += each.points[cached].tolist()
        for index in np.argsort(points, kind="stable").tolist():
            if self._free >= 0:
                break
            self._release(owners[index], numbers[index])
        return self._free >= 0

    def _release(self, mixture: Mixture, number: int) -> None:
        mixture.is_cached[number] = False
        self._free += mixture.nbytes
        for stack in mixture.stacks:
            stack.give_back(number)

    def restart(self) -> None:
        """Forget the experts of mixtures whose reads were given up; no read is running."""
        for mixture in self.mixtures:
            if any(mixture.left):
                mixture.left[:] = [0] * len(mixture.left)
                for number in np.flatnonzero(mixture.is_cached).tolist():
                    self._release(mixture, number)


def find_mixtures(steps: Sequence[KernelStep], locate: Locate) -> list[Mixture]:
    """Return the mixtures of a tape whose stacks are in the mapped file; steps: with stages."""
    writers, planned = dict[int, KernelStep](), dict[int, tuple[Router | None, int]]()  # by the buffer's id
    found = dict[int, tuple[Buffer, np.ndarray, list[ExpertStack]]]()
    for step in steps:
        view = step.arguments.get("weights")
        if step.kernel == "plan_experts":
            planned[id(step.arguments["active"])] = find_router(step, writers), step.stage
        elif step.kernel.startswith("experts_") and isinstance(view, np.ndarray) and (place := locate(view)):
            active, count = step.arguments["active"], step.arguments["active_count"]
            assert isinstance(active, Buffer) and isinstance(count, np.ndarray)
            found.setdefault(id(active), (active, count, []))[2].append(ExpertStack(step, view, *place))
        writers |= {id(buffer): step for buffer in step.writes}
    return [Mixture(*each, *planned[active]) for active, each in found.items()]


def find_router(plan: KernelStep, writers: Mapping[int, KernelStep]) -> Router | None:
    """Return the router of a mixture, or None if its weights are not float32; writers: of buffers so far, by id."""
    route = writers.get(id(plan.arguments["chosen"]))
    product = writers.get(id(route.arguments.get("logits"))) if route else None
    if not route or not product or product.kernel != "linear_float-F32":
        return None
    x, count, weights = (product.arguments[name] for name in ("x", "count", "weights"))
    used = route.arguments["used"]
    if not isinstance(x, Buffer) or not isinstance(count, np.ndarray) or not isinstance(weights, np.ndarray):
        return None
    assert isinstance(used, int)
    return Router(x, count, weights.view(np.float32).reshape(len(weights), -1), used)
