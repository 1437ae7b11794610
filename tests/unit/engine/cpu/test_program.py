"""Test the CPU's programs with stand-ins for kernels: slices of the tape, threads, images, shifts."""

from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.layer_state import LatentState, PagedState, RecurrentLayerState
from localllm.engine import vision_encoder as pictures
from localllm.engine.cpu import backend, program
from localllm.engine.cpu import backend as shift
from localllm.engine.cpu import kernel_variants as variants_module
from localllm.engine.cpu import limits as bandwidth
from localllm.engine.cpu import program as passing
from localllm.engine.cpu import program as program_module
from localllm.engine.cpu.backend import CpuBackend, ImageRowProgram, KeyRotator
from localllm.engine.cpu.kernel_variants import RunShape, VariantLoader, VariantProduct, VariantTable
from localllm.engine.cpu.limits import MemoryReader, measure_read_bandwidth
from localllm.engine.cpu.program import CpuProgram, StreamingRunner, TapeThreads, WorkerGroup
from localllm.engine.lower import tape as lower_tape
from localllm.engine.lower.activation import ALL, WANTED, RoutedRows
from localllm.engine.lower.header import RunHeader, SequenceSpan, TextSpan
from localllm.engine.lower.tape import TapeSlice, slice_steps
from localllm.engine.memory.cache import ReservedMemory
from localllm.engine.options import EngineOptions
from localllm.engine.runs import BATCH
from localllm.engine.vision_encoder import VisionEncoder
from localllm.errors import ModelError, UnsupportedError
from localllm.kernels.cpu.shared_job import CACHE_LINE, JOB, JOB_WORDS

# ---- weights that are given back ------------------------------------------------------------------------------------


def test_tapes_are_sliced_at_stages_before_weights_exceed_the_limit(monkeypatch):
    """Check that a single step may exceed the limit."""
    monkeypatch.setattr(lower_tape, "MAX_SLICE_BYTES", 10)
    sizes = [(0, 6), (0, 6), (1, 0), (1, 4), (2, 6), (3, 1), (3, 9), (4, 0), (5, 12)]
    weights = [np.zeros(size, np.uint8) if size else 7 for _, size in sizes]
    steps = [SimpleNamespace(stage=stage, arguments={"weights": some} if number else {"weights": some, "x": 1})
             for number, ((stage, _), some) in enumerate(zip(sizes, weights, strict=True))]  # fmt: skip
    steps[7].arguments = {}
    slices = slice_steps(steps)
    where = {id(some): number for number, some in enumerate(weights)}
    assert [(end, [where[id(some)] for some in held]) for end, held in slices] == [
        (2, [0, 1]), (5, [3, 4]), (8, [5, 6]), (9, [8]),
    ]  # fmt: skip
    assert slice_steps([]) == [TapeSlice(0, [])]
    full = [SimpleNamespace(stage=stage, arguments={"weights": np.zeros(5, np.uint8)}) for stage in range(3)]
    assert [end for end, _ in slice_steps(full)] == [2, 3]
    done = []
    monkeypatch.setattr(passing, "release_pages", lambda some: done.append(where[id(some)]))
    StreamingRunner(SimpleNamespace(run_steps=lambda *steps: done.append(steps)), steps).run()
    assert done == [(0, 2), 0, 1, (2, 5), 3, 4, (5, 8), 5, 6, (8, 9), 8]


