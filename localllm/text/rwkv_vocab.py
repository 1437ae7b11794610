r"""RWKV's tokenizer ("World"): at each position of the UTF-8 bytes it takes the longest piece that matches; no merges.

Files write a piece with the escapes of Python's bytes: \n, \x8f and the like, and a backslash before a backslash or
quote.
"""

import re
from collections.abc import Iterable

from localllm.errors import ModelError
from localllm.text.subwords import Subwords
from localllm.text.token_types import NORMAL
from localllm.text.vocabulary import Vocabulary

_ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_NAMED = {"t": b"\t", "n": b"\n", "r": b"\r"}


def unescape(piece: str) -> bytes:
    """Decode the bytes of a piece."""
    data, end = b"", 0
    for escape in _ESCAPED.finditer(piece):
        data += piece[end : escape.start()].encode(errors="replace")
        name, end = escape[1], escape.end()
        data += bytes([int(name[1:], 16)]) if len(name) == 3 else _NAMED.get(name, name.encode(errors="replace"))
    return data + piece[end:].encode(errors="replace")


class RwkvVocab(Subwords):
    """RWKV's tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build the table of pieces. Raises ModelError if there is no token for one of the 256 bytes."""
        super().__init__(vocabulary)
        kinds = vocabulary.types
        tokens = [token for token in vocabulary.ids.values() if kinds[token] == NORMAL]
        self._bytes = {token: unescape(vocabulary.pieces[token]) for token in tokens}
        self._ids = {piece: token for token, piece in self._bytes.items()}
        lengths: dict[bytes, set[int]] = {}
        for piece in self._ids:
            lengths.setdefault(piece[:2], set()).add(len(piece))
        self._lengths = {start: sorted(by_bytes, reverse=True) for start, by_bytes in lengths.items()}
        if missing := [byte for byte in range(256) if bytes([byte]) not in self._ids]:
            more_bytes = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"tokenizer.ggml.tokens: the byte {missing[0]:#04x}{more_bytes} is missing")

    def _words_of(self, text: str) -> Iterable[str]:
        return [text] if text else []

    def _tokens(self, word: str) -> list[int]:
        data, ids, at = word.encode(), self._ids, 0
        tokens = []
        while at < len(data):
            for length in self._lengths.get(data[at : at + 2], ()):
                if (token := ids.get(data[at : at + length])) is not None:
                    break
            else:
                length = 1
                token = ids[data[at : at + 1]]
            tokens.append(token)
            at += length
        return tokens

    def _piece_bytes(self, piece: str) -> bytes:
        return unescape(piece)
