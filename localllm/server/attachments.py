"""Images and text files in requests; no URL is ever fetched.

Images are data URLs, or files in folders that the user allows. Text files are base64: parts of type file and
input_file, and Anthropic's documents.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.request import url2pathname

from localllm.errors import UsageError
from localllm.images.data_urls import decode_base64, is_bare_base64, is_data_url
from localllm.images.parts import list_image_parts
from localllm.server.fields import RequestBody
from localllm.text.messages import Message

IMAGE_TYPES = ("image_url", "input_image", "image")  # types of parts: Chat Completions, Responses, Anthropic
MAX_IMAGES = 64  # per request
NOT_FETCHED = (
    "image_url: URLs are not fetched; send the image as data:image/...;base64,... or as file:// in an allowed folder"
)
FILE_TYPES = ("file", "input_file")  # types of parts: Chat Completions, Responses
TEXT_TYPES = ("text/", "application/json", "application/xml", "application/x-")  # prefixes


def convert_image_part(part: Mapping[str, object], name: str) -> dict[str, str]:
    """Convert a part of one of IMAGE_TYPES to {"type": "image_url", "image_url": URL}. Raises UsageError."""
    body = RequestBody(part, name)
    source = body.get_object("source")
    if body.get("file_id") or (source and source.get("file_id")):
        raise UsageError(f"{name}: file_id is not supported; send the image as data:image/...;base64,...")
    if source and source.get_choice("type", ("base64", "url")) == "base64":
        data = source.require_string("data")
        url = data if is_data_url(data) else f"data:{source.get_string('media_type') or 'image/png'};base64,{data}"
    elif source:
        url = source.require_string("url")
    elif isinstance(inner := part.get("image_url"), dict):
        url = RequestBody(inner, f"{name}.image_url").require_string("url")
    else:
        url = body.require_string("image_url")
    return {"type": "image_url", "image_url": url}


def resolve_images(messages: Sequence[Message], folders: Sequence[str]) -> list[Message]:
    """Replace file URLs of images by paths.

    Raises UsageError for files outside the folders, for other URLs, and for more than MAX_IMAGES images.
    """
    if (count := sum(len(list_image_parts(message)) for message in messages)) > MAX_IMAGES:
        raise UsageError(f"too many images: {count}, but at most {MAX_IMAGES} are allowed per request")
    return [
        {**message, "content": [_resolve_part(part, folders) for part in message["content"]]}
        if list_image_parts(message)
        else message
        for message in messages
    ]


def _resolve_part(part: Mapping[str, object], folders: Sequence[str]) -> Mapping[str, object]:
    url = part.get("image_url")
    if not isinstance(url, str) or is_data_url(url) or is_bare_base64(url):
        return part
    if not url.startswith("file://"):
        raise UsageError(NOT_FETCHED)
    return {"type": "image", "image": resolve_file(url[7:], folders)}


def resolve_file(url_path: str, folders: Sequence[str]) -> str:
    """Resolve the path of a file URL, absolute or relative to one of the folders.

    Raises UsageError for a path outside all folders, or without a file.
    """
    for folder in map(os.path.realpath, folders):
        try:
            path = os.path.realpath(os.path.join(folder, url2pathname(url_path)))
        except (OSError, ValueError):  # invalid file name
            continue
        if Path(path).is_relative_to(folder):
            if os.path.isfile(path):
                return path
            raise UsageError(f"image not found: {url_path[:200]!r}")
    raise UsageError(
        "image_url: the file is outside the folders that the server allows; send it as data:image/...;base64,..."
    )


def convert_file_part(part: Mapping[str, object], name: str) -> dict[str, str]:
    """Convert a part of FILE_TYPES to a text part that begins with the file's name. Raises UsageError."""
    outer = RequestBody(part, name)
    file = outer.get_object("file") or outer
    url = file.get_string("file_data")
    if url is None:
        raise UsageError(f"{name}: files are not stored or fetched; send the text, or file_data with a text file")
    head, _, data = url.rpartition(",")
    media = head.strip().lower().removeprefix("data:").partition(";")[0]
    text = decode_text(data, media or "text/plain", name)
    title = file.get_string("filename")
    return {"type": "text", "text": f"{title}\n{text}" if title else text}


def decode_text(data: str, media: str, name: str) -> str:
    """Decode UTF-8 text from base64. Raises UsageError if it is invalid, or its media type is not in TEXT_TYPES."""
    if not media.startswith(TEXT_TYPES):
        raise UsageError(f"{name}: media type {media[:60]} is not supported; send the file's text")
    try:
        return decode_base64(data).decode()
    except (UsageError, UnicodeDecodeError):
        raise UsageError(f"{name}: the data must be UTF-8 text, encoded as base64") from None
