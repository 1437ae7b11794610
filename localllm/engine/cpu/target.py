"""The CPU's choices: work division, scratch memory, and products in tiles."""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import ClassVar

import numpy as np

from localllm.arch.weights import Weight
from localllm.engine.cpu.kernel_variants import VariantTable
from localllm.engine.lower.tape import SCRATCH_BYTES, Scratch
from localllm.engine.run import BATCH
from localllm.errors import UnsupportedError
from localllm.frozen import frozen
from localllm.kernels.cpu import EXPERT_ROWS, PLAIN, TOKENS_AT_ONCE
from localllm.quant.formats import LAYOUTS


@frozen
class CpuTarget:
    """A localllm.engine.lower.steps.Target.

    Attributes:
        in_tiles: whether attention, and products of more than a few tokens, use BF16 tiles.
        variants: kernel variants of quantized products, which are loaded on demand.
        keeps: whether later runs read the keys and values of a run; float weights then compute them in float32.
            Quantized weights always use 16-bit activations for them: MiniLM in Q8_0 loses 2.6e-4 of its vectors'
            cosine with these, 4.3e-4 without.
    """

    threads: int
    in_tiles: bool
    verbs: Mapping[str, Callable[..., None]]
    variants: VariantTable = field(default_factory=VariantTable)
    tokens: int = BATCH
    keeps: bool = True
    expert_rows: ClassVar[int] = EXPERT_ROWS

    @property
    def buffer_rows(self) -> int:
        """Rows of an activation's buffer: rounded up to the tokens that kernels process at once."""
        return max(-(-self.tokens // at_once) * at_once for at_once in TOKENS_AT_ONCE)

    @property
    def wanted_rows(self) -> int:
        return self.buffer_rows

    def matrix(self, weight: Weight) -> np.ndarray:
        name = weight.tensor.format.name
        if name not in PLAIN and name not in LAYOUTS:
            raise UnsupportedError(f"tensor {weight.name}: format {name} is not supported")
        return weight.tensor.data

    def layout_of(self, weight: Weight) -> tuple[str, int]:
        """Return the file's layout: the CPU reads weights as they are in the file."""
        return weight.tensor.format.name, weight.tensor.format.row_bytes(weight.shape[-1])

    def scratch(self, size: int) -> dict[str, object]:
        return {"scratch": Scratch(size), "scratch_bytes": SCRATCH_BYTES}

    def share(self, rows: int, count: np.ndarray) -> tuple[int, np.ndarray | None]:
        """Return 4 parts per thread."""
        return 4 * self.threads, count

    def parts(self, wanted: int, rows: int) -> int:
        return wanted
