"""Load images from paths, bytes, Pillow images and arrays: upright, in RGB.

Other formats, truncated files, and images that would fill the memory are rejected with a one-line message.
"""

import io
import os
import warnings
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from localllm.errors import UsageError
from localllm.images.data_urls import decode_data_url, is_bare_base64, is_data_url

if TYPE_CHECKING:
    from PIL import Image

# Only those that the installed Pillow supports are used.
FORMATS = "JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "MPO", "AVIF", "HEIF"
PLUGINS = "Jpeg", "Png", "WebP", "Gif", "Tiff", "Bmp", "Mpo", "Avif"  # HEIF is in a separate package
MAX_BYTES = 256 << 20
MAX_PIXELS = 100_000_000  # 400 MB while loading
MAX_RATIO = 200  # of the longer side to the shorter one
MISSING = "images need Pillow: pip install 'localllm[images]'"
WHITE = 255, 255, 255


def load_image(source: object) -> "Image.Image":
    """Load an image as a Pillow image in RGB. Raises UsageError.

    source: a path, the bytes of a file, a data URL, a Pillow image or an array uint8 [rows, columns, 3].
    """
    pillow = import_pillow()
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise UsageError(f"an image array must be uint8 [rows, columns, 3], not {source.dtype} {[*source.shape]}")
        source = pillow.fromarray(source)
    if isinstance(source, pillow.Image):
        return to_upright_rgb(source, "the image")
    name, data = read_source(source)
    return decode_image(pillow, data, name)


def import_pillow() -> ModuleType:
    """Import PIL.Image. Raises UsageError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(MISSING) from None
    return Image


def read_source(source: object) -> tuple[str, bytes]:
    """Read an image file, data URL or bytes; return a name for messages, and the bytes. Raises UsageError."""
    if isinstance(source, bytes | bytearray | memoryview):
        return "the image", bytes(source)
    if isinstance(source, str) and (is_data_url(source) or (is_bare_base64(source) and not os.path.exists(source))):
        return "the image", decode_data_url(source)
    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"an image must be a path, bytes or a Pillow image, not {type(source).__name__}")
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise UsageError(f"{source[:200]}: images are not downloaded; use a pipe, e.g. `curl -s URL | ... --image -`")
    try:
        with open(source, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a NUL in it is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the image {os.fsdecode(source)}: {reason}") from None
    return os.fsdecode(source), data


def decode_image(pillow: ModuleType, data: bytes, name: str) -> "Image.Image":
    """Decode the first image in a file's bytes; pillow: PIL.Image. Raises UsageError."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name}: the image exceeds the limit of {MAX_BYTES >> 20} MB")
    for plugin in PLUGINS:  # only a few of Pillow's more than 40
        with suppress(ImportError):
            import_module(f"PIL.{plugin}ImagePlugin")
    formats = [format for format in FORMATS if format in pillow.OPEN]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large images and unusual metadata
            image = pillow.open(io.BytesIO(data), formats=formats)
            require_size(image.size, name)
            image.load()
            return to_upright_rgb(image, name)
    except UsageError:
        raise
    except pillow.DecompressionBombError:
        raise UsageError(f"{name}: the image exceeds the limit of {MAX_PIXELS} pixels") from None
    except MemoryError:
        raise UsageError(f"{name}: not enough memory to load the image; use a smaller one") from None
    except Exception as error:  # Pillow's readers may raise any error
        raise UsageError(f"{name}: {describe_error(error, data)}") from None


def require_size(size: tuple[int, int], name: str) -> None:
    """Raise UsageError for an image without pixels, too many pixels, or extreme proportions."""
    columns, rows = size
    if columns < 1 or rows < 1:
        raise UsageError(f"{name}: the image has no pixels; use an image of at least 1 x 1")
    if columns * rows > MAX_PIXELS:
        raise UsageError(f"{name}: the image has {columns} x {rows} pixels, but the limit is {MAX_PIXELS}")
    if max(size) > MAX_RATIO * min(size):
        raise UsageError(
            f"{name}: the image has {columns} x {rows} pixels, but one side may be at most {MAX_RATIO} times the other"
        )


def describe_error(error: Exception, data: bytes) -> str:
    """Describe an error in one line of printable characters."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "expected an image file (JPEG, PNG, WebP, GIF, TIFF, BMP)" if data else "the file is empty"
    text = " ".join(str(error).split())[:100]
    printable = "".join(character if character.isprintable() else "�" for character in text)
    return f"the image is damaged ({printable or type(error).__name__})"


def to_upright_rgb(image: "Image.Image", name: str) -> "Image.Image":
    """Convert to RGB, rotated by the EXIF orientation, with transparency on white."""
    from PIL import ImageOps

    require_size(image.size, name)
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I;16", "I;16B", "I;16L", "I;16N", "I"):  # Pillow would clip values above 255
        levels = np.asarray(image).astype(np.int64)
        highest = 65535 if image.mode != "I" or levels.max() > 255 else 255
        image = import_pillow().fromarray((np.clip(levels, 0, highest) * 255 // highest).astype(np.uint8))
    if image.mode == "F":
        raise UsageError(f"{name}: the pixels must be colours or grey levels, not float")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = import_pillow().new("RGBA", image.size, (*WHITE, 255))
        image = import_pillow().alpha_composite(ground, image)
    return image.convert("RGB")
