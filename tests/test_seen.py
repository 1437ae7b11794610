"""Rows of images in the place of tokens: a row that is a token's embedding is read as that token."""

import numpy as np
import pytest
from engines import bound, open_engine
from models import model, write
from test_goldens import nmse

from localllm.engine.engine import batches
from localllm.engine.seen import Seen, has_images, passages, texts_only, whole_end
from localllm.errors import UsageError

SCALED = {"gemma3": 8.0}  # by the root of its width
NAMES = "llama", "gemma3", "qwen2vl", "qwen3vl", "lfm2"
IDS = np.random.default_rng(0).integers(3, 250, 40).tolist()
FIRST, LAST = 10, 25
GRID = np.stack([np.zeros(15), np.arange(15) // 5, np.arange(15) % 5], axis=1).astype(np.int64)


@pytest.fixture
def opened(tmp_path, request):
    """An engine for a model, and the embeddings of IDS."""
    engines = []

    def opened(name: str, backend: str):
        made = model(name)
        engine = open_engine(write(made, tmp_path / f"{name}.gguf"), backend=backend, kv_type="f32")
        engines.append(engine)
        return engine, made.tensors["token_embd.weight"][IDS] * np.float32(SCALED.get(name, 1))

    yield opened
    for engine in engines:
        engine.close()


def read(engine, seen: Seen, pieces=(40,)) -> np.ndarray:
    """Logits behind IDS, some of them an image."""
    engine.see(seen)
    ids, sequence, rows, first = [*IDS[:FIRST], *seen.ids, *IDS[LAST:]], engine.sequence(), [], 0
    for piece in pieces:
        rows.append(sequence.append(ids[first : first + piece], "all"))
        first += piece
    return np.concatenate(rows)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_tokens(opened, name, backend):
    """All at once, and with pieces that end before, in and behind the image."""
    engine, embedded = opened(name, backend)
    expected = engine.sequence().append(IDS, "all")
    seen = Seen(b"image", embedded[FIRST:LAST])
    for pieces in ((40,), (10, 15, 15), (4, 9, 20, 7)):
        assert nmse(read(engine, seen, pieces), expected) < bound(1e-10, 1e-6)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_rows_that_see_each_other_and_turn_by_axes(opened, name):
    """As the reference; and neither is what one behind the other is."""
    found = {}
    for backend in ("cpu", "reference"):
        engine, embedded = opened(name, backend)
        rows = embedded[FIRST:LAST]
        images = Seen(b"whole", rows, is_whole=True), Seen(b"grid", rows, GRID), Seen(b"row", rows)
        found[backend] = [read(engine, seen) for seen in images]
    for ours, theirs in zip(*found.values(), strict=True):
        assert nmse(ours, theirs) < bound(1e-10, 1e-6)
    whole, grid, plain = found["cpu"]
    assert nmse(whole[FIRST:], plain[FIRST:]) > 1e-2
    assert np.array_equal(whole[:FIRST], plain[:FIRST])
    assert nmse(grid[FIRST + 1 :], plain[FIRST + 1 :]) > 1e-2


def test_positions_behind_an_image(opened):
    """A grid of 3 x 5 rows takes 5 positions, so that text behind it turns as if 10 rows were missing."""
    engine, embedded = opened("qwen2vl", "reference")
    seen = Seen(b"grid", embedded[FIRST:LAST], GRID)
    assert seen.places == 5
    engine.see(seen)
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
def test_forgetting_around_an_image(tmp_path, name, backend):
    """In one layer what is left is as if it had been read alone: text in front of the image goes, or the image with
    it, which may have taken fewer positions than rows."""
    made = model(name, layers=1, context=1024)
    engine = open_engine(write(made, tmp_path / "one.gguf"), backend=backend, kv_type="f32")
    ids = np.random.default_rng(3).integers(3, 250, 300).tolist()
    rows = made.tensors["token_embd.weight"][ids[100:115]] * np.float32(SCALED.get(name, 1))
    seen = Seen(b"image", rows, GRID if name == "qwen2vl" else None, is_whole=name == "gemma3")
    engine.see(seen)
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
def test_many_rows(opened, tmp_path):
    """More than a run has, and two images one behind the other."""
    made = model("llama", context=2000)
    ids = np.random.default_rng(1).integers(3, 250, 1300)
    path, found = write(made, tmp_path / "long.gguf"), {}
    for backend in ("cpu", "reference"):
        engine = open_engine(path, backend=backend, kv_type="f32")
        rows = made.tensors["token_embd.weight"][ids]
        images = [Seen(b"one", rows[:700]), Seen(b"two", rows[700:1250])]
        for seen in images:
            engine.see(seen)
        shown = [*images[0].ids, *images[1].ids, *ids[1250:].tolist()]
        found[backend] = engine.sequence().append(shown), engine.sequence().append(ids.tolist())
        engine.close()
    assert nmse(found["cpu"][0], found["reference"][1]) < 1e-7
    assert nmse(found["reference"][0], found["reference"][1]) < 1e-10


def test_ids_of_nothing(opened):
    """An image that nobody has shown, or one that is forgotten, is refused; and so are rows of another width."""
    engine, embedded = opened("llama", "cpu")
    seen = Seen(b"gone", embedded[:4])
    ids = seen.ids
    with pytest.raises(UsageError, match="token ids"):
        engine.sequence().append(ids)
    engine.see(seen)
    sequence = engine.sequence()
    sequence.append(ids)
    with pytest.raises(UsageError, match="token ids"):
        sequence.append([ids[-1] - 1])
    del seen
    sequence.append(ids)  # the sequence has it still
    sequence.close()
    with pytest.raises(UsageError, match="token ids"):
        engine.sequence().append(ids)
    with pytest.raises(UsageError, match="numbers"):
        engine.see(Seen(b"wide", np.zeros((1, 7), np.float32)))
    with pytest.raises(UsageError, match="rows"):
        engine.see(Seen(b"long", np.zeros((513, embedded.shape[1]), np.float32), is_whole=True))


def test_pieces():
    """Images are read alone, and not cut where they need not be."""
    one, two = Seen(b"1", np.zeros((3, 1), np.float32)), Seen(b"2", np.zeros((600, 1), np.float32))
    ids = [5, *one.ids, *one.ids, 6, *two.ids]
    assert [(first, end, key is None) for first, end, key in passages(np.array(ids))] == [
        (0, 1, True), (1, 4, False), (4, 7, False), (7, 8, True), (8, 608, False),
    ]  # fmt: skip
    assert list(batches([np.array(ids), np.arange(4)])) == [
        [(0, 0, 1)], [(0, 1, 4)], [(0, 4, 7)], [(0, 7, 8)], [(0, 8, 520)], [(0, 520, 608)], [(1, 0, 4)],
    ]  # fmt: skip
    assert [whole_end(ids, end) for end in (0, 1, 2, 4, 5, 7, 100, 608)] == [0, 1, 4, 4, 7, 7, 608, 608]
    assert has_images(ids) and list(texts_only(ids)) == [5, 6]
    assert Seen(b"1", np.zeros((2, 1), np.float32)).ids == one.ids[:2] != two.ids[:2]
