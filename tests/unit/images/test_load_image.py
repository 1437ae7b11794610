"""Test opening images: orientation, colours, limits, and one-line errors."""

import base64
import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from localllm.errors import UsageError
from localllm.images import data_urls
from localllm.images import opened as opening
from localllm.images.opened import load_image
from localllm.images.parts import extract_images, get_text, has_image, list_image_parts, to_data_url, to_data_urls
from localllm.text.special_tokens import IMAGE

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def encode(image: Image.Image, format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("BMP", {})])
def test_lossless_formats_keep_all_pixels(tmp_path, format, options):
    data = encode(PICTURE, format, **options)
    path = tmp_path / "a file.bin"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, path, str(path), url, PICTURE, PIXELS):
        assert np.array_equal(np.asarray(load_image(source)), PIXELS)


def test_jpeg_is_close_and_a_gif_gives_its_first_frame():
    assert load_image(encode(PICTURE, "JPEG")).size == (9, 6)
    frames = [Image.new("RGB", (5, 4), colour) for colour in ("red", "blue")]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert load_image(data).getpixel((1, 1)) == (255, 0, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)  # Pillow's operations that undo it
    turned = PICTURE if back is None else PICTURE.transpose(Image.Transpose(back))
    assert np.array_equal(np.asarray(load_image(encode(turned, "PNG", exif=tags))), PIXELS)


def test_transparent_pixels_become_white():
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    for image in (clear, clear.convert("PA")):
        opened = load_image(encode(image, "PNG" if image.mode == "RGBA" else "TIFF") if image is clear else image)
        assert opened.getpixel((0, 0)) == (255, 255, 255)
    palette = clear.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    assert load_image(encode(palette, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    half = Image.new("LA", (1, 1), (0, 128))
    assert load_image(half).getpixel((0, 0)) == (127, 127, 127)


def test_other_colour_modes_become_rgb_and_float_is_refused():
    for image in (PICTURE.convert("L"), PICTURE.convert("CMYK"), PICTURE.convert("1"), PICTURE.convert("P")):
        assert load_image(image).mode == "RGB"
    deep = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    opened = load_image(encode(deep, "PNG"))
    assert [opened.getpixel((x, 0))[0] for x in range(3)] == [0, 127, 255]
    with pytest.raises(UsageError, match="must be colours or grey levels"):
        load_image(Image.fromarray(np.zeros((2, 2), np.float32)))


@pytest.mark.parametrize(("levels", "dtype", "expected"), [
    ([0, 1, 255], "i4", [0, 1, 255]), ([0, 256, 65535], "i4", [0, 0, 255]), ([-5, 70_000, 512], "i4", [0, 255, 1]),
    ([0, 257, 65535], "u2", [0, 1, 255]), ([0, 100, 255], "u2", [0, 0, 0]),
])  # fmt: skip
def test_16_and_32_bit_pixels_are_scaled_to_8_bits(levels: list[int], dtype: str, expected: list[int]):
    """Scale 16 bits by 65535; guess 8 or 16 bits of a 32-bit image from its brightest pixel."""
    pixels = np.asarray(load_image(Image.fromarray(np.array([levels], dtype))))
    assert pixels.tolist() == [[[level] * 3 for level in expected]]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(columns: int, rows: int) -> bytes:
    """Return a PNG that declares a size and has little data."""
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"no image", "expected an image file"),
        (b"%PDF-1.4 ...", "expected an image file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "expected an image file"),
        (png_of(50_000, 50_000), "pixels"),
        (png_of(200_000, 200_000), "pixels"),
        (png_of(20_000, 10), "times the other"),
        (png_of(500, 400), "damaged"),
        (encode(PICTURE, "JPEG")[:300], "damaged|not an image"),
        (encode(PICTURE, "PNG")[:80], "damaged"),
    ],
)
def test_invalid_image_files_are_refused_in_one_line(data, message):
    with pytest.raises(UsageError, match=message) as error:
        load_image(data)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_randomly_damaged_images_open_or_are_refused(format):
    """Damage some 60 files of each format."""
    random, data = np.random.default_rng(sum(map(ord, format))), encode(PICTURE.resize((40, 30)), format)
    for number in range(60):
        broken = bytearray(data)
        for place in random.integers(0, len(broken), 1 + number % 7):
            broken[place] = random.integers(256)
        broken = broken[: random.integers(1, len(broken))] if number % 3 == 0 else broken
        try:
            assert load_image(bytes(broken)).mode == "RGB"
        except UsageError as error:
            assert "\n" not in str(error) and str(error).isprintable()


