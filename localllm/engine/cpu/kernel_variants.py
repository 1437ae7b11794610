"""Select the kernel variants that a run's quantized matrix products need, and load them before the run."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from localllm.engine.operations.activation import ALL, Routed, Rows
from localllm.kernels.build.library import Library
from localllm.kernels.build.objects import Progress
from localllm.kernels.cpu.matmul.kernel_variants import VARIANTS, few_tokens, variant_for

EVERY = 1 << 40  # tokens
# The most frequent first runs: a short prompt in a chat template, and one token.
FIRST_RUNS = (32, 1, 128), (1, 1, 128)


class VariantProduct(NamedTuple):
    """The properties of a matrix product that select its kernel variants."""

    format: str
    few: int  # see `few_tokens`
    rows: Rows
    most: int  # tokens; more are multiplied in tiles
    is_precise: bool  # whether activations keep 16 bits in every run

    def variants(self, tokens: int, wanted: int, most_precise: int) -> list[str]:
        """List the kernels that a run needs; arguments: see VariantTable.names."""
        of = self.rows.of if isinstance(self.rows, Routed) else self.rows
        first = last = tokens if of is ALL else wanted
        if isinstance(self.rows, Routed):  # experts with some of the tokens, in the run's precision
            first, most_precise = 1, EVERY if last <= most_precise else 0
        most_precise, last = EVERY if self.is_precise else most_precise, min(last, self.most)
        counts = [first, *(count for count in (2, self.few + 1, most_precise + 1) if first < count)]
        select: Callable[..., int] = variant_for
        numbers = {select(count, self.few, most_precise) for count in counts if 0 < count <= last}
        return [f"{VARIANTS[number]}-{self.format}" for number in sorted(numbers)]


class VariantTable:
    """The addresses of a model's kernel variants, where its kernels find them."""

    def __init__(self) -> None:
        self._tables: dict[str, np.ndarray] = {}  # addresses of variants, by format
        self._products: dict[VariantProduct, None] = {}

    def arguments(self, format: str, columns: int, rows: Rows, most_tokens: int, is_precise: bool) -> dict[str, object]:
        """Return the kernel arguments by which a matrix product finds its variants."""
        table = self._tables.setdefault(format, np.zeros(len(VARIANTS), np.int64))
        product = VariantProduct(format, few_tokens(format, columns), rows, most_tokens, is_precise)
        self._products[product] = None
        return {"variants": table, "few_tokens": product.few}

    def names(self, tokens: int, wanted: int, most_precise: int) -> list[str]:
        """List the kernels that a run needs.

        tokens: number of tokens of the run; wanted: requested logits; most_precise: the most tokens whose activations
        keep 16 bits.
        """
        run = tokens, wanted, most_precise
        return [*dict.fromkeys(name for product in self._products for name in product.variants(*run))]

    def all_names(self) -> list[str]:
        """List the kernels of all possible runs, those of the most frequent first runs at the front."""
        counts = {1, 2, *(count for product in self._products for count in (product.few + 1, product.most))}
        runs = [*FIRST_RUNS, *((count, count, precise) for count in sorted(counts) for precise in (EVERY, 1))]
        return [*dict.fromkeys(name for run in runs for name in self.names(*run))]

    def fill(self, addresses: dict[str, int]) -> None:
        """Store the variants' addresses."""
        for format, table in self._tables.items():
            table[:] = [addresses.get(f"{piece}-{format}", 0) for piece in VARIANTS]


class Loader:
    """Loads the variants that runs need.

    Attributes:
        library: all kernels of the model.
    """

    def __init__(self, library: Library, variants: VariantTable, progress: Progress | None):
        """Store the library; progress(done, total) is called while a run waits for variants, up to the first logits."""
        self.library, self._variants, self._progress = library, variants, progress
        self._ready = set[tuple[int, int, int]]()

    def prepare(self, tokens: int, wanted: int, most_precise: int) -> None:
        """Load the variants that a run needs, see VariantTable.names. Raises LocalllmError."""
        run = tokens, wanted, most_precise
        if run not in self._ready:
            self._load(self._variants.names(*run), self._progress)
            self._ready.add(run)
            if wanted:
                self._progress = None
                self.library.give_way()

    def prepare_all(self) -> None:
        """Load the variants of all possible runs. Raises LocalllmError."""
        self._load(self._variants.all_names(), self._progress)

    def _load(self, names: list[str], progress: Progress | None) -> None:
        self.library.load(names, progress)
        self._variants.fill(self.library.addresses)
