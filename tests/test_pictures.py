"""Vision encoders: the CPU as the reference, the files that are refused, and how images are prepared."""

from pathlib import Path

import numpy as np
import pytest
from engines import bound
from models.projectors import PROJECTORS, projector, write_projector
from PIL import Image
from test_goldens import nmse

from localllm.arch.storage import KVType
from localllm.arch.weights import Weights
from localllm.engine.options import EngineOptions
from localllm.engine.pictures import PictureReader
from localllm.engine.run import Span
from localllm.errors import ModelError
from localllm.files.gguf_file import GGUFFile
from localllm.kernels.reference import Reference
from localllm.kernels.remembered import Remembered

SIZES = (131, 90), (33, 200)


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Random blocks, smooth enough that resizing matters little where it should not."""
    columns, rows = size
    blocks = np.random.default_rng(seed).integers(0, 256, (rows // 8 + 1, columns // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(blocks, np.ones((8, 8, 1), np.uint8))[:rows, :columns])


def twin(file: GGUFFile, reader: PictureReader, shown: Image.Image) -> np.ndarray:
    """What the reference makes of a picture."""
    h, family, weights = reader.hyperparameters, reader.family, Weights(file.tensors)

    def builder(count: int) -> Reference:
        return Reference([Span(Remembered(KVType.of("f32")), 0, np.zeros(count, np.int64), count)], {}, count)

    pixels = h.rows(shown)
    rows = family.gathered(h, family.tower(builder(len(pixels)), weights, h, pixels), h.grid(shown))
    return family.project(builder(len(rows)), weights, h, rows)


def opened(tmp_path: Path, name: str, **changed) -> tuple[GGUFFile, PictureReader]:
    file = GGUFFile.open(write_projector(projector(name, **changed), tmp_path / "mmproj.gguf"))
    return file, PictureReader(file, EngineOptions(threads=2))


@pytest.mark.parametrize("name", PROJECTORS)
def test_as_the_reference(tmp_path, name):
    file, reader = opened(tmp_path, name)
    for size in SIZES:
        for shown in reader.family.prepared(reader.hyperparameters, picture(size)).pictures:
            found = reader.read(shown)
            assert nmse(found, twin(file, reader, shown)) < bound(1e-10, 1e-6)
    reader.close()


def test_pictures_differ(tmp_path):
    """Every patch counts, and one after the other is as each alone."""
    _, reader = opened(tmp_path, "gemma3")
    first, second = (
        reader.family.prepared(reader.hyperparameters, picture((70, 60), seed)).pictures[0] for seed in (1, 2)
    )
    rows = reader.read(first)
    assert nmse(reader.read(second), rows) > 1e-3
    assert np.array_equal(reader.read(first), rows)
    changed = first.copy()
    changed.putpixel((55, 55), (255, 0, 255))
    assert not np.allclose(reader.read(changed), rows, atol=1e-6)
    reader.close()


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0"])
def test_other_formats(tmp_path, format):
    """Weights in 16 bits or in blocks, as projectors are often written; rows of convolutions are not in blocks."""
    made = projector("idefics3", width=96, hidden=128, side=64, patch=16)
    path = write_projector(made, tmp_path / "mmproj.gguf", format)
    file = GGUFFile.open(path)
    kinds = {tensor.format.name for tensor in file.tensors.values()}
    assert format in kinds
    reader = PictureReader(file, EngineOptions(threads=2))
    shown = picture((64, 64))
    assert nmse(reader.read(shown), twin(file, reader, shown)) < {"Q8_0": 1e-4}.get(format, 1e-5)
    reader.close()


def test_how_gemma_3_prepares(tmp_path):
    _, reader = opened(tmp_path, "gemma3")
    shown = picture((131, 90))
    made = reader.family.prepared(reader.hyperparameters, shown)
    assert made.parts == ["<start_of_image>", 0, "<end_of_image>"]
    by_columns = shown.resize((56, 90), Image.Resampling.BILINEAR)
    assert np.array_equal(made.pictures[0], by_columns.resize((56, 56), Image.Resampling.BILINEAR))
    reader.close()


@pytest.mark.parametrize(
    ("size", "grid"), [((131, 90), (2, 2)), ((300, 60), (2, 1)), ((40, 90), (1, 2)), ((8, 8), (2, 2))]
)
def test_how_idefics_3_prepares(tmp_path, size, grid):
    """Squares of 56, the longer side of the image 112, and then all of it; each row of squares ends with its line."""
    _, reader = opened(tmp_path, "idefics3")
    made = reader.family.prepared(reader.hyperparameters, picture(size))
    columns, rows = grid
    assert [shown.size for shown in made.pictures] == [(56, 56)] * (columns * rows + 1)
    text = "".join(f"[{part}]" if isinstance(part, int) else part for part in made.parts)
    squares = [
        "".join(f"<fake_token_around_image><row_{y + 1}_col_{x + 1}>[{y * columns + x}]" for x in range(columns))
        for y in range(rows)
    ]
    whole = f"<fake_token_around_image><global-img>[{columns * rows}]<fake_token_around_image>"
    assert text == "\n".join(squares) + "\n\n" + whole
    reader.close()


def test_how_llava_prepares(tmp_path):
    """Bars above and below, or on both sides."""
    _, reader = opened(tmp_path, "llava")
    for size, bars in (((112, 56), ((0, 0), (55, 13))), ((56, 112), ((0, 0), (13, 55)))):
        (square,) = reader.family.prepared(reader.hyperparameters, picture(size)).pictures
        assert square.size == (56, 56) and all(square.getpixel(place) == (122, 116, 104) for place in bars)
        assert square.getpixel((28, 28)) != (122, 116, 104)
    reader.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"projector_type": "resampler"}, "resampler"),
        ({"projector_type": 3}, "a text"),
        ({"has_vision_encoder": False}, "vision"),
        ({"vision.image_size": 1 << 20}, "image_size|pixels"),
        ({"vision.patch_size": 0}, "patch_size"),
        ({"vision.patch_size": 57}, "pixels"),
        ({"vision.patch_size": 8}, "v.patch_embd.weight"),
        ({"vision.attention.head_count": 5}, "heads"),
        ({"vision.embedding_length": 48}, "v.patch_embd.weight|columns|rows"),
        ({"vision.block_count": 0}, "block_count"),
        ({"vision.block_count": 1}, "not part of"),
        ({"vision.block_count": 3}, "v.blk.2"),
        ({"vision.projection_dim": 95}, "projection_dim"),
        ({"vision.image_std": np.float32([0, 1, 1])}, "image_std"),
        ({"vision.image_mean": np.float32([np.nan, 1, 1])}, "image_mean"),
        ({"vision.image_mean": np.float32([1, 1])}, "image_mean"),
        ({"vision.projector.scale_factor": 9}, "merged"),
        ({"vision.attention.layer_norm_epsilon": 0.0}, "epsilon"),
        ({"use_silu": True}, "both"),
    ],
)
def test_metadata_that_lie(tmp_path, changed, message):
    with pytest.raises(ModelError, match=message) as error:
        opened(tmp_path, "gemma3", metadata=changed)
    assert "\n" not in str(error.value) and "mmproj.gguf" in str(error.value)


@pytest.mark.parametrize("name", ["gemma3", "idefics3", "llava"])
def test_tensors_that_are_missing_or_too_many(tmp_path, name):
    made = projector(name)
    for tensor in made.tensors:
        fewer = {key: value for key, value in made.tensors.items() if key != tensor}
        path = write_projector(type(made)(made.arch, made.metadata, fewer), tmp_path / "mmproj.gguf")
        if tensor.endswith(".bias"):
            continue
        with pytest.raises(ModelError) as error:
            PictureReader(GGUFFile.open(path), EngineOptions(threads=1)).close()
        assert "\n" not in str(error.value)
    more = {**made.tensors, "v.blk.0.extra.weight": np.zeros(4, np.float32)}
    path = write_projector(type(made)(made.arch, made.metadata, more), tmp_path / "mmproj.gguf")
    with pytest.raises(ModelError, match="extra"):
        PictureReader(GGUFFile.open(path), EngineOptions(threads=1))


def test_broken_numbers(tmp_path):
    """A weight that is not a number is seen, not hidden."""
    made = projector("gemma3")
    made.tensors["v.blk.1.ffn_up.weight"][3, 5] = np.nan
    file = GGUFFile.open(write_projector(made, tmp_path / "mmproj.gguf"))
    reader = PictureReader(file, EngineOptions(threads=1))
    with pytest.raises(ModelError, match="not numbers"):
        reader.read(picture((56, 56)))
    reader.close()
