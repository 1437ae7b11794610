"""Text files that requests contain in base64: parts of type file and input_file, and Anthropic's documents."""

from collections.abc import Mapping

from localllm.errors import UsageError
from localllm.images.data_urls import decode_base64
from localllm.server.fields import Body

TYPES = ("file", "input_file")  # types of parts: Chat Completions, Responses
TEXT_TYPES = (
    "text/",
    "application/json",
    "application/xml",
    "application/x-",
)  # prefixes


def file_part(part: Mapping[str, object], name: str) -> dict[str, str]:
    """Convert a part of one of the TYPES to a text part with the file's name. Raises UsageError for other files."""
    outer = Body(part, name)
    file = outer.get_object("file") or outer
    url = file.get_text("file_data")
    if url is None:
        raise UsageError(f"{name}: files are not stored or fetched; send the text, or file_data with a text file")
    head, _, data = url.rpartition(",")
    media = head.strip().lower().removeprefix("data:").partition(";")[0]
    text = decode_text(data, media or "text/plain", name)
    title = file.get_text("filename")
    return {"type": "text", "text": f"{title}\n{text}" if title else text}


def decode_text(data: str, media: str, name: str) -> str:
    """Decode a text in base64. Raises UsageError if it is invalid, or its media type is not one of TEXT_TYPES."""
    if not media.startswith(TEXT_TYPES):
        raise UsageError(f"{name}: {media[:60]} is not supported; send its text")
    try:
        return decode_base64(data).decode()
    except (UsageError, UnicodeDecodeError):
        raise UsageError(f"{name}: the data should be a text in UTF-8, as base64") from None
