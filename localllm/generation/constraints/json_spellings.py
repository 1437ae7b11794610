r"""The spellings of a character or number in JSON: é is \u00e9, too, and 0.00001 is 1e-05.

llguidance accepts one spelling of each where a schema restricts a string or number: the canonical one.
"""

import re
from collections.abc import Iterator
from decimal import Decimal

Ranges = list[tuple[int, int]]  # of code points, both ends included

_SHORT = {b'"': '"', b"\\": "\\", b"/": "/", b"b": "\b", b"f": "\f", b"n": "\n", b"r": "\r", b"t": "\t"}
_WRITTEN = {ord(character): b"\\" + byte for byte, character in _SHORT.items() if character != "/"}
_HEX = b"0123456789abcdef"
_HIGH, _LOW, _END = 0xD800, 0xDC00, 0xE000  # the surrogates
_NUMBER = rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
EXPONENT = re.compile(rb"(%b)[eE]([+-]?)([0-9]*)" % _NUMBER)
MANTISSA = re.compile(_NUMBER)
_MOST_EXPONENT = 308  # of a float


def canonical_character(code: int) -> bytes:
    """Return the spelling of a character that llguidance accepts in every string."""
    if code in _WRITTEN:
        return _WRITTEN[code]
    return b"\\u%04x" % code if code < 0x20 or code == 0x7F else chr(code).encode()


def read_escape(text: bytes) -> Ranges:
    r"""Return the code points whose escapes begin with a text: one for a whole escape, none for an invalid one.

    Surrogates must come in pairs, which are one character: JSON in UTF-8 cannot hold a single one.
    """
    short, digits = text[1:2], text[2:6].lower()
    if not short:
        return [(0, 0x10FFFF)]
    if short != b"u":
        return [(ord(_SHORT[short]),) * 2] if short in _SHORT and len(text) == 2 else []
    if any(digit not in _HEX for digit in digits):
        return []
    first, last = _extremes(digits)
    highs = max(first, _HIGH), min(last, _LOW - 1)
    if len(text) > 6:
        return _read_pair(first, text[6:]) if highs == (first, last) else []
    ranges = [(first, min(last, _HIGH - 1)), (max(first, _END), last)]
    ranges += [(_join(highs[0], _LOW), _join(highs[1], _END - 1))] if highs[0] <= highs[1] else []
    return [(low, high) for low, high in ranges if low <= high]


def _read_pair(high: int, text: bytes) -> Ranges:
    """Return the code points that a high surrogate and the beginning of an escape may spell."""
    digits = text[2:].lower()
    if not b"\\u".startswith(text[:2]) or len(digits) > 4 or any(digit not in _HEX for digit in digits):
        return []
    first, last = _extremes(digits)
    first, last = max(first, _LOW), min(last, _END - 1)
    return [(_join(high, first), _join(high, last))] if first <= last else []


def is_whole_escape(text: bytes) -> bool:
    """Return whether a text that read_escape accepts is a whole escape."""
    if text[1:2] != b"u":
        return len(text) == 2
    return len(text) == 12 or (len(text) == 6 and not _HIGH <= int(text[2:], 16) < _LOW)


def _extremes(digits: bytes) -> tuple[int, int]:
    return int(digits.ljust(4, b"0"), 16), int(digits.ljust(4, b"f"), 16)


def _join(high: int, low: int) -> int:
    return 0x10000 + ((high - _HIGH) << 10) + low - _LOW


def canonical_number(text: bytes) -> bytes:
    """Return a number without an exponent and without zeros at its end."""
    value = Decimal(text.decode())
    return format(value.normalize(), "f").encode() if value else b"0"


def possible_numbers(text: bytes) -> Iterator[bytes]:
    """Yield the canonical spellings of the numbers that begin with a mantissa and the beginning of an exponent."""
    match = EXPONENT.fullmatch(text)
    if not match or len(match[3]) > 3:
        return
    mantissa, sign, digits = match.groups()
    signs = [sign] if sign or digits else [b"-", b"+"]
    for exponent in range(_MOST_EXPONENT + 1):
        if any((b"%d" % exponent).rjust(width, b"0").startswith(digits) for width in (1, 2, 3)):
            yield from (canonical_number(b"%be%b%d" % (mantissa, each, exponent)) for each in signs)
