"""Offsets of tokens: the characters of a text that each token stands for."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from localllm.errors import UnsupportedError
from localllm.text.tokenizer import Tokenizer

Span = tuple[int | None, int | None]


def locate_tokens(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[Span]:
    """Return the first character of each token of a text, and the one after its last.

    ids: of the text, encoded by this tokenizer. Tokens of one character's bytes all have that character. A token that
    is not in the text, such as BOS, has (None, None). Raises UnsupportedError if the tokenizer changes the text, such
    as to lower case, so that offsets are unknown.
    """
    data = text.encode(errors="replace")
    ends = [*accumulate(len(character.encode(errors="replace")) for character in text)]  # bytes up to each character
    starts, place, spans = [0, *ends[:-1]], 0, list[Span]()
    for number, token in enumerate(ids):
        own = tokenizer.token_bytes(token, special=True)
        if own and data.startswith(own, place):
            count = len(own)
        elif own.startswith(b" ") and data.startswith(own[1:], place):  # the space that SentencePiece adds
            count = len(own) - 1
        elif token in tokenizer.control_ids and number in (0, len(ids) - 1):
            spans.append((None, None))
            continue
        else:
            raise UnsupportedError("offsets of tokens are unknown: this tokenizer changes the text that it reads")
        spans.append((bisect_right(starts, place) - 1, bisect_left(ends, place + count) + 1) if count else EMPTY)
        place += count
    if place < len(data):
        raise UnsupportedError("offsets of tokens are unknown: this tokenizer changes the text that it reads")
    return spans


EMPTY: Span = (None, None)
