"""Declare the options of an engine, for the command line and the Python API."""

import re
from functools import cached_property
from typing import TYPE_CHECKING

from localllm.arch.layer_state import KVType
from localllm.engine.trace.imatrix_collector import ImatrixCollector
from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.kernels.build.objects import Progress
from localllm.system.cpu import count_usable_cores
from localllm.values import require_integer

if TYPE_CHECKING:
    from localllm.arch.rope_scaling import RopeScaling
    from localllm.engine.adapters import Adapter

MAX_THREADS = 1024
DEVICES = re.compile(r"cpu|auto|reference|cuda(:\d{1,3})?")


@frozen
class EngineOptions:
    """The options of an engine.

    Attributes:
        threads: compute threads; None: the available physical cores.
        context: maximum number of tokens in a sequence; None: the model's training context.
        kv_type: storage type of keys and values, see KVType.parse.
        backend: cpu, cuda, cuda:N, auto (a GPU if one works) or reference.
        gpu_layers: how many of the last layers a GPU computes: a count, all, or auto for as many as fit.
        progress: called with (done, total) while kernels are compiled.
        on_upload: called with (bytes, total) while weights are uploaded to a GPU.
        observer: collects statistics of the matrices' inputs for an importance matrix.
        rope: RoPE scaling that replaces the file's; None: the file's.
        lora: low-rank adapters that sequences can use, each with the scale that new sequences have; `open_with_options`
            also takes the paths of files and PEFT folders.
        control_vectors: files of control vectors, each with a scale; they are added up.
        control_layers: the first and the last layer that they change; None: all.
        memory: bytes for weights, cache and buffers on the CPU; a larger model's weights are read from the disk in each
            run. None: what is available.
    """

    threads: int | None = None
    context: int | None = None
    kv_type: str = "f16"
    backend: str = "cpu"
    gpu_layers: int | str = "auto"
    progress: Progress | None = None
    on_upload: Progress | None = None
    observer: ImatrixCollector | None = None
    rope: "RopeScaling | None" = None
    lora: "tuple[tuple[Adapter | str, float], ...]" = ()
    control_vectors: tuple[tuple[str, float], ...] = ()
    control_layers: tuple[int, int] | None = None
    memory: int | None = None

    @cached_property
    def kv_cache_type(self) -> KVType:
        """The storage type of keys and values. Raises UsageError."""
        return KVType.parse(self.kv_type)

    @cached_property
    def thread_count(self) -> int:
        """The number of compute threads. Raises UsageError if the option is invalid."""
        count = count_usable_cores() if self.threads is None else self.threads
        if not 1 <= count <= MAX_THREADS:
            raise UsageError(f"threads must be from 1 to {MAX_THREADS} (found {count})")
        return count

    def require_valid(self) -> None:
        _ = self.kv_cache_type
        if self.context is not None and self.context < 1:
            raise UsageError(f"context must be at least 1 token (found {self.context})")
        _ = self.thread_count
        if self.rope:
            self.rope.require_valid()
        if not DEVICES.fullmatch(self.backend):
            raise UsageError(f"unknown device {self.backend!r}: use cpu, cuda, cuda:N, auto or reference")


def parse_gpu_layers(gpu_layers: int | str) -> int | str:
    """Return a layer count, "all" or "auto". Raises UsageError for anything else."""
    if isinstance(gpu_layers, str) and gpu_layers not in ("all", "auto"):
        raise UsageError(f"gpu_layers must be an integer, all or auto (found {gpu_layers!r})")
    return gpu_layers if isinstance(gpu_layers, str) else require_integer("gpu_layers", gpu_layers)
