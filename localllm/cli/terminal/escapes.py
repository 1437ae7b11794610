"""Escape sequences in texts of the command line, as in llama.cpp's -e."""

import re

MEANINGS = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescape_text(text: str) -> str:
    r"""Replace \n, \r, \t, \', \", \\ and \xNN, a byte of UTF-8, by their characters; other sequences are kept."""
    unescaped = re.sub(r"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))", _meaning, text)
    return unescaped.encode(errors="surrogateescape").decode(errors="surrogateescape")


def _meaning(match: re.Match[str]) -> str:
    """Replace escape sequences; consecutive bytes above 0x7F (as surrogates meanwhile) are decoded as UTF-8."""
    if match[1]:
        return bytes([int(match[1], 16)]).decode(errors="surrogateescape")
    return MEANINGS[match[2]]
