"""Encode images with the projector of a model, and assign the token ids that represent them."""

import hashlib
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm import images
from localllm.arch import vision
from localllm.engine.image_cache import EncodedImageCache, compute_projector_fingerprint
from localllm.engine.image_tokens import ImageEmbedding
from localllm.engine.options import EngineOptions
from localllm.engine.vision_encoder import VisionEncoder
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.images.opened import load_image

if TYPE_CHECKING:
    from PIL import Image

    from localllm.engine.engine import Engine
    from localllm.text.tokenizer import Tokenizer

# Cached encoded images: the latest 64, and more up to 256 MB.
MIN_CACHED, MAX_BYTES = 64, 256 << 20


class EncodedImage(NamedTuple):
    """An encoded image.

    Attributes:
        ids: its token ids in a prompt.  seen: the embeddings that these ids represent.
    """

    ids: list[int]
    seen: list[ImageEmbedding]


class ImageEncoder:
    """The image encoder of an open model: its projector with caches of encoded images.

    Not thread-safe.

    Attributes:
        path: path of the projector.  encoded: number of images encoded so far, without those from a cache.
    """

    def __init__(
        self, path: str, engine: "Engine", tokenizer: "Tokenizer", options: EngineOptions, keeps: bool = False,
        pan_and_scan: bool = False,
    ):  # fmt: skip
        """Load a projector.

        keeps: whether encoded images are cached on disk. pan_and_scan: whether crops of long images are encoded, too.
        Raises ModelError for an invalid projector or that of another model, UnsupportedError for an unknown type, and
        UsageError if the projector has no pan-and-scan.
        """
        self.path, self.encoded, self._engine, self._tokenizer = path, 0, engine, tokenizer
        self._cache: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._file, self._root = GGUFFile.open(path), b"" if keeps else path.encode()
        self._reader = VisionEncoder(self._file, options)
        h, family, width = self._reader.hyperparameters, self._reader.family, engine.hyperparameters.row_width
        if h.row_width != width:
            problem = f"it makes rows of {h.row_width} numbers, the model reads {width}"
            raise ModelError(f"{path}: the projector of another model: {problem}")
        missing = [mark for mark in family.MARKS if tokenizer.get_special_id(mark) is None]
        if missing:
            raise ModelError(f"{path}: the projector of another model: this model lacks the token {missing[0]}")
        if pan_and_scan and not hasattr(family, "prepare_crops"):
            raise UsageError(f"{path}: pan-and-scan is for Gemma 3's projectors, this one's type is {h.kind}")
        self._prepared = family.prepare_crops if pan_and_scan else family.prepare
        engine.register_image(
            ImageEmbedding(b"", np.zeros((1, width), np.float32))
        )  # refuses models that images cannot be read by
        self._files = EncodedImageCache(os.path.basename(path), width) if keeps else None

    def encode(self, source: object) -> EncodedImage:
        """Encode an image; the engine knows its token ids as long as the result is referenced.

        source: types as in localllm.images.opened. Raises UsageError for an invalid image, ModelError.
        """
        image = load_image(source)
        self._root = self._root or self._compute_fingerprint()
        description = f" {self._prepared.__name__} {image.size} ".encode()
        digest = hashlib.sha256(self._root + description + image.tobytes()).digest()
        look = self._cache.pop(digest, None) or self._encode_image(image, digest)
        self._cache[digest] = look
        for embedding in look.seen:
            self._engine.register_image(embedding)
        self._evict_images()
        return look

    def _compute_fingerprint(self) -> bytes:
        """Return the disk cache's key of the projector and of the code that prepares images."""
        try:
            return compute_projector_fingerprint(self._file, self._reader.operations, (vision, images))
        except OSError:  # the file is gone
            self._files = None
            return self.path.encode()

    def _encode_image(self, image: "Image.Image", digest: bytes) -> EncodedImage:
        """Encode an image that is not cached in memory.

        digest: checksum of its pixels.
        """
        h = self._reader.hyperparameters
        prepared = self._prepared(h, image)
        rows = self._files.find(digest) if self._files else None
        if rows is None:
            self.encoded += 1
            rows = self._reader.encode_crops(prepared.pictures, image.size)
            if self._files:
                self._files.keep(digest, rows)
        embeddings = [
            ImageEmbedding(
                digest + bytes([number & 255, number >> 8]),
                some,
                h.compute_mrope_positions(prepared.pictures[number]),
                h.sees_ahead,
            )
            for number, some in enumerate(rows)
        ]
        ids = list[int]()
        for part in prepared.parts:
            ids += self._tokenizer.encode(part, special=True) if isinstance(part, str) else embeddings[part].ids
        return EncodedImage(ids, embeddings)

    def _evict_images(self) -> None:
        """Drop the oldest cached images above the limits."""
        while len(self._cache) > MIN_CACHED and sum(map(count_bytes, self._cache.values())) > MAX_BYTES:
            self._cache.popitem(last=False)

    def close(self) -> None:
        self._reader.close()


def count_bytes(look: EncodedImage) -> int:
    """Return the size of an encoded image in bytes."""
    return sum(embedding.rows.nbytes for embedding in look.seen)