# ---- variants of products -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "most", "is_precise", "run", "names"),
    [
        (ALL, 99, False, (1, 1, 128), "one"),
        (ALL, 99, False, (2, 1, 128), "few"),
        (ALL, 99, False, (4, 0, 128), "few"),
        (ALL, 99, False, (5, 0, 128), "precise"),
        (ALL, 99, False, (5, 0, 5), "precise"),
        (ALL, 99, False, (5, 0, 4), "fast"),
        (ALL, 99, False, (4, 0, 4), "few"),
        (ALL, 99, False, (4, 0, 3), "few_fast"),
        (ALL, 99, True, (4, 0, 3), "few"),
        (ALL, 99, True, (90, 0, 3), "precise"),
        (ALL, 99, False, (99, 0, 1), "fast"),
        (ALL, 99, False, (100, 0, 1), ""),
        (WANTED, 99, False, (90, 1, 1), "one"),
        (WANTED, 99, False, (90, 3, 1), "few_fast"),
        (WANTED, 99, False, (90, 0, 1), ""),
        (RoutedRows("experts", None, ALL), 99, False, (1, 1, 128), "one"),
        (RoutedRows("experts", None, ALL), 99, False, (2, 0, 128), "one few"),
        (RoutedRows("experts", None, ALL), 99, False, (4, 0, 128), "one few"),
        (RoutedRows("experts", None, ALL), 99, False, (5, 0, 128), "one few"),
        (RoutedRows("experts", None, ALL), 99, False, (5, 0, 5), "one few"),
        (RoutedRows("experts", None, ALL), 999, False, (129, 0, 4), "one few_fast fast"),
        (RoutedRows("experts", None, ALL), 4, False, (129, 0, 4), "one few_fast"),
        (RoutedRows("experts", None, ALL), 999, True, (129, 0, 4), "one few precise"),
        (RoutedRows("experts", None, WANTED), 99, False, (90, 1, 4), "one"),
    ],
)  # fmt: skip
def test_a_run_lists_the_variants_that_its_products_need(of, most, is_precise, run, names):
    """Four tokens are few; experts have some of the tokens each, in the precision of the run."""
    tokens, wanted, most_precise = run
    shape = RunShape(tokens, wanted, tokens, wanted, most_precise)
    listed = VariantProduct("Q8_0", 4, 4, of, most, is_precise).list_variants(shape)
    assert listed == [f"linear_{name}-Q8_0" for name in names.split()]


def test_products_of_one_format_and_width_share_their_variant_table(monkeypatch):
    for name in ("get_max_few_tokens", "get_max_few_fast"):
        monkeypatch.setattr(variants_module, name, lambda format, columns: columns)
    variants = VariantTable()
    first = variants.register("Q8_0", 40, ALL, 512, False)
    second = variants.register("Q8_0", 20, WANTED, 60, True)
    other = variants.register("Q4_0", 40, ALL, 30, False)
    assert first["variants"] is second["variants"] is not other["variants"]
    assert (first["few_tokens"], second["few_tokens"], len(first["variants"])) == (40, 20, 5)
    assert variants.list_names(RunShape(1, 1, 1, 1, 128)) == ["linear_one-Q8_0", "linear_one-Q4_0"]
    assert variants.list_names(RunShape(35, 25, 35, 25, 128)) == ["linear_few-Q8_0", "linear_precise-Q8_0"]
    assert variants.list_all_names() == [
        "linear_few-Q8_0", "linear_one-Q8_0", "linear_one-Q4_0", "linear_few-Q4_0", "linear_few_fast-Q8_0",
        "linear_few_fast-Q4_0", "linear_precise-Q8_0", "linear_fast-Q8_0",
    ]  # fmt: skip
    variants.fill({"linear_one-Q8_0": 5, "linear_fast-Q8_0": 6, "linear_few-Q4_0": 7})
    assert first["variants"].tolist() == [5, 0, 0, 0, 6] and other["variants"].tolist() == [0, 7, 0, 0, 0]


def test_variants_are_loaded_once_for_each_shape_of_run():
    """Check that progress shows only until the first logits, and that background compilation gives way."""
    done, addresses = [], {"a": 1}
    library = SimpleNamespace(addresses=addresses, load=lambda *given: done.append(given),
                              lower_priority=lambda: done.append("way"))  # fmt: skip
    variants = SimpleNamespace(
        list_names=lambda run: [*run], list_all_names=lambda: ["all"], fill=lambda to: done.append(to)
    )
    loader = VariantLoader(library, variants, "shown")
    runs = [(3, 0, 9), (3, 0, 9), (3, 1, 9), (3, 1, 9), (4, 0, 9)]
    for tokens, wanted, most in runs:
        loader.prepare(RunShape(tokens, wanted, tokens, wanted, most))
    loader.prepare_all()
    assert done == [
        ([3, 0, 3, 0, 9], "shown"), addresses, ([3, 1, 3, 1, 9], "shown"), addresses, "way",
        ([4, 0, 4, 0, 9], None), addresses,
        (["all"], None), addresses,
    ]  # fmt: skip


