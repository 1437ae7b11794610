"""An engine of many sequences whose logits are any function of all tokens so far."""

import sys
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from localllm.engine.adapter_scales import AdapterScales
from localllm.engine.runs import RunPlan


class FakeSequences:
    """Stands in for the engine with forked sequences and keeps its promises, and nobody else's.

    Logits are good until the engine runs again; then they turn into NaN.

    Attributes:
        made: every sequence there ever was.
        steps: how many sequences took part in each run of several.
        read: how many tokens each run of one sequence had.
        rewound: where sequences went back to, to go on as new ones.
        moments: how often Ctrl-C could have struck so far, before or after what a call does.
        interrupt_at: the moment at which it does, or None.
    """

    adapters = adapter_scales = ()

    def __init__(self, vocab_size: int, row: Callable[[tuple[int, ...]], np.ndarray], context: int = 512):
        """Set `row`, a function from all tokens so far to the next logits, float32 [vocab_size]."""
        self.vocab_size, self.context, self.row = vocab_size, context, row
        self.runs, self.has_draft_head, self.written = RunPlan(), False, None
        self.made: list[FakeSequence] = []
        self.steps: list[int] = []
        self.read: list[int] = []
        self.rewound: list[int] = []
        self.moments, self.interrupt_at = 0, None
        self._given: list[np.ndarray] = []

    def sequence(self) -> "FakeSequence":
        self.moment()
        return FakeSequence(self, [])

    def run(
        self,
        requests: Sequence[tuple["FakeSequence", list[int]]],
        logits: str,
        precise: bool,
        kernel_tokens: Sequence[int] = (),
    ) -> list[np.ndarray]:
        assert len({id(sequence) for sequence, _ in requests}) == len(requests) > 0, "a sequence twice"
        assert precise
        self.moment()
        if len(requests) > 1:
            self.steps.append(len(requests))
        else:
            self.read.append(len(requests[0][1]))
        for sequence, ids in requests:
            sequence.add(ids)
        self.moment()
        return self.give_logits(requests, logits)

    def give_logits(self, requests: Sequence[tuple["FakeSequence", list[int]]], logits: str) -> list[np.ndarray]:
        """Return the rows of the tokens just appended to the sequences."""
        rows = []
        for sequence, ids in requests:
            ends = range(len(sequence.tokens) - len(ids) + 1, len(sequence.tokens) + 1)
            wanted = {"last": ends[-1:], "all": ends, "none": ()}[logits]
            rows.append([self.row(tuple(sequence.tokens[:end])) for end in wanted])
        return self.give(rows)

    def get_cache_usage(self) -> tuple[int, int]:
        return sum(len(sequence.tokens) for sequence in self.made if not sequence.closed), 10**6

    def give(self, rows: list[list[np.ndarray]]) -> list[np.ndarray]:
        for old in self._given:
            old[:] = np.nan
        self._given = [np.array(wanted, np.float32).reshape(-1, self.vocab_size) for wanted in rows]
        return self._given

    def moment(self) -> None:
        self.moments += 1
        if self.moments == self.interrupt_at:
            raise KeyboardInterrupt

    def open(self) -> int:
        """Return the number of open sequences."""
        return sum(not sequence.closed for sequence in self.made)


class FakeSequence:
    """A sequence of FakeSequences."""

    listener = None
    exact = sys.maxsize  # of the tokens: all were read as alone
    adapter_scales = AdapterScales()

    def __init__(self, engine: FakeSequences, tokens: list[int]):
        self.tokens, self.closed, self.aligned = tokens, False, 0
        self.context, self.vocab_size = engine.context, engine.vocab_size
        self.engine = engine
        engine.made.append(self)

    def append(self, ids: list[int], logits: str = "last", precise: bool = True, kernel_tokens: int = 0) -> np.ndarray:
        assert logits in ("last", "none", "all")
        self.engine.moment()
        before = len(self.tokens)
        self.add(ids)
        self.engine.read.append(len(ids))
        self.engine.moment()
        wanted = {"last": [len(ids)], "all": range(1, len(ids) + 1), "none": []}[logits]
        return self.engine.give([[self.engine.row(tuple(self.tokens[: before + count])) for count in wanted]])[0]

    def fork(self) -> Self:
        assert not self.closed
        self.engine.moment()
        twin = type(self)(self.engine, list(self.tokens))
        twin.aligned = self.aligned
        return twin

    def truncate(self, length: int) -> int:
        assert not self.closed and length <= len(self.tokens)
        del self.tokens[length:]
        return length

    def rewind(self, length: int) -> None:
        self.truncate(length)
        self.engine.rewound.append(length)

    def release(self) -> None:
        self.close()

    def close(self) -> None:
        self.engine.moment()
        self.closed = True
        self.engine.moment()

    def add(self, ids: list[int]) -> None:
        assert not self.closed
        assert 0 < len(ids) <= 512
        assert all(0 <= token < self.vocab_size for token in ids)
        self.tokens += ids
        assert len(self.tokens) <= self.context
