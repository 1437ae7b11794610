"""From what an architecture has said of a model, and options, to what computes it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from localllm.arch.layer_state import State
from localllm.arch.weights import Weights
from localllm.engine.backend import Backend
from localllm.engine.cpu.backend import CpuBackend
from localllm.engine.cuda.driver import has_driver
from localllm.engine.operations.operation import Operation
from localllm.engine.options import EngineOptions
from localllm.errors import LocalllmError, UnsupportedError
from localllm.files.gguf.file import GGUFFile

if TYPE_CHECKING:
    from localllm.engine.cuda.devices import Placed


class TracedModel(NamedTuple):
    """What an architecture has said of a model.

    forward: says it once more, to another builder; context: the most tokens of a sequence; encoding: what an encoder
    does, if there is one; rows: what is done with an image's rows (localllm.engine.trace.image_rows), if they see
    each other and if not.
    """

    file: GGUFFile
    operations: list[Operation]
    forward: Callable[..., Any]
    hyperparameters: Any
    context: int
    encoding: Sequence[Operation] = ()
    rows: Callable[[bool], Any] | None = None

    @property
    def states(self) -> list[State]:
        return list(self.hyperparameters.states())


class SelectedBackend(NamedTuple):
    """What computes, for people what that is, and what they should know, in one line.

    limits: of a card that computes all, bytes per second of its memory, and operations per second; None otherwise.
    """

    backend: Backend
    device: str = "CPU"
    note: str | None = None
    limits: tuple[float, float] | None = None


class BackendChoice(NamedTuple):
    """What is going to compute: cpu, reference, or card, which has to be found first; and why no card does."""

    kind: str
    note: str | None = None


def chosen(options: EngineOptions, has_driver: Callable[[], bool]) -> BackendChoice:
    """The choice that options make; has_driver is asked only where it matters."""
    if options.backend in ("cpu", "reference"):
        return BackendChoice(options.backend)
    if options.backend == "auto" and not has_driver():
        is_surprise = options.gpu_layers not in ("auto", 0)
        return BackendChoice("cpu", "the CPU computes: there is no NVIDIA driver" if is_surprise else None)
    return BackendChoice("card")


def opened(said: TracedModel, options: EngineOptions) -> SelectedBackend:
    """What computes a model. Raises LocalllmError."""
    kind, note = chosen(options, has_driver)
    if kind == "reference":
        return SelectedBackend(reference(said, options))
    if kind == "card":
        found = on_card(said, options)
        if isinstance(found, SelectedBackend):
            return found
        note = found
    operations = options.observer.watch(said.operations) if options.observer else said.operations
    backend = CpuBackend(operations, said.states, said.context, options, said.encoding, said.rows)
    return SelectedBackend(backend, note=note)


def reference(said: TracedModel, options: EngineOptions) -> Backend:
    """Plain NumPy."""
    from localllm.engine.reference import ReferenceBackend  # seldom needed

    forward = partial(said.forward, w=Weights(said.file.tensors), h=said.hyperparameters)
    encode = said.hyperparameters.encode
    encoding = encode and partial(encode, w=Weights(said.file.tensors), h=said.hyperparameters)
    return ReferenceBackend(forward, options.kept_as, said.context, options.observer, encoding)


def on_card(said: TracedModel, options: EngineOptions) -> SelectedBackend | str | None:
    """What computes with a card; if none gets layers, why, should that surprise. Raises LocalllmError."""
    if said.encoding:
        if options.backend != "auto":
            raise UnsupportedError("what an encoder reads is computed by the CPU only: use --device cpu")
        return "the CPU computes: encoders do not run on cards"
    from localllm.engine.cuda.devices import placed
    from localllm.engine.cuda.program import buffer_bytes

    layers, buffers = said.hyperparameters.layers, partial(buffer_bytes, said.operations)
    found = placed(options, said.file, said.states, layers, said.context, buffers)
    if found.card is None or not found.layers:
        return found.warning
    try:
        backend = card_backend(said, options, found)
    except LocalllmError as error:
        found.card.close()
        if options.backend != "auto":
            raise
        return f"the CPU computes: {error}"
    limits = (found.card.bandwidth, found.card.peak) if found.layers == layers else None
    return SelectedBackend(backend, f"{found.card.name}, {found.layers} of {layers} layers", found.warning, limits)


def card_backend(said: TracedModel, options: EngineOptions, found: "Placed") -> Backend:
    """Raises MemoryLimitError, UnsupportedError, LocalllmError."""
    from localllm.engine.cuda.backend import CudaBackend

    assert found.card
    on_cpu = said.hyperparameters.layers - found.layers
    return CudaBackend(found.card, said.operations, said.states, said.context, options, on_cpu, found.spare)
