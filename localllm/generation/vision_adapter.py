"""Load the projector of an open model with its first image, or when one is chosen."""

import os
from typing import TYPE_CHECKING

from localllm.engine.forks import create_lock
from localllm.engine.options import EngineOptions

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.generation.image_encoder import EncodedImage, ImageEncoder
    from localllm.text.tokenizer import Tokenizer


class VisionAdapter:
    """The image encoder of a model, opened at its first use.

    Thread-safe.

    Attributes:
        encoder: None until then.
    """

    def __init__(self, path: str, engine: "Engine", tokenizer: "Tokenizer", threads: int | None, keeps: bool = False):
        """Store the options of the encoder.

        path: path of the model. threads: number of threads for encoding. keeps: whether encoded images are cached on
        disk.
        """
        self._path, self._engine, self._tokenizer, self._threads, self._keeps = path, engine, tokenizer, threads, keeps
        self.lock = create_lock(self)
        self.encoder: ImageEncoder | None = None

    def open_projector(
        self, projector: str | os.PathLike[str] | None = None, pan_and_scan: bool = False
    ) -> "ImageEncoder":
        """Open a projector; None: the one next to the model.

        pan_and_scan: whether crops of long images are encoded, too. Raises UsageError if no projector is found, and the
        errors of ImageEncoder.
        """
        from localllm.files.models_folder import find_projector
        from localllm.generation.image_encoder import ImageEncoder

        path = find_projector(self._path) if projector is None else os.fsdecode(projector)
        encoder = ImageEncoder(
            path, self._engine, self._tokenizer, EngineOptions(self._threads), self._keeps, pan_and_scan
        )
        self.close()
        self.encoder = encoder
        return encoder

    def encode(self, image: object) -> "EncodedImage":
        """Encode an image; types as in localllm.images.opened.

        Raises UsageError if no projector is found or the image is invalid, and the errors of `open_projector`.
        """
        with self.lock:
            return (self.encoder or self.open_projector()).encode(image)

    @property
    def nbytes(self) -> int:
        """The size in bytes of the projector in use, or of the one next to the model; 0 without one."""
        from localllm.files.models_folder import get_projector_size

        return os.stat(self.encoder.path).st_size if self.encoder else get_projector_size(self._path)

    def close(self) -> None:
        if self.encoder:
            self.encoder.close()
        self.encoder = None
