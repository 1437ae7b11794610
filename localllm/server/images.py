"""Images in requests: data URLs, or files in folders that the user allows. Nothing is fetched."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.request import url2pathname

from localllm.errors import UsageError
from localllm.images.data_urls import is_bare_base64, is_data_url
from localllm.images.parts import images_of
from localllm.server.fields import Body
from localllm.text.messages import Message

TYPES = ("image_url", "input_image", "image")  # types of parts: Chat Completions, Responses, Anthropic
MAX_IMAGES = 64  # per request
NOT_FETCHED = (
    "image_url: URLs are not fetched; send the image as data:image/...;base64,... or as file:// in an allowed folder"
)


def image_part(part: Mapping[str, object], name: str) -> dict[str, str]:
    """Convert a part of one of the TYPES to {"type": "image_url", "image_url": URL}.

    Raises UsageError.
    """
    body = Body(part, name)
    source = body.get_object("source")
    if body.get("file_id") or (source and source.get("file_id")):
        raise UsageError(f"{name}: file_id is not supported; send the image as data:image/...;base64,...")
    if source and source.get_choice("type", ("base64", "url")) == "base64":
        data = source.require_text("data")
        url = data if is_data_url(data) else f"data:{source.get_text('media_type') or 'image/png'};base64,{data}"
    elif source:
        url = source.require_text("url")
    elif isinstance(inner := part.get("image_url"), dict):
        url = Body(inner, f"{name}.image_url").require_text("url")
    else:
        url = body.require_text("image_url")
    return {"type": "image_url", "image_url": url}


def resolve_images(messages: Sequence[Message], folders: Sequence[str]) -> list[Message]:
    """Replace file URLs of images by paths.

    Raises UsageError for files outside of the folders, for other URLs, and for too many images.
    """
    if (count := sum(len(images_of(message)) for message in messages)) > MAX_IMAGES:
        raise UsageError(f"too many images: {count}, but at most {MAX_IMAGES} are allowed per request")
    return [
        {**message, "content": [_resolve_part(part, folders) for part in message["content"]]}
        if images_of(message)
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
    """Resolve the path after file://, absolute or relative to one of the folders.

    Raises UsageError if it is in none of the folders.
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
        "image_url: this file is outside of the folders that the server allows; send it as data:image/...;base64,..."
    )
