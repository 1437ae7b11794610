"""Arrays of short strings, as GGUF has them, many at a time: a vocabulary is most of what a start reads."""

import numpy as np

GAP = 8  # bytes of a length; seven of them are zero if it is less than 256
CHUNK = 1 << 18  # bytes to look at together, which stay in the cache


def short_strings(chunk: np.ndarray, most: int) -> tuple[list[str], int]:
    """The whole strings that a chunk (uint8 [bytes]) begins with, at most so many, and how many bytes they take.

    Each is behind its length in bytes (8 of them, little-endian). None if they are not all what those of vocabularies
    are: 1 to 255 bytes of UTF-8, none of them zero. Looking at one after the other takes five times as long.
    """
    filled = np.flatnonzero(chunk)
    lengths_at = filled[:-1][np.diff(filled) == GAP][:most]  # where just seven zeros follow
    ends = lengths_at + GAP + chunk[lengths_at]
    whole = int(np.searchsorted(ends, len(chunk), side="right"))
    if not whole or lengths_at[0] or (ends[: whole - 1] != lengths_at[1:whole]).any():
        return [], 0
    size = int(ends[whole - 1])
    part = chunk[:size].copy()
    part[lengths_at[:whole]] = 0
    if np.count_nonzero(part) != size - GAP * whole:
        return [], 0
    try:
        return part.tobytes().decode().split("\0" * GAP)[1:], size
    except UnicodeDecodeError:
        return [], 0