def test_invalid_sources_of_images_are_refused(tmp_path, monkeypatch):
    for source, message in (
        (tmp_path / "none.png", "No such file"),
        ("a\0b", "cannot read"),
        (str(tmp_path), "cannot read"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,a*b", "must contain valid base64"),
        (7, "must be a path"),
        (np.zeros((2, 2), np.uint8), "uint8"),
        (np.zeros((0, 2, 3), np.uint8), "uint8"),
        (np.zeros((2, 2, 4), np.uint8), "uint8"),
        (np.zeros((2, 2, 1), np.uint8), "uint8"),
        (np.zeros((1, 2, 2, 3), np.uint8), "uint8"),
        (np.zeros((2, 2, 3), np.int8), "uint8"),
    ):
        with pytest.raises(UsageError, match=message):
            load_image(source)
    monkeypatch.setattr(opening, "MAX_BYTES", 10)
    with pytest.raises(UsageError, match="MB"):
        load_image(encode(PICTURE, "PNG"))


def test_image_parts_become_markers_in_the_text():
    """Join them without line breaks, and break markers that the text contains."""
    url = "data:image/png;base64,xyz"
    content = ["Look", {"type": "image", "image": "a.png"}, {"type": "text", "text": "here"},
               {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"and {IMAGE}"},
               {"type": "text", "text": "there"}]  # fmt: skip
    messages_before = [{"role": "system", "content": f"a{IMAGE}"}, {"role": "user", "content": content}]
    messages, images = extract_images(messages_before)
    assert images == ["a.png", url]
    assert [message["content"] for message in messages] == ["a�", f"Look{IMAGE}here{IMAGE}and �\nthere"]
    assert messages_before[1]["content"] is content and get_text(content) == f"Look\nhere\nand {IMAGE}\nthere"
    messages, images = extract_images([{"role": "user", "content": "What?", "images": [b"1", b"2"]}])
    assert messages == [{"role": "user", "content": f"{IMAGE * 2}What?"}] and images == [b"1", b"2"]
    assert extract_images([{"role": "user", "content": "no"}]) == ([{"role": "user", "content": "no"}], [])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, "must have an"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not downloaded"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not downloaded"),
        ({"type": "audio"}, "a content part"),
    ],
)
def test_invalid_content_parts_are_refused(part, message):
    with pytest.raises(UsageError, match=message):
        extract_images([{"role": "user", "content": [{"type": "image", "image": b""}, part]}])
    with pytest.raises(UsageError, match="a list"):
        extract_images([{"role": "user", "content": "x", "images": "a.png"}])


def make_image(kind: str) -> tuple[str, bytes]:
    """Return a data URL's expected format, None if converted, and an image file of that description."""
    clear, turned = PICTURE.copy(), Image.Exif()
    clear.putalpha(100)
    turned[0x0112] = 6  # of the EXIF specification: turned to the right
    upright = Image.Exif()
    upright[0x0112] = 1
    hole = PICTURE.convert("P")
    deep = Image.fromarray(np.arange(6, dtype=np.uint16).reshape(2, 3) * 9999)
    return {
        "png": ("png", encode(PICTURE, "PNG")),
        "jpeg": ("jpeg", encode(PICTURE, "JPEG")),
        "upright": ("jpeg", encode(PICTURE, "JPEG", exif=upright)),
        "grey png": ("png", encode(PICTURE.convert("L"), "PNG")),
        "grey jpeg": ("jpeg", encode(PICTURE.convert("L"), "JPEG")),
        "turned png": ("", encode(PICTURE, "PNG", exif=turned)),
        "turned jpeg": ("", encode(PICTURE, "JPEG", exif=turned)),
        "clear": ("", encode(clear, "PNG")),
        "one clear colour": ("", encode(PICTURE, "PNG", transparency=tuple(PIXELS[0, 0].tolist()))),
        "palette": ("", encode(hole, "PNG", transparency=hole.getpixel((0, 0)))),
        "cmyk": ("", encode(PICTURE.convert("CMYK"), "JPEG")),
        "16 bits": ("", encode(deep, "PNG")),
        "webp": ("", encode(PICTURE, "WEBP", lossless=True)),
        "gif": ("", encode(PICTURE, "GIF")),
        "tiff": ("", encode(PICTURE, "TIFF")),
    }[kind]


