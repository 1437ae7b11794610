"""How a model is run, as the command line and the Python API say it: one record that travels to the engine."""

import re

from localllm.arch.kv_cache_types import KVType
from localllm.engine.trace.imatrix_collector import ImatrixCollector
from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.kernels.build.library import Progress
from localllm.system.cpu import usable_cores
from localllm.values import whole_number

MOST_THREADS = 1024
DEVICES = re.compile(r"cpu|auto|reference|cuda(:\d{1,3})?")


@frozen
class EngineOptions:
    """What an engine is told.

    Attributes:
        threads: that compute; None: as many as the computer has physical cores to spare.
        context: the most tokens of a sequence; None: what the model was trained for.
        kv_type: how keys and values are kept, see KVType.of.
        backend: cpu, cuda, cuda:N, auto (a card if there is one that works) or reference.
        gpu_layers: how many of the last layers a card gets, a number, all, or auto for as many as it has room for.
        progress: called with (done, total) while kernels are compiled.
        uploading: called with (bytes, of all) while weights go to a card.
        observer: sums up what the matrices meet.
    """

    threads: int | None = None
    context: int | None = None
    kv_type: str = "f16"
    backend: str = "cpu"
    gpu_layers: int | str = "auto"
    progress: Progress | None = None
    uploading: Progress | None = None
    observer: ImatrixCollector | None = None

    @property
    def kept_as(self) -> KVType:
        """How keys and values are kept. Raises UsageError."""
        return KVType.of(self.kv_type)

    @property
    def thread_count(self) -> int:
        """How many compute. Raises UsageError."""
        count = usable_cores() if self.threads is None else self.threads
        if not 1 <= count <= MOST_THREADS:
            raise UsageError(f"threads should be from 1 to {MOST_THREADS}, not {count}")
        return count

    def require_valid(self) -> None:
        """Raises UsageError for options that make no sense."""
        _ = self.kept_as
        if self.context is not None and self.context < 1:
            raise UsageError(f"context should be at least 1 token, not {self.context}")
        _ = self.thread_count
        if not DEVICES.fullmatch(self.backend):
            raise UsageError(f"unknown device {self.backend!r}: use cpu, cuda, cuda:N, auto or reference")


def layers_of(gpu_layers: int | str) -> int | str:
    """Raises UsageError if they are no number, nor "all" or "auto"."""
    if isinstance(gpu_layers, str) and gpu_layers not in ("all", "auto"):
        raise UsageError(f"gpu_layers should be a number, all or auto, not {gpu_layers!r}")
    return gpu_layers if isinstance(gpu_layers, str) else whole_number("gpu_layers", gpu_layers)
