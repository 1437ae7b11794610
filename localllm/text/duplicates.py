"""Tokens with the same text, and which of them the text is encoded to."""

from collections.abc import Mapping, Sequence

from localllm.files.oddities import Oddities
from localllm.text.token_types import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

Twins = Mapping[str, Sequence[int]]  # the tokens of a text that more than one have
# The first kind that one of them has: text is written by what was trained for text.
ORDER = {BYTE: 0, NORMAL: 1, USER_DEFINED: 1, UNUSED: 2, CONTROL: 3, UNKNOWN: 4}


def index_duplicates(pieces: Sequence[str], types: bytearray, oddities: Oddities) -> tuple[dict[str, int], Twins]:
    """Map each text to its first token of the plainest type; list all tokens of shared texts."""
    all_tokens: dict[str, list[int]] = {}
    for token, piece in enumerate(pieces):
        all_tokens.setdefault(piece, []).append(token)
    ids = {piece: min(tokens, key=lambda token: ORDER[types[token]]) for piece, tokens in all_tokens.items()}
    twins = {piece: tokens for piece, tokens in all_tokens.items() if len(tokens) > 1}
    piece, tokens = next(iter(twins.items()))
    more = f", and {len(twins) - 1} more texts have several tokens" if len(twins) > 1 else ""
    oddities.note(f"tokens {tokens[0]} and {tokens[1]} are both {piece[:40]!r}, written as {ids[piece]}{more}")
    return ids, twins


def all_tokens(text: str, ids: Mapping[str, int], twins: Twins) -> Sequence[int]:
    """List all tokens of a text; mostly one or none."""
    return twins.get(text) or ([ids[text]] if text in ids else [])
