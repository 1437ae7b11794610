"""Images in messages: convert OpenAI's content parts to placeholders in the text and a list of images."""

import base64
import io
from collections.abc import Sequence

import numpy as np

from localllm.errors import UsageError
from localllm.images.data_urls import is_bare_base64, is_data_url
from localllm.images.opened import import_pillow, load_image, read_source
from localllm.text.messages import Message
from localllm.text.special_tokens import IMAGE


def extract_images(messages: Sequence[Message]) -> tuple[list[Message], list[object]]:
    """Replace images in messages by placeholders; return the messages, and the images in order.

    A part is {"type": "image", "image": path, bytes or a Pillow image}, or {"type": "image_url", "image_url": {"url":
    "data:image/png;base64,..."}}. Images in Ollama's format, {"content": ..., "images": [path, ...]}, are put before
    the text. As in llama.cpp, there is no line break before or after an image. Raises UsageError.
    """
    if not any(has_image(message) for message in messages):
        return list(messages), []
    images = list[object]()
    return [_insert_placeholders(message, images) for message in messages], images


def has_image(message: object) -> bool:
    """Return whether a message has "images", or image parts in its content."""
    return isinstance(message, dict) and (bool(message.get("images")) or bool(list_image_parts(message)))


def list_image_parts(message: Message) -> list[Message]:
    """List the image parts of a message."""
    content = message.get("content")
    return [part for part in content if is_image(part)] if isinstance(content, list) else []


def get_text(content: str | list[str | Message]) -> str:
    """Return a content's text without images, its parts joined by line breaks."""
    if not isinstance(content, list):
        return content
    return "\n".join(
        part if isinstance(part, str) else str(part.get("text", "")) for part in content if not is_image(part)
    )


def is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _insert_placeholders(message: Message, images: list[object]) -> Message:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str | list):
        return message
    parts = [content] if isinstance(content, str) else content
    if not has_image(message):
        return {
            **message,
            "content": [*map(_escape_placeholders, parts)] if content is parts else _escape_placeholders(content),
        }
    attached, message = message.get("images") or (), {key: message[key] for key in message if key != "images"}
    if isinstance(attached, str | bytes) or not isinstance(attached, Sequence):
        raise UsageError(f"a message's images must be a list, not {type(attached).__name__}")
    images += attached
    text, follows_image = IMAGE * len(attached), bool(attached)
    for part in parts:
        if isinstance(part, dict) and is_image(part):
            images.append(get_source(part))
            text, follows_image = text + IMAGE, True
            continue
        texts = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(texts, str):
            raise UsageError('a content part must be {"type": "text", "text": ...}' + f", not {part!r}"[:100])
        text += ("\n" if text and not follows_image else "") + texts.replace(IMAGE, "�")
        follows_image = False
    return {**message, "content": text}


def _escape_placeholders(part: object) -> object:
    """Replace IMAGE in a content part's text, so that a user cannot inject the placeholder."""
    if isinstance(part, str):
        return part.replace(IMAGE, "�")
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {**part, "text": part["text"].replace(IMAGE, "�")}
    return part


def get_source(part: Message) -> object:
    """Return the path, bytes, Pillow image or data URL of an image part. Raises UsageError."""
    if part["type"] == "image":
        if "image" not in part:
            raise UsageError('a content part of type "image" must have an "image": a path, bytes or a Pillow image')
        return part["image"]
    source = part.get("image_url")
    url = source.get("url") if isinstance(source, dict) else source
    if not isinstance(url, str):
        raise UsageError('a content part of type "image_url" must have an image_url: {"url": ...}')
    if not is_data_url(url) and not is_bare_base64(url):
        raise UsageError("images are not downloaded: an image URL must begin with data:image/...;base64,")
    return url


# ---- for servers

MEDIA_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png"}  # every server supports these
ORIENTATION = 0x0112  # EXIF tag


def to_data_urls(messages: Sequence[Message]) -> list[Message]:
    """Convert every image of messages to a part of type image_url. Raises UsageError for an invalid image."""
    return [_convert_images(message) if has_image(message) else message for message in messages]


def _convert_images(message: Message) -> Message:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    images = [{"type": "image", "image": source} for source in message.get("images") or ()]
    converted = [
        {"type": "image_url", "image_url": {"url": to_data_url(get_source(part))}} if is_image(part) else part
        for part in (*images, *parts)
    ]
    return {**{key: value for key, value in message.items() if key != "images"}, "content": converted}


def to_data_url(source: object) -> str:
    """Convert an image to a data URL; source: see load_image. Raises UsageError.

    A file that every program displays alike is encoded unchanged, any other image as PNG.
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
