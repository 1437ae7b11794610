"""Test sizes and tiles of pictures with examples by hand, without an encoder."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.arch.metadata import HyperparameterReader
from localllm.arch.vision import clip, idefics3, internvl, lfm2vl, llava, pixtral, qwen2vl
from localllm.arch.vision.any_size import compute_area_weights, compute_corner_weights, read_any_size
from localllm.arch.vision.hyperparameters import (
    cut_into_patches,
    group_in_squares,
    read_activation,
    read_rgb,
    read_vision,
)
from localllm.arch.vision.lfm2vl import choose_grid
from localllm.arch.vision.llava import TilingRules, arrange_rows, read_anyres, remove_bars
from localllm.arch.vision.resizing import (
    BICUBIC,
    BILINEAR,
    LANCZOS,
    PixelLimits,
    choose_size,
    cut_into_tiles,
    cut_tiles,
    list_grids,
    resize,
    resize_with_bars,
    round_size,
)
from localllm.errors import ModelError
from localllm.files.gguf.metadata import Irregularities

Image = pytest.importorskip("PIL.Image")


def test_filters_have_the_values_of_pillow():
    kinds = Image.Resampling
    assert (LANCZOS, BILINEAR, BICUBIC) == (kinds.LANCZOS, kinds.BILINEAR, kinds.BICUBIC)


def noise(*size: int) -> Any:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8), "RGB")


def test_pictures_are_resized_by_columns_first():
    picture = noise(9, 7)
    by_hand = picture.resize((5, 7), BICUBIC).resize((5, 11), BICUBIC)
    assert resize(picture, (5, 11), BICUBIC).tobytes() == by_hand.tobytes()


@pytest.mark.parametrize(("size", "wanted", "box"), [
    ((10, 10), (10, 10), (0, 0, 10, 10)), ((20, 10), (10, 10), (0, 2, 10, 7)), ((10, 20), (10, 10), (2, 0, 7, 10)),
    ((5, 5), (12, 10), (1, 0, 11, 10)), ((30, 10), (10, 10), (0, 3, 10, 7)),
])  # fmt: skip
def test_padding_is_on_both_sides(size: tuple[int, int], wanted: tuple[int, int], box: tuple[int, int, int, int]):
    padded = np.asarray(resize_with_bars(Image.new("RGB", size, (255, 255, 255)), wanted, BILINEAR, (1, 2, 3)))
    left, top, right, bottom = box
    inside = np.zeros(padded.shape[:2], bool)
    inside[top:bottom, left:right] = True
    assert (padded[inside] == 255).all() and (padded[~inside] == (1, 2, 3)).all()
    black = np.asarray(resize_with_bars(Image.new("RGB", size, (255, 255, 255)), wanted, BILINEAR))
    assert (black[~inside] == 0).all()


@pytest.mark.parametrize(("size", "pixels", "expected"), [
    ((100, 50), PixelLimits(0, 10**6), (96, 64)),  # 3.125 units and 1.5625
    ((10, 10), PixelLimits(0, 10**6), (32, 32)), ((100, 100), PixelLimits(0, 96 * 96), (96, 96)),
    ((112, 40), PixelLimits(0, 128 * 32), (128, 32)), ((112, 40), PixelLimits(0, 128 * 32 - 1), (96, 32)),
    # half a unit counts
    ((1000, 100), PixelLimits(0, 32 * 32 * 4), (192, 32)), ((40, 40), PixelLimits(4096, 10**6), (64, 64)),
    ((32, 96), PixelLimits(32 * 96, 10**6), (32, 96)), ((32, 96), PixelLimits(32 * 96 + 1, 10**6), (64, 128)),
])  # fmt: skip
def test_sizes_are_rounded_to_whole_squares_within_limits(
    size: tuple[int, int], pixels: PixelLimits, expected: tuple[int, int]
):
    assert round_size(size, 32, pixels) == expected


# ---- tiles


def test_tiles_are_cut_row_by_row():
    picture = noise(7, 4)
    tiles = cut_tiles(picture, 2)
    assert len(tiles) == 6
    whole = np.asarray(picture)
    for number, tile in enumerate(tiles):
        y, x = number // 3 * 2, number % 3 * 2
        assert (np.asarray(tile) == whole[y : y + 2, x : x + 2]).all()


def test_grids_have_every_shape_within_their_limits():
    assert sorted(list_grids(1, 4, 10)) == [
        (10, 10),
        (10, 20),
        (10, 30),
        (10, 40),
        (20, 10),
        (20, 20),
        (30, 10),
        (40, 10),
    ]
    assert list_grids(2, 4, 1) == [(2, 2)] and len(list_grids(1, 12, 448)) == 35


@pytest.mark.parametrize(("size", "best"), [
    ((100, 100), (20, 20)), ((200, 100), (20, 10)), ((100, 200), (10, 20)), ((10, 10), (10, 10)), ((5, 5), (10, 10)),
    ((11, 11), (20, 20)), ((1000, 100), (40, 10)),
])  # fmt: skip
def test_the_size_that_keeps_most_pixels_is_chosen(size: tuple[int, int], best: tuple[int, int]):
    allowed = [(10, 10), (10, 20), (20, 10), (20, 20), (40, 10)]
    assert choose_size(size, allowed) == choose_size(size, allowed[::-1]) == best


def test_small_pictures_have_no_tiles():
    allowed = [(10, 10), (20, 10)]
    assert cut_into_tiles(noise(10, 9), allowed, 10) == [] and len(cut_into_tiles(noise(11, 5), allowed, 10)) == 2


@pytest.mark.parametrize(("size", "grid"), [
    ((512, 512), (2, 2)), ((1024, 512), (2, 1)), ((2048, 512), (4, 1)), ((512, 1536), (1, 3)), ((9999, 512), (10, 1)),
    ((1086, 1086), (2, 2)), ((1087, 1087), (3, 3)), ((3000, 3000), (3, 3)), ((3000, 2000), (3, 2)),
])  # fmt: skip
def test_lfm2_chooses_the_larger_of_equal_grids_if_half_is_filled(size: tuple[int, int], grid: tuple[int, int]):
    assert choose_grid(size) == grid


# ---- LLaVA 1.6


def fields_of(**values: Any) -> HyperparameterReader:
    named = {f"clip.{key.replace('__', '.')}": value for key, value in values.items()}
    return HyperparameterReader({"general.architecture": "clip", **named}, "m.gguf", 0)


def test_llava_sizes_are_read_from_the_metadata():
    sizes = np.array([336, 672, 672, 336], np.int32)
    assert read_anyres(fields_of(), 336) == TilingRules()
    flat = read_anyres(fields_of(vision__image_grid_pinpoints=sizes), 336)
    assert flat == TilingRules(((336, 672), (672, 336)))
    unpadded = {"vision__image_grid_pinpoints": sizes, "vision__mm_patch_merge_type": "spatial_unpad"}
    assert read_anyres(fields_of(**unpadded), 336).is_unpadded
    assert len(read_anyres(fields_of(vision__image_grid_pinpoints=np.array([6, 6, 36, 1])), 1).sizes) == 2
    for odd in ([], [336], [336, 337], [0, 336], [-336, 336], [37, 1], [6, 7]):
        with pytest.raises(ModelError, match="image_grid_pinpoints"):
            read_anyres(
                fields_of(vision__image_grid_pinpoints=np.array(odd, np.int64)), 1 if 37 in odd or 7 in odd else 336
            )


@pytest.mark.parametrize(("size", "lines", "columns"), [
    ((10, 10), slice(0, 8), slice(0, 8)), ((20, 10), slice(2, 6), slice(0, 8)), ((10, 20), slice(0, 8), slice(2, 6)),
    ((16, 12), slice(1, 7), slice(0, 8)), ((100, 1), slice(4, 4), slice(0, 8)),
])  # fmt: skip
def test_padding_is_removed_from_grids(size: tuple[int, int], lines: slice, columns: slice):
    grid = np.arange(64).reshape(8, 8, 1)
    np.testing.assert_array_equal(remove_bars(grid, size), grid[lines, columns])


def test_tiles_become_lines_with_an_end_each():
    """Two tiles beside each other, of 2 by 2 patches each, become lines of four."""
    rows = [np.full((4, 1), -1.0), np.arange(4.0)[:, None], np.arange(4.0, 8)[:, None]]
    newline = np.array([9.0])
    how = TilingRules(((20, 10),), True)
    values = arrange_rows(rows, (20, 10), how, 10, newline)[:, 0].tolist()
    assert values == [-1, -1, -1, -1, 0, 1, 4, 5, 9, 2, 3, 6, 7, 9]
    assert arrange_rows(rows, (20, 10), TilingRules(((20, 10),)), 10, newline)[:, 0].tolist() == [-1] * 4 + [*range(8)]


# ---- positions, pixels, what a file says


def test_positions_are_interpolated_by_corners_or_areas():
    np.testing.assert_allclose(compute_corner_weights(3, 2), [[1, 0], [0.5, 0.5], [0, 1]])
    np.testing.assert_allclose(compute_corner_weights(1, 3), [[1, 0, 0]])
    np.testing.assert_allclose(compute_area_weights(4, 2), [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]])
    np.testing.assert_allclose(compute_area_weights(1, 2), [[0.5, 0.5]])
    for function in (compute_corner_weights, compute_area_weights):
        np.testing.assert_allclose(function(5, 5), np.eye(5), atol=1e-12)
        np.testing.assert_allclose(function(7, 3).sum(axis=1), 1)


def test_pixels_are_ordered_like_a_convolutions_weights():
    h: Any = SimpleNamespace(
        mean=(0.5, 0.25, 0.0), deviation=(0.5, 1.0, 2.0), patch=2, pixels=12, compute_grid=lambda picture: (2, 1)
    )
    picture = noise(3, 4)  # a column is left over
    rows = cut_into_patches(h, picture)
    assert rows.shape == (2, 12) and rows.dtype == np.float32
    numbers = (np.asarray(picture)[:, :2] / 255 - h.mean) / h.deviation
    np.testing.assert_allclose(rows[1], numbers[2:].transpose(2, 0, 1).reshape(-1), rtol=1e-5, atol=1e-6)


def test_rows_are_grouped_in_squares():
    rows = np.arange(6)[:, None] + 1
    assert group_in_squares(rows, (2, 3), 1)[..., 0].tolist() == [[1], [2], [3], [4], [5], [6]]
    assert group_in_squares(rows, (2, 3), 2)[..., 0].tolist() == [[1, 2, 4, 5], [3, 0, 6, 0]]
    assert group_in_squares(rows, (3, 2), 2)[..., 0].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]


SEEING = {"vision__attention__head_count": 4, "vision__embedding_length": 8, "vision__image_size": 8,
"vision__patch_size": 2,
          "vision__block_count": 3, "vision__attention__layer_norm_epsilon": 1e-5, "vision__projection_dim": 6,
          "vision__image_mean": np.zeros(3, np.float32), "vision__image_std": np.ones(3, np.float32),
          "projector_type": "mlp"}  # fmt: skip


def test_vision_metadata_are_read_with_their_defaults():
    read = read_vision(fields_of(**SEEING))
    assert (read["layers"], read["width"], read["hidden"], read["heads"], read["side"], read["patch"],
    read["merge"],
            read["out"], read["activation"], read["kind"]) == (3, 8, 0, 4, 8, 2, 1, 6, "gelu_quick",
            "mlp")  # fmt: skip
    assert read_vision(fields_of(**SEEING), merge=2)["merge"] == 2
    assert read_vision(fields_of(**SEEING, vision__projector__scale_factor=4), merge=2)["merge"] == 4
    assert read_vision(fields_of(**SEEING), kind="clip")["kind"] == "clip"


@pytest.mark.parametrize(("changes", "message"), [
    ({"vision__attention__head_count": 3}, "8 is not divisible by vision.attention.head_count 3"),
    ({"vision__patch_size": 9}, "vision.patch_size at most"),
    ({"vision__image_size": 1 << 20}, "vision.image_size must be at most"),
    ({"vision__projector__scale_factor": 5}, "the merge factor 5 must be at most"),
    ({"vision__block_count": 1025}, "block_count"), ({"use_gelu": True, "use_silu": True}, "not both be true"),
    ({"vision__image_mean": np.zeros(2, np.float32)}, "image_mean"),
    ({"vision__image_std": np.zeros(3, np.float32)}, "image_std"),
])  # fmt: skip
def test_invalid_vision_metadata_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        read_vision(fields_of(**{**SEEING, **changes}))


ANY_SIZE = {"vision__embedding_length": 16, "vision__image_size": 40}


@pytest.mark.parametrize(("read", "right", "wrong", "message"), [
    (idefics3.read, {"vision__preproc_image_size": 256}, {"vision__preproc_image_size": 257}, "up to 256 .found 257"),
    (internvl.read, {"vision__projector__scale_factor": 4}, {"vision__projector__scale_factor": 3},
     "4 patches per side are not divisible by the merge factor 3"),
    (internvl.read, {"vision__preproc_max_tiles": 1}, {"vision__preproc_min_tiles": 2, "vision__preproc_max_tiles": 1},
     "preproc_max_tiles must be a number from 2 to"),
    (lfm2vl.read, ANY_SIZE, {**ANY_SIZE, "vision__spatial_merge_size": 3},
     "merge factor, 6, must divide the tile size 512"),
    (llava.read, {"vision__feature_layer": np.array([1])}, {"vision__feature_layer": np.array([0])},
     "feature_layer must be from 1 to 3"),
    (llava.read, {"vision__feature_layer": np.array([3])}, {"vision__feature_layer": np.array([4])},
     "feature_layer must be from 1 to 3"),
    (llava.read, {}, {"vision__feature_layer": np.array([1, 2])}, "feature_layer must name one layer"),
    (partial(read_any_size, merge=4), ANY_SIZE, {**ANY_SIZE, "vision__spatial_merge_size": 5},
     "the merge factor must be at most 4"),
    (partial(read_any_size, merge=2), ANY_SIZE, {**ANY_SIZE, "vision__embedding_length": 24},
     "must be a multiple of 4"),
])  # fmt: skip
def test_encoders_refuse_sizes_that_do_not_fit(read: Any, right: dict[str, Any], wrong: dict[str, Any], message: str):
    assert read(fields_of(**{**SEEING, **right}))
    with pytest.raises(ModelError, match=message):
        read(fields_of(**{**SEEING, **wrong}))


def test_llava_reads_rows_of_the_given_layer():
    layers = [llava.read(fields_of(**SEEING, vision__feature_layer=np.array([layer]))).seen for layer in (1, 2, 3)]
    assert layers == [1, 2, 3] and llava.read(fields_of(**SEEING)).seen == 3


def test_projectors_have_defaults_by_family():
    tiles = internvl.read(fields_of(**SEEING))
    assert (tiles.tiles, tiles.uses_rms_norm, tiles.exact, tiles.max_patches) == ((1, 12), False, True, 17)
    assert idefics3.read(fields_of(**SEEING)).longest == 0 and pixtral.read(fields_of(**SEEING | ONE)).merge == 1
    assert qwen2vl.read(fields_of(**SEEING | ONE)).merge == lfm2vl.read(fields_of(**SEEING | ONE)).merge == 2
    llava_defaults = llava.read(fields_of(**SEEING))
    assert (llava_defaults.seen, llava_defaults.cuts, llava_defaults.max_patches) == (3, TilingRules(), 17)
    for width, layers, rms in ((3200, 45, True), (3200, 44, False), (3204, 45, False)):
        large = {"vision__embedding_length": width, "vision__block_count": layers}
        assert internvl.read(fields_of(**SEEING | large)).uses_rms_norm is rms


ONE = {"vision__attention__head_count": 1}
PAIR = {"has_text_encoder": True, "has_vision_encoder": True, "text__attention__head_count": 2,
        "text__embedding_length": 8, "text__projection_dim": 6, "text__block_count": 1, "text__context_length": 3,
        "text__attention__layer_norm_epsilon": 1e-5}  # fmt: skip


def pair(**changes: Any) -> clip.ClipEncoders:
    fields = fields_of(**{**SEEING, **PAIR, **changes})
    metadata = {**fields.metadata, "general.architecture": "clip"}
    metadata = {key.replace(fields.prefix, "clip."): value for key, value in metadata.items()}
    return clip.read_clip(SimpleNamespace(metadata=metadata, path="clip.gguf", oddities=Irregularities()))


def test_both_encoders_of_a_pair_are_read():
    vision, text = pair()
    assert (vision.kind, vision.exact, vision.max_patches, vision.layers, vision.out) == ("clip", True, 17, 3, 6)
    assert (text.kind, text.path, text.width, text.heads, text.out, text.side, text.patch, text.merge) == (
        "clip", "clip.gguf", 8, 2, 6, 1, 1, 1
    )  # fmt: skip
    assert (text.layers, text.hidden, text.context, text.max_patches) == (1, 0, 3, 3)
    assert (text.input_width, text.lookahead, text.exact) == (8, 0, True)
    assert pair(use_gelu=True).text.activation == pair(use_gelu=True).vision.activation == "gelu"
    assert pair(text__block_count=1024, text__context_length=4096).text.context == 4096


@pytest.mark.parametrize(("changes", "problem"), [
    ({"has_text_encoder": False}, "must have a text encoder and an image encoder"),
    ({"has_vision_encoder": False}, "must have a text encoder and an image encoder"),
    ({"text__attention__head_count": 3}, "8 is not divisible by text.attention.head_count 3"),
    ({"text__projection_dim": 7}, "text.projection_dim 7 and vision.projection_dim 6 must be equal"),
    ({"text__block_count": 0}, "block_count must be a number from 1 to 1024"),
    ({"text__block_count": 1025}, "block_count must be a number from 1 to 1024"),
    ({"text__context_length": 2}, "context_length must be a number from 3 to 4096"),
    ({"text__context_length": 4097}, "context_length must be a number from 3 to 4096"),
])  # fmt: skip
def test_invalid_pairs_are_refused(changes: dict[str, Any], problem: str):
    with pytest.raises(ModelError) as error:
        pair(**changes)
    assert str(error.value).startswith("clip.gguf: ") and problem in str(error.value)


def test_activations_and_colours_are_read_or_refused():
    assert [read_activation(fields_of(**{f"use_{name}": True})) for name in ("gelu", "silu")] == ["gelu", "silu"]
    assert read_activation(fields_of(use_gelu=False)) == "gelu_quick"
    border = np.array([1e-3, 1000, 0.5], np.float32)
    assert read_rgb(fields_of(x=border), "x", float(border[0])) == tuple(border.tolist())
    for odd in ([-0.1, 0, 0], [0, 0, 1001], [0, np.nan, 0], [0, 0, 0, 0]):
        with pytest.raises(ModelError, match="three numbers"):
            read_rgb(fields_of(x=np.array(odd, np.float32)), "x", 0.0)
