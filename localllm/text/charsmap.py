"""SentencePiece's normalization, as files bring it: which characters, or sequences of them, become which others.

`tokenizer.ggml.precompiled_charsmap` holds the size of a double-array trie in bytes (uint32), the trie, a uint32 for
every node, and the replacements, each ended by a zero byte. Of a node's 32 bits 0 to 7 are the byte that leads to it
(with bit 31 clear), bit 8 says that a sequence ends there, bits 10 to 30 are the offset to its children, in units of
256 with bit 9 set. The child for a byte b is at (node ^ offset) ^ b, the place of a replacement at node ^ offset.
Source: https://github.com/s-yata/darts-clone
"""

import re
from collections.abc import Callable, Iterator

import numpy as np

from localllm.errors import ModelError

_BYTES = np.arange(1, 256)
_AT_ONCE = 2048  # nodes, whose 255 possible children take some megabytes
_LONGEST = 256  # bytes of a sequence: those of Unicode's normalization have up to 18


def normalizer(data: bytes) -> Callable[[str], str]:
    """The function that replaces what the map says, at each place the longest sequence. ModelError for a bad map."""
    replacements = read_charsmap(data)
    if not replacements:
        return lambda text: text
    longest = max(map(len, replacements))
    sequences = [sequence for sequence in replacements if len(sequence) > 1]
    first, later = {sequence[0] for sequence in sequences}, {c for sequence in sequences for c in sequence[1:]}
    alone = {sequence for sequence in replacements if len(sequence) == 1}
    candidates = [f"{_one_of(first)}{_one_of(later)}+"] if sequences else []
    candidates += [_one_of(alone)] if alone else []

    def replaced(text: str) -> str:
        at, parts = 0, []
        while at < len(text):
            lengths = range(min(longest, len(text) - at), 0, -1)
            length = next((length for length in lengths if text[at : at + length] in replacements), 0)
            parts.append(replacements[text[at : at + length]] if length else text[at])
            at += length or 1
        return "".join(parts)

    expression = re.compile("|".join(candidates))
    return lambda text: expression.sub(lambda found: replaced(found[0]), text)


def _one_of(characters: set[str]) -> str:
    return f"[{re.escape(''.join(sorted(characters)))}]"


def read_charsmap(data: bytes) -> dict[str, str]:
    """All sequences and what becomes of them. Raises ModelError for a map that is not one."""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or size + 4 >= len(data):
        raise ModelError(f"the charsmap has {len(data)} bytes: its trie of {size} bytes does not fit")
    nodes, texts = np.frombuffer(data, "<u4", size // 4, 4), data[4 + size :]
    found = {}
    for sequence, place in _sequences(nodes):
        end = texts.find(b"\0", place)
        if end < 0:
            raise ModelError("the charsmap has a replacement without an end")
        try:
            found[sequence.decode()] = texts[place:end].decode()
        except UnicodeDecodeError:
            raise ModelError("the charsmap has a sequence that is no text") from None
    return found


def _sequences(nodes: np.ndarray) -> Iterator[tuple[bytes, int]]:
    """Each sequence in the trie and the place of its replacement. Raises ModelError where it is no tree."""
    level = [(b"", _offset(int(nodes[0])))] if len(nodes) else []  # sequences so far, and where their children are
    count = 0
    while level:
        deeper = []
        for start in range(0, len(level), _AT_ONCE):
            some = level[start : start + _AT_ONCE]
            children = np.array([place for _, place in some])[:, None] ^ _BYTES
            inside = children < len(nodes)
            rows, columns = np.nonzero(inside & (nodes[np.where(inside, children, 0)] & 0x800000FF == _BYTES))
            count += len(rows)
            if count > len(nodes) or len(some[0][0]) > _LONGEST:
                raise ModelError("the charsmap's trie is no tree")
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
                sequence, child = some[row][0] + bytes([column + 1]), int(children[row, column])
                inner = child ^ _offset(int(nodes[child]))
                if nodes[child] >> 8 & 1:
                    if inner >= len(nodes):
                        raise ModelError("the charsmap's trie leads out of itself")
                    yield sequence, int(nodes[inner] & 0x7FFFFFFF)
                deeper.append((sequence, inner))
        level = deeper


def _offset(node: int) -> int:
    return node >> 10 << ((node & 512) >> 6)
