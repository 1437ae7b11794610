"""Damaged images and projectors: 250 of each that are refused, every one by a line, and none that crashes."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from models import write
from models.projectors import PROJECTORS, projector, seeing, write_projector

from localllm.engine.options import EngineOptions
from localllm.engine.vision_encoder import VisionEncoder
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.images.opened import load_image
from tests.unit.engine.test_vision_encoder import picture
from tests.unit.images.test_load_image import encode

FORMATS = "PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"
REFUSED = 250


def damaged(draw: random.Random, whole: bytes, most: int) -> bytes:
    """Cut a file off, or change, leave out or double some bytes among the first `most`."""
    data = bytearray(whole)
    for _ in range(draw.randrange(1, 9)):
        place, count = draw.randrange(most), draw.randrange(1, 5)
        data[place : place + count] = draw.choice((draw.randbytes(count), b"", bytes(data[place : place + count]) * 2))
    return bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)


def count_refused(read: Callable[[bytes], None], wholes: list[tuple[bytes, int]], kind: type[Exception]) -> int:
    """Count the damaged files until so many are refused; each is, by one line, or is read."""
    draw, refused, tried = random.Random(31), 0, 0
    while refused < REFUSED:
        tried += 1
        whole, most = wholes[tried % len(wholes)]
        try:
            read(damaged(draw, whole, most))
        except kind as error:
            assert str(error).isprintable() and len(str(error)) > 10
            refused += 1
    return tried


@pytest.mark.slow
def test_damaged_images_are_read_or_refused():
    wholes = [encode(picture((40, 30)), format) for format in FORMATS]

    def read(data: bytes) -> None:
        assert load_image(data).mode == "RGB"

    assert count_refused(read, [(whole, len(whole)) for whole in wholes], UsageError) < 2 * REFUSED


@pytest.mark.sampled
@pytest.mark.slow
def test_damaged_projectors_are_read_or_refused(tmp_path):
    """Damage every family where names, numbers and places of tensors stand; expect numbers of those that are read."""
    path, wholes = tmp_path / "mmproj.gguf", []
    for name in PROJECTORS:
        whole = write_projector(projector(name), path)
        with GGUFFile.open(whole) as file:
            begin = sum(tensor.data.nbytes for tensor in file.tensors.values())
        wholes.append((whole.read_bytes(), whole.stat().st_size - begin))

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with GGUFFile.open(path) as file:
            reader = VisionEncoder(file, EngineOptions(threads=1))
            family, h = reader.family, reader.hyperparameters
            try:
                assert np.isfinite(reader.read(family.prepare(h, picture((70, 50))).pictures[-1])).all()
            finally:
                reader.close()

    assert count_refused(read, wholes, ModelError) < 2 * REFUSED


def test_run_refuses_damaged_images_and_projectors_in_one_line(tmp_path, cli):
    """Expect exit code 2 for an image and 3 for a projector, and nothing on stdout."""
    write(seeing("llava", context=512), tmp_path / "tiny.gguf")
    beside = write_projector(projector("llava"), tmp_path / "mmproj.gguf")
    shown, draw = Path(tmp_path / "one.png"), random.Random(0)
    whole = encode(picture((40, 30)), "PNG")
    for data, mmproj in ((whole[: draw.randrange(200)], beside.read_bytes()), (whole, beside.read_bytes()[:5000])):
        shown.write_bytes(data)
        beside.write_bytes(mmproj)
        code, out, err = cli("run", str(tmp_path / "tiny.gguf"), "-p", "?", "--image", str(shown), "-n", "2")
        assert code == (3 if data == whole else 2) and not out
        assert err.startswith("localllm: error: ") and len(err.splitlines()) == 1
