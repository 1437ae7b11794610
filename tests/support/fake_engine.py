"""An engine with scripted tokens."""

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from localllm.engine.adapter_scales import AdapterScales
from localllm.engine.runs import RunPlan
from localllm.errors import LocalllmError
from localllm.kernels.table import PAGE
from localllm.text.tokenizer import Tokenizer


class FakeEngine:
    """Stands in for localllm.engine.engine.Engine and keeps its promises, and nobody else's.

    Attributes:
        sequences: all that were asked for, and forks of them.
        calls: (position, number of tokens) of every append.
    """

    device = "CPU"
    has_draft_head = False
    adapters = adapter_scales = control_vectors = ()
    written = None
    hyperparameters = SimpleNamespace(arch="llama", start_token=None)

    def __init__(self, vocab_size: int, say: Callable[[list[int]], int | None], context: int = 512):
        """Set `say`, a function from all tokens so far to the next one."""
        self.vocab_size, self.context, self.runs = vocab_size, context, RunPlan()
        self.sequences: list[FakeSequence] = []
        self.calls: list[tuple[int, int]] = []
        self.engine = self  # it stands in for Sequences, too
        self.closed = 0
        self.fail: BaseException | None = None  # raised by the next append
        self.say = say

    def sequence(self) -> "FakeSequence":
        return FakeSequence(self, [])

    def run(
        self,
        requests: Sequence[tuple["FakeSequence", Sequence[int]]],
        logits: str,
        precise: bool,
        kernel_tokens: Sequence[int] = (),
    ) -> list[np.ndarray]:
        assert len({id(sequence) for sequence, _ in requests}) == len(requests)
        return [sequence.append(ids, logits, precise) for sequence, ids in requests]

    def require_shift(self) -> None:
        """Accept, as this engine can shift."""

    prepare_shift = require_shift

    streamed_bytes = 0

    def get_disk_statistics(self) -> dict[str, float]:
        return {}

    def get_cache_usage(self) -> tuple[int, int]:
        return sum(len(sequence.tokens) for sequence in self.open_sequences), 16 * self.context

    @property
    def open_sequences(self) -> list["FakeSequence"]:
        return [sequence for sequence in self.sequences if not sequence.closed]

    def close(self) -> None:
        self.closed += 1


class FakeSequence:
    """A sequence of a FakeEngine."""

    listener = None

    exact = sys.maxsize  # of the tokens: all were read as alone
    adapter_scales = AdapterScales()

    def __init__(self, engine: FakeEngine, tokens: list[int]):
        self.tokens, self.engine, self.closed, self.aligned = tokens, engine, False, 0
        self.context, self.vocab_size = engine.context, engine.vocab_size
        engine.sequences.append(self)

    def append(
        self, ids: Sequence[int], logits: str = "last", precise: bool = True, kernel_tokens: int = 0
    ) -> np.ndarray:
        self._require_open()
        assert ids
        assert len(self.tokens) + len(ids) <= self.context
        self.engine.calls.append((len(self.tokens), len(ids)))
        if len(self.tokens) == self.aligned and len(self.tokens) + len(ids) == self.engine.runs.find_next_end(
            self.aligned
        ):
            self.aligned += len(ids)
        if self.engine.fail is not None:
            failure, self.engine.fail = self.engine.fail, None
            raise failure
        wanted = {"last": 1, "all": len(ids), "none": 0}[logits]
        self.tokens += ids
        rows = np.full((wanted, self.vocab_size), -10.0, np.float32)
        for i, row in enumerate(rows):
            row[self.engine.say(self.tokens[: len(self.tokens) - wanted + i + 1])] = 20.0
        return rows

    def fork(self) -> "FakeSequence":
        self._require_open()
        twin = type(self)(self.engine, list(self.tokens))
        twin.aligned = self.aligned
        return twin

    def truncate(self, length: int) -> int:
        self._require_open()
        assert length >= 0
        del self.tokens[length:]
        self.aligned = min(self.aligned, self.engine.runs.find_last_end(length))
        return len(self.tokens)

    def rewind(self, length: int) -> int:
        return self.truncate(self.engine.runs.find_last_end(min(length, self.aligned)))

    def shift(self, keep: int, count: int) -> None:
        self._require_open()
        assert count % PAGE == 0 and 0 <= keep <= keep + count <= len(self.tokens)
        del self.tokens[keep : keep + count]
        self.aligned = min(self.aligned, self.engine.runs.find_last_end(keep))

    def release(self) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        self.tokens = []

    def _require_open(self) -> None:
        if self.closed or self.engine.closed:
            raise LocalllmError("this sequence is closed" if self.closed else "the model is closed")


def saying(tokenizer: Tokenizer, *answers: str) -> Callable[[list[int]], int | None]:
    """Return a script for FakeEngine.

    The n-th "assistant" header of a ChatML conversation is followed by the n-th answer and the end token. Without any
    header (raw text), the first answer follows the first token.
    """
    scripts = [[*tokenizer.encode(answer), tokenizer.eos_id] for answer in answers]
    header = tokenizer.encode("<|im_start|>assistant\n", special=True)

    def say(tokens: list[int]) -> int | None:
        ends = [end for end in range(len(header), len(tokens) + 1) if tokens[end - len(header) : end] == header]
        number, said = (len(ends) - 1, len(tokens) - ends[-1]) if ends else (0, len(tokens) - 1)
        script = scripts[min(number, len(scripts) - 1)]
        return script[min(said, len(script) - 1)]

    return say
