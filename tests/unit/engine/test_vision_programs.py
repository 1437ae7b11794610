"""Test which programs a vision encoder runs, with what, and what it gives back. Nothing is computed."""

from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.vision import clip
from localllm.engine import clip_encoder as pairs
from localllm.engine import vision_encoder as pictures
from localllm.engine.clip_encoder import ClipEncoder, dequantize_rows
from localllm.engine.cpu.program import StreamingRunner
from localllm.engine.vision_encoder import VisionEncoder, VisionProgram, trace_program, trace_programs
from localllm.errors import ModelError
from tests.unit.engine.trace.test_recorder import tensor, w
from tests.unit.generation.test_prefix_cache import TakenLock

H = SimpleNamespace(
    path="mmproj.gguf", vocab_size=9, width=4, max_patches=6, input_width=20, max_grid=(2, 3), row_width=5,
    list_states=lambda: (),
)  # fmt: skip


def family(project_columns: int = 5, names=("tower", "project")) -> SimpleNamespace:
    """Return a transformer of rows of 3, two of which make a row for the projector."""
    return SimpleNamespace(
        encode=lambda b, weights, h, x: b.linear(x, w(3, 20, name=names[0])),
        project=lambda b, weights, h, x: b.linear(x, w(project_columns, 6, name=names[1])),
        merge_patches=lambda h, rows, grid: rows.reshape(len(rows) // 2, -1) if grid == (2, 3) else 1 // 0,
    )


def file(*names: str) -> SimpleNamespace:
    return SimpleNamespace(path="mmproj.gguf", tensors=dict.fromkeys(names, tensor("x", 1)))


def test_tracing_a_projector_records_tower_and_projection():
    tower, project = trace_programs(file("tower", "project"), family(), H)
    assert (len(tower.rows), len(project.rows)) == (6, 3)
    assert (tower.width, project.width) == (3, 5)
    for part, columns in ((tower, 20), (project, 6)):
        source, product = part.recorder.operations
        assert (source.memory is part.rows, source.output.columns) == (True, columns)
        assert (
            part.rows.shape[1] == {20: 48, 6: 16}[columns]
            and part.rows.dtype == np.float32
            and product.inputs == (source.output,)
        )
        assert part.recorder._tabulate_angles(SimpleNamespace(dims=4), None).shape == (len(part.rows), 2, 2)


@pytest.mark.parametrize(
    ("tensors", "columns", "message"),
    [
        (("tower", "project", "more"), 5,
         "mmproj.gguf: tensor more: not part of this architecture as localllm supports it"),
        (("tower", "project"), 4, "mmproj.gguf: rows must have projection_dim columns, 5 (found 4)"),
        (("tower", "project"), 6, "mmproj.gguf: rows must have projection_dim columns, 5 (found 6)"),
    ],
)  # fmt: skip
def test_projectors_that_do_not_fit_are_refused(tensors, columns, message):
    with pytest.raises(ModelError) as error:
        trace_programs(file(*tensors), family(columns), H)
    assert str(error.value) == message


class Program:
    """A program that records its arguments and counts its closings."""

    def __init__(self, *given):
        self.records_input, self.ran, self.closed, self.error = given, [], 0, None
        made.append(self)

    def run(self, *given):
        if self.error:
            raise self.error
        self.ran.append(given)
        return f"{self.records_input[0]} of {given[0]}"

    def close(self) -> None:
        self.closed += 1


made = list[Program]()


@pytest.fixture
def programs(monkeypatch) -> list[Program]:
    made.clear()
    monkeypatch.setattr(pictures, "VisionProgram", Program)
    monkeypatch.setattr(pairs, "VisionProgram", Program)
    return made


def test_a_picture_runs_through_tower_and_projection(programs):
    """Compile both programs for the first picture."""
    reader = VisionEncoder.__new__(VisionEncoder)
    reader.hyperparameters = h = SimpleNamespace(
        path="mmproj.gguf", compute_grid=lambda picture: f"grid of {picture}",
        compute_rotary_positions=lambda grid: f"turns of {grid}",
        compute_rows=lambda picture, weights: f"rows of {picture} by {weights}",
        find_window_ends=lambda grid: f"windows of {grid}",
        insert_breaks=lambda rows, grid, weights: (rows, grid, weights),
        arrange=lambda rows, size, weights: (rows, size, weights),
    )  # fmt: skip
    reader.family = SimpleNamespace(merge_patches=lambda hyperparameters, rows, grid: f"gathered {rows}")
    reader._weights, reader._options, reader.lock, reader._programs = "W", "options", Lock(), []
    reader._parts = "tower", "project"
    expected = "project of gathered tower of rows of P by W", "grid of P", "W"
    assert reader.encode_crops(["P", "P"], (3, 4)) == ([expected] * 2, (3, 4), "W")
    tower, project = programs
    assert [one.records_input for one in programs] == [("tower", h, "options", True), ("project", h, "options", True)]
    assert tower.ran == [("rows of P by W", "turns of grid of P", "windows of grid of P")] * 2
    assert project.ran == [("gathered tower of rows of P by W",)] * 2
    project.error = ModelError("not numbers")
    with pytest.raises(ModelError, match=r"^mmproj\.gguf: not numbers$"):
        reader.read("P")
    reader.close()
    assert [one.closed for one in programs] == [1, 1]
    reader._parts = [SimpleNamespace(recorder=SimpleNamespace(operations=some)) for some in ([1, 2], [3])]
    assert reader.operations == [1, 2, 3]
    reader.lock = TakenLock()
    for call in (lambda: reader.read("P"), reader.close):
        with pytest.raises(BlockingIOError):
            call()


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_gives_its_memory_back_even_if_it_fails(fails):
    calls, filled = list[tuple](), list[object]()

    def rows(*pixels):
        calls.append(pixels)
        if fails:
            raise ModelError("not numbers")
        return "rows"

    program = VisionProgram.__new__(VisionProgram)
    program._rows, program._pages = np.full((6, 8), 9, np.float32), np.arange(3)
    program._angles = [SimpleNamespace(fill=filled.append)]
    program._program = SimpleNamespace(compute_rows=rows, give_back=lambda: calls.append(("program",)))
    program._cache = SimpleNamespace(give_back=lambda pages: calls.append(("cache", pages)))
    pixels = np.arange(8, dtype=np.float32).reshape(2, 4)
    if fails:
        with pytest.raises(ModelError):
            program.run(pixels, "turns", "windows")
    else:
        assert program.run(pixels, "turns", "windows") == "rows"
    assert program._rows[:2, :4].tolist() == pixels.tolist() and (program._rows[2:] == 9).all()
    assert (program._rows[:2, 4:] == 9).all()
    assert calls == [(2, program._pages, "windows"), ("program",), ("cache", [0, 1, 2])] and filled == ["turns"]


@pytest.mark.parametrize(("rows", "pages"), [(64, 1), (65, 2)])
def test_a_program_has_memory_for_all_rows(monkeypatch, rows, pages):
    """Share the memory of keys between layers."""
    calls = []
    part = trace_program(lambda b, weights, h, x: x, file(), H, rows, 4)
    monkeypatch.setattr(pictures, "RunCache", lambda *given: calls.append(given) or "cache")
    program = SimpleNamespace(close="close")
    monkeypatch.setattr(pictures, "compile_program", lambda *given, **named: calls.append((given, named)) or program)
    options = SimpleNamespace(thread_count=3, progress="progress")
    program_of_part = VisionProgram(part, H, options, True)
    cache, ((operations, places, threads, progress), named) = calls
    assert cache == ((), pages, pictures.KV_TYPE, part.recorder.operations) and operations is part.recorder.operations
    assert (places.cache, places.layout, len(places.header.ids)) == ("cache", None, rows)
    assert (threads, progress, named, program_of_part.close) == (
        3,
        "progress",
        {"keeps": False, "make_runner": StreamingRunner},
        "close",
    )
    VisionProgram(part, H, options)
    assert calls[-1][1] == {"keeps": False, "make_runner": None}


def test_clip_compiles_two_programs_each_for_pictures_and_texts(programs, monkeypatch):
    """They are compiled at first use; of a text the last row counts."""
    reader = ClipEncoder.__new__(ClipEncoder)
    vision = SimpleNamespace(compute_rows=lambda picture, weights: np.full((3, 2), 7))
    reader._path, reader._options, reader.lock, reader._programs = "clip.gguf", "options", Lock(), {}
    reader._pair, reader._parts = clip.ClipEncoders(vision, "text"), ["see", "of picture", "read", "of text"]
    table = SimpleNamespace(
        token_embd=w(5, 2, name="t"), position_embd=w(4, 2, name="p", first=100),
    )  # fmt: skip
    reader._weights = SimpleNamespace(get_submodel=lambda prefix: table if prefix == "t." else 1 // 0)
    monkeypatch.setattr(clip, "prepare", lambda h, picture: (h, picture))

    def run(self, rows):
        self.ran.append(rows.tolist())
        return 10 + np.arange(rows.size).reshape(rows.shape)

    monkeypatch.setattr(Program, "run", run)
    assert reader.encode_image("P").tolist() == [10, 11]
    assert [(one.records_input, one.ran) for one in programs] == [
        (("see", vision, "options"), [[[7, 7]] * 3]), (("of picture", vision, "options"), [[[10, 11]]]),
    ]  # fmt: skip
    assert reader.encode_text([3, 0]).tolist() == [10, 11]
    assert [(one.records_input, one.ran) for one in programs[2:]] == [
        (("read", "text", "options"), [[[107.0, 109.0], [103.0, 105.0]]]),
        (("of text", "text", "options"), [[[12, 13]]]),
    ]  # fmt: skip
    reader.encode_image("P")
    assert len(programs) == 4

    def broken(self, rows):
        raise ModelError("not numbers")

    monkeypatch.setattr(Program, "run", broken)
    for call in (lambda: reader.encode_image("P"), lambda: reader.encode_text([1])):
        with pytest.raises(ModelError, match=r"^clip\.gguf: not numbers$"):
            call()
    reader.close()
    assert [one.closed for one in programs] == [1] * 4
    reader.lock = TakenLock()
    for call in (lambda: reader.encode_image("P"), lambda: reader.encode_text([1]), reader.close):
        with pytest.raises(BlockingIOError):
            call()
    assert dequantize_rows(w(5, 2), np.array([4, 0])).tolist() == [[9, 10], [1, 2]]


def test_tracing_a_clip_pair_records_both_encoders_and_projections(monkeypatch):
    same = {"vocab_size": 9, "width": 4, "out": 3}
    vision, text = (SimpleNamespace(max_patches=n, input_width=c, **same) for n, c in ((6, 20), (7, 4)))
    monkeypatch.setattr(clip, "encode_image", lambda b, weights, h, x: b.linear(x, w(4, 20, name="a")))
    monkeypatch.setattr(clip, "encode_text", lambda b, weights, h, x: b.linear(x, w(4, 4, name="b")))
    for name in ("project_image", "project_text"):
        monkeypatch.setattr(clip, name, lambda b, weights, h, x, name=name: b.linear(x, w(3, 4, name=name)))
    names = "a", "b", "project_image", "project_text"
    pair = SimpleNamespace(vision=vision, text=text)
    parts = pairs.trace_programs(file(*names), pair)
    assert [(len(part.rows), part.recorder.operations[0].output.columns, part.width) for part in parts] == [
        (6, 20, 4), (1, 4, 3), (7, 4, 4), (1, 4, 3),
    ]  # fmt: skip
    with pytest.raises(ModelError, match=r"^mmproj\.gguf: tensor more: not part of this architecture"):
        pairs.trace_programs(file(*names, "more"), pair)
    text.out = 4
    with pytest.raises(ModelError) as error:
        pairs.trace_programs(file(*names), pair)
    assert str(error.value) == "mmproj.gguf: vectors must have the length projection_dim, 4 (found 3)"
