"""Converts images to data URLs for servers."""

import base64
import io
from collections.abc import Sequence

import numpy as np

from localllm.images.opened import import_pillow, load_image, read_source
from localllm.images.parts import has_image, is_image, source_of
from localllm.text.messages import Message

MEDIA_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png"}  # every server reads these
ORIENTATION = 0x0112  # EXIF tag


def to_data_urls(messages: Sequence[Message]) -> list[Message]:
    """Convert every image of messages to a part of type image_url. Raises UsageError for an invalid image."""
    return [_with_urls(message) if has_image(message) else message for message in messages]


def _with_urls(message: Message) -> Message:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    images = [{"type": "image", "image": source} for source in message.get("images") or ()]
    converted = [
        {"type": "image_url", "image_url": {"url": data_url(source_of(part))}} if is_image(part) else part
        for part in (*images, *parts)
    ]
    return {**{key: value for key, value in message.items() if key != "images"}, "content": converted}


def data_url(source: object) -> str:
    """Convert an image to a data URL; source: see load_image. Raises UsageError.

    A file that every program shows the same way is encoded as it is, any other image as a PNG.
    """
    image = load_image(source)
    format, data = read_unchanged(source)
    if not format:
        file = io.BytesIO()
        image.save(file, "PNG")
        format, data = "PNG", file.getvalue()
    return f"data:{MEDIA_TYPES[format]};base64,{base64.b64encode(data).decode()}"


def read_unchanged(source: object) -> tuple[str, bytes]:
    """Return the format ("JPEG", "PNG") and bytes of an upright, opaque file; "" for any other image."""
    pillow = import_pillow()
    if isinstance(source, np.ndarray | pillow.Image):
        return "", b""
    data = read_source(source)[1]
    with pillow.open(io.BytesIO(data)) as file:
        is_plain = file.mode in ("RGB", "L") and "transparency" not in file.info
        is_plain = is_plain and file.format in MEDIA_TYPES and file.getexif().get(ORIENTATION, 1) == 1
        return (file.format if is_plain else ""), data
