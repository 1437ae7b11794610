"""An engine whose words are known: it says, token by token, what a test's script tells it to."""

from collections.abc import Callable, Sequence

import numpy as np

from localllm.text.tokenizer import Tokenizer


class FakeEngine:
    """Stands in for localllm.engine.model.Engine and keeps its promises, and nobody else's.

    Attributes:
        cache: the tokens that a real cache would hold.
        calls: (position, number of tokens) of every call.
    """

    def __init__(self, vocab_size: int, say: Callable[[list[int]], int], context: int = 512):
        """say: from all the tokens so far to the next one."""
        self.vocab_size, self.context = vocab_size, context
        self.cache: list[int] = []
        self.calls: list[tuple[int, int]] = []
        self.closed = 0
        self.fail: BaseException | None = None  # raised in the middle of the next call
        self._say = say

    def forward(self, ids: Sequence[int], position: int, logits: str = "last", verify: bool = False) -> np.ndarray:
        assert 0 < len(ids) <= 512
        assert position <= len(self.cache), "positions without keys and values"
        assert position + len(ids) <= self.context
        self.calls.append((position, len(ids)))
        self.cache[position:] = [-1] * len(ids)  # being overwritten
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        self.cache[position:] = ids
        wanted = {"last": [len(ids)], "all": range(1, len(ids) + 1), "none": []}[logits]
        rows = np.full((len(wanted), self.vocab_size), -10.0, np.float32)
        for row, count in zip(rows, wanted, strict=True):
            row[self._say(self.cache[: position + count])] = 20.0
        return rows

    def close(self) -> None:
        self.closed += 1


def saying(tokenizer: Tokenizer, *answers: str) -> Callable[[list[int]], int]:
    """A script for FakeEngine: after the n-th "assistant" header of a ChatML conversation comes the n-th answer, then
    the end token. Without any header (raw text), the first answer follows the first token.
    """
    scripts = [[*tokenizer.encode(answer), tokenizer.eos_id] for answer in answers]
    header = tokenizer.encode("<|im_start|>assistant\n", special=True)

    def say(tokens: list[int]) -> int:
        ends = [end for end in range(len(header), len(tokens) + 1) if tokens[end - len(header) : end] == header]
        number, said = (len(ends) - 1, len(tokens) - ends[-1]) if ends else (0, len(tokens) - 1)
        script = scripts[min(number, len(scripts) - 1)]
        return script[min(said, len(script) - 1)]

    return say