# ---- programs and threads -------------------------------------------------------------------------------------------


def made_program(tokens=8, **changed):
    done, header = [], RunHeader(tokens)
    library = SimpleNamespace(warning="slow", close=lambda: done.append("library"))
    loader = SimpleNamespace(
        library=library, prepare=lambda run: done.append((run.tokens, run.wanted, run.most_precise)), prepare_all="all"
    )
    walker = SimpleNamespace(run=lambda: done.append("walk"), close=lambda: done.append("threads"))
    return done, header, CpuProgram(header, walker, 3, loader, **changed)


def test_programs_prepare_kernels_then_compute_and_return_what_threads_write():
    done, header, program = made_program()
    store = SimpleNamespace(addresses=(1, 2, 3))
    spans = [SequenceSpan(store, 0, np.array([4, 5]), 1), SequenceSpan(store, 0, np.array([6]), 1)]
    logits = program.run(spans, True)
    assert (logits.shape, logits.dtype, header.logits[0]) == ((2, 3), np.float32, logits.ctypes.data)
    assert done == [(3, 2, 128), "walk"] and header.ids[:3].tolist() == [4, 5, 6]
    program.run(spans, False)
    assert done[2:] == [(3, 2, 1), "walk"]
    pages = np.array([9, 8])
    results = program.compute_rows(5, pages)
    assert (results.shape, done[4:]) == ((5, 3), [(5, 1, 128), "walk"]) and header.window_count[0] == 0
    assert header.sequences[0].tolist() == [0, 5, 5, pages.ctypes.data, 0, 0, 0, 5] and not header.kinds.any()
    program.compute_rows(5, pages, np.array([2, 5]))
    assert header.window_count[0] == 2 and header.windows[:2, 2].tolist() == [2, 5]
    done.clear()
    texts = [TextSpan(np.array([4, 5]), 1), TextSpan(np.array([6]), 1)]
    for precise, most in ((True, 128), (False, 128)):
        results = program.read(texts, pages, precise)
        assert (results.shape, header.numbers.tolist()) == ((2, 3), [3, 2, 2, most, results.ctypes.data, 0])
        assert done.pop(0) == (3, 2, most) and done.pop(0) == "walk" and header.kinds[:3].tolist() == [0, 1, 0]
    header.flaws[0] = 1
    with pytest.raises(ModelError):
        done.clear()
        program._compute(logits)
    program.close()
    assert done == [(3, 2, 128), "walk", "threads", "library"]
    assert (program.warning, program.prepare_all) == ("slow", "all")


@pytest.mark.parametrize(("precise", "most"), [(True, 130), (False, 128)])
def test_texts_may_exceed_128_tokens_in_precise_runs_and_rows_may_not(precise, most):
    """Of texts, where nobody wants more; of rows that are given always."""
    done, _, program = made_program(tokens=200)
    program.read([TextSpan(np.zeros(130, np.int64), 130)], np.arange(3), precise)
    program.compute_rows(130, np.arange(3))
    assert done == [(130, 1, most), "walk", (130, 1, 128), "walk"]


def test_giving_memory_back_releases_all_reserved_buffers():
    released = []
    memory = [SimpleNamespace(bytes=bytes(size), give_back=lambda *span: released.append(span)) for size in (5, 7)]
    done, _, program = made_program(memory=memory, streaming=SimpleNamespace(run=lambda: done.append("passes")))
    program.give_back()
    program.compute_rows(1, np.array([0]))
    assert released == [(0, 5), (0, 7)] and done == [(1, 1, 128), "passes"]


