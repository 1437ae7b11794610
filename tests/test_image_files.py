"""Images as files have them: upright, in colour, and refused by a line where they lie."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from localllm.errors import UsageError
from localllm.images import opened as opening
from localllm.images.opened import opened_image
from localllm.images.parts import marked, texts_of
from localllm.text.plain import IMAGE

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def saved(image: Image.Image, format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("BMP", {})])
def test_formats_that_lose_nothing(tmp_path, format, options):
    data = saved(PICTURE, format, **options)
    path = tmp_path / "a file.bin"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, path, str(path), url, PICTURE, PIXELS):
        assert np.array_equal(np.asarray(opened_image(source)), PIXELS)


def test_jpeg_and_the_first_frame_of_a_gif():
    assert opened_image(saved(PICTURE, "JPEG")).size == (9, 6)
    frames = [Image.new("RGB", (5, 4), colour) for colour in ("red", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert opened_image(data).getpixel((1, 1)) == (255, 0, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation):
    """As a camera was held: the reddest corner comes back to where it was."""
    tags = Image.Exif()
    tags[0x0112] = orientation
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)  # Pillow's operations that undo it
    turned = PICTURE if back is None else PICTURE.transpose(Image.Transpose(back))
    assert np.array_equal(np.asarray(opened_image(saved(turned, "PNG", exif=tags))), PIXELS)


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    for image in (clear, clear.convert("PA")):
        found = opened_image(saved(image, "PNG" if image.mode == "RGBA" else "TIFF") if image is clear else image)
        assert found.getpixel((0, 0)) == (255, 255, 255)
    palette = clear.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    assert opened_image(saved(palette, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    half = Image.new("LA", (1, 1), (0, 128))
    assert opened_image(half).getpixel((0, 0)) == (127, 127, 127)


def test_other_kinds_of_numbers():
    for image in (PICTURE.convert("L"), PICTURE.convert("CMYK"), PICTURE.convert("1"), PICTURE.convert("P")):
        assert opened_image(image).mode == "RGB"
    deep = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    found = opened_image(saved(deep, "PNG"))
    assert [found.getpixel((x, 0))[0] for x in range(3)] == [0, 127, 255]
    with pytest.raises(UsageError, match="no colours"):
        opened_image(Image.fromarray(np.zeros((2, 2), np.float32)))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(columns: int, rows: int) -> bytes:
    """Says that it is so large, and has little."""
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b"no image", "not an image"),
        (b"%PDF-1.4 ...", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (png_of(50_000, 50_000), "pixels"),
        (png_of(200_000, 200_000), "pixels"),
        (png_of(20_000, 10), "times the other"),
        (png_of(500, 400), "damaged"),
        (saved(PICTURE, "JPEG")[:300], "damaged|not an image"),
        (saved(PICTURE, "PNG")[:80], "damaged"),
    ],
)
def test_what_is_refused(data, message):
    with pytest.raises(UsageError, match=message) as error:
        opened_image(data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_random_damage(format):
    """Of each format some 60 files, cut off or with other bytes: an image comes of them, or one line."""
    random, data = np.random.default_rng(sum(map(ord, format))), saved(PICTURE.resize((40, 30)), format)
    for number in range(60):
        broken = bytearray(data)
        for place in random.integers(0, len(broken), 1 + number % 7):
            broken[place] = random.integers(256)
        broken = broken[: random.integers(1, len(broken))] if number % 3 == 0 else broken
        try:
            assert opened_image(bytes(broken)).mode == "RGB"
        except UsageError as error:
            assert "\n" not in str(error) and str(error).isprintable()


def test_sources_that_are_none(tmp_path, monkeypatch):
    for source, message in (
        (tmp_path / "none.png", "No such file"),
        ("a\0b", "cannot read"),
        (str(tmp_path), "cannot read"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,a*b", "damaged"),
        (7, "should be a path"),
        (np.zeros((2, 2), np.uint8), "uint8"),
        (np.zeros((0, 2, 3), np.uint8), "uint8"),
    ):
        with pytest.raises(UsageError, match=message):
            opened_image(source)
    monkeypatch.setattr(opening, "MOST_BYTES", 10)
    with pytest.raises(UsageError, match="MB"):
        opened_image(saved(PICTURE, "PNG"))


def test_parts_of_messages():
    """Images become marks, without a line break beside them; marks that a text has are none."""
    url = "data:image/png;base64,xyz"
    content = ["Look", {"type": "image", "image": "a.png"}, {"type": "text", "text": "here"},
               {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"and {IMAGE}"},
               {"type": "text", "text": "there"}]  # fmt: skip
    given = [{"role": "system", "content": f"a{IMAGE}"}, {"role": "user", "content": content}]
    messages, images = marked(given)
    assert images == ["a.png", url]
    assert [message["content"] for message in messages] == ["a�", f"Look{IMAGE}here{IMAGE}and �\nthere"]
    assert given[1]["content"] is content and texts_of(content) == f"Look\nhere\nand {IMAGE}\nthere"
    messages, images = marked([{"role": "user", "content": "What?", "images": [b"1", b"2"]}])
    assert messages == [{"role": "user", "content": f"{IMAGE * 2}What?"}] and images == [b"1", b"2"]
    assert marked([{"role": "user", "content": "no"}]) == ([{"role": "user", "content": "no"}], [])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, "should have an"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not fetched"),
        ({"type": "audio"}, "a part of a content"),
    ],
)
def test_parts_that_are_none(part, message):
    with pytest.raises(UsageError, match=message):
        marked([{"role": "user", "content": [{"type": "image", "image": b""}, part]}])
    with pytest.raises(UsageError, match="a list"):
        marked([{"role": "user", "content": "x", "images": "a.png"}])
