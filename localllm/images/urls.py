"""Converts images to data URLs for other programs."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from localllm.images.opened import import_pillow, load_image, read_source
from localllm.images.parts import has_image, is_image, source_of
from localllm.text.marker_escaping import Message

KINDS = {"JPEG": "image/jpeg", "PNG": "image/png"}  # that every server reads
ORIENTATION = 0x0112  # among what EXIF tells


def to_data_urls(messages: Sequence[Message]) -> list[Message]:
    """Convert every image to a part of OpenAI's type image_url. Raises UsageError for an invalid image."""
    return [_with_urls(message) if has_image(message) else message for message in messages]


def _with_urls(message: Message) -> Message:
    said = message["content"]
    parts = [{"type": "text", "text": said}] if isinstance(said, str) else said
    beside = [{"type": "image", "image": source} for source in message.get("images") or ()]
    told = [
        {"type": "image_url", "image_url": {"url": data_url(source_of(part))}} if is_image(part) else part
        for part in (*beside, *parts)
    ]
    return {**{key: value for key, value in message.items() if key != "images"}, "content": told}


def data_url(source: Any) -> str:
    """Convert an image, as of localllm.images.opened, to a data URL. Raises UsageError.

    The file itself if every program shows it the same way, or else a PNG of the loaded image.
    """
    image = load_image(source)
    kind, data = read_unchanged(source)
    if not kind:
        file = io.BytesIO()
        image.save(file, "PNG")
        kind, data = "PNG", file.getvalue()
    return f"data:{KINDS[kind]};base64,{base64.b64encode(data).decode()}"


def read_unchanged(source: Any) -> tuple[str, bytes]:
    """Return the format and bytes of an upright file without transparency; "" for any other."""
    pillow = import_pillow()
    if isinstance(source, np.ndarray | pillow.Image):
        return "", b""
    data = read_source(source)[1]
    with pillow.open(io.BytesIO(data)) as file:
        is_plain = file.mode in ("RGB", "L") and "transparency" not in file.info
        is_plain = is_plain and file.format in KINDS and file.getexif().get(ORIENTATION, 1) == 1
        return (file.format if is_plain else ""), data
