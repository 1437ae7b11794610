"""Test vision encoders: agreement with the reference, refused files, and preparation of images."""

import hashlib
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import bound
from models.golden import FOLDER
from models.projectors import PROJECTORS, projector, write_projector
from PIL import Image

from localllm.arch.layer_state import KVType
from localllm.arch.vision.any_size import compute_area_weights, compute_corner_weights
from localllm.arch.vision.llava import TilingRules, arrange_rows
from localllm.arch.vision.resizing import choose_size
from localllm.arch.weights import Weights
from localllm.engine.image_tokens import ImageEmbedding
from localllm.engine.lower import tape
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.engine.options import EngineOptions
from localllm.engine.vision_encoder import VisionEncoder
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile, get_map, release_pages
from localllm.kernels.reference import ReferenceCache
from tests.goldens.test_logits import nmse
from tests.unit.generation.test_prefix_cache import TakenLock

SIZES = (131, 90), (33, 200)


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Return random blocks, smooth enough that resizing matters little where it should not."""
    columns, rows = size
    blocks = np.random.default_rng(seed).integers(0, 256, (rows // 8 + 1, columns // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(blocks, np.ones((8, 8, 1), np.uint8))[:rows, :columns])


def twin(file: GGUFFile, reader: VisionEncoder, shown: Image.Image) -> np.ndarray:
    """Return the reference's rows of a picture."""
    h, family, weights = reader.hyperparameters, reader.family, Weights(file.tensors)
    grid = h.compute_grid(shown)

    def builder(rows: np.ndarray, turns: np.ndarray | None = None) -> ReferenceBuilder:
        seen = ImageEmbedding(b"", rows, turns)
        ids = np.array(seen.ids)
        return ReferenceBuilder(
            [SequenceSpan(ReferenceCache(KVType.parse("f32")), 0, ids, len(rows), seen=seen)], {}, len(rows)
        )

    pixels, windows = h.compute_rows(shown, weights), h.find_window_ends(grid)
    b = builder(pixels, h.compute_rotary_positions(grid))
    b.windows = None if windows is None else np.searchsorted(windows, np.arange(len(pixels)), side="right")
    rows = family.merge_patches(h, family.encode(b, weights, h, pixels), grid)
    return h.insert_breaks(family.project(builder(rows), weights, h, rows), grid, weights)


def opened(tmp_path: Path, name: str, **changed) -> tuple[GGUFFile, VisionEncoder]:
    file = GGUFFile.open(write_projector(projector(name, **changed), tmp_path / "mmproj.gguf"))
    return file, VisionEncoder(file, EngineOptions(threads=2))


@pytest.mark.parametrize("name", PROJECTORS)
def test_rows_of_pictures_agree_with_the_reference(tmp_path, name):
    file, reader = opened(tmp_path, name)
    for size in SIZES:
        for shown in reader.family.prepare(reader.hyperparameters, picture(size)).pictures:
            rows = reader.read(shown)
            assert nmse(rows, twin(file, reader, shown)) < bound(1e-10, 1e-6)
    reader.close()


def test_rows_depend_on_every_patch_and_on_no_other_picture(tmp_path):
    _, reader = opened(tmp_path, "gemma3")
    first, second = (
        reader.family.prepare(reader.hyperparameters, picture((70, 60), seed)).pictures[0] for seed in (1, 2)
    )
    rows = reader.read(first)
    assert nmse(reader.read(second), rows) > 1e-3
    assert np.array_equal(reader.read(first), rows)
    changed = first.copy()
    changed.putpixel((55, 55), (255, 0, 255))
    assert not np.allclose(reader.read(changed), rows, atol=1e-6)
    reader.close()


def test_reading_a_picture_takes_the_lock(tmp_path):
    """One program's buffers hold one picture."""
    _, reader = opened(tmp_path, "idefics3")
    (shown, *_) = reader.family.prepare(reader.hyperparameters, picture((64, 64))).pictures
    free, reader.lock = reader.lock, TakenLock()
    for call in (lambda: reader.read(shown), reader.close):
        with pytest.raises(BlockingIOError):
            call()
    reader.lock = free
    reader.close()


