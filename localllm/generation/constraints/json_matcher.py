r"""Match JSON in all its spellings, such as \u00e9, \/ and 1e-05 for é, / and 0.00001.

llguidance accepts only the latter. It parses the text as it is while it can. From a backslash or the first digit of a
number on, a copy of its parser waits; when the escape or number is complete, and the parser did not accept it, the copy
parses its canonical spelling. A token is allowed only if some continuation of it is, so that no answer ends in half an
escape.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from localllm.generation.constraints.vocabulary import SpellingVocabulary, TokenConsumer

if TYPE_CHECKING:
    from llguidance import LLMatcher


Ranges = list[tuple[int, int]]  # of code points, both ends included

_SHORT = {b'"': '"', b"\\": "\\", b"/": "/", b"b": "\b", b"f": "\f", b"n": "\n", b"r": "\r", b"t": "\t"}
_WRITTEN = {ord(character): b"\\" + byte for byte, character in _SHORT.items() if character != "/"}
_HEX = b"0123456789abcdef"
_HIGH, _LOW, _END = 0xD800, 0xDC00, 0xE000  # the surrogates
_NUMBER = rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
EXPONENT = re.compile(rb"(%b)[eE]([+-]?)([0-9]*)" % _NUMBER)
MANTISSA = re.compile(_NUMBER)
_MOST_EXPONENT = 308  # of a float


def spell_canonically(code: int) -> bytes:
    """Return the spelling of a character, in UTF-8, that llguidance accepts in every string."""
    if code in _WRITTEN:
        return _WRITTEN[code]
    return b"\\u%04x" % code if code < 0x20 or code == 0x7F else chr(code).encode()


def parse_escape(text: bytes) -> Ranges:
    """Return the code points whose JSON escapes begin with these bytes, as ranges.

    There is exactly one if the escape is complete, and none if it is invalid. A surrogate must be part of a pair,
    because UTF-8 cannot encode a lone surrogate.
    """
    short, digits = text[1:2], text[2:6].lower()
    if not short:
        return [(0, 0x10FFFF)]
    if short != b"u":
        return [(ord(_SHORT[short]),) * 2] if short in _SHORT and len(text) == 2 else []
    if any(digit not in _HEX for digit in digits):
        return []
    first, last = _get_code_range(digits)
    highs = max(first, _HIGH), min(last, _LOW - 1)
    if len(text) > 6:
        return _parse_surrogates(first, text[6:]) if highs == (first, last) else []
    ranges = [(first, min(last, _HIGH - 1)), (max(first, _END), last)]
    ranges += [(_join_surrogates(highs[0], _LOW), _join_surrogates(highs[1], _END - 1))] if highs[0] <= highs[1] else []
    return [(low, high) for low, high in ranges if low <= high]


def _parse_surrogates(high: int, text: bytes) -> Ranges:
    """Return the code points that a high surrogate and the beginning of another escape may spell."""
    digits = text[2:].lower()
    if not b"\\u".startswith(text[:2]) or len(digits) > 4 or any(digit not in _HEX for digit in digits):
        return []
    first, last = _get_code_range(digits)
    first, last = max(first, _LOW), min(last, _END - 1)
    return [(_join_surrogates(high, first), _join_surrogates(high, last))] if first <= last else []


def is_whole_escape(text: bytes) -> bool:
    """Return whether a valid escape, or pair of escapes, is complete."""
    if text[1:2] != b"u":
        return len(text) == 2
    return len(text) == 12 or (len(text) == 6 and not _HIGH <= int(text[2:], 16) < _LOW)


def _get_code_range(digits: bytes) -> tuple[int, int]:
    """Return the first and last code unit that begin with these hexadecimal digits."""
    return int(digits.ljust(4, b"0"), 16), int(digits.ljust(4, b"f"), 16)


def _join_surrogates(high: int, low: int) -> int:
    return 0x10000 + ((high - _HIGH) << 10) + low - _LOW


def normalize_number(text: bytes) -> bytes:
    """Return a number without exponent and without zeros at its end."""
    value = Decimal(text.decode())
    return format(value.normalize(), "f").encode() if value else b"0"


def expand_numbers(text: bytes) -> Iterator[bytes]:
    """Yield the canonical spellings of the numbers that begin with these bytes, which end within an exponent."""
    match = EXPONENT.fullmatch(text)
    if not match or len(match[3]) > 3:
        return
    mantissa, sign, digits = match.groups()
    signs = [sign] if sign or digits else [b"-", b"+"]
    for exponent in range(_MOST_EXPONENT + 1):
        if any((b"%d" % exponent).rjust(width, b"0").startswith(digits) for width in (1, 2, 3)):
            yield from (normalize_number(b"%be%b%d" % (mantissa, each, exponent)) for each in signs)


_BACKSLASH, _QUOTE, _DELETE = b'\\"\x7f'
_NUMERIC = b"-+.eE0123456789"
_AFTER_NUMBER = b",}] \n"
_ESCAPABLE = re.compile(rb"[\x7f-\xff/]")
_SPECIAL = re.compile(rb'["\\\x7f]')  # of a string
_GENERAL = rb"\u4e00"
_UNESCAPED = {*range(0x20, 0x7F)} - {*b"\"&'/<>\\"}
_SAMPLES = (b"0", b"Q", b"z", b";")  # characters that a string must take to take escapes of all that it takes
# The first and last code point of the characters that begin with a byte in UTF-8.
_BEGINNINGS = [
    *((code, code, code) for code in range(0x80)),
    *((byte - 0xC0 << 6, (byte - 0xBF << 6) - 1, byte) for byte in range(0xC2, 0xE0)),
    *((byte - 0xE0 << 12, (byte - 0xDF << 12) - 1, byte) for byte in range(0xE0, 0xF0)),
    *((byte - 0xF0 << 18, (byte - 0xEF << 18) - 1, byte) for byte in range(0xF0, 0xF5)),
]


class JsonMatcher(TokenConsumer):
    """Matches one answer that is or contains JSON, with llguidance's methods.

    Attributes:
        depth: number of open brackets of the current JSON; None outside of JSON.
    """

    def __init__(self, parser: "LLMatcher", vocabulary: SpellingVocabulary, is_json: bool):
        """Start at the beginning of an answer.

        is_json: whether the whole answer is JSON; otherwise the grammar marks the beginning of JSON.
        """
        self._parser: LLMatcher | None = parser  # after all of the text; None if only a canonical spelling goes on
        self._waiting: LLMatcher | None = None  # before the pending spelling
        self._pending = b""  # the beginning of an escape or number
        self._is_inside = False  # a string
        self._vocabulary, self._is_json = vocabulary, is_json
        self.depth: int | None = 0 if is_json else None

    def deep_copy(self) -> "JsonMatcher":
        twin: JsonMatcher = object.__new__(JsonMatcher)
        vars(twin).update(vars(self))
        twin._parser = self._parser and self._parser.deep_copy()
        return twin  # the waiting parser is never advanced, and shared

    # ---- tokens

    def _accept(self, token: int) -> bool:
        text = self._vocabulary.texts[token] if token < self._vocabulary.size else b""
        if not text or (self.depth is None and not {*b"{["} & {*text}):
            parser = self._resolve_number()
            if parser is None or not parser.try_consume_tokens([token]):
                return False
            self._parser, self._waiting, self._pending = parser, None, b""
            return True
        is_plain = self._is_inside and not self._pending and not _SPECIAL.search(text)
        if is_plain:
            return self._parser is not None and self._parser.try_consume_tokens([token]) == 1
        twin = self.deep_copy()
        if not twin._consume_bytes(text):
            return False
        vars(self).update(vars(twin))
        return True

    def _resolve_number(self) -> "LLMatcher | None":
        """Return a parser after the text, with the pending number in its canonical spelling.

        Returns None if the number is incomplete.
        """
        if self._parser is not None or self._is_inside or self._waiting is None:
            return self._parser
        match = EXPONENT.fullmatch(self._pending)
        return self._extend_parser(self._waiting, normalize_number(self._pending)) if match and match[3] else None

    def _extend_parser(self, parser: "LLMatcher", data: bytes) -> "LLMatcher | None":
        """Return a copy of a parser that has consumed more bytes; None if it does not accept them."""
        ids = self._vocabulary.get_ids(data)
        if parser.validate_tokens(ids) < len(ids):
            return None
        twin = parser.deep_copy()
        twin.try_consume_tokens(ids)
        return twin

    def _consume_character(self, parser: "LLMatcher", code: int) -> "LLMatcher | None":
        """Return a copy of a parser after a character of a string; None if it does not accept the character.

        A letter of a name or constant is never escaped, since that would only change its spelling.
        """
        if code in _UNESCAPED and not all(parser.validate_tokens(self._vocabulary.get_ids(each)) for each in _SAMPLES):
            return None
        after = self._extend_parser(parser, spell_canonically(code))
        return self._extend_parser(parser, b"\x7f") if after is None and code == _DELETE else after  # as in names

    # ---- bytes

    def _consume_bytes(self, data: bytes) -> bool:
        """Advance by bytes; return whether all are allowed."""
        return all(map(self._consume_byte, data))

    def _consume_byte(self, byte: int) -> bool:
        """Advance by a byte; return whether it is allowed."""
        if self.depth is None:
            self._enter_json(byte)
            return self._advance(byte)
        if self._is_inside and self._pending:
            return self._consume_in_escape(byte)
        if self._pending and byte in _NUMERIC:
            is_exponent = byte in b"eE" and self._allows_exponent()
            has_exponent = self._parser is None
            self._pending += bytes([byte])
            return self._advance(byte) or ((is_exponent or has_exponent) and self._can_end_number())
        if self._pending:
            self._parser, self._waiting, self._pending = self._resolve_number(), None, b""
            if self._parser is None:
                return False
        if self._is_inside and byte == _DELETE:
            self._parser = self._parser and self._consume_character(self._parser, byte)
            return self._parser is not None
        begins = byte == _BACKSLASH if self._is_inside else byte in b"-0123456789"
        if begins:
            self._waiting, self._pending = self._parser and self._parser.deep_copy(), bytes([byte])
            return self._advance(byte) or (self._is_inside and self._can_end_escape())
        self._update_depth(byte)
        return self._advance(byte)

    def _advance(self, byte: int) -> bool:
        """Advance the parser by a byte as it is; return whether the parser accepts it."""
        if self._parser and not self._parser.try_consume_tokens(self._vocabulary.get_ids(bytes([byte]))):
            self._parser = None
        return self._parser is not None

    def _enter_json(self, byte: int) -> None:
        if byte in b"{[" and self._parser and self._parser.validate_tokens([self._vocabulary.mark]):
            self.depth = 1

    def _update_depth(self, byte: int) -> None:
        if byte == _QUOTE:
            self._is_inside = not self._is_inside
        elif not self._is_inside and not self._is_json and self.depth is not None:
            self.depth += (byte in b"{[") - (byte in b"}]")
            self.depth = self.depth or None

    def _consume_in_escape(self, byte: int) -> bool:
        """Advance within an escape; return whether the byte is allowed."""
        self._pending += bytes([byte])
        ranges = parse_escape(self._pending)
        if not ranges:
            return False
        is_native = self._advance(byte)
        if not is_whole_escape(self._pending):
            return is_native or self._can_end_escape()
        if not is_native and self._waiting:
            self._parser = self._consume_character(self._waiting, ranges[0][0])
        self._waiting, self._pending = None, b""
        return self._parser is not None

    def _can_end_escape(self) -> bool:
        """Return whether the pending escape can become that of an allowed character."""
        return self._waiting is not None and self._accepts_any(self._waiting, parse_escape(self._pending))

    def _allows_exponent(self) -> bool:
        """Return whether the pending number may have an exponent; integers may not."""
        point = self._parser is not None and self._parser.validate_tokens(self._vocabulary.get_ids(b"."))
        return MANTISSA.fullmatch(self._pending) is not None and (bool(point) or b"." in self._pending)

    def _can_end_number(self) -> bool:
        """Return whether the pending number, which has an exponent, can become an allowed one."""
        return any(map(self._accepts_number, expand_numbers(self._pending)))

    def _accepts_number(self, number: bytes) -> bool:
        """Return whether the text may continue with a number and end or go on after it."""
        parser = self._waiting and self._extend_parser(self._waiting, number)
        return parser is not None and (
            parser.is_accepting()
            or any(parser.validate_tokens(self._vocabulary.get_ids(bytes([b]))) for b in _AFTER_NUMBER)
        )

    def _accepts_any(self, parser: "LLMatcher", ranges: Ranges) -> bool:
        """Return whether a string may continue with a character in one of these ranges."""
        for first, last, byte in _BEGINNINGS:
            if not _is_overlapping(first, last, ranges):
                continue
            if first == last:
                if self._consume_character(parser, first):
                    return True
            elif self._accepts_utf8(parser, byte, ranges):
                return True
        return False

    def _accepts_utf8(self, parser: "LLMatcher", lead: int, ranges: Ranges) -> bool:
        """Return whether a string may continue with a character in these ranges whose first byte is `lead`."""
        length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        waiting = [(parser, lead, lead & (0x7F >> length), length - 1)]
        while waiting:
            before, byte, value, missing = waiting.pop()
            first, last = value << 6 * missing, ((value + 1) << 6 * missing) - 1
            if not _is_overlapping(first, last, ranges):
                continue
            after = self._extend_parser(before, bytes([byte]))
            if after is None:
                continue
            if not missing or any(low <= first and last <= high for low, high in ranges):
                return True
            waiting += [(after, byte, value << 6 | byte & 0x3F, missing - 1) for byte in range(0x80, 0xC0)]
        return False

    # ---- masks

    def compute_bitmask(self) -> bytes:
        """Compute the mask of the next token, which includes end tokens, one bit per token, the lowest bit first."""
        parser, vocabulary = self._resolve_number(), self._vocabulary
        allowed = np.zeros(vocabulary.mark + 1, bool) if parser is None else _unpack_mask(parser).copy()
        allowed = allowed[: vocabulary.size]
        if self.depth is None:
            return np.packbits(allowed, bitorder="little").tobytes()
        if self._parser is None and not self._is_inside:  # after an exponent, whose digits the parser has not read
            allowed[[token for byte in _NUMERIC for token in vocabulary.by_first.get(byte, ())]] = False
        if self._pending:
            self._allow_pending(allowed)
        else:
            self._allow_forced(allowed)
            for token in vocabulary.spelled[self._is_inside]:
                allowed[token] = allowed[token] or self._allows(vocabulary.texts[token])
        return np.packbits(allowed, bitorder="little").tobytes()

    def _allow_forced(self, allowed: np.ndarray) -> None:
        """Allow all tokens that write a prefix of the forced text, up to a character that may be escaped.

        llguidance allows only the usual token of such a text, which may reach beyond that character.
        """
        if self._parser is None or np.count_nonzero(allowed) != 1:
            return
        forced = self._parser.compute_ff_bytes()
        if spelled := _ESCAPABLE.search(forced):
            for token in self._vocabulary.by_first.get(forced[0], ()):
                text = self._vocabulary.texts[token]
                allowed[token] |= len(text) <= spelled.start() and forced.startswith(text)

    def _allow_pending(self, allowed: np.ndarray) -> None:
        """Allow the tokens that continue an escape or number in a spelling that the parser does not accept."""
        by_first, texts = self._vocabulary.by_first, self._vocabulary.texts
        heads: dict[bytes, JsonMatcher | None] = {b"": self}  # after the beginnings of tokens
        viable = [byte for byte in by_first if self._is_viable(byte)]
        is_exponent = {*viable} <= {*b"eE"}
        tokens = self._vocabulary.exponents if is_exponent else (token for byte in viable for token in by_first[byte])
        for token in tokens if viable else ():
            if allowed[token]:
                continue
            text, place, after = texts[token], 0, heads[b""]
            while after and after._pending and place < len(text):
                place += 1
                head = text[:place]
                if head not in heads:
                    twin = after.deep_copy()
                    heads[head] = twin if twin._consume_byte(head[-1]) else None
                after = heads[head]
            allowed[token] = after is not None and (place == len(text) or after._allows(text[place:]))

    def _is_viable(self, byte: int) -> bool:
        """Return whether the pending spelling may continue with a byte.

        Only called for bytes after which the parser does not accept everything.
        """
        one, ids = bytes([byte]), self._vocabulary.get_ids
        is_native = self._parser is not None and bool(self._parser.validate_tokens(ids(one)))
        if not self._is_inside:
            is_exponent = byte in b"eE" and self._allows_exponent()
            return (
                not is_native and bool(byte in _NUMERIC if self._parser is None else is_exponent) and self._allows(one)
            )
        if not parse_escape(self._pending + one):
            return False
        if is_native and self._waiting:
            is_general = self._waiting.validate_tokens(ids(_GENERAL)) == len(_GENERAL)
            if is_general or (self._pending == b"\\" and byte != ord("u")):
                return False
        return self._allows(one)

    def _allows(self, data: bytes) -> bool:
        """Return whether the answer may continue with these bytes."""
        if self._is_inside and not self._pending and self._parser and not _SPECIAL.search(data):
            return self._parser.validate_tokens(self._vocabulary.get_ids(data)) == len(data)
        return self.deep_copy()._consume_bytes(data)

    # ---- state

    def is_stopped(self) -> bool:
        """Return whether the answer must end now."""
        return self._parser is not None and self._parser.is_stopped()

    def is_accepting(self) -> bool:
        """Return whether the answer may end now."""
        parser = self._resolve_number()
        return parser is not None and parser.is_accepting()

    def compute_ff_tokens(self) -> list[int]:
        """Return the usual tokens of the forced text."""
        if self._parser is None or self._pending:
            return []
        return self._parser.compute_ff_tokens()

    def is_error(self) -> bool:
        """Return whether a token that is not allowed was consumed, or a limit was exceeded."""
        return bool(self._error) or (self._parser is not None and self._parser.is_error())

    def get_error(self) -> str:
        """Return the error message; "" without an error."""
        return self._error or (self._parser.get_error() if self._parser else "")


def _unpack_mask(parser: "LLMatcher") -> np.ndarray:
    """Return the mask of a parser's next token, bool [tokens]."""
    return np.unpackbits(np.frombuffer(parser.compute_bitmask(), np.uint8), bitorder="little").view(bool)


def _is_overlapping(first: int, last: int, ranges: Ranges) -> bool:
    """Return whether a range of code points overlaps one of several ranges."""
    return any(low <= last and first <= high for low, high in ranges)
