"""Escape sequences in texts of the command line, as llama.cpp's -e reads them."""

import re

MEANINGS = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescape_text(text: str) -> str:
    r"""Replace \n, \r, \t, \', \", \\ and \xNN, a byte of UTF-8, by what they mean; others stay."""
    whole = re.sub(r"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))", _meaning, text)
    return whole.encode(errors="surrogateescape").decode(errors="surrogateescape")


def _meaning(match: re.Match[str]) -> str:
    """Bytes beyond ASCII wait as surrogates until those next to them make a character of them."""
    if match[1]:
        return bytes([int(match[1], 16)]).decode(errors="surrogateescape")
    return MEANINGS[match[2]]