def test_streamed_weights_leave_memory_and_give_the_same_rows(tmp_path, monkeypatch):
    """Only what several stages share may stay mapped."""
    wide = {"layers": 3, "width": 384, "hidden": 768, "side": 64, "patch": 16}
    file, reader = opened(tmp_path, "idefics3", **wide)
    rows = reader.read(picture((64, 64)))
    reader.close()
    monkeypatch.setattr(tape, "MAX_SLICE_BYTES", 1)
    reader = VisionEncoder(file, EngineOptions(threads=2))
    assert np.array_equal(reader.read(picture((64, 64))), rows)
    assert np.array_equal(reader.read(picture((64, 64))), rows)
    reader.close()
    if sys.platform == "linux":
        assert mapped_bytes(Path(file.path)) < file.nbytes / 3


def mapped_bytes(path: Path) -> int:
    """Return how many bytes of a file are resident in this process."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return sum(
        int(size) << 10 for one in maps if str(path) in one for size in re.findall(r"^Rss: +(\d+) kB", one, re.M)
    )


def test_pages_of_other_arrays_are_not_released(tmp_path):
    file = GGUFFile.open(write_projector(projector("idefics3"), tmp_path / "mmproj.gguf"))
    for tensor in file.tensors.values():
        found = get_map(tensor.data)
        assert found is not None
        data, start = found
        assert data[start : start + tensor.nbytes] == tensor.data.tobytes()
    own = np.arange(1 << 16)
    release_pages(own[4:].reshape(-1, 3))
    assert get_map(own) is None
    assert (own == np.arange(1 << 16)).all()


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0"])
def test_every_type_of_weights_agrees_with_the_reference(tmp_path, format):
    """Projectors often have 16 bits or blocks; convolutions are not stored in blocks."""
    declared = projector("idefics3", width=96, hidden=128, side=64, patch=16)
    path = write_projector(declared, tmp_path / "mmproj.gguf", format)
    file = GGUFFile.open(path)
    kinds = {tensor.format.name for tensor in file.tensors.values()}
    assert format in kinds
    reader = VisionEncoder(file, EngineOptions(threads=2))
    shown = picture((64, 64))
    assert nmse(reader.read(shown), twin(file, reader, shown)) < {"Q8_0": 1e-4}.get(format, 1e-5)
    reader.close()


def test_gemma_3_resizes_to_one_square(tmp_path):
    _, reader = opened(tmp_path, "gemma3")
    shown = picture((131, 90))
    prepared = reader.family.prepare(reader.hyperparameters, shown)
    assert prepared.parts == ["<start_of_image>", 0, "<end_of_image>"]
    by_columns = shown.resize((56, 90), Image.Resampling.BILINEAR)
    assert np.array_equal(prepared.pictures[0], by_columns.resize((56, 56), Image.Resampling.BILINEAR))
    reader.close()


@pytest.mark.parametrize(
    ("size", "sides"),
    [
        ((600, 501), []), ((600, 500), [0, 300, 600]), ((500, 600), [0, 300, 600]), ((501, 600), []), ((800, 800), []),
        ((512, 256), [0, 256, 512]), ((511, 256), [0, 256, 511]), ((510, 256), []), ((640, 255), []), ((255, 640), []),
        ((700, 300), [0, 350, 700]), ((901, 600), [0, 451, 901]), ((1500, 1000), [0, 750, 1500]),
        ((1001, 333), [0, 334, 668, 1001]), ((333, 1001), [0, 334, 668, 1001]),
        ((2999, 500), [0, 750, 1500, 2250, 2999]),
    ],
)  # fmt: skip
def test_gemma_3_adds_crops_of_long_pictures(tmp_path, size, sides):
    """The borders are those of transformers 5.23 (pan_and_scan_batched)."""
    _, reader = opened(tmp_path, "gemma3")
    h, shown = reader.hyperparameters, picture(size)
    panned, whole = reader.family.prepare_crops(h, shown), reader.family.prepare(h, shown)
    numbers = np.asarray(shown)
    cut = [
        numbers[:, begin:end] if size[0] > size[1] else numbers[begin:end] for begin, end in itertools.pairwise(sides)
    ]
    squares = [reader.family.prepare(h, Image.fromarray(part)).pictures[0] for part in cut]
    assert len(panned.pictures) == 1 + len(squares) and (cut or panned.parts == whole.parts)
    for one, other in zip(panned.pictures, [*whole.pictures, *squares], strict=True):
        assert np.array_equal(one, other)
    reader.close()


@pytest.mark.parametrize(
    ("size", "grid"), [((131, 90), (2, 2)), ((300, 60), (2, 1)), ((40, 90), (1, 2)), ((8, 8), (2, 2))]
)
def test_idefics_3_cuts_squares_of_56_and_adds_the_whole(tmp_path, size, grid):
    """The longer side becomes 112; each row of squares ends with a line break."""
    _, reader = opened(tmp_path, "idefics3")
    prepared = reader.family.prepare(reader.hyperparameters, picture(size))
    columns, rows = grid
    assert [shown.size for shown in prepared.pictures] == [(56, 56)] * (columns * rows + 1)
    text = "".join(f"[{part}]" if isinstance(part, int) else part for part in prepared.parts)
    squares = [
        "".join(f"<fake_token_around_image><row_{y + 1}_col_{x + 1}>[{y * columns + x}]" for x in range(columns))
        for y in range(rows)
    ]
    whole = f"<fake_token_around_image><global-img>[{columns * rows}]<fake_token_around_image>"
    assert text == "\n".join(squares) + "\n\n" + whole
    reader.close()


def test_llava_pads_pictures_to_squares(tmp_path):
    _, reader = opened(tmp_path, "llava")
    for size, bars in (((112, 56), ((0, 0), (55, 13))), ((56, 112), ((0, 0), (13, 55)))):
        (square,) = reader.family.prepare(reader.hyperparameters, picture(size)).pictures
        assert square.size == (56, 56) and all(square.getpixel(place) == (122, 116, 104) for place in bars)
        assert square.getpixel((28, 28)) != (122, 116, 104)
    (square,) = reader.family.prepare(reader.hyperparameters, picture((112, 112))).pictures
    by_columns = picture((112, 112)).resize((56, 112), Image.Resampling.BICUBIC)
    assert np.array_equal(square, by_columns.resize((56, 56), Image.Resampling.BICUBIC))
    reader.close()


@pytest.mark.parametrize(
    ("size", "grid", "lines", "across"),
    [
        ((300, 300), (2, 2), 8, 8), ((500, 100), (3, 1), 2, 12), ((30, 100), (1, 2), 8, 2), ((100, 30), (2, 1), 2, 8),
        ((40, 50), (1, 2), 6, 4), ((1, 1), (1, 2), 4, 4),
    ],
)  # fmt: skip
def test_llava_1_6_cuts_tiles_whose_lines_end_with_a_newline(tmp_path, size, grid, lines, across):
    """The whole picture comes first; bars are left out of the lines."""
    _, reader = opened(tmp_path, "llava16")
    h, (columns, rows) = reader.hyperparameters, grid
    prepared = reader.family.prepare(h, picture(size))
    assert {square.size for square in prepared.pictures} == {(56, 56)} and prepared.parts == [0]
    assert len(prepared.pictures) == 1 + columns * rows
    (all_rows,) = reader.encode_crops(prepared.pictures, size)
    assert len(all_rows) == 16 + lines * (across + 1)
    newline = projector("llava16").tensors["v.image_newline"]
    assert (all_rows[16:].reshape(lines, across + 1, -1)[:, -1] == newline).all()
    last = reader.read(prepared.pictures[-1])[15 - (columns * 4 - across) // 2 - (rows * 4 - lines) // 2 * 4]
    assert np.array_equal(all_rows[-2], last)
    assert np.array_equal(all_rows[:16], reader.read(prepared.pictures[0]))
    reader.close()


def test_flat_tiles_are_concatenated(tmp_path):
    flat = {"vision.mm_patch_merge_type": "flat"}
    write_projector(projector("llava16", metadata=flat), tmp_path / "flat.gguf")
    reader = VisionEncoder(GGUFFile.open(tmp_path / "flat.gguf"), EngineOptions(threads=2))
    pictures = reader.family.prepare(reader.hyperparameters, picture((500, 100))).pictures
    (rows,) = reader.encode_crops(pictures, (500, 100))
    assert np.array_equal(rows, np.concatenate([reader.read(each) for each in pictures]))
    reader.close()


def test_lines_of_tiles_agree_with_transformers():
    """Compare the chosen size, the rows of bars and the ends of lines for some 500 sizes from 3 to 3000 pixels.


    scripts/record/record_lines.py recorded them from transformers for LLaVA 1.6 7B.
    """
    how = TilingRules(((672, 336), (336, 672), (672, 672), (336, 1008), (1008, 336)), is_unpadded=True)
    with np.load(FOLDER / "lines_of_llava16.npz") as golden:
        sizes, digests = golden["sizes"].tolist(), golden["digests"].tolist()
    assert len(sizes) > 500
    for size, digest in zip(sizes, digests, strict=True):
        columns, rows = choose_size(tuple(size), how.sizes)
        count = 1 + columns * rows // 336**2
        numbers = np.arange(count * 24**2, dtype=np.float32).reshape(count, -1, 1)
        arranged = arrange_rows(list(numbers), tuple(size), how, 336, np.float32([-1])).astype(np.int32)
        assert hashlib.sha256(arranged.tobytes()).hexdigest()[:16] == digest, size


@pytest.mark.parametrize(
    "sizes", [[56, 57], [56], [], [28, 56], [0, 0], [56 * 37, 56], [56 * 7, 56 * 7], [-56, -56], 5]
)
def test_invalid_grid_sizes_of_llava_1_6_are_refused(tmp_path, sizes):
    changed = np.array(sizes, np.int64) if isinstance(sizes, list) else sizes
    refused(tmp_path, "llava16", {"vision.image_grid_pinpoints": changed}, "image_grid_pinpoints")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"projector_type": "resampler"}, "resampler"),
        ({"projector_type": 3}, "a string"),
        ({"has_vision_encoder": False}, "vision"),
        ({"vision.image_size": 1 << 20}, "image_size|pixels"),
        ({"vision.patch_size": 0}, "patch_size"),
        ({"vision.patch_size": 57}, "patch_size"),
        ({"vision.patch_size": 8}, "v.patch_embd.weight"),
        ({"vision.attention.head_count": 5}, "head_count"),
        ({"vision.embedding_length": 48}, "v.patch_embd.weight|columns|rows"),
        ({"vision.block_count": 0}, "block_count"),
        ({"vision.block_count": 1}, "not part of"),
        ({"vision.block_count": 3}, "v.blk.2"),
        ({"vision.projection_dim": 95}, "projection_dim"),
        ({"vision.image_std": np.float32([0, 1, 1])}, "image_std"),
        ({"vision.image_mean": np.float32([np.nan, 1, 1])}, "image_mean"),
        ({"vision.image_mean": np.float32([1, 1])}, "image_mean"),
        ({"vision.projector.scale_factor": 9}, "the merge factor"),
        ({"vision.attention.layer_norm_epsilon": 0.0}, "epsilon"),
        ({"use_silu": True}, "both"),
    ],
)
def test_invalid_projector_metadata_is_refused(tmp_path, changed, message):
    refused(tmp_path, "gemma3", changed, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vision.n_wa_pattern": 0}, "n_wa_pattern"),
        ({"vision.n_wa_pattern": "x"}, "n_wa_pattern"),
        ({"vision.spatial_merge_size": 5}, "the merge factor"),
        ({"vision.spatial_merge_size": 0}, "spatial_merge_size"),
        ({"vision.spatial_merge_size": 3}, "mm.0.weight"),
        ({"vision.attention.head_count": 16}, "must be a multiple of 4"),
        ({"vision.patch_size": 57, "vision.image_size": 560}, "merge factor must be at most 112"),
    ],
)
def test_invalid_metadata_of_qwen_2_5_is_refused(tmp_path, changed, message):
    refused(tmp_path, "qwen25vl", changed, message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vision.is_deepstack_layers": np.array([True, False, False, False])}, "not of 192|not part of"),
        (
            {"vision.is_deepstack_layers": np.array([True, False, True, False, True])},
            "layer 4, but there are only 4 layers",
        ),
        ({"vision.is_deepstack_layers": np.array([True, True, True, False])}, "v.deepstack.1"),
        ({"vision.is_deepstack_layers": "x"}, "is_deepstack_layers"),
    ],
)
def test_invalid_deepstack_layers_of_qwen_3_are_refused(tmp_path, changed, message):
    refused(tmp_path, "qwen3vl", changed, message)


def test_a_position_table_for_no_square_is_refused(tmp_path):
    declared = projector("qwen3vl")
    declared.tensors["v.position_embd.weight"] = declared.tensors["v.position_embd.weight"][:35]
    path = write_projector(declared, tmp_path / "mmproj.gguf")
    with pytest.raises(ModelError, match=r"v\.position_embd\.weight must have the shape \[n \* n, "):
        VisionEncoder(GGUFFile.open(path), EngineOptions(threads=1))


def test_position_tables_are_interpolated_between_corners_or_over_areas():
    assert np.array_equal(compute_corner_weights(5, 5), np.eye(5)) and np.allclose(
        compute_area_weights(5, 5), np.eye(5)
    )
    assert compute_corner_weights(3, 2).tolist() == [[1, 0], [0.5, 0.5], [0, 1]] and compute_corner_weights(
        1, 3
    ).tolist() == [[1, 0, 0]]
    assert np.allclose(compute_area_weights(1, 2), [[0.5, 0.5]])
    assert np.allclose(compute_area_weights(2, 4), [[3 / 7, 3 / 7, 1 / 7, 0], [0, 1 / 7, 3 / 7, 3 / 7]])
    assert np.allclose(compute_area_weights(4, 2), [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]])


def refused(tmp_path: Path, name: str, changed: dict, message: str) -> None:
    """Check that a projector is refused in one line that names the file."""
    with pytest.raises(ModelError, match=message) as error:
        opened(tmp_path, name, metadata=changed)
    assert "\n" not in str(error.value) and "mmproj.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("size", "wanted", "bars"),
    [
        ((131, 90), (140, 84), (8, 0)),  # 123 x 84 pixels of it
        ((33, 100), (56, 140), (4, 0)),  # too few pixels: 47 x 140 of it
        ((70, 200), (84, 196), (7, 0)),  # half a square counts as one: 69 x 196
        ((4000, 3000), (2044, 1540), (0, 3)),  # too many pixels
        ((56, 56), (84, 84), (0, 0)),
        ((112, 112), (112, 112), (0, 0)),
    ],
)
def test_qwen_2_5_resizes_to_multiples_of_28_and_pads_with_black(tmp_path, size, wanted, bars):
    """Between 8 and 4096 squares of 28 pixels are used."""
    _, reader = opened(tmp_path, "qwen25vl")
    white = Image.new("RGB", size, (255, 255, 255))
    prepared = reader.family.prepare(reader.hyperparameters, white)
    (shown,) = prepared.pictures
    assert shown.size == wanted and prepared.parts == ["<|vision_start|>", 0, "<|vision_end|>"]
    lit = np.asarray(shown)[:, :, 0] == 255
    columns, rows = np.flatnonzero(lit.any(axis=0)), np.flatnonzero(lit.any(axis=1))
    assert (columns[0], rows[0]) == bars and lit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    reader.close()


@pytest.mark.parametrize(
    ("size", "grid", "bars"),
    [
        ((131, 90), (3, 2), (2, 0)),  # all pixels count, as of 4 x 3 tiles, and less is empty
        ((112, 112), (2, 2), (0, 0)),
        ((300, 40), (6, 1), (0, 5)),
        ((30, 120), (1, 3), (7, 0)),
        ((56, 56), (0, 0), (0, 0)),
    ],
)
def test_internvl_cuts_up_to_12_tiles_and_adds_the_whole(tmp_path, size, grid, bars):
    """A picture no larger than a tile is not cut."""
    _, reader = opened(tmp_path, "internvl")
    white = Image.new("RGB", size, (255, 255, 255))
    prepared = reader.family.prepare(reader.hyperparameters, white)
    columns, rows = grid
    assert prepared.parts == ["<img>", *range(columns * rows + 1), "</img>"]
    assert {shown.size for shown in prepared.pictures} == {(56, 56)} and len(prepared.pictures) == columns * rows + 1
    left, upper = np.argwhere(np.asarray(prepared.pictures[0])[:, :, 0] == 255)[0][::-1]
    assert (left, upper) == bars
    reader.close()


@pytest.mark.parametrize(
    ("size", "grid"), [((3000, 1000), (3, 1)), ((1100, 2000), (2, 4)), ((1600, 1600), (3, 3)), ((1000, 2500), (2, 5))]
)
def test_lfm2_cuts_tiles_of_the_nearest_shape_and_adds_a_thumbnail(tmp_path, size, grid):
    """Of equal shapes, the one with the most tiles of which half is filled is taken."""
    _, reader = opened(tmp_path, "lfm2")
    prepared, (columns, rows) = reader.family.prepare(reader.hyperparameters, picture(size)), grid
    *tiles, whole = prepared.pictures
    assert [tile.size for tile in tiles] == [(512, 512)] * (columns * rows) and whole.size[0] * whole.size[1] <= 1 << 20
    text = "".join(f"[{part}]" if isinstance(part, int) else part for part in prepared.parts)
    places = "".join(f"<|img_row_{n // columns + 1}_col_{n % columns + 1}|>[{n}]" for n in range(columns * rows))
    assert text == f"<|image_start|>{places}<|img_thumbnail|>[{columns * rows}]<|image_end|>"
    reader.close()


def test_lfm2_resizes_small_pictures_to_whole_squares(tmp_path):
    """At least 64 squares of 64 pixels are filled."""
    _, reader = opened(tmp_path, "lfm2")
    for size, wanted in (((131, 90), (640, 448)), ((1000, 700), (1024, 704)), ((1024, 2000), (704, 1408))):
        prepared = reader.family.prepare(reader.hyperparameters, Image.new("RGB", size, (255, 255, 255)))
        assert prepared.parts == ["<|image_start|>", 0, "<|image_end|>"]
        assert prepared.pictures[0].size == wanted and np.asarray(prepared.pictures[0]).min() == 255
    reader.close()


def test_pixtral_ends_each_line_of_rows_with_a_break(tmp_path):
    """The picture becomes whole squares of 28 pixels; the last line has no break."""
    file, reader = opened(tmp_path, "mistral3")
    prepared = reader.family.prepare(reader.hyperparameters, picture((131, 90)))
    (shown,) = prepared.pictures
    assert shown.size == (140, 84) and prepared.parts == [0, "[IMG_END]"]
    rows = reader.read(shown)
    end = np.asarray(file.tensors["v.token_embd.img_break"].data).view(np.float32)
    assert len(rows) == 3 * 6 - 1 and np.array_equal(rows[[5, 11]], np.stack([end.reshape(-1)] * 2))
    assert not any(np.array_equal(row, rows[5]) for row in rows[12:])
    reader.close()


def test_windows_of_qwen_2_5_cover_every_patch_once(tmp_path):
    """They are 8 x 8 patches, in order, and smaller at the edges."""
    _, reader = opened(tmp_path, "qwen25vl")
    h = reader.hyperparameters
    assert h.find_window_ends((6, 20)).tolist() == [48, 96, 120] and h.find_window_ends((8, 8)).tolist() == [64]
    places = h.list_patches((6, 20))
    assert sorted(map(tuple, places.tolist())) == [(y, x) for y in range(6) for x in range(20)]
    assert places[:5].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]] and places[48].tolist() == [0, 8]
    assert [h.is_windowed(layer) for layer in range(4)] == [True, False, True, False]
    reader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gemma3", "idefics3", "llava", "llava16", "qwen2vl", "qwen25vl", "qwen3vl", "lfm2", "mistral3", "internvl"]
)
def test_missing_and_unknown_projector_tensors_are_refused(tmp_path, name):
    declared = projector(name)
    for tensor in declared.tensors:
        fewer = {key: value for key, value in declared.tensors.items() if key != tensor}
        path = write_projector(type(declared)(declared.arch, declared.metadata, fewer), tmp_path / "mmproj.gguf")
        if tensor.endswith(".bias"):
            continue
        with pytest.raises(ModelError) as error:
            VisionEncoder(GGUFFile.open(path), EngineOptions(threads=1)).close()
        assert "\n" not in str(error.value)
    more = {**declared.tensors, "v.blk.0.extra.weight": np.zeros(4, np.float32)}
    path = write_projector(type(declared)(declared.arch, declared.metadata, more), tmp_path / "mmproj.gguf")
    with pytest.raises(ModelError, match="extra"):
        VisionEncoder(GGUFFile.open(path), EngineOptions(threads=1))


def test_a_nan_among_projector_weights_is_refused(tmp_path):
    declared = projector("gemma3")
    declared.tensors["v.blk.1.ffn_up.weight"][3, 5] = np.nan
    file = GGUFFile.open(write_projector(declared, tmp_path / "mmproj.gguf"))
    reader = VisionEncoder(file, EngineOptions(threads=1))
    with pytest.raises(ModelError, match="not finite"):
        reader.read(picture((56, 56)))
    reader.close()
