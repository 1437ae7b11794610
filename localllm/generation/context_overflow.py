"""Shift a conversation that exceeds its context, by one of three policies (GenerationOptions.on_overflow).

- error: a prompt that is too long is refused, and an answer ends where the context is full.
- drop-turns: the oldest turns are dropped until the rest fits; the rest is prefilled again (generation.session).
- shift: the first tokens stay, the older half of the others is dropped, and the rest moves to earlier positions
  (ShiftedSequence). Nothing is prefilled again. Of a prompt that exceeds the context, the first tokens and as much of
  its end as fits are read.
"""

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING

import numpy as np

from localllm.engine.image_tokens import cuts_image, skip_image_rows
from localllm.errors import ContextError
from localllm.kernels.table import PAGE

if TYPE_CHECKING:
    from localllm.engine.adapter_scales import AdapterScales
    from localllm.engine.sequence import Sequence

SINK_TOKENS = 4  # minimum of first tokens that stay: attention sinks (Xiao et al. 2023)


def require_shift(keep: int, context: int) -> None:
    """Raise ContextError for a context that is too small to shift while keeping `keep` tokens."""
    if context < keep + 2 * PAGE:
        raise ContextError(
            f"a context of {context} is too small to keep {keep} tokens when shifting; use at least {keep + 2 * PAGE}"
        )


class ShiftedSequence:
    """A sequence that never gets full, because it drops old tokens; its `tokens` include the dropped ones.

    When the context is full, half of the tokens after the first `keep` are dropped, in whole pages. So a key is
    rotated, and rounded, only once or twice before it is dropped itself.

    Attributes:
        keep: number of first tokens that stay.  tokens: all tokens that were appended.
        dropped: number of tokens dropped since `prepare_prompt`.  skipped: how many of these were never prefilled.
    """

    listener = None  # draft heads cannot follow a text with dropped tokens

    def __init__(self, sequence: "Sequence", keep: int):
        self.keep, self.dropped, self.skipped, self.engine = keep, 0, 0, sequence.engine
        self._sequence, self.tokens = sequence, list(sequence.tokens)
        self._gap = 0  # dropped tokens between the first `keep` and those that it holds
        self._unneeded = range(0)  # positions of prompt tokens that would be dropped before the prompt's end is read

    @property
    def closed(self) -> bool:
        return self._sequence.closed

    @property
    def adapter_scales(self) -> "AdapterScales":
        """The scales of the wrapped sequence, which are the same for all tokens."""
        return self._sequence.adapter_scales

    @adapter_scales.setter
    def adapter_scales(self, scales: "AdapterScales") -> None:
        self._sequence.adapter_scales = scales

    @property
    def room(self) -> int:
        """The number of tokens that can be appended before any is dropped."""
        return self._sequence.context - len(self._sequence.tokens)

    def prepare_prompt(self, prompt: Ids[int]) -> None:
        """Prepare for a prompt that continues the sequence: choose the tokens of a long prompt to skip.

        Whole pages are skipped; at least an eighth of the positions after the first tokens stays free for the answer.
        """
        self.dropped = self.skipped = 0
        self._unneeded = range(0)
        places = self._sequence.context - self.keep
        pages = -((places - places // 8 + self.keep - len(prompt)) // PAGE)
        start = self.keep + pages * PAGE
        end = skip_image_rows(prompt, start)
        while cuts_image(prompt, start):
            start -= 1
        fits = end - start <= places  # `append` raises an error for an image that does not
        if fits and len(prompt) >= self._sequence.context and len(self.tokens) < end < len(prompt):
            self.truncate(min(len(self.tokens), self.keep))
            self._unneeded = range(self.keep, end)

    def append(self, ids: Ids[int], logits: str = "last", precise: bool = True, kernel_tokens: int = 0) -> np.ndarray:
        """Append any number of tokens and drop older ones as needed; see Sequence.append."""
        rows, ids = [], list(ids)
        while ids:
            place, unneeded = len(self.tokens), self._unneeded
            if place in unneeded:
                ids = self._skip_tokens(ids, unneeded.stop - place)
                continue
            least = skip_image_rows(ids, 1)
            while (room := self.room) < least:
                self._drop_tokens(least)
            room = min(room, len(ids), unneeded.start - place if place < unneeded.start else room)
            while cuts_image(ids, room):  # an image is read as a whole
                room -= 1
            piece, ids = ids[:room], ids[room:]
            wanted = "none" if ids and logits == "last" else logits
            rows.append(self._sequence.append(piece, wanted, precise, kernel_tokens))
            self.tokens += piece
        if not rows:
            return np.empty((0, 0), np.float32)
        return np.concatenate(rows) if len(rows) > 1 else rows[0]

    def _skip_tokens(self, ids: list[int], limit: int) -> list[int]:
        """Count the first `limit` tokens as dropped without prefilling them; return the others."""
        self.tokens += ids[:limit]
        count = len(ids[:limit])
        self._gap, self.dropped, self.skipped = self._gap + count, self.dropped + count, self.skipped + count
        return ids[limit:]

    def _drop_tokens(self, length: int) -> None:
        """Drop tokens until `length` new ones fit. Raises ContextError if they never fit."""
        cached, keep = self._sequence.tokens, self.keep
        if length > self._sequence.context - keep:
            raise ContextError(
                f"an image of {length} tokens does not fit the context of {self._sequence.context}: raise --ctx-size"
            )
        count = count_droppable(cached, keep)
        if keep + count < len(cached):
            self._sequence.shift(keep, count)
        else:
            self._sequence.truncate(keep)
        self._gap += count
        self.dropped += count

    def truncate(self, length: int) -> int:
        """Truncate to the first `length` of all tokens, or to `keep` if the new end was dropped.

        Returns the number of tokens left.
        """
        if length < self.keep + self._gap:
            length = min(length, self.keep)
            self._gap = 0
        length_left = self._sequence.truncate(length - self._gap) + self._gap
        del self.tokens[length_left:]
        return length_left

    def fork(self) -> "ShiftedSequence":
        """Return a copy that shares the memory of its tokens."""
        twin = ShiftedSequence(self._sequence.fork(), self.keep)
        twin._gap, twin.tokens = self._gap, [*self.tokens]
        return twin

    def unwrap(self) -> "Sequence":
        """Return the wrapped sequence, truncated to `keep` if tokens were dropped."""
        self.truncate(self.keep if self._gap else len(self._sequence.tokens))
        return self._sequence

    def release(self) -> None:
        """Queue the memory to be freed.

        Takes no lock, so finalizers may call it.
        """
        self._sequence.release()

    def close(self) -> None:
        self._sequence.close()


def count_droppable(cached: Ids[int], keep: int) -> int:
    """Return how many tokens after the first `keep` to drop: half of them, in whole pages, without cutting an image."""
    droppable = len(cached) - keep
    for count in range(max(droppable // 2 // PAGE, 1) * PAGE, droppable, PAGE):
        if not cuts_image(cached, keep + count):
            return count
    return droppable


def wrap_sequence(sequence: "Sequence | ShiftedSequence", keep: int | None) -> "Sequence | ShiftedSequence":
    """Return a sequence that shifts and keeps the first `keep` tokens, or one that does not shift if `keep` is None."""
    if isinstance(sequence, ShiftedSequence):
        if sequence.keep == keep:
            return sequence
        sequence = sequence.unwrap()
    return sequence if keep is None else ShiftedSequence(sequence, keep)
