"""Images as a model reads them: rows of numbers in the place of tokens' embeddings.

Among a sequence's tokens an image has ids of its own, below 0, that follow from what is seen and its row: so prompts
with the same image begin alike, and others do not.
"""

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from localllm.engine.run import PRECISE_TOKENS
from localllm.engine.runs import LONG, Runs
from localllm.errors import UsageError

ROW_BITS = 15  # of an id: the number of the row
MOST_ROWS = 1 << ROW_BITS
KEY_BITS = 47  # the rest of an int64's, without its sign
NEAR = 64  # tokens between images that are most often parts of one


class ImageEmbedding:
    """What is seen of an image, or of a part of it.

    Attributes:
        rows: float32 [rows, width of the model].
        ids: by which the rows are called.
        axes: int64 [rows, 3], time, height and width from the image's position on, for models that turn keys by all
            three (M-RoPE); None for positions one behind the other.
        places: how many positions the image takes.
        is_whole: whether its rows see each other, so that they are read in one run.
    """

    def __init__(self, digest: bytes, rows: np.ndarray, axes: np.ndarray | None = None, is_whole: bool = False):
        """digest: of what is seen, and by what. Raises UsageError for too many rows."""
        if len(rows) > MOST_ROWS:
            raise UsageError(f"an image of {len(rows)} rows, {MOST_ROWS} are the most")
        self.rows, self.axes, self.is_whole = rows, axes, is_whole
        self.key = int.from_bytes(hashlib.sha256(digest).digest()[:8], "little") >> (64 - KEY_BITS)
        self.places = len(rows) if axes is None else int(axes.max()) + 1
        first = self.key << ROW_BITS
        self.ids = [-1 - (first | row) for row in range(len(rows))]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Those that are called so, one behind the other: float32 [ids, width]."""
        first = row_of(int(ids[0]))
        return self.rows[first : first + len(ids)]

    def turns_of(self, ids: np.ndarray, place: int) -> np.ndarray:
        """By which positions their queries and keys turn, int64 [ids, 3], if the first id's place would be its position
        in a text without images that take fewer positions than rows."""
        first = row_of(int(ids[0]))
        if self.axes is None:
            return np.repeat(np.arange(place, place + len(ids))[:, None], 3, axis=1)
        return self.axes[first : first + len(ids)] + (place - first)


def key_of(token: int) -> int:
    """What an id below 0 belongs to."""
    return (-1 - token) >> ROW_BITS


def row_of(token: int) -> int:
    """Which row an id below 0 is."""
    return (-1 - token) & (MOST_ROWS - 1)


def ahead_of(images: Ids[tuple[int, ImageEmbedding]], place: int) -> int:
    """By how much a place is ahead of its position, behind images that begin at places and take fewer positions than
    rows."""
    return sum(len(seen.rows) - seen.places for begin, seen in images if begin + len(seen.rows) <= place)


def images_between(images: Ids[tuple[int, ImageEmbedding]], first: int, end: int) -> list[tuple[int, ImageEmbedding]]:
    """Those that begin there."""
    return [(begin, seen) for begin, seen in images if first <= begin < end]


def has_images(tokens: Ids[int]) -> bool:
    return any(token < 0 for token in tokens)


def texts_only(tokens: Ids[int]) -> Ids[int]:
    """Without images."""
    return [token for token in tokens if token >= 0] if has_images(tokens) else tokens


def whole_end(tokens: Ids[int], end: int) -> int:
    """Where to end instead of within an image."""
    while is_within(tokens, end):
        end += 1
    return end


def is_within(tokens: Ids[int], place: int) -> bool:
    """Whether an image goes on there."""
    return 0 < place < len(tokens) and tokens[place] < 0 and tokens[place - 1] - 1 == tokens[place]


def last_end(tokens: Ids[int], length: int, runs: Runs) -> int:
    """Where the last whole run, or the last image, ends within so many tokens: what is behind is read alike whether it
    is read from there on or with all that is in front. No run ends within an image."""
    while True:
        end = runs.last_end(length)
        if min(tokens[end : length + 1], default=0) >= 0:
            return end
        for place in range(length, end, -1):
            if tokens[place - 1] < 0 and not is_within(tokens, place):
                return place
        if not is_within(tokens, end):
            return end
        length = end - 1
        while is_within(tokens, length):
            length -= 1


def is_worth_keeping(tokens: Ids[int]) -> bool:
    """Whether to read so many tokens again would take about a second."""
    return len(tokens) > LONG or (len(tokens) > PRECISE_TOKENS and has_images(tokens))


def piece_ends(tokens: Ids[int], runs: Runs) -> list[int]:
    """Where reading can go on behind pieces of a prompt: ends of whole runs, and of images behind which no other comes
    soon."""
    end, found = 0, set[int]()
    while (end := runs.next_end(end)) <= len(tokens):
        end = whole_end(tokens, end)
        found.add(end)
    images = [one for one in passages(np.asarray(tokens, np.int64)) if one.key is not None]
    for one, following in pairwise([*images, None]):
        if one and (following is None or following.first - one.end > NEAR):
            found.add(one.end)
    return sorted(found)


class Passage(NamedTuple):
    """Tokens of one kind: text, or rows of one image."""

    first: int
    end: int
    key: int | None  # of an image


def passages(tokens: np.ndarray) -> Iterator[Passage]:
    """int64 tokens, in pieces that are text or of one image each; the same image twice in a row are two."""
    if not len(tokens) or tokens.min() >= 0:
        yield Passage(0, len(tokens), None)
        return
    starts = np.flatnonzero((np.diff(tokens) != -1) & ((tokens[1:] < 0) | (tokens[:-1] < 0))) + 1
    first = 0
    for end in (*starts.tolist(), len(tokens)):
        yield Passage(first, end, key_of(int(tokens[first])) if tokens[first] < 0 else None)
        first = end
