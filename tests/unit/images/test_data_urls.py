"""Test images in base64: every form gives the same image in Python, in messages and over HTTP."""

import base64
import io
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="needs the extra localllm[images]")

from localllm.errors import UsageError  # noqa: E402
from localllm.images.data_urls import decode_base64, decode_data_url, is_bare_base64, is_data_url  # noqa: E402
from localllm.images.opened import load_image  # noqa: E402
from localllm.images.parts import extract_images  # noqa: E402
from localllm.server.attachments import convert_image_part, resolve_images  # noqa: E402


def encode_image(kind: str, seed: int = 1) -> bytes:
    """Return an image's file."""
    levels = np.random.default_rng(seed).integers(0, 256, (4 + seed, 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, kind)
    return file.getvalue()


# Files whose base64 has padding of each length, and both characters in which the alphabets differ.
FILES = [data for data in (encode_image("PNG", seed) for seed in range(60)) if {*b"+/"} <= {*base64.b64encode(data)}]
FILES = [next(data for data in FILES if len(data) % 3 == rest) for rest in sorted({len(data) % 3 for data in FILES})]


def lines(text: str, width: int, end: str) -> str:
    return end.join(text[place : place + width] for place in range(0, len(text), width))


HEAD = "data:image/png;base64,"
FORMS: dict[str, Callable[[str], str]] = {
    "as it must be": lambda text: HEAD + text,
    "in lines": lambda text: HEAD + lines(text, 76, "\n"),
    "in lines of mail": lambda text: HEAD + lines(text, 64, "\r\n") + "\r\n",
    "with spaces": lambda text: HEAD + " " + lines(text, 10, " ") + " ",
    "behind a line break": lambda text: "\n " + HEAD + "\n" + text,
    "without padding": lambda text: HEAD + text.rstrip("="),
    "for URLs": lambda text: HEAD + text.replace("+", "-").replace("/", "_"),
    "for URLs without padding": lambda text: HEAD + text.replace("+", "-").replace("/", "_").rstrip("="),
    "percent-encoded": lambda text: HEAD + quote(text, safe=""),
    "percent-encoded in lines": lambda text: HEAD + quote(lines(text, 76, "\n"), safe=""),
    "in capitals": lambda text: f"DATA:IMAGE/PNG;BASE64,{text}",
    "in mixed case": lambda text: f"Data:Image/Png;Base64,{text}",
    "with parameters": lambda text: f"data:image/png;charset=utf-8;name=a.png;base64,{text}",
    "with a space in the head": lambda text: f"data:image/png; base64,{text}",
    "without a type": lambda text: f"data:;base64,{text}",
    "of another type": lambda text: f"data:application/octet-stream;base64,{text}",
    "without a head": lambda text: text,
    "without a head, in lines": lambda text: lines(text, 76, "\n") + "\n",
    "without a head and padding": lambda text: text.rstrip("="),
    "without a head, for URLs": lambda text: text.replace("+", "-").replace("/", "_"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("data", FILES, ids=lambda data: f"padding {-len(data) % 3}")
def test_every_form_of_base64_gives_the_same_image(form: str, data: bytes):
    url = FORMS[form](base64.b64encode(data).decode())
    assert decode_data_url(url) == data
    assert (np.asarray(load_image(url)) == np.asarray(load_image(data))).all()
    part = {"type": "image_url", "image_url": {"url": url}}
    assert extract_images([{"role": "user", "content": [part]}])[1] == [url]
    messages = resolve_images([{"role": "user", "content": [convert_image_part(part, "x")]}], [])
    assert decode_data_url(messages[0]["content"][0]["image_url"]) == data
    source = {"type": "base64", "media_type": "image/png", "data": url}
    assert decode_data_url(convert_image_part({"type": "image", "source": source}, "x")["image_url"]) == data


def test_the_test_images_cover_both_alphabets_and_all_paddings():
    assert {-len(data) % 3 for data in FILES} == {0, 1, 2}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_image_formats_are_recognized_without_a_data_url_head(kind: str):
    assert is_bare_base64(base64.b64encode(encode_image(kind)).decode())


def test_other_texts_are_not_taken_for_base64_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for text in (
        "photo.png",
        "/home/me/photo.png",
        "",
        "iVBORw0",
        "aGVsbG8gd29ybGQsIGhlbGxvIHdvcmxk",
        "http://a.example/x",
    ):
        assert not is_bare_base64(text) and not is_data_url(text)
    for text in ("####", "iVBORw0KGgo$", "aGVsb", "a=b=", "%FF%FE", "aGV\u00e9"):
        with pytest.raises(
            UsageError, match="the image's data URL must contain valid base64 after the comma; encode the image again"
        ):
            decode_base64(text)
    for url in ("data:image/png,abc", "data:image/png;base64", "data:,abc", "DATA:image/png;base32,abc"):
        with pytest.raises(UsageError, match=r"an image's URL must begin with data:image/\.\.\.;base64,"):
            decode_data_url(url)
    monkeypatch.chdir(tmp_path)
    name = base64.b64encode(FILES[0]).decode()[:24].replace("/", "_")
    Path(name).write_bytes(FILES[1])  # a file of that name goes before
    assert os.path.exists(name) and load_image(name).size == load_image(FILES[1]).size
