"""Images in requests: sent along as data URLs, or files below folders that the user has allowed. None is fetched."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

from localllm.errors import UsageError
from localllm.images.data_urls import is_bare_base64, is_data_url
from localllm.images.parts import images_of
from localllm.server.fields import Body
from localllm.text.marker_escaping import Message

TYPES = ("image_url", "input_image", "image")  # of parts: OpenAI's, those of its responses, Anthropic's
MOST_IMAGES = 64  # in a request
FETCHED = "images are not fetched: send data:image/...;base64, or file: below a folder that --media-path names"


def image_part(part: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of one of the TYPES as {"type": "image_url", "image_url": URL}. Raises UsageError."""
    body = Body(part, name)
    source = body.object("source")
    if body.get("file_id") or (source and source.get("file_id")):
        raise UsageError(f"{name}: images with a file_id are not supported, nothing is kept here")
    if source and source.choice("type", ("base64", "url")) == "base64":
        data = source.needed_text("data")
        url = data if is_data_url(data) else f"data:{source.text('media_type') or 'image/png'};base64,{data}"
    elif source:
        url = source.needed_text("url")
    elif isinstance(inner := part.get("image_url"), dict):
        url = Body(inner, f"{name}.image_url").needed_text("url")
    else:
        url = body.needed_text("image_url")
    return {"type": "image_url", "image_url": url}


def with_files(messages: Sequence[Message], folders: Sequence[str]) -> list[Message]:
    """The same with paths in the place of URLs of files. Raises UsageError for those that are below none of the
    folders, for what had to be fetched, and for too many images."""
    if (count := sum(len(images_of(message)) for message in messages)) > MOST_IMAGES:
        raise UsageError(f"{count} images are too many: {MOST_IMAGES} are the most in a request")
    return [
        {**message, "content": [_found(part, folders) for part in message["content"]]}
        if images_of(message)
        else message
        for message in messages
    ]


def _found(part: dict[str, Any], folders: Sequence[str]) -> dict[str, Any]:
    url = part.get("image_url")
    if url is None or is_data_url(url) or is_bare_base64(url):
        return part
    if not url.startswith("file://"):
        raise UsageError(FETCHED)
    return {"type": "image", "image": file_below(url[7:], folders)}


def file_below(place: str, folders: Sequence[str]) -> str:
    """The file that a URL means, behind its file://: a path, or one in one of the folders. Raises UsageError."""
    for folder in map(os.path.realpath, folders):
        try:
            path = os.path.realpath(os.path.join(folder, url2pathname(place)))
        except (OSError, ValueError):  # a name that no file can have
            continue
        if Path(path).is_relative_to(folder):
            if os.path.isfile(path):
                return path
            raise UsageError(f"there is no image {place[:200]!r}")
    raise UsageError("images are read from the folders only that --media-path names, and this is none of their files")