KINDS = ["png", "jpeg", "upright", "grey png", "grey jpeg", "turned png", "turned jpeg", "clear", "one clear colour",
         "palette", "cmyk", "16 bits", "webp", "gif", "tiff"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_data_urls_keep_files_that_other_programs_read_alike(kind: str, tmp_path):
    """Keep such JPEG and PNG files, and convert all others to PNG."""
    format, data = make_image(kind)
    path, seen = tmp_path / "x", np.asarray(load_image(data))
    path.write_bytes(data)
    for source in (data, path, str(path)):
        head, _, body = to_data_url(source).partition(",")
        shown = base64.b64decode(body)
        assert head == f"data:image/{format or 'png'};base64" and (shown == data) == bool(format)
        with Image.open(io.BytesIO(shown)) as image:
            assert image.mode in ("RGB", "L") and image.getexif().get(0x0112, 1) == 1
            np.testing.assert_array_equal(np.asarray(image.convert("RGB")), seen)
    for source in (PICTURE, PIXELS):
        np.testing.assert_array_equal(np.asarray(load_image(to_data_url(source))), PIXELS)
        assert to_data_url(source).startswith("data:image/png;base64,")


def test_messages_of_other_programs_get_data_urls():
    """Put images of a message's list before its text."""
    url, other = to_data_url(PICTURE), to_data_url(PICTURE.transpose(Image.Transpose.ROTATE_90))
    part = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "What?"}
    plain = {"role": "system", "content": "Be brief."}
    messages = [
        plain,
        {"role": "user", "content": "What?", "images": [PICTURE], "name": "me"},
        {"role": "user", "content": ["a", {"type": "image", "image": PICTURE}, text], "images": (other,)},
        {"role": "user", "content": [part, text]},
    ]
    assert to_data_urls(messages) == [
        plain,
        {"role": "user", "content": [part, text], "name": "me"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": other}}, "a", part, text]},
        messages[3],
    ]
    assert to_data_urls(messages)[0] is plain and "images" in messages[1]
    with pytest.raises(UsageError, match="expected an image file"):
        to_data_urls([{"role": "user", "content": "?", "images": [b"no image"]}])


@pytest.mark.parametrize(
    ("message", "there"),
    [
        ({"content": "x"}, False), ({"content": "x", "images": []}, False), ({"content": "x", "images": ["a"]}, True),
        ({"content": [{"type": "text", "text": "image"}]}, False), ({"content": [{"type": "image"}]}, True),
        ({"content": ["image", {"type": "image_url"}]}, True), ({"content": None}, False), ({}, False),
        ("image", False), ({"content": {"type": "image"}}, False),
    ],
)  # fmt: skip
def test_a_message_with_images_is_recognized(message, there: bool):
    assert has_image(message) is there
    if isinstance(message, dict) and not message.get("images"):
        assert len(list_image_parts(message)) == there


def test_texts_beside_images_are_joined_by_line_breaks():
    """Put no line break beside an image, and keep unknown parts."""
    image = {"type": "image", "image": "a"}
    for content, text in (
        (["a", "b"], "a\nb"), ([image, "a", "b"], f"{IMAGE}a\nb"), (["a", image, "b"], f"a{IMAGE}b"),
        (["a", image, image], f"a{IMAGE}{IMAGE}"), (["", image, ""], IMAGE), ([image], IMAGE),
    ):  # fmt: skip
        expected = text if image in content else ["a", "b"]
        assert extract_images([{"role": "user", "content": content}, {"content": [image]}])[0][0]["content"] == expected
    several = extract_images([{"content": "x", "images": ("1", "2")}, {"content": ["y"], "images": ["3"]}])
    assert several == ([{"content": f"{IMAGE * 2}x"}, {"content": f"{IMAGE}y"}], ["1", "2", "3"])
    for odd in (None, 7, {"a": 1}):
        assert extract_images([{"content": odd}, {"content": [image]}])[0][0] == {"content": odd}
    parts = [{"type": "text", "text": f"a{IMAGE}"}, f"b{IMAGE}", {"type": "audio"}, 7]
    content_found = extract_images([{"content": parts}, {"content": [image]}])[0][0]["content"]
    assert content_found == [{"type": "text", "text": "a�"}, "b�", {"type": "audio"}, 7]
    for wrong in (b"a", "a", {"a": 1}, 7):
        with pytest.raises(UsageError, match=f"a message's images must be a list, not {type(wrong).__name__}"):
            extract_images([{"content": "x", "images": wrong}])


def test_messages_without_images_stay_as_they_are():
    original = [
        {"role": "user", "content": f"a{IMAGE}"},
        {"role": "user", "content": ["b", {"type": "text", "text": "c"}]},
    ]
    messages, images = extract_images(original)
    assert messages == original and messages is not original and not images
    assert all(one is other for one, other in zip(messages, original, strict=True))
    assert [get_text(content) for content in ("a", None, ["a", {"type": "text"}, "b"])] == ["a", None, "a\n\nb"]
    with pytest.raises(UsageError) as error:
        extract_images([{"content": [{"type": "image", "image": "a"}, {"type": "text", "n": "x" * 200}]}])
    suffix = f", not { ({'type': 'text', 'n': 'x' * 200})!r}"[:100]
    assert str(error.value) == 'a content part must be {"type": "text", "text": ...}' + suffix


# ---- Pillow


def test_only_common_image_formats_are_opened(monkeypatch):
    """Do not load Pillow's other readers, and tolerate a missing one."""
    asked = []

    def imported(name: str) -> None:
        asked.append(name)
        if "Avif" in name:
            raise ImportError

    monkeypatch.setattr(opening, "import_module", imported)
    assert load_image(encode(PICTURE, "PNG")).size == (9, 6)
    kinds = ["Jpeg", "Png", "WebP", "Gif", "Tiff", "Bmp", "Mpo", "Avif"]
    assert asked == [f"PIL.{kind}ImagePlugin" for kind in kinds]
    for format in ("PPM", "TGA", "PCX", "ICO"):
        message = "the image: expected an image file (JPEG, PNG, WebP, GIF, TIFF, BMP)"
        assert refusal(encode(PICTURE, format)) == message


def test_pillows_size_warnings_are_not_shown(monkeypatch, recwarn):
    """Leave the program's other warning filters alone."""
    warnings.simplefilter("always")
    filters = list(warnings.filters)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    assert load_image(encode(PICTURE, "PNG")).size == (9, 6) and not recwarn.list
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 26)
    assert refusal(encode(PICTURE, "PNG")) == "the image: the image exceeds the limit of 100000000 pixels"
    assert warnings.filters == filters


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "not enough memory to load the image; use a smaller one"), (OSError("a\n  b"), "the "
        "image is damaged (a b)"),
        (KeyError(), "the image is damaged (KeyError)"), (ValueError("a\x1b[2Jb"), "the image is damaged (a�[2Jb)"),
        (RuntimeError("x" * 101), f"the image is damaged ({'x' * 100})"),
        (OSError("ö " * 60), f"the image is damaged ({'ö ' * 50})"),
    ],
)  # fmt: skip
def test_any_error_of_pillow_becomes_one_line(monkeypatch, error: Exception, message: str):
    def load(image: Image.Image) -> None:
        raise error

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    assert refusal(encode(PICTURE, "PNG")) == f"the image: {message}"


