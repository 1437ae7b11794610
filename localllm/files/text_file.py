"""Decode the text files of users: UTF-8, UTF-16 with a byte order mark, or an encoding that they name.

`decode_text` raises for invalid bytes, because text that is silently wrong costs more than an error.
`decode_with_replacement`, for prompts, replaces them with a warning, because one bad byte in a log should not cost the
answer.
"""

import codecs
import os

from localllm.errors import UsageError
from localllm.files.gguf.header import printable

UTF16_MARKS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE


def read_text(path: str | os.PathLike[str], encoding: str | None = None) -> str:
    """Read a text file without its last line break. Raises UsageError that names the file."""
    return strip_line_break(read_exact_text(path, encoding))


def read_template_choice(choice: str) -> str:
    """Return a chat template's name or source, read from the file if `choice` is a path.

    A path has a folder or ends with .jinja. Raises UsageError if the file cannot be read.
    """
    if "{" in choice or not (os.path.dirname(choice) or choice.endswith(".jinja")):
        return choice
    return read_text(choice)


def read_exact_text(path: str | os.PathLike[str], encoding: str | None = None) -> str:
    """Read a text file with all line breaks. Raises UsageError that names the file."""
    name = printable(os.fsdecode(path), 4096)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, ValueError) as error:  # a name with a NUL in it is a ValueError
        raise UsageError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return decode_text(data, name, encoding)


def read_keys(path: str) -> list[str]:
    """Read API keys, one per line, without blank lines and lines that begin with #. Raises UsageError."""
    lines = [line.strip() for line in read_text(path).splitlines()]
    if keys := [line for line in lines if line and not line.startswith("#")]:
        return keys
    raise UsageError(f"{path} must have at least one key, one per line")


def decode_text(data: bytes, name: str, encoding: str | None = None) -> str:
    """Decode the content of a text file, without its byte order mark.

    encoding: a name that `require_encoding` accepts, or None. Raises UsageError with `name` and the offset of the first
    invalid byte.
    """
    codec = encoding or ("utf-16" if data.startswith(UTF16_MARKS) else "utf-8")
    try:
        return data.decode(codec).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        wrong = data[error.start : error.start + 1].hex()
        raise UsageError(f"{name}: not {codec.upper()} at byte {error.start} (0x{wrong})") from None
    except UnicodeError as error:  # from codecs that report no position
        raise UsageError(f"{name}: not {codec.upper()}: {error}") from None


def decode_with_replacement(data: bytes, name: str) -> tuple[str, str]:
    """Decode like decode_text, but replace invalid bytes by U+FFFD.

    Returns the text and a warning, "" if all bytes were valid. Raises UsageError for invalid UTF-16, and for a binary
    file, recognized by a zero byte.
    """
    try:
        return decode_text(data, name), ""
    except UsageError as error:
        if b"\0" in data or data.startswith(UTF16_MARKS):
            raise
        text, count = replace_invalid(data)
        return text.removeprefix("\ufeff"), describe_replacement(str(error), count)


def replace_invalid(data: bytes) -> tuple[str, int]:
    """Decode UTF-8 with U+FFFD for invalid bytes; return the text and the number of those bytes."""
    escaped = data.decode(errors="surrogateescape")
    return data.decode(errors="replace"), sum("\udc80" <= letter <= "\udcff" for letter in escaped)


def describe_replacement(problem: str, count: int) -> str:
    """Return a warning: the first problem, and how many bytes were replaced."""
    return f"{problem}; replaced {'1 byte' if count == 1 else f'{count} bytes'} in all"


def require_encoding(name: str | None) -> None:
    """Raise UsageError for an encoding that Python does not know."""
    try:
        if name is not None and not isinstance(b" ".decode(name), str):
            raise LookupError
    except (LookupError, ValueError):
        raise UsageError(
            f"encoding {printable(str(name))} is unknown; use, for example, utf-8, utf-16, latin-1 or cp1252"
        ) from None


def strip_line_break(text: str) -> str:
    """Remove one line break at the end, also that of Windows."""
    return text.removesuffix("\n").removesuffix("\r")