@pytest.mark.parametrize("passes", [True, False])
def test_compiling_a_program_wires_its_target_tape_library_and_threads(monkeypatch, passes):
    calls = {}

    def keep(name, value):
        monkeypatch.setattr(
            program_module, name, lambda *given, **named: [calls.setdefault(name, (*given, named))] and value
        )

    memory = [object.__new__(ReservedMemory), np.zeros(2), object.__new__(ReservedMemory)]
    target = SimpleNamespace(variants=SimpleNamespace(list_all_names=lambda: ["later"], limits={20}), uses_tiles=False)
    tape = SimpleNamespace(kernels={"k"}, steps=(), memory=memory, finish=lambda *given: given)
    library = SimpleNamespace(addresses="addresses", warning=None)
    walker = SimpleNamespace(run="run", close=None)
    for name, value in (
        ("create_target", target), ("optimize_graph", "prepared"), ("Tape", tape), ("TapeThreads", walker),
                        ("lower_operations", SimpleNamespace(all="lowered")), ("KernelLibrary", library),
                        ):  # fmt: skip
        keep(name, value)
    make_runner = (lambda *given: calls.update(runner=given) or SimpleNamespace(run="passing")) if passes else None
    operations, places = [SimpleNamespace(output=SimpleNamespace(columns=5))], SimpleNamespace(header=RunHeader(9))
    program = program_module.compile_program(operations, places, 3, "progress", "given", False, make_runner)
    assert calls["create_target"] == (3, 9, False, {}) and calls["optimize_graph"] == (operations, target, {})
    assert calls["lower_operations"] == ("prepared", target, places, {"exported": "given"}) and calls["Tape"] == (
        "lowered",
        {},
    )
    assert calls["KernelLibrary"] == ({"k", "run", "work"}, "progress", ["later"], {})
    assert calls["TapeThreads"] == (3, "addresses", ("addresses", 3), {"keep": (library, places, memory)})
    assert (program._memory, program._vocab_size) == ([memory[0], memory[2]], 5)
    assert program._walk == ("passing" if passes else "run") and calls.get("runner") == (
        (walker, ()) if passes else None
    )
    calls.clear()
    program_module.compile_program([SimpleNamespace(output=SimpleNamespace(columns=1)), *operations], places, 1, None)
    assert calls["create_target"] == (1, 9, True, {})
    assert program._loader._progress == "progress" and program._loader._variants is target.variants


def test_worker_groups_share_a_job_and_end_their_threads_once(monkeypatch):
    """Check that a forked process does not end its parent's team."""
    called, prepared = [], []
    monkeypatch.setattr(program, "KERNEL", lambda address: lambda *given: called.append((address, *given)))
    monkeypatch.setattr(program, "get_waiting_functions", lambda: [11, 12, 13, 14, 15])
    monkeypatch.setattr(program, "init_waiting", lambda *given: prepared.append(given))
    tape = np.zeros((6, 5), np.int64)
    team = WorkerGroup({"run": 1, "work": 2}, tape, "kept")
    job, address = team.job, team.job.ctypes.data
    assert len(job) == JOB_WORDS and address % CACHE_LINE == team.cells.ctypes.data % CACHE_LINE == 0
    assert len(team.cells) * 8 == 6 * CACHE_LINE and team.keep == ("kept", tape)
    assert job[[JOB.tape, JOB.steps, JOB.cells]].tolist() == [tape.ctypes.data, 6, team.cells.ctypes.data]
    assert job[[JOB.offer, JOB.lock, JOB.unlock, JOB.wait, JOB.wake]].tolist() == [11, 12, 13, 14, 15]
    assert prepared == [
        ((address + 8 * JOB.run_mutex, address + 8 * JOB.sleep_mutex), address + 8 * JOB.wake_condition)
    ]
    team.select_steps(2, 5)
    assert job[[JOB.tape, JOB.steps]].tolist() == [tape.ctypes.data + 2 * 5 * 8, 3]
    team.start(3)
    for thread in team.threads:
        thread.join()
    assert sorted(called) == [(2, address, 1, 0, 0), (2, address, 2, 0, 0)]
    assert [thread.daemon for thread in team.threads] == [True, True]
    called.clear()
    team.threads = [SimpleNamespace(join=lambda: called.append("join"))] * 2
    team.process += 1
    team.stop()
    team.join()
    assert called == []
    team.process -= 1
    team.stop()
    team.join()
    assert called == [(1, address, 1, 0, 0), "join", "join"]