# ---- limits


def refusal(source) -> str:
    with pytest.raises(UsageError) as error:
        load_image(source)
    return str(error.value)


def test_images_beyond_the_size_limits_are_refused(monkeypatch):
    for columns, rows in ((200, 1), (1, 200), (400, 2)):
        assert load_image(Image.new("L", (columns, rows))).size == (columns, rows)
    for none in ((0, 5), (5, 0), (0, 0)):
        assert refusal(Image.new("L", none)) == "the image: the image has no pixels; use an image of at least 1 x 1"
    message = "the image: the image has 201 x 1 pixels, but one side may be at most 200 times the other"
    assert refusal(Image.new("L", (201, 1))) == message
    assert "one side may be at most 200 times" in refusal(Image.new("L", (1, 201)))
    monkeypatch.setattr(opening, "MAX_PIXELS", 54)
    assert load_image(PICTURE).size == (9, 6)
    monkeypatch.setattr(opening, "MAX_PIXELS", 53)
    for source in (PICTURE, encode(PICTURE, "PNG")):
        assert refusal(source) == "the image: the image has 9 x 6 pixels, but the limit is 53"


def test_files_beyond_the_size_limit_are_refused(tmp_path, monkeypatch):
    data = encode(PICTURE, "BMP")
    (tmp_path / "x.bmp").write_bytes(data)
    url = "data:image/bmp;base64," + base64.b64encode(data).decode()
    monkeypatch.setattr(opening, "MAX_BYTES", len(data))
    assert [load_image(source).size for source in (data, tmp_path / "x.bmp", url)] == [(9, 6)] * 3
    monkeypatch.setattr(opening, "MAX_BYTES", len(data) - 1)
    assert refusal(data) == "the image: the image exceeds the limit of 0 MB"
    assert refusal(tmp_path / "x.bmp") == f"{tmp_path / 'x.bmp'}: the image exceeds the limit of 0 MB"
    assert refusal(url) == "the image: the image exceeds the limit of 0 MB"
    monkeypatch.setattr(data_urls, "MAX_CHARACTERS", 50)
    assert refusal(url) == "an image URL must have at most 0 million characters, not 296"
    monkeypatch.undo()
    assert opening.MAX_BYTES == 256 * 2**20 and opening.MAX_PIXELS == 10**8


