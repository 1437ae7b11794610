"""Select the kernel variants of a run's quantized products, and load them before the run."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from localllm.engine.lower.activation import ALL, RoutedRows, RowSet
from localllm.engine.runs import UNLIMITED
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.build.objects import Progress
from localllm.kernels.cpu import PRECISE_TOKENS
from localllm.kernels.cpu.matmul.kernel_variants import VARIANTS, get_max_few_fast, get_max_few_tokens, select_variant


class RunShape(NamedTuple):
    """The token counts that select the kernels of a run.

    Attributes:
        tokens, wanted: counts of tokens, and of requested logits.
        kernel_tokens, kernel_wanted: see localllm.engine.runs.
        most_precise: activations keep 16 bits up to this value of kernel_tokens.
    """

    tokens: int
    wanted: int
    kernel_tokens: int
    kernel_wanted: int
    most_precise: int


# The most common first runs: a short prompt in a chat template, and one token.
FIRST_RUNS = RunShape(32, 1, 32, 1, PRECISE_TOKENS), RunShape(1, 1, 1, 1, PRECISE_TOKENS)


class VariantProduct(NamedTuple):
    """The properties that determine the kernel variants of a matrix product."""

    format: str
    few: int  # see `few_tokens`
    few_fast: int
    rows: RowSet
    most: int  # maximum of kernel_tokens; more are multiplied in tiles
    is_precise: bool  # whether activations keep 16 bits in every run

    def list_variants(self, run: RunShape) -> list[str]:
        """Return the kernels that a run needs for this product."""
        of = self.rows.of if isinstance(self.rows, RoutedRows) else self.rows
        tokens, kernel_tokens = (run.tokens, run.kernel_tokens) if of is ALL else (run.wanted, run.kernel_wanted)
        most_precise = UNLIMITED if self.is_precise else run.most_precise
        counts = [(tokens, kernel_tokens)]
        if isinstance(self.rows, RoutedRows):  # experts with some of the tokens, in the run's precision
            most_precise = UNLIMITED if kernel_tokens <= most_precise else 0
            numbers = [count for count in (1, 2, self.few + 1, self.few_fast + 1) if count <= tokens]
            counts = [(count, 1 if kernel_tokens <= PRECISE_TOKENS else count) for count in numbers]
        select: Callable[..., int] = select_variant
        chosen = {
            select(count, kernel, self.few, self.few_fast, most_precise)
            for count, kernel in counts
            if count and kernel <= self.most
        }
        return [f"{VARIANTS[number]}-{self.format}" for number in sorted(chosen)]


class VariantTable:
    """The addresses of a model's kernel variants, in arrays that its kernels read."""

    def __init__(self) -> None:
        self._tables: dict[str, np.ndarray] = {}  # addresses of variants, by format
        self._products: dict[VariantProduct, None] = {}

    def register(
        self, format: str, columns: int, rows: RowSet, most_tokens: int, is_precise: bool
    ) -> dict[str, object]:
        """Add a matrix product, and return the kernel arguments that locate its variants."""
        table = self._tables.setdefault(format, np.zeros(len(VARIANTS), np.int64))
        few, fast = get_max_few_tokens(format, columns), get_max_few_fast(format, columns)
        product = VariantProduct(format, few, fast, rows, most_tokens, is_precise)
        self._products[product] = None
        return {"variants": table, "few_tokens": few, "few_fast": fast}

    def list_names(self, run: RunShape) -> list[str]:
        """Return the kernels that a run needs for all products."""
        return [*dict.fromkeys(name for product in self._products for name in product.list_variants(run))]

    def list_all_names(self) -> list[str]:
        """Return the kernels of all possible runs, those of the most common first runs first."""
        limits = {1, *self.limits, *(product.most for product in self._products)}
        numbers = sorted(limits | {limit + 1 for limit in limits})
        shapes = [(number, number, precise) for number in numbers for precise in (UNLIMITED, 1)] + [(2, 1, UNLIMITED)]
        runs = [*FIRST_RUNS, *(RunShape(count, count, kernel, kernel, precise) for count, kernel, precise in shapes)]
        return [*dict.fromkeys(name for run in runs for name in self.list_names(run))]

    @property
    def limits(self) -> set[int]:
        """The values of kernel_tokens above which other variants are selected."""
        return {limit for product in self._products for limit in (product.few, product.few_fast)}

    def fill(self, addresses: dict[str, int]) -> None:
        for format, table in self._tables.items():
            table[:] = [addresses.get(f"{piece}-{format}", 0) for piece in VARIANTS]


class VariantLoader:
    """Loads kernel variants when a run first needs them.

    Attributes:
        library: all kernels of the model.
    """

    def __init__(self, library: KernelLibrary, variants: VariantTable, progress: Progress | None):
        """Prepare to load variants from a library.

        progress(done, total): called while runs wait for variants, up to the first logits.
        """
        self.library, self._variants, self._progress = library, variants, progress
        self._ready = set[RunShape]()

    def prepare(self, run: RunShape) -> None:
        """Load the variants that a run needs. Raises LocalllmError."""
        if run not in self._ready:
            self._load(self._variants.list_names(run), self._progress)
            self._ready.add(run)
            if run.wanted:
                self._progress = None
                self.library.lower_priority()

    def prepare_all(self) -> None:
        """Load the variants of all possible runs. Raises LocalllmError."""
        self._load(self._variants.list_all_names(), self._progress)

    def _load(self, names: list[str], progress: Progress | None) -> None:
        self.library.load(names, progress)
        self._variants.fill(self.library.addresses)
