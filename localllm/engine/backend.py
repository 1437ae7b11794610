"""Define the Backend protocol; select and build the backend of a traced model."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Sequence as Ids
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import State
from localllm.arch.verbs import Activation
from localllm.arch.weights import Weights, count_table_bytes
from localllm.engine.cpu.backend import CpuBackend
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.operations.operation import Operation
from localllm.engine.options import EngineOptions
from localllm.engine.trace.recorder import ImageRowOperations
from localllm.engine.trace.rope_shift import RopeShift
from localllm.errors import LocalllmError, UnsupportedError
from localllm.files.gguf.file import GGUFFile
from localllm.system.memory import get_available_memory, get_system_memory
from localllm.system.processes import has_driver

if TYPE_CHECKING:
    from localllm.engine.cpu.weight_stream import WeightStorage
    from localllm.engine.cuda.devices import GpuPlacement
    from localllm.engine.hooks import HookedOperations


WORKING_BYTES = 200 << 20  # memory besides weights and cache: activations, kernels


class Backend(Protocol):
    """Executes the runs of one model."""

    warning: str | None  # one line for the user, or None
    bytes_per_token: int  # cache memory of one token in all layers
    rotates_keys: bool  # whether prepare_shift and rotate_keys are supported

    @property
    def kernel_limits(self) -> Ids[int]:
        """Ascending token counts above which matrix products use other kernels (localllm.engine.runs)."""
        ...

    def create_state(self) -> SequenceState: ...

    def get_cache_usage(self) -> tuple[int, int]:
        """Return the number of token slots in use and of all slots, in whole pages."""
        ...

    def run(self, spans: Ids[SequenceSpan], precise: bool) -> np.ndarray:
        """Compute the requested logits of all spans in order, float32 [wanted, vocab].

        The spans have at most BATCH tokens in total. precise: runs of few tokens keep 16-bit activations. Raises
        ModelError if a logit is NaN or infinite.
        """
        ...

    def encode(self, spans: Ids[SequenceSpan], precise: bool) -> None:
        """Run the encoder over whole inputs, one per span, so that the decoder can attend to its output.

        Raises the errors of `run`.
        """
        ...

    def prepare_all(self) -> None:
        """Wait until all kernels are compiled. Raises LocalllmError."""
        ...

    def prepare_shift(self, turns: Mapping[State, RopeShift]) -> None:
        """Compile the kernels that rotate cached keys.

        turns: the rotation of each layer's keys. Raises LocalllmError.
        """
        ...

    def rotate_keys(self, store: SequenceState, first: int, end: int, distance: int) -> None:
        """Rotate the keys at positions [first, end), which were computed `distance` positions later."""
        ...

    def close(self) -> None: ...


class TracedModel(NamedTuple):
    """The operations of a model, and what is needed to trace it again.

    Attributes:
        forward: the architecture's function, which takes any builder.
        context: maximum number of tokens in a sequence.
        encoding: operations of the encoder, empty without one.
        rows: traces the model for image rows (localllm.engine.trace.recorder), given whether these have bidirectional
            attention.
        hooks: traces the model with hook points (localllm.engine.hooks), given whether with attention.
    """

    file: GGUFFile
    operations: list[Operation]
    forward: Callable[..., Activation]
    hyperparameters: Hyperparameters
    context: int
    encoding: Sequence[Operation] = ()
    rows: Callable[[bool], ImageRowOperations | None] | None = None
    hooks: "Callable[[bool], HookedOperations] | None" = None

    @property
    def states(self) -> list[State]:
        return list(self.hyperparameters.list_states())


class SelectedBackend(NamedTuple):
    """A backend, the name of its device for users, and a one-line warning.

    limits: bytes and operations per second of a GPU that has all layers, otherwise None.
    """

    backend: Backend
    device: str = "CPU"
    note: str | None = None
    limits: tuple[float, float] | None = None


class BackendChoice(NamedTuple):
    """The backend to build: cpu, reference or card.

    note: why the CPU was chosen, where the user may not expect it, otherwise None.
    """

    kind: str
    note: str | None = None


def choose_backend(options: EngineOptions, has_driver: Callable[[], bool]) -> BackendChoice:
    """Choose the backend that the options ask for.

    has_driver: called only for the device auto; returns whether there is a GPU driver.
    """
    if options.backend in ("cpu", "reference"):
        return BackendChoice(options.backend)
    if options.backend == "auto" and not has_driver():
        is_surprise = options.gpu_layers not in ("auto", 0)
        return BackendChoice("cpu", "the CPU computes: no NVIDIA driver found" if is_surprise else None)
    return BackendChoice("card")


def build_backend(traced: TracedModel, options: EngineOptions) -> SelectedBackend:
    """Build the backend of a traced model, as its options ask for. Raises LocalllmError."""
    kind, note = choose_backend(options, has_driver)
    if kind == "reference":
        return SelectedBackend(build_reference_backend(traced, options))
    if kind == "card":
        choice = build_gpu_backend(traced, options)
        if isinstance(choice, SelectedBackend):
            return choice
        note = choice
    operations = options.observer.insert_sums(traced.operations) if options.observer else traced.operations
    storage = make_storage(traced, options)
    backend = CpuBackend(
        operations, traced.states, traced.context, options, traced.encoding, traced.rows, storage, traced.hooks
    )
    return SelectedBackend(backend, note=storage.describe(traced.file.nbytes) if storage else note)


def make_storage(traced: TracedModel, options: EngineOptions) -> "WeightStorage | None":
    """Return the storage from which the CPU reads weights larger than memory; None if they fit."""
    nbytes = traced.file.nbytes - count_table_bytes(traced.file.tensors)
    memory = get_available_memory(mapped=nbytes) if options.memory is None else options.memory
    if nbytes <= memory - WORKING_BYTES:
        return None
    from localllm.engine.cpu.weight_stream import WeightStorage

    if options.memory is None:  # leave some to other programs
        memory = min(memory, get_system_memory() * 15 // 16)
    return WeightStorage(traced.file.locate, max(memory - WORKING_BYTES, 0), options.memory)


def build_reference_backend(traced: TracedModel, options: EngineOptions) -> Backend:
    from localllm.engine.reference import ReferenceBackend  # rarely needed

    forward = partial(traced.forward, w=Weights(traced.file.tensors), h=traced.hyperparameters)
    encode = traced.hyperparameters.encode
    encoding = encode and partial(encode, w=Weights(traced.file.tensors), h=traced.hyperparameters)
    return ReferenceBackend(forward, options.kv_cache_type, traced.context, options.observer, encoding)


def build_gpu_backend(traced: TracedModel, options: EngineOptions) -> SelectedBackend | str | None:
    """Build a GPU backend, or return why the CPU is used instead: a line for the user, or None.

    Raises LocalllmError.
    """
    if traced.encoding:
        if options.backend != "auto":
            raise UnsupportedError("encoder models run on the CPU only: use --device cpu")
        return "the CPU computes: encoders do not run on GPUs"
    from localllm.engine.cuda.devices import place_layers
    from localllm.engine.cuda.program import compute_buffer_bytes

    layers, buffers = traced.hyperparameters.layers, partial(compute_buffer_bytes, traced.operations)
    placement = place_layers(options, traced.file, traced.states, layers, traced.context, buffers)
    if placement.card is None or not placement.layers:
        return placement.warning
    try:
        backend = build_cuda_backend(traced, options, placement)
    except LocalllmError as error:
        placement.card.close()
        if options.backend != "auto":
            raise
        return f"the CPU computes: {error}"
    limits = (placement.card.bandwidth, placement.card.peak) if placement.layers == layers else None
    return SelectedBackend(
        backend, f"{placement.card.name}, {placement.layers} of {layers} layers", placement.warning, limits
    )


def build_cuda_backend(traced: TracedModel, options: EngineOptions, placement: "GpuPlacement") -> Backend:
    """Build the CUDA backend for a GPU that is open. Raises MemoryLimitError, UnsupportedError, LocalllmError."""
    from localllm.engine.cuda.backend import CudaBackend

    assert placement.card
    on_cpu = traced.hyperparameters.layers - placement.layers
    return CudaBackend(
        placement.card, traced.operations, traced.states, traced.context, options, on_cpu, placement.spare
    )