@pytest.mark.parametrize("line", [64, 128, 4096])
def test_allocations_begin_at_cache_lines(monkeypatch, line):
    monkeypatch.setattr(program, "CACHE_LINE", line)
    for size in (64, 8 * 77):
        blocks = [program.allocate_aligned(size) for _ in range(20)]
        assert {memory.ctypes.data % line for memory in blocks} == {0}
        assert {len(memory) for memory in blocks} == {size // 8} and not np.any(blocks)


def test_threads_run_all_steps_or_a_range_of_them(monkeypatch):
    done = []

    class Known(WorkerGroup):
        def __init__(self, *given):
            done.append(given)
            self.job, self.run = np.zeros(1, np.int64), lambda *given: done.append(given[1:])

        def start(self, count):
            done.append(count)

        def select_steps(self, *steps):
            done.append(steps)

        def stop(self):
            done.append("end")

        def join(self):
            done.append("join")

    monkeypatch.setattr(program, "WorkerGroup", Known)
    walker = TapeThreads(4, "addresses", "tape")
    assert done == [("addresses", "tape", None), 4]
    walker.run()
    walker.run_steps(3, 7)
    assert done[2:] == [(0, 0, 0), (3, 7), (0, 0, 0)]
    walker.close()
    del walker
    assert done[5:] == ["end", "join"]


# ---- the backend ----------------------------------------------------------------------------------------------------


def test_a_backend_compiles_a_program_for_each_use_and_closes_each_once(monkeypatch):
    compiled_programs, done = [], []

    def compiled(operations, places, threads, progress, storage=None, make_runner=None):
        number = len(compiled_programs)
        compiled_programs.append((operations, places, threads, progress))
        return SimpleNamespace(warning=f"warning {number}", kernel_limits=[],
                               run=lambda *given: done.append((number, *given)) or number,
                               close=lambda: done.append(f"close {number}"),
                               prepare_all=lambda: done.append(f"prepare {number}"))  # fmt: skip

    monkeypatch.setattr(backend, "compile_program", compiled)
    options = EngineOptions(threads=3, progress="shown")
    span = SimpleNamespace(seen=None, hook=None)
    for context, room in ((100, BATCH), (1000, 1000)):
        compiled_programs.clear()
        tested = CpuBackend(["model"], [], context, options, ["encoder"])
        assert [(operations, *rest) for operations, _, *rest in compiled_programs] == [
            (["model"], 3, "shown"),
            (["encoder"], 3, "shown"),
        ]
        assert [len(places.header.ids) for _, places, *_ in compiled_programs] == [BATCH, room]
        assert compiled_programs[0][1].cache is compiled_programs[1][1].cache is tested._cache
    assert tested.warning == "warning 0" and compiled_programs[0][1].layout is None
    assert (tested.run([span], True), tested.encode([span], False)) == (0, None)
    assert done == [(0, [span], True), (1, [span], False)]
    beside = tested.compile_second(["beside"])
    assert (
        compiled_programs[2][1].header is not compiled_programs[0][1].header
        and compiled_programs[2][1].cache is tested._cache
        and compiled_programs[2][2:] == (3, "shown")
    )
    done.clear()
    tested.replace_operations(["another"])
    assert done == ["close 0"] and compiled_programs[3] == (["another"], compiled_programs[0][1], 3, "shown")
    assert tested.run([span], False) == 3 and beside.warning == "warning 2"
    done.clear()
    tested.prepare_all()
    tested._row_programs = {True: SimpleNamespace(close=lambda: done.append("close rows"))}
    tested.close()
    assert done == ["prepare 3", "prepare 1", "prepare 2", "close 3", "close 1", "close 2", "close rows"]
    compiled_programs.clear()
    CpuBackend(["model"], [], 100, options)
    assert len(compiled_programs) == 1


def test_a_backend_keeps_pages_for_attention_and_states_for_recurrence(monkeypatch):
    """Check that keys are rotated in pages only."""
    calls = {}
    for name in ("KVCache", "StateLayout", "CachePool", "KeyRotator"):
        there = shift if name == "KeyRotator" else backend
        stand_in = SimpleNamespace(
            create_state="store", get_cache_usage="places", bytes_per_token=5, rotate_keys="turn"
        )
        monkeypatch.setattr(
            there, name, lambda *given, name=name, known=stand_in: calls.setdefault(name, given) and known
        )
    monkeypatch.setattr(
        backend, "compile_program", lambda *_, **__: SimpleNamespace(run=None, warning=None, kernel_limits=[])
    )
    states, options = (
        [PagedState(0, 1, 16, 16), RecurrentLayerState(1, ()), LatentState(2, 16, 16)],
        EngineOptions(threads=3),
    )
    tested = CpuBackend(["model"], states, 100, options)
    assert calls["KVCache"] == (states[::2], 100, options.kv_cache_type) and calls["StateLayout"] == (states[1:2],)
    assert calls["CachePool"] == (tested._cache, tested._places.layout) and tested._places.layout is not None
    assert (tested.create_state, tested.get_cache_usage, tested.bytes_per_token) == ("store", "places", 5)
    tested.prepare_shift("turns")
    assert calls["KeyRotator"] == (tested._cache, states[::2], "turns", 3) and tested.rotate_keys == "turn"


def test_a_backend_compiles_one_image_program_for_each_type_of_attention(monkeypatch):
    programs = []
    monkeypatch.setattr(
        backend, "compile_program", lambda *_, **__: SimpleNamespace(run=None, warning=None, kernel_limits=[])
    )
    monkeypatch.setattr(backend, "ImageRowProgram", lambda *given: programs.append(given) or SimpleNamespace(
        run=lambda *run: (given[0], *run)))  # fmt: skip
    options = EngineOptions(threads=3)

    def rows(is_whole):
        return f"rows {is_whole}"

    tested = CpuBackend(["model"], [], 100, options, rows=rows)
    spans = [SimpleNamespace(seen=SimpleNamespace(is_whole=is_whole), hook=None) for is_whole in (True, False, True)]
    assert [tested.run([span], False) for span in spans] == [
        ("rows True", spans[0], False), ("rows False", spans[1], False), ("rows True", spans[2], False),
    ]  # fmt: skip
    assert programs == [("rows True", tested._places, options), ("rows False", tested._places, options)]
    for none in (None, lambda is_whole: None):
        bare = CpuBackend(["model"], [], 100, options, rows=none)
        with pytest.raises(UnsupportedError, match=r"^the model does not accept images$"):
            bare.run([spans[0]], False)


def test_image_rows_are_padded_and_positioned_by_their_angles(monkeypatch):
    compiled, done = [], []
    program = SimpleNamespace(run=lambda *given: done.append(given) or "logits", close=lambda: done.append("close"))
    monkeypatch.setattr(backend, "compile_program", lambda *given: compiled.append(given) or program)
    traced = SimpleNamespace(operations="operations", rows=np.full((4, 5), 9.0),
                           angles=[SimpleNamespace(fill=lambda turns: done.append(turns))] * 2)  # fmt: skip
    places = shift_places()
    reader = ImageRowProgram(traced, places, EngineOptions(threads=3, progress="shown"))
    ((operations, own, *rest),) = compiled
    assert (operations, own.cache, rest) == ("operations", "cache", [3, "shown"]) and own.header is not places.header
    seen = SimpleNamespace(
        select_rows=lambda ids: np.arange(6).reshape(2, 3) + ids[0], compute_mrope_positions=lambda ids, at: (*ids, at)
    )
    span = SequenceSpan(None, 30, np.array([1, 2]), 1, seen=seen, ahead=10)
    assert reader.run(span, True) == "logits"
    assert traced.rows.tolist() == [[1, 2, 3, 9, 9], [4, 5, 6, 9, 9], [9] * 5, [9] * 5]
    reader.close()
    assert done == [(1, 2, 20), (1, 2, 20), ([span], True), "close"]


def shift_places():
    return backend.StepMemory("cache", None, RunHeader(4))


def test_keys_are_rotated_in_batches():
    calls = []
    turner = object.__new__(KeyRotator)
    turner._distances = np.zeros(BATCH, np.int64)
    turner._header = SimpleNamespace(fill=lambda spans, *rest: calls.append((*spans, *rest)))
    turner._walker = SimpleNamespace(run=lambda: calls.append(turner._distances.tolist()))
    turner.rotate_keys("store", 3, 3 + BATCH + 5, 64)
    (first, *rest), distances, (second, *_), _ = calls
    assert [(span.store, span.position, len(span.ids), span.wanted) for span in (first, second)] == [
        ("store", 3, BATCH, 0), ("store", 3 + BATCH, 5, 0),
    ]  # fmt: skip
    assert rest == [True, shift.NO_LOGITS] and distances == [-64] * BATCH
    calls.clear()
    turner.rotate_keys("store", 3, 3 + BATCH, 1)
    assert len(calls) == 2
    turner.rotate_keys("store", 3, 3, 1)
    assert len(calls) == 2


# ---- memory that is read, pictures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "size"),
    [(0, 1 << 24), (4 << 24, 1 << 24), (4 * ((1 << 24) + 1024), (1 << 24) + 1024), (4 * ((1 << 24) + 1023), 1 << 24),
     (1 << 40, 500_000 * 1024)],
)  # fmt: skip
def test_a_quarter_of_the_free_memory_measures_the_bandwidth(monkeypatch, available, size):
    """Check that the size exceeds any cache, and that the best pass of ten counts."""
    readers, speeds = [], iter([3.0, 9.0, *[1.0] * 7, 5.0, 99.0])
    reader = SimpleNamespace(run=lambda: next(speeds), close=lambda: readers.append("close"))
    monkeypatch.setattr(bandwidth, "get_available_memory", lambda: available)
    monkeypatch.setattr(bandwidth, "MemoryReader", lambda *given: readers.append(given) or reader)
    assert measure_read_bandwidth(3) == 9.0
    assert readers == [(3, size), "close"]
    reader.run = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        measure_read_bandwidth(3)
    assert readers[2:] == [(3, size), "close"]