def test_refusals_name_the_file_or_the_image(tmp_path):
    """Explain at once that URLs are not downloaded."""
    (tmp_path / "x").write_bytes(b"")
    assert refusal(tmp_path / "x") == f"{tmp_path / 'x'}: the file is empty"
    assert refusal(b"") == refusal(bytearray()) == "the image: the file is empty"
    for scheme in ("http", "https"):
        url = f"{scheme}://example.org/{'a' * 300}.png"
        assert refusal(url) == f"{url[:200]}: images are not downloaded; use a pipe, e.g. `curl -s URL | ... --image -`"
    assert refusal(None) == "an image must be a path, bytes or a Pillow image, not NoneType"
    assert refusal(tmp_path / "none") == f"cannot read the image {tmp_path / 'none'}: No such file or directory"
    for url in ("data:image/png;base64", "data:image/png;base32,abc", "data:,abc"):
        assert refusal(url) == "an image's URL must begin with data:image/...;base64,"


@pytest.mark.parametrize(
    ("levels", "expected"),
    [([-5, 100, 255], [0, 100, 255]), ([-5, 100, 256], [0, 0, 0]), ([257, 514, 99999], [1, 2, 255])],
)
def test_grey_levels_are_scaled_from_8_or_16_bits(levels: list[int], expected: list[int]):
    seen = load_image(Image.fromarray(np.array([levels], np.int32)))
    assert np.asarray(seen)[0].tolist() == [[level] * 3 for level in expected]


def test_a_data_url_with_other_characters_is_refused():
    head, comma, body = to_data_url(PICTURE).partition(",")
    with pytest.raises(UsageError, match=r"^the image's data URL must contain valid base64 after the comma"):
        load_image(f"{head}{comma}{body[:8]}!{body[8:]}")
