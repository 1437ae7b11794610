"""Decode request bodies that clients compress: Content-Encoding gzip and zstd, within the limit of bytes.

zstd is Python's own from 3.14 on, and before that its backport by the same author.
"""

import sys
import zlib
from collections.abc import Callable
from functools import cache
from typing import Protocol

from localllm.errors import LocalllmError

MOST = 2  # codings of a body


class CodingError(LocalllmError):
    """A body that cannot be decoded; status: that of its response."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


class Decompressor(Protocol):
    """A stream as zlib, bz2 and zstd decompress it."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


@cache
def decompressors() -> dict[str, tuple[Callable[[], Decompressor], type[Exception]]]:
    """Return how to begin a stream of each coding, and the error of a broken one."""
    supported: dict[str, tuple[Callable[[], Decompressor], type[Exception]]] = {
        "gzip": (lambda: zlib.decompressobj(wbits=31), zlib.error)
    }
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:  # an installation without the extra, or a Python without the library
        return supported
    supported["zstd"] = zstd.ZstdDecompressor, zstd.ZstdError
    return supported


def parse_codings(value: str) -> list[str]:
    """Return the codings of a Content-Encoding header in their order. Raises CodingError."""
    names = [name for part in value.split(",") if (name := part.strip().lower())]
    codings = [name.removeprefix("x-") for name in names if name != "identity"]
    supported = [*decompressors(), "identity"]
    for name in codings:
        if name not in supported:
            expected = f"{', '.join(supported[:-1])} or {supported[-1]}"
            raise CodingError(415, f"the Content-Encoding must be {expected}, found {name[:60]!r}")
    if len(codings) > MOST:
        raise CodingError(415, f"the Content-Encoding must name at most {MOST} codings, found {len(codings)}")
    return codings


def decode(body: bytes, codings: list[str], limit: int) -> bytes:
    """Decode a body; call it outside of the event loop. Raises CodingError for more than `limit` bytes."""
    for name in reversed(codings):
        body = decode_one(body, name, limit)
    return body


def decode_one(data: bytes, name: str, limit: int) -> bytes:
    """Undo one coding, of one stream or several in a row."""
    begin, broken = decompressors()[name]
    decoded = bytearray()
    try:
        while data:
            stream = begin()
            while not stream.eof:
                chunk = stream.decompress(data, limit + 1 - len(decoded))
                decoded += chunk
                if len(decoded) > limit:
                    raise CodingError(413, f"the decoded body is larger than the limit of {limit} bytes")
                if not chunk and not stream.eof:
                    raise CodingError(400, f"the body ends within its {name} stream (Content-Encoding)")
                data = b"" if not stream.eof else stream.unused_data
    except broken:
        raise CodingError(400, f"the body is not a valid {name} stream (Content-Encoding)") from None
    return bytes(decoded)
