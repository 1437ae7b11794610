"""A fast reader for arrays of short strings: vocabularies are most of what a start reads."""

import numpy as np

GAP = 8  # bytes of a length; seven of them are zero if it is less than 256
CHUNK = 1 << 18  # bytes to look at together, which stay in the cache


def short_strings(chunk: np.ndarray, most: int) -> tuple[list[str], int]:
    """Read the whole strings at the start of a chunk, uint8 [bytes], and the bytes they take.

    At most `most` strings. Each follows its length in bytes (8 of them, little-endian). None if one is unlike those of
    vocabularies: 1 to 255 bytes of UTF-8, none of them zero. Reading one after the other takes five times as long.
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
