"""Decode data URLs and bare base64 of images, also with line breaks, in capitals, or without padding.

Sources: RFC 2397 (data URLs), RFC 4648 (base64, and its URL-safe alphabet), RFC 2045 (lines of 76 characters).
"""

import base64
import binascii
import re
from urllib.parse import unquote

from localllm.errors import UsageError

MAX_CHARACTERS = 400 << 20  # more than the largest allowed file needs, line breaks included
PREFIX_ERROR = "an image's URL must begin with data:image/...;base64,"
# First bytes of PNG, JPEG, GIF, BMP, WebP and TIFF (either byte order); AVIF and HEIF have "ftyp" at byte 4.
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
_DATA = re.compile(r"\s*data:", re.IGNORECASE)
_BARE = re.compile(r"[A-Za-z0-9+/_=%\s-]{24}")  # 24 characters of base64; few paths match
_SPACE = re.compile(r"\s+")


def is_data_url(text: str) -> bool:
    return bool(_DATA.match(text))


def is_bare_base64(text: str) -> bool:
    """Return whether a string is an image file in base64 without "data:", judged by its first bytes."""
    beginning = _SPACE.sub("", text[:64])[:24]
    if not _BARE.match(beginning):
        return False
    try:
        data = decode_base64(unquote(beginning)[:16])
    except UsageError:
        return False
    return data.startswith(SIGNATURES) or data[4:8] == b"ftyp"


def decode_data_url(url: str) -> bytes:
    """Decode a data URL, or base64 without "data:...". Raises UsageError."""
    if not is_data_url(url):
        return decode_base64(url)
    head, comma, body = url.partition(",")
    if not comma or not _SPACE.sub("", head).lower().endswith(";base64"):
        raise UsageError(PREFIX_ERROR)
    return decode_base64(body)


def decode_base64(text: str) -> bytes:
    """Decode base64 of either alphabet, with or without padding, white space and percent escapes.

    Raises UsageError.
    """
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"an image URL must have at most {MAX_CHARACTERS >> 20} million characters, not {len(text)}")
    if "%" in text:
        text = unquote(text)
    text = _SPACE.sub("", text).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(
            "the image's data URL must contain valid base64 after the comma; encode the image again"
        ) from None
