"""Represent image embeddings by token ids, in place of token embeddings.

An image's rows have negative ids, composed of the image's digest and the row index, so that prompts have equal tokens
only if their images are equal.
"""

import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ids
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from localllm.engine.runs import MIN_CACHED_TOKENS, PRECISE_TOKENS, RunPlan
from localllm.errors import UsageError

ROW_BITS = 15  # bits of an id for the row index
MAX_ROWS = 1 << ROW_BITS
KEY_BITS = 47  # the other bits of an int64, without its sign
MAX_GAP = 64  # maximum number of tokens between crops of one image


class ImageEmbedding:
    """The rows of an image, or of one of its crops.

    Attributes:
        rows: float32 [rows, width of the model].
        ids: token ids of the rows.
        mrope_offsets: int64 [rows, 3], time, height and width relative to the image's position, for M-RoPE; None: rows
            have consecutive positions.
        position_count: by how many positions the image advances the sequence.
        is_whole: its rows have bidirectional attention, so that they must share one run.
    """

    def __init__(self, digest: bytes, rows: np.ndarray, axes: np.ndarray | None = None, is_whole: bool = False):
        """Assign ids to the rows.

        digest: of the image and its encoder. Raises UsageError for more than MAX_ROWS rows.
        """
        if len(rows) > MAX_ROWS:
            raise UsageError(f"an image can have at most {MAX_ROWS} rows (found {len(rows)}): use a smaller image")
        self.rows, self.mrope_offsets, self.is_whole = rows, axes, is_whole
        self.key = int.from_bytes(hashlib.sha256(digest).digest()[:8], "little") >> (64 - KEY_BITS)
        self.position_count = len(rows) if axes is None else int(axes.max()) + 1
        first = self.key << ROW_BITS
        self.ids = [-1 - (first | row) for row in range(len(rows))]

    def select_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of consecutive ids, float32 [ids, width]."""
        first = decode_row(int(ids[0]))
        return self.rows[first : first + len(ids)]

    def compute_mrope_positions(self, ids: np.ndarray, place: int) -> np.ndarray:
        """Return the M-RoPE positions of ids, int64 [ids, 3].

        place: RoPE position of the first id.
        """
        first = decode_row(int(ids[0]))
        if self.mrope_offsets is None:
            return np.repeat(np.arange(place, place + len(ids))[:, None], 3, axis=1)
        return self.mrope_offsets[first : first + len(ids)] + (place - first)


def decode_image_key(token: int) -> int:
    """Return the key of the image that a (negative) token id belongs to."""
    return (-1 - token) >> ROW_BITS


def decode_row(token: int) -> int:
    """Return the row index in a (negative) token id."""
    return (-1 - token) & (MAX_ROWS - 1)


def find_image(images: Mapping[int, ImageEmbedding], token: int) -> ImageEmbedding | None:
    """Return the image of a token id; None for text, and for an image that is not in `images` (by key)."""
    image = images.get(decode_image_key(token)) if token < 0 else None
    return image if image is not None and decode_row(token) < len(image.rows) else None


def compute_position_offset(images: Ids[tuple[int, ImageEmbedding]], place: int) -> int:
    """Return a token's index minus its RoPE position, because images may have fewer positions than rows.

    images: of the sequence, with the index of their first row; only those that end at or before index `place` count.
    """
    return sum(len(image.rows) - image.position_count for begin, image in images if begin + len(image.rows) <= place)


def select_images(images: Ids[tuple[int, ImageEmbedding]], first: int, end: int) -> list[tuple[int, ImageEmbedding]]:
    return [(begin, image) for begin, image in images if first <= begin < end]


def has_images(tokens: Ids[int]) -> bool:
    return min(tokens, default=0) < 0


def remove_images(tokens: Ids[int]) -> Ids[int]:
    return [token for token in tokens if token >= 0] if has_images(tokens) else tokens


def skip_image_rows(tokens: Ids[int], end: int) -> int:
    while cuts_image(tokens, end):
        end += 1
    return end


def cuts_image(tokens: Ids[int], place: int) -> bool:
    """Return whether the boundary before index `place` is within an image."""
    return 0 < place < len(tokens) and tokens[place] < 0 and tokens[place - 1] - 1 == tokens[place]


def find_last_end(tokens: Ids[int], length: int, runs: RunPlan) -> int:
    """Return the last end of a whole run or of an image within `length` tokens, where prefill can resume.

    Later tokens are computed identically, to the bit, whether prefill starts there or at position 0.
    """
    while True:
        end = runs.find_last_end(length)
        if min(tokens[end : length + 1], default=0) >= 0:
            return end
        for place in range(length, end, -1):
            if tokens[place - 1] < 0 and not cuts_image(tokens, place):
                return place
        if not cuts_image(tokens, end):
            return end
        length = end - 1
        while cuts_image(tokens, length):
            length -= 1


def is_worth_caching(tokens: Ids[int]) -> bool:
    """Return whether a prefix should be cached on disk, because prefilling it takes about a second or more."""
    return len(tokens) > MIN_CACHED_TOKENS or (len(tokens) > PRECISE_TOKENS and has_images(tokens))


def list_chunk_ends(tokens: Ids[int], runs: RunPlan) -> list[int]:
    """Return where prefill can resume: the ends of whole runs and of images.

    An image does not count if another follows within MAX_GAP tokens.
    """
    end, ends = 0, set[int]()
    while (end := runs.find_next_end(end)) <= len(tokens):
        end = skip_image_rows(tokens, end)
        ends.add(end)
    images = [passage for passage in split_images(np.asarray(tokens, np.int64)) if passage.key is not None]
    for passage, following in pairwise([*images, None]):
        if passage and (following is None or following.first - passage.end > MAX_GAP):
            ends.add(passage.end)
    return sorted(ends)


class TokenRange(NamedTuple):
    """Consecutive tokens: of text, or of one image."""

    first: int
    end: int
    key: int | None  # of an image


def split_images(tokens: np.ndarray) -> Iterator[TokenRange]:
    """Split int64 tokens into ranges of text and of images; an image twice in a row makes two ranges."""
    if not len(tokens) or tokens.min() >= 0:
        yield TokenRange(0, len(tokens), None)
        return
    starts = np.flatnonzero((np.diff(tokens) != -1) & ((tokens[1:] < 0) | (tokens[:-1] < 0))) + 1
    first = 0
    for end in (*starts.tolist(), len(tokens)):
        yield TokenRange(first, end, decode_image_key(int(tokens[first])) if tokens[first] < 0 else None)
        first = end
