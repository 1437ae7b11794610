"""Test rows of images in place of tokens: a token's embedding as a row gives the token's logits."""

import numpy as np
import pytest
from engines import bound, open_engine
from models import model, write

from localllm.engine.engine import TokenSlice, split_runs
from localllm.engine.image_tokens import (
    MAX_ROWS,
    ROW_BITS,
    ImageEmbedding,
    compute_position_offset,
    cuts_image,
    decode_image_key,
    decode_row,
    find_last_end,
    has_images,
    is_worth_caching,
    list_chunk_ends,
    remove_images,
    select_images,
    skip_image_rows,
    split_images,
)
from localllm.engine.runs import RunPlan
from localllm.errors import UsageError
from tests.goldens.test_logits import nmse

SCALED = {"gemma3": 8.0}  # by the root of its width
NAMES = "llama", "gemma3", "qwen2vl", "qwen3vl", "lfm2"
IDS = np.random.default_rng(0).integers(3, 250, 40).tolist()
FIRST, LAST = 10, 25
GRID = np.stack([np.zeros(15), np.arange(15) // 5, np.arange(15) % 5], axis=1).astype(np.int64)


@pytest.fixture
def opened(tmp_path, request):
    """Return a function that opens a model and returns its engine and the embeddings of IDS."""
    engines = []

    def opened(name: str, backend: str):
        declared = model(name)
        engine = open_engine(write(declared, tmp_path / f"{name}.gguf"), backend=backend, kv_type="f32")
        engines.append(engine)
        return engine, declared.tensors["token_embd.weight"][IDS] * np.float32(SCALED.get(name, 1))

    yield opened
    for engine in engines:
        engine.close()


def read(engine, seen: ImageEmbedding, pieces=(40,)) -> np.ndarray:
    """Return the logits behind IDS, some of them replaced by an image."""
    engine.register_image(seen)
    ids, sequence, rows, first = [*IDS[:FIRST], *seen.ids, *IDS[LAST:]], engine.sequence(), [], 0
    for piece in pieces:
        rows.append(sequence.append(ids[first : first + piece], "all"))
        first += piece
    return np.concatenate(rows)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_equal_to_embeddings_give_the_logits_of_their_tokens(opened, name, backend):
    """Run them at once, and in chunks that end before, in and behind the image."""
    engine, embedded = opened(name, backend)
    expected = engine.sequence().append(IDS, "all")
    seen = ImageEmbedding(b"image", embedded[FIRST:LAST])
    for pieces in ((40,), (10, 15, 15), (4, 9, 20, 7)):
        assert nmse(read(engine, seen, pieces), expected) < bound(1e-10, 1e-6)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_whole_and_grid_images_agree_with_the_reference(opened, name):
    """Check that both differ from an image in a row."""
    logits = {}
    for backend in ("cpu", "reference"):
        engine, embedded = opened(name, backend)
        rows = embedded[FIRST:LAST]
        images = (
            ImageEmbedding(b"whole", rows, is_whole=True),
            ImageEmbedding(b"grid", rows, GRID),
            ImageEmbedding(b"row", rows),
        )
        logits[backend] = [read(engine, seen) for seen in images]
    for ours, theirs in zip(*logits.values(), strict=True):
        assert nmse(ours, theirs) < bound(1e-10, 1e-6)
    whole, grid, plain = logits["cpu"]
    assert nmse(whole[FIRST:], plain[FIRST:]) > 1e-2
    assert np.array_equal(whole[:FIRST], plain[:FIRST])
    assert nmse(grid[FIRST + 1 :], plain[FIRST + 1 :]) > 1e-2


def test_text_behind_a_grid_continues_at_its_positions(opened):
    """Expect 5 positions for a grid of 3 x 5 rows, so that the text after it is rotated as if 10 rows were missing."""
    engine, embedded = opened("qwen2vl", "reference")
    seen = ImageEmbedding(b"grid", embedded[FIRST:LAST], GRID)
    assert seen.position_count == 5
    engine.register_image(seen)
    sequence = engine.sequence()
    sequence.append([*IDS[:FIRST], *seen.ids])
    before = sequence.append(IDS[LAST:], "all")
    assert sequence.truncate(LAST) == LAST
    assert np.array_equal(sequence.append(IDS[LAST:], "all"), before)
    twin = sequence.fork()
    twin.truncate(LAST + 3)
    assert nmse(twin.append(IDS[LAST + 3 :], "all"), before[3:]) < 1e-10
    assert sequence.truncate(FIRST + 4) and sequence.images
    ids = [*seen.ids[4:], *IDS[LAST:]]
    assert nmse(sequence.append(ids, "all")[-15:], before) < 1e-10
    sequence.truncate(FIRST)
    assert not sequence.images


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl"])
def test_shifting_around_an_image_equals_prefilling_the_rest(tmp_path, name, backend):
    """With one layer, drop text before the image, or the image with it, which may take fewer positions than rows."""
    declared = model(name, layers=1, context=1024)
    engine = open_engine(write(declared, tmp_path / "one.gguf"), backend=backend, kv_type="f32")
    ids = np.random.default_rng(3).integers(3, 250, 300).tolist()
    rows = declared.tensors["token_embd.weight"][ids[100:115]] * np.float32(SCALED.get(name, 1))
    seen = ImageEmbedding(b"image", rows, GRID if name == "qwen2vl" else None, is_whole=name == "gemma3")
    engine.register_image(seen)
    tokens = [*ids[:100], *seen.ids, *ids[115:]]
    for keep, count in ((4, 64), (4, 128), (0, 128), (120, 64)):
        moved, alone = engine.sequence(), engine.sequence()
        moved.append(tokens, "none")
        moved.shift(keep, count)
        left = [*tokens[:keep], *tokens[keep + count :]]
        alone.append(left, "none")
        assert moved.tokens == left and moved.images == alone.images
        assert nmse(moved.append(ids[:40], "all"), alone.append(ids[:40], "all")) < bound(1e-9, 1e-6)
    for keep, count in ((40, 64), (110, 64)):
        moved = engine.sequence()
        moved.append(tokens, "none")
        with pytest.raises(UsageError, match="image would be cut"):
            moved.shift(keep, count)
    engine.close()


@pytest.mark.slow
def test_images_longer_than_a_run_agree_with_the_reference(opened, tmp_path):
    declared = model("llama", context=2000)
    ids = np.random.default_rng(1).integers(3, 250, 1300)
    path, logits = write(declared, tmp_path / "long.gguf"), {}
    for backend in ("cpu", "reference"):
        engine = open_engine(path, backend=backend, kv_type="f32")
        rows = declared.tensors["token_embd.weight"][ids]
        images = [ImageEmbedding(b"one", rows[:700]), ImageEmbedding(b"two", rows[700:1250])]
        for seen in images:
            engine.register_image(seen)
        shown = [*images[0].ids, *images[1].ids, *ids[1250:].tolist()]
        logits[backend] = engine.sequence().append(shown), engine.sequence().append(ids.tolist())
        engine.close()
    assert nmse(logits["cpu"][0], logits["reference"][1]) < 1e-7
    assert nmse(logits["reference"][0], logits["reference"][1]) < 1e-10


def test_ids_of_unknown_or_collected_images_are_refused(opened):
    """Check also rows of another width."""
    engine, embedded = opened("llama", "cpu")
    seen = ImageEmbedding(b"gone", embedded[:4])
    ids = seen.ids
    with pytest.raises(UsageError, match="token ids"):
        engine.sequence().append(ids)
    engine.register_image(seen)
    sequence = engine.sequence()
    sequence.append(ids)
    with pytest.raises(UsageError, match="token ids"):
        sequence.append([ids[-1] - 1])
    del seen
    sequence.append(ids)  # the sequence has it still
    sequence.close()
    with pytest.raises(UsageError, match="token ids"):
        engine.sequence().append(ids)
    with pytest.raises(UsageError, match="rows must have 256 columns"):
        engine.register_image(ImageEmbedding(b"wide", np.zeros((1, 7), np.float32)))
    with pytest.raises(UsageError, match="rows"):
        engine.register_image(ImageEmbedding(b"long", np.zeros((513, embedded.shape[1]), np.float32), is_whole=True))


def test_images_run_alone_and_are_divided_only_at_full_runs():
    one, two = ImageEmbedding(b"1", np.zeros((3, 1), np.float32)), ImageEmbedding(b"2", np.zeros((600, 1), np.float32))
    ids = [5, *one.ids, *one.ids, 6, *two.ids]
    assert [(first, end, key is None) for first, end, key in split_images(np.array(ids))] == [
        (0, 1, True), (1, 4, False), (4, 7, False), (7, 8, True), (8, 608, False),
    ]  # fmt: skip
    readings = [TokenSlice(0, 0, np.array(ids)), TokenSlice(1, 0, np.arange(4))]
    runs = split_runs(readings)
    assert [[(part.request, part.begin, part.begin + len(part.ids)) for part in run] for run in runs] == [
        [(0, 0, 1)], [(0, 1, 4)], [(0, 4, 7)], [(0, 7, 8)], [(0, 8, 520)], [(0, 520, 608)], [(1, 0, 4)],
    ]  # fmt: skip
    assert [skip_image_rows(ids, end) for end in (0, 1, 2, 4, 5, 7, 100, 608)] == [0, 1, 4, 4, 7, 7, 608, 608]
    assert has_images(ids) and list(remove_images(ids)) == [5, 6]
    assert ImageEmbedding(b"1", np.zeros((2, 1), np.float32)).ids == one.ids[:2] != two.ids[:2]


def test_image_ids_encode_the_images_hash_and_the_row():
    """47 bits are for the image and 15 for the row; positions count rows, or the extent of a grid."""
    rows, grid = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([[0, i // 3, i % 3] for i in range(6)])
    plain, turned = ImageEmbedding(b"x", rows), ImageEmbedding(b"x", rows, grid, True)
    assert (plain.is_whole, plain.mrope_offsets, plain.position_count, turned.is_whole, turned.position_count) == (
        False,
        None,
        6,
        True,
        3,
    )
    # The first 8 bytes of sha256(b"x") are 2d711642b726b044: without 17 bits of the last ones.
    assert plain.key == turned.key == int.from_bytes(bytes.fromhex("2d711642b726b044"), "little") >> 17
    assert plain.ids == [-1 - plain.key * MAX_ROWS - row for row in range(6)] and plain.ids[-1] >= -(2**62)
    assert [(decode_image_key(token), decode_row(token)) for token in plain.ids] == [
        (plain.key, row) for row in range(6)
    ]
    some = np.array(plain.ids[2:5])
    assert plain.select_rows(some).tolist() == rows[2:5].tolist()
    assert plain.compute_mrope_positions(some, 40).tolist() == [[place] * 3 for place in (40, 41, 42)]
    assert turned.compute_mrope_positions(some, 40).tolist() == [[38, 38, 40], [38, 39, 38], [38, 39, 39]]
    assert len(ImageEmbedding(b"", np.zeros((MAX_ROWS, 1))).ids) == MAX_ROWS
    with pytest.raises(UsageError, match=r"^an image can have at most 32768 rows \(found 32769\)"):
        ImageEmbedding(b"", np.zeros((MAX_ROWS + 1, 1)))


def test_position_offsets_grow_behind_images_with_a_grid():
    grid = ImageEmbedding(b"x", np.zeros((15, 1)), GRID)
    images = [(10, grid), (30, ImageEmbedding(b"y", np.zeros((4, 1)))), (40, grid)]
    assert [compute_position_offset(images, place) for place in (0, 24, 25, 34, 54, 55)] == [0, 0, 10, 10, 10, 20]
    assert [select_images(images, *ends) for ends in ((0, 10), (10, 30), (10, 31), (11, 99))] == [
        [], images[:1], images[:2], images[1:],
    ]  # fmt: skip


def rows_of(key: int, count: int, first: int = 0) -> list[int]:
    return [-1 - (key * MAX_ROWS + row) for row in range(first, first + count)]


def test_positions_within_images_are_recognized():
    tokens = [5, *rows_of(1, 3), *rows_of(2, 2), 6]
    assert [place for place in range(9) if cuts_image(tokens, place)] == [2, 3, 5]
    assert not cuts_image(rows_of(1, 2, first=4), 0) and not cuts_image(rows_of(1, 2), 2)
    assert remove_images([3, 0]) == [3, 0] and remove_images(tokens) == [5, 6] and remove_images([-1, 0]) == [0]
    assert [has_images(some) for some in ([], [0], [0, -1])] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "rows", "is_worth"), [(512, 0, False), (513, 0, True), (127, 1, False), (128, 1, True), (0, 129, True)]
)
def test_prompts_are_cached_above_a_length_that_images_shorten(text, rows, is_worth):
    assert is_worth_caching([5] * text + rows_of(1, rows)) == is_worth


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ([9], 8), ([8], 8), ([7], 4), ([3], 0),  # text, in runs of 4
        ([2, -1], 3), ([2, -1, 1], 4), ([4, -1, 2], 5),
        ([2, -1, 2], 4), ([2, -2], 4), ([1, -2, -2], 5), ([1, -2, 3, -1], 7),
        ([3, -4], 7), ([1, -7], 8),
    ],
)  # fmt: skip
def test_the_last_end_is_that_of_a_run_or_an_image(parts, end):
    """parts: numbers of text tokens, or of rows of an image, below 0."""
    tokens = [token for number, count in enumerate(parts)
              for token in ([5] * count if count > 0 else rows_of(number, -count))]  # fmt: skip
    assert find_last_end(tokens, len(tokens), RunPlan(4, 4)) == end
    assert find_last_end([*tokens, 5], len(tokens), RunPlan(4, 4)) == end


def test_runs_do_not_end_within_an_image():
    """Run rows after the last end again."""
    for before, rows, length, end in (
        (3, 4, 5, 0),
        (3, 4, 6, 0),
        (3, 4, 7, 7),
        (5, 4, 8, 4),
        (5, 9, 13, 4),
        (2, 9, 9, 0),
    ):
        tokens = [5] * before + rows_of(1, rows) + [5] * 9
        assert find_last_end(tokens, length, RunPlan(4, 4)) == end
    tokens = [5, *rows_of(1, 2), *rows_of(2, 9)]
    assert [find_last_end(tokens, length, RunPlan(4, 4)) for length in (2, 3, 4, 8, 11, 12)] == [0, 3, 3, 3, 3, 12]


@pytest.mark.parametrize(("between", "ends"), [(63, [30]), (64, [30]), (65, [15, 30])])
def test_tiles_with_at_most_64_tokens_between_them_are_one_image(between, ends):
    tokens = [5] * 5 + rows_of(1, 10) + [5] * between + rows_of(2, 15)
    ends = [end if end == 15 else 15 + between + 15 for end in ends]
    assert list_chunk_ends(tokens, RunPlan(1000, 1000)) == ends


@pytest.mark.parametrize("key", [0, 1, 5])
@pytest.mark.parametrize("row", [0, 1, MAX_ROWS - 1])
def test_token_ids_are_decoded_to_an_image_and_a_row(key: int, row: int):
    token = -1 - ((key << ROW_BITS) + row)
    assert (decode_image_key(token), decode_row(token)) == (key, row)


def test_rows_of_an_image_continue_in_order_only():
    assert [cuts_image([-3, -2], place) for place in range(3)] == [False] * 3  # the last one comes before no other
    assert [cuts_image([-1, -2], place) for place in range(3)] == [False, True, False]


def test_passages_divide_tokens_by_image():
    assert [*split_images(np.zeros(0, np.int64))] == [(0, 0, None)]
    assert [*split_images(np.array([0, 4]))] == [(0, 2, None)]
    assert [*split_images(np.array(rows_of(7, 3, first=2)))] == [(0, 3, 7)]
    assert [*split_images(np.array([*rows_of(7, 1), *rows_of(8, 1), 3, 2]))] == [(0, 1, 7), (1, 2, 8), (2, 4, None)]
    assert [*split_images(np.array([3, *rows_of(7, 2), *rows_of(7, 1)]))] == [(0, 1, None), (1, 3, 7), (3, 4, 7)]
