"""Find the paths of images in a question, as terminals write them when a file is dropped onto the window."""

import os
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
# A path in quotes, or one whose spaces have a backslash before them.
PATH = re.compile(r"(?<!\S)(?:'(?P<single>[^'\n]+)'|\"(?P<double>[^\"\n]+)\"|(?P<bare>(?:\\.|[^\s\\'\"])+))(?!\S)")
STARTS = ("/", "./", "../", "~/", "file://")


class DroppedImages(NamedTuple):
    """The paths of images in a question, and the question without them."""

    text: str
    paths: list[str]


def find_images(text: str) -> DroppedImages:
    """Find the images in a question: existing files whose paths are written with at least one slash."""
    paths, kept, end = list[str](), "", 0
    for match in PATH.finditer(text):
        if path := locate_image(match):
            paths.append(path)
            kept, end = kept + text[end : match.start()].rstrip(" "), match.end()
    return DroppedImages((kept + text[end:]).strip() if paths else text, paths)


def locate_image(match: re.Match[str]) -> str | None:
    """Return the path that a match stands for if it is that of an image, else None."""
    bare = match["bare"]
    path = re.sub(r"\\(.)", r"\1", bare) if bare and not re.match(r"[A-Za-z]:\\", bare) else match[0].strip("'\"")
    if not (path.startswith(STARTS) or re.match(r"[A-Za-z]:[\\/]", path)) or not path.lower().endswith(IMAGES):
        return None
    if path.startswith("file://"):
        path = unquote(urlsplit(path).path)
    path = os.path.expanduser(path)
    return path if os.path.isfile(path) else None
