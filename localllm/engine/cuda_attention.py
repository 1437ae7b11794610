"""Attention on a card: which kernels, and in how many parts."""

from typing import Any

from localllm.arch.states import Latent, Paged
from localllm.engine.lowering import Lowering
from localllm.engine.recorder import ALL
from localllm.engine.tape import Buffer, Step
from localllm.frozen import frozen

BLOCKS = 264  # that fill a card of 132 multiprocessors, two each
DECODE = 8  # tokens; of so many, each has its context cut as if it were alone, and gets the same bits
FEW_TOKENS = 16  # of a run; for more, tensor cores
MOST_DIM = 256  # of a head, for tensor cores; beyond there are not enough registers
LANES, NUMBERS = 32, 8  # that share a head at most, and numbers that each reads of it at once
MOST_HEADS, MOST_NUMBERS = 8, 128  # of a bundle: query heads, and numbers of theirs and their results in registers


@frozen
class Few:
    """How localllm.kernels.cuda.attend_few deals with heads of these dimensions."""

    key_dim: int
    value_dim: int
    group: int  # query heads that share a key-value head

    @property
    def bundle(self) -> int:
        """Query heads that a block treats together: equal parts of the group that fit the registers."""
        numbers = NUMBERS * sum(-(-dim // (NUMBERS * LANES)) for dim in (self.key_dim, self.value_dim))
        most = min(max(MOST_NUMBERS // numbers, 1), MOST_HEADS)
        return -(-self.group // -(-self.group // most))

    @property
    def bundles(self) -> int:
        return -(-self.group // self.bundle)

    @property
    def partial_bytes(self) -> int:
        """Of the partial result of a head."""
        return 4 * (4 + -(-self.value_dim // 8) * 8)

    def parts(self, tokens: int, kv_heads: int) -> int:
        """In how many a context is cut at most."""
        return -(-BLOCKS // (kv_heads * self.bundles * (tokens if tokens > DECODE else 1)))


class AttentionLowering(Lowering):
    """Attention becomes steps, for a program of `tokens` tokens at most.

    Attributes:
        depth: of a product of tensor cores: 16, or 8 with compute capability 7.5.
    """

    depth: int = 16

    def _attention(self, state: Paged | Latent, arguments: dict[str, Any], reads: list[Buffer], y: Buffer) -> None:
        arguments |= {"window": state.window or 0, "chunked": state.chunked, "sequences": self.header.sequences}
        attend = self._attend_few if self._are_few(state) else self._attend_many
        attend(state, arguments, reads, y)

    def _are_few(self, state: Paged | Latent) -> bool:
        """Whether float32 is used: for few tokens, for who wants a cache in float32, and for very long heads."""
        is_exact = any(side.kind == "f32" for side in self._cache.sides(state))
        return self.tokens <= FEW_TOKENS or is_exact or max(state.key_dim, state.value_dim) > MOST_DIM

    def _attend_few(self, state: Paged | Latent, arguments: dict[str, Any], reads: list[Buffer], y: Buffer) -> None:
        """Each token on its own, its context cut in parts."""
        heads = arguments["heads"]
        few = Few(state.key_dim, state.value_dim, heads // state.kv_heads)
        parts = few.parts(self.tokens, state.kv_heads)
        partial = Buffer(self.tokens * heads * parts, few.partial_bytes)
        arguments |= {"count": self._count(ALL), "positions": self.header.positions, "owners": self.header.owners}
        arguments |= {"parts": parts, "partial": partial, "partial_bytes": few.partial_bytes}
        merged = {name: arguments.pop(name) for name in ("sinks", "y", "y_stride")}
        shared = ("count", "positions", "heads", "window", "chunked", "parts", "partial", "partial_bytes")
        merged |= {name: arguments[name] for name in shared} | {"value_dim": state.value_dim}
        kinds = "-".join(side.kind.upper() for side in self._cache.sides(state))
        kernel = f"attend_few-{kinds}-{few.bundle}-{few.key_dim}-{few.value_dim}"
        self.tape.append(Step(kernel, arguments | {"bundles": few.bundles}, self.tokens, None, reads, [partial]))
        self.tape.append(Step("merge_few", merged, self.tokens, None, [partial], [y]))

    def _attend_many(self, state: Paged | Latent, arguments: dict[str, Any], reads: list[Buffer], y: Buffer) -> None:
        """Tokens of a sequence together, on tensor cores."""
        arguments["sequence_count"] = self.header.sequence_count
        kinds = "-".join(side.kind.upper() for side in self._cache.sides(state))
        kernel = f"attend_many-{kinds}-{state.key_dim}-{state.value_dim}-{self.depth}"
        self.tape.append(Step(kernel, arguments, self.tokens, None, reads, [y]))