def test_memory_is_streamed_by_all_threads_in_parts(monkeypatch):
    calls, done = [], []
    library = SimpleNamespace(addresses={"stream": 1, "run": 2, "work": 3})
    monkeypatch.setattr(bandwidth, "KernelLibrary", lambda *given: calls.append(given) or library)
    walker = SimpleNamespace(run=lambda: done.append("run"), close=lambda: done.append("close"))
    monkeypatch.setattr(bandwidth, "TapeThreads", lambda *given, **named: calls.append((*given, named)) or walker)
    times = iter([10.0, 14.0])
    monkeypatch.setattr(bandwidth, "perf_counter", lambda: next(times))
    reader = MemoryReader(3, 2048)
    asked, (count, addresses, steps, kept) = calls
    assert asked == ({"stream", "run", "work"},) and (count, addresses) == (3, library.addresses)
    assert reader.results.shape == (24, 8) and reader.words.tolist() == [*range(256)]
    (step,) = kept["keep"][1].steps
    assert (step.kernel, step.parts, step.arguments["size"]) == ("stream", 24, 2048) and len(steps) == 1
    assert step.arguments["memory"] is reader.words and step.arguments["results"] is reader.results
    assert reader.run() == 512.0
    reader.close()
    assert done == ["run", "close"]


def test_vision_encoders_keep_their_engine_options(monkeypatch):
    monkeypatch.setattr(pictures, "load_projector", lambda file: ("family", "hyperparameters"))
    monkeypatch.setattr(pictures, "trace_programs", lambda *given: given)
    file, options = SimpleNamespace(tensors={}), EngineOptions(threads=3)
    assert VisionEncoder(file, options)._options is options and VisionEncoder(file)._options == EngineOptions()
    assert VisionEncoder(file)._parts == (file, "family", "hyperparameters")
