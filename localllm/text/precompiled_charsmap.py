"""SentencePiece's normalization map as files contain it: sequences of characters and their replacements.

`tokenizer.ggml.precompiled_charsmap` holds the size of a double-array trie in bytes (uint32), the trie, a uint32 for
every node, and the replacements, each ended by a zero byte. Of a node's 32 bits 0 to 7 are the byte that leads to it
(with bit 31 clear), bit 8 says that a sequence ends there, bits 10 to 30 are the offset to its children, in units of
256 with bit 9 set. The child for a byte b is at (node ^ offset) ^ b, the place of a replacement at node ^ offset.
Source: https://github.com/s-yata/darts-clone
"""

import re

import numpy as np

from localllm.errors import ModelError

_LONGEST = 256  # bytes of a sequence: those of Unicode's normalization have up to 12
_LABEL = 0x800000FF


class Charsmap:
    """A normalizer that replaces the longest mapped sequence at each position."""

    def __init__(self, data: bytes) -> None:
        """Read a map; an empty one has no effect. Raises ModelError if its parts do not fit."""
        size = int.from_bytes(data[:4], "little")
        if data and (len(data) <= size + 4 or size % 4 or data[-1] != 0):
            raise ModelError(f"the charsmap has {len(data)} bytes, too few for a trie of {size} bytes and its texts")
        self._nodes: list[int] = np.frombuffer(data, "<u4", size // 4, 4).tolist() if size else []
        self._texts = data[4 + size :]
        self._inert: set[str] = set()  # characters that begin no mapped sequence
        ascii_ones = [chr(code) for code in range(128)]
        quiet = [character for character in ascii_ones if self._is_quiet(character, ascii_ones)] if self._nodes else []
        # Runs of ASCII characters that no sequence changes: the larger part of most texts.
        self._quiet = re.compile(f"[{re.escape(''.join(quiet))}]+(?![^\\x00-\\x7f])" if quiet else "(?!)")

    def __call__(self, text: str) -> str:
        """Normalize a text. Raises ModelError if the map refers to bytes beyond its end."""
        if not self._nodes:
            return text
        parts, at = [], 0
        while at < len(text):
            if run := self._quiet.match(text, at):
                parts.append(run[0])
                at = run.end()
                continue
            end, place = self._longest(text, at) if text[at] not in self._inert else (at, 0)
            parts.append(self._replacement(place) if end > at else text[at])
            at = max(end, at + 1)
        return "".join(parts)

    def _is_quiet(self, character: str, characters: list[str]) -> bool:
        return all(self._longest(character + second, 0)[0] == 0 for second in characters)

    def _longest(self, text: str, start: int) -> tuple[int, int]:
        """Return the end of the longest sequence at a position, and its replacement's offset, or (start, 0)."""
        nodes, count = self._nodes, len(self._nodes)
        best, place = start, 0
        inner = _offset(nodes[0])
        for at in range(start, min(start + _LONGEST, len(text))):
            for byte in text[at].encode(errors="replace"):
                child = inner ^ byte
                if not byte or child >= count or nodes[child] & _LABEL != byte:
                    if at == start:
                        self._inert.add(text[start])
                    return best, place
                inner = child ^ _offset(nodes[child])
            if nodes[child] & 256 and inner < count:
                best, place = at + 1, nodes[inner] & 0x7FFFFFFF
        return best, place

    def _replacement(self, place: int) -> str:
        if place >= len(self._texts):
            raise ModelError("the charsmap refers to bytes beyond its end")
        return self._texts[place : self._texts.index(b"\0", place)].decode(errors="replace")


def _offset(node: int) -> int:
    return node >> 10 << ((node & 512) >> 6)
