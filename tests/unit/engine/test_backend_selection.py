"""Test how options and a traced model select a backend, without computing anything."""

import importlib.util
import re
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm import api, arch, builtin_model
from localllm.api import Model
from localllm.arch.layer_state import KVType, PagedState, RecurrentLayerState
from localllm.arch.rope import RopeParameters
from localllm.arch.verbs import FULL_ATTENTION, AttentionScores
from localllm.engine import backend as opening
from localllm.engine import forks
from localllm.engine.backend import BackendChoice, SelectedBackend, TracedModel, build_backend, choose_backend
from localllm.engine.cpu.lowering import find_kv_producers
from localllm.engine.cuda import devices
from localllm.engine.cuda.card import NoGpuError
from localllm.engine.cuda.devices import (
    MARGIN,
    GpuPlacement,
    GpuSizes,
    compute_sizes,
    compute_spare,
    compute_state_bytes,
    select_layer_count,
    split_at_layer,
)
from localllm.engine.embedding_runner import EmbeddingOnlyEngine
from localllm.engine.forks import ForkedLock, create_lock, was_forked
from localllm.engine.lower.activation import ALL, WANTED, Activation
from localllm.engine.operations.attention import Attend, WriteKV
from localllm.engine.operations.elementwise import Elementwise, Scale
from localllm.engine.operations.key_selection import SelectKeyBlocks, SelectKeys
from localllm.engine.operations.linear import Linear
from localllm.engine.operations.operation import (
    Operation,
    StateOperation,
    find_last_uses,
    insert_activation_forms,
    operation,
)
from localllm.engine.options import EngineOptions, parse_gpu_layers
from localllm.engine.runs import PRECISE_TOKENS, RunPlan
from localllm.engine.trace.imatrix_collector import ImatrixCollector
from localllm.engine.trace.recorder import AngleTable, ImageRowRecorder, TabulatedRecorder, trace_image_rows
from localllm.errors import ContextError, LocalllmError, MemoryLimitError, UnsupportedError, UsageError
from localllm.generation import chunked_prefill as reading
from localllm.generation import scheduler as batch
from localllm.generation.embedding.embedder import EmbedOptions
from localllm.generation.options import GenerationOptions
from localllm.kernels.table import PAGE
from localllm.system import memory as system_memory
from localllm.system import processes
from tests.unit.engine.trace.test_recorder import tensor

NO_DRIVER = "the CPU computes: no NVIDIA driver found"


@pytest.mark.parametrize(
    ("backend", "layers", "driver", "choice"),
    [
        ("cpu", "all", None, BackendChoice("cpu")), ("reference", "all", None, BackendChoice("reference")),
        ("cuda", "auto", None, BackendChoice("card")), ("cuda:1", 0, None, BackendChoice("card")),
        ("auto", "auto", True, BackendChoice("card")), ("auto", "auto", False, BackendChoice("cpu")),
        ("auto", 0, False, BackendChoice("cpu")), ("auto", 1, False, BackendChoice("cpu", NO_DRIVER)),
        ("auto", "all", False, BackendChoice("cpu", NO_DRIVER)),
    ],
)  # fmt: skip
def test_the_backend_is_chosen_by_device_layers_and_driver(backend, layers, driver, choice):
    """Check that the driver is looked for only where it matters."""

    def has_driver() -> bool:
        assert driver is not None
        return driver

    assert choose_backend(EngineOptions(backend=backend, gpu_layers=layers), has_driver) == choice


def said(encoding=()) -> TracedModel:
    h = SimpleNamespace(layers=4, list_states=lambda: ("a", "b"), encode=None)
    return TracedModel(
        SimpleNamespace(tensors={}, nbytes=0),
        ["operation"],
        lambda *given, **named: (given, named),
        h,
        64,
        encoding,
        "rows",
    )


@pytest.fixture
def made(monkeypatch) -> list[tuple]:
    """Record what a CPU backend is built from, in place of building it."""
    built = list[tuple]()
    monkeypatch.setattr(opening, "CpuBackend", lambda *given: built.append(given) or "the CPU")
    monkeypatch.setattr(opening, "has_driver", lambda: True)
    return built


def test_building_the_cpu_backend_passes_operations_states_and_options(made):
    options = EngineOptions()
    assert build_backend(said(["encode"]), options) == SelectedBackend("the CPU", "CPU", None, None)
    assert made.pop() == (["operation"], ["a", "b"], 64, options, ["encode"], "rows", None, None)
    options = EngineOptions(observer=SimpleNamespace(insert_sums=lambda operations: ["watched", *operations]))
    build_backend(said(), options)
    assert made == [(["watched", "operation"], ["a", "b"], 64, options, (), "rows", None, None)]


@pytest.mark.parametrize("encodes", [False, True])
def test_building_the_reference_passes_forward_and_encode(made, monkeypatch, encodes):
    built = list[tuple]()
    monkeypatch.setattr("localllm.engine.reference.ReferenceBackend", lambda *given: built.append(given) or "plain")
    monkeypatch.setattr(opening, "Weights", lambda tensors: "weights")
    of_model, options = said(), EngineOptions(backend="reference", observer="observer")
    h: Any = of_model.hyperparameters
    h.encode = (lambda *given, **named: ("encoded", given, named)) if encodes else None
    assert build_backend(of_model, options) == SelectedBackend("plain")
    ((forward, kept_as, context, observer, encoding),) = built
    assert (kept_as, context, observer) == (options.kv_cache_type, 64, "observer")
    assert forward("builder") == (("builder",), {"w": "weights", "h": h})
    assert (encoding and encoding("builder")) == (
        ("encoded", ("builder",), {"w": "weights", "h": h}) if encodes else None
    )
    assert made == []


def card(**known):
    closed = list[int]()
    return SimpleNamespace(
        name="a card", bandwidth=5.0, peak=6.0, closed=closed, close=lambda: closed.append(1)
    ), closed


@pytest.mark.parametrize(("layers", "limits"), [(4, (5.0, 6.0)), (3, None)])
def test_a_card_that_computes_all_layers_reports_its_limits(made, monkeypatch, layers, limits):
    calls, (one, closed) = [], card()
    monkeypatch.setattr(
        devices, "place_layers", lambda *given: calls.append(given) or GpuPlacement(one, layers, 7, "slow")
    )
    monkeypatch.setattr("localllm.engine.cuda.backend.CudaBackend", lambda *given: calls.append(given) or "on a card")
    options = EngineOptions(backend="cuda")
    assert build_backend(said(), options) == SelectedBackend(
        "on a card", f"a card, {layers} of 4 layers", "slow", limits
    )
    (asked_options, file, states, count, context, buffers), backend = calls
    assert (asked_options, file.tensors, states, count, context) == (options, {}, ["a", "b"], 4, 64)
    assert buffers.args == (["operation"],)
    assert backend == (one, ["operation"], ["a", "b"], 64, options, 4 - layers, 7)
    assert made == [] and closed == []


@pytest.mark.parametrize(
    "found", [GpuPlacement(None, 0), GpuPlacement(None, 0, 0, "why"), GpuPlacement(card()[0], 0, 0, "why")]
)
def test_a_card_that_gets_no_layers_leaves_all_to_the_cpu(made, monkeypatch, found):
    monkeypatch.setattr(devices, "place_layers", lambda *given: found)
    assert build_backend(said(), EngineOptions(backend="auto")) == SelectedBackend("the CPU", "CPU", found.warning)


def test_a_card_that_fails_is_closed_and_reported(made, monkeypatch):
    one, closed = card()

    def broken(*given):
        raise LocalllmError("it is on fire")

    monkeypatch.setattr(devices, "place_layers", lambda *given: GpuPlacement(one, 4))
    monkeypatch.setattr("localllm.engine.cuda.backend.CudaBackend", broken)
    with pytest.raises(LocalllmError, match=r"^it is on fire$"):
        build_backend(said(), EngineOptions(backend="cuda"))
    assert closed == [1]
    selected = build_backend(said(), EngineOptions(backend="auto"))
    assert selected == SelectedBackend("the CPU", "CPU", "the CPU computes: it is on fire") and closed == [1, 1]


def test_encoders_run_on_the_cpu_only(made):
    selected = build_backend(said(["encode"]), EngineOptions(backend="auto"))
    assert selected == SelectedBackend("the CPU", "CPU", "the CPU computes: encoders do not run on GPUs")
    with pytest.raises(UnsupportedError) as error:
        build_backend(said(["encode"]), EngineOptions(backend="cuda"))
    assert str(error.value) == "encoder models run on the CPU only: use --device cpu"


# ---- which card, and how much of a model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "free", "layers"),
    [("all", 65, 4), (4, 65, 4), (9, 65, 4), (2, 45, 2), ("auto", 44, 1), ("auto", 35, 1), ("auto", 999, 4)],
)
def test_placement_gives_a_card_all_layers_that_fit(wanted, free, layers):
    needed = GpuSizes([10, 10, 10, 30], 5)
    assert select_layer_count("a card", needed, wanted, MARGIN + free) == layers
    for more, room, message in (("all", 64, "4 layers need 0.0 GB of GPU memory"), (9, 64, "4 layers need 0.0 GB"),
                             ("auto", 34, "a card has 0.4 GB free, too little for one layer of")):  # fmt: skip
        with pytest.raises(MemoryLimitError, match=message):
            select_layer_count("a card", needed, more, MARGIN + room)


def test_placing_layers_opens_the_named_card_and_closes_it_on_failure(monkeypatch):
    opened, (one, closed) = [], card()
    one.get_free_bytes = lambda: MARGIN + 100
    monkeypatch.setattr(devices, "open_card", lambda number: opened.append(number) or one)

    def place_layers(device, layers="auto", buffers=lambda states, kv_type: 30, kv_type="f16"):
        file, options = (
            SimpleNamespace(tensors={}, nbytes=0),
            EngineOptions(backend=device, gpu_layers=layers, kv_type=kv_type),
        )
        return devices.place_layers(options, file, [], 2, 64, buffers)

    assert place_layers("cuda", 0) == GpuPlacement(None, 0) and opened == []
    for device, number in (("cuda", 0), ("cuda:12", 12), ("auto", 0)):
        assert place_layers(device) == GpuPlacement(one, 2, 70) and opened.pop() == number
    assert place_layers("cuda", 1) == GpuPlacement(one, 1, 70) and closed == []
    reason = "a card has 0.4 GB free, too little for one layer of this model: use --device cpu"
    assert place_layers("auto", buffers=lambda *given: 101) == GpuPlacement(None, 0, 0, f"the CPU computes: {reason}")
    assert closed == [1]
    for device, layers in (("cuda", "auto"), ("auto", "all"), ("auto", 1)):
        with pytest.raises(MemoryLimitError):
            place_layers(device, layers, lambda *given: 101)
    assert closed == [1] * 4
    reason = "the KV cache on a GPU must have the type f16, f32, q8_0, q4_1, q4_0 (found bf16): use --device cpu"
    assert place_layers("auto", kv_type="v=bf16").warning == f"the CPU computes: {reason}"
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        place_layers("cuda", kv_type="bf16")

    def missing(number):
        raise NoGpuError("there is none")

    monkeypatch.setattr(devices, "open_card", missing)
    assert place_layers("auto", 1) == GpuPlacement(None, 0, 0, "the CPU computes: there is none")
    with pytest.raises(NoGpuError):
        place_layers("cuda")


def test_layer_sizes_count_windows_states_and_spare_pages():
    """Check all tokens, also those behind a window, and two pages more; recurrent layers have seven states."""
    plain, kept = PagedState(0, 1, 16, 16, window=4), KVType.parse("f16")
    assert compute_state_bytes(plain, 64, kept) == (64 + 2 * PAGE) * 2 * 32
    assert compute_state_bytes(RecurrentLayerState(0, ((2, 3),)), 64, kept) == 7 * 24
    tensors = {name: tensor(name, 3, 8) for name in ("blk.0.a.weight", "blk.1.b.weight", "blk.2.c.weight", "output")}
    one = 3 * 32
    estimated = compute_sizes(tensors, [plain, RecurrentLayerState(1, ((2, 3),))], 2, 64, kept, 1000)
    assert estimated == GpuSizes([one + (64 + 2 * PAGE) * 64, one + 7 * 24], 1000 + 2 * one)
    assert compute_spare(GpuSizes([1, 20, 300], 4000), 2, MARGIN + 5000) == 680
    assert compute_spare(GpuSizes([1, 20, 300], 4000), 0, MARGIN + 5000) == 1000


# ---- options, and what stands for an engine -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context must be at least 1 token (found 0)"),
        ({"threads": 0}, "threads must be from 1 to 1024 (found 0)"),
        ({"threads": 1025}, "threads must be from 1 to 1024 (found 1025)"),
        ({"backend": "cuda:1234"}, "unknown device 'cuda:1234': use cpu, cuda, cuda:N, auto or reference"),
    ],
)
def test_invalid_engine_options_are_refused(options, message):
    with pytest.raises(UsageError) as error:
        EngineOptions(**options).require_valid()
    assert str(error.value) == message


def test_valid_engine_options_are_accepted():
    for options in ({"context": 1}, {"threads": 1}, {"threads": 1024}, {"backend": "cuda:123"}, {"backend": "auto"}):
        EngineOptions(**options).require_valid()
    options = EngineOptions()
    assert (options.backend, options.kv_type, options.gpu_layers) == ("cpu", "f16", "auto")


def test_gpu_layers_are_a_number_all_or_auto():
    assert [parse_gpu_layers(layers) for layers in ("all", "auto", 0, 7)] == ["all", "auto", 0, 7]
    with pytest.raises(UsageError, match=r"^gpu_layers must be an integer, all or auto \(found 'most'\)$"):
        parse_gpu_layers("most")


def test_an_embedding_engine_refuses_to_generate():
    h = SimpleNamespace(arch="bert", context=77, vocab_size=9)
    options = EngineOptions(threads=2)
    engine = EmbeddingOnlyEngine("m.gguf", h, options)
    assert (engine.context, engine.vocab_size, engine.thread_count, engine.kv_type) == (77, 9, 2, options.kv_cache_type)
    assert EmbeddingOnlyEngine("m.gguf", h, EngineOptions(context=5)).context == 5
    assert (engine.device, engine.warning, engine.bytes_per_token, engine.runs, engine.draft_head_path) == (
        "CPU", None, 0, RunPlan(), None,
    )  # fmt: skip
    for call in (engine.sequence, lambda: engine.step(1)):
        with pytest.raises(UnsupportedError) as error:
            call()
        message = "m.gguf: bert models make embeddings and cannot generate text: use localllm embed or localllm rerank"
        assert str(error.value) == message
    engine.prepare_all()
    engine.close()


def test_using_an_engine_after_a_fork_is_refused():
    class Owner:
        lock = None

    owner = Owner()
    owner.lock = create_lock(owner)
    assert not was_forked(owner)
    with owner.lock:
        pass
    owner.lock = ForkedLock()
    assert was_forked(owner)
    with pytest.raises(
        LocalllmError,
        match=r"^the model was opened before this process was forked: open it "
        r"again in this process$",
    ):
        owner.lock.__enter__()


def test_a_fork_replaces_the_locks_of_all_living_owners(monkeypatch):
    calls = []
    monkeypatch.setattr(processes, "register_after_fork", calls.append)
    spec = importlib.util.spec_from_file_location("other_forks", forks.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (refuse,) = calls

    class Owner:
        pass

    owners = [Owner(), Owner(), Owner()]
    for owner in owners:
        owner.lock = module.create_lock(owner)
    del owners[0], owner
    assert [module.was_forked(owner) for owner in owners] == [False, False] and len(module._owners) == 2
    refuse()
    assert [module.was_forked(owner) for owner in owners] == [True, True]


# ---- lists of operations --------------------------------------------------------------------------------------------


@operation
class Named(StateOperation):
    """A verb that has a state."""

    function: str

    @property
    def verb(self) -> str:
        return self.function


def other(verb: str, inputs: tuple[Activation, ...], output: Activation) -> Operation:
    return Elementwise(inputs, output, verb, {})


def at(verb: str, layer: int, inputs: tuple[Activation, ...], output: Activation) -> Operation:
    return Named(inputs, output, SimpleNamespace(layer=layer), verb)


def chain(*verbs: str, weights: dict[str, int] | None = None) -> list[Operation]:
    """Return operations that each read the output of the one before; weights: the layer of each, by verb."""
    operations, x = [], Activation(ALL, 4)
    for number, verb in enumerate(verbs):
        inputs, output = (x,) if number else (), Activation(ALL, 4 + number)
        operations.append(
            at(verb, weights[verb], inputs, output) if weights and verb in weights else other(verb, inputs, output)
        )
        x = output
    return operations


def test_kv_producers_are_found_back_to_the_last_product():
    x, q, k, scaled, v, output, chosen = (Activation(ALL, number) for number in range(7))
    attend = Attend((q, scaled, v), output, *[None] * 12)
    operations = [
        other("norm", (), x), Linear((x,), q, None, None), Linear((x,), k, None, None),
        Scale((k,), scaled, 2.0), Linear((x,), v, None, None), attend,
    ]  # fmt: skip
    assert find_kv_producers(operations) == {k, scaled, v}
    assert find_kv_producers([*operations[:5], WriteKV((scaled, v), output, None)]) == {k, scaled, v}
    assert find_kv_producers([*operations[:5], SelectKeys((q, scaled), chosen, None, 1, 1, 1)]) == {k, scaled}
    assert find_kv_producers([*operations[:5], SelectKeyBlocks((q, scaled), chosen, None, 1, 1, 1, 1)]) == {k, scaled}
    assert find_kv_producers(operations[:5]) == set()
    assert find_last_uses(operations) == {
        x: operations[4], q: operations[5], k: operations[3], scaled: operations[5], v: operations[5],
    }  # fmt: skip


def test_each_activation_form_is_inserted_once_before_its_first_use():
    x, y = Activation(WANTED, 4), Activation(ALL, 5)
    operations = [other(verb, (x, y), Activation(ALL, 1)) for verb in ("one", "none", "both", "one")]
    wanted = {"one": {"halve": True}, "none": {}, "both": {"pack": False, "halve": False}}
    inserted = insert_activation_forms(operations, lambda operation: wanted[operation.verb])
    assert [one.verb for one in inserted] == ["halve", "one", "none", "pack", "both", "one"]
    halved, packed = inserted[0].output, inserted[3].output
    assert (inserted[0].inputs, inserted[0].exact, halved.rows, halved.columns) == ((x,), True, WANTED, 4)
    assert [one.inputs for one in inserted[1:]] == [
        (x, y, halved),
        (x, y),
        (x,),
        (x, y, packed, halved),
        (x, y, halved),
    ]
    assert inserted[2] is operations[1] and [one.output for one in inserted if one.verb == "one"] == [
        operations[0].output, operations[3].output,
    ]  # fmt: skip


def test_a_model_is_split_where_the_fewest_values_cross():
    """Check that the first of equal positions is taken."""
    operations = chain("embed", "a", "wide", "b", "end", weights={"a": 0, "b": 1})
    halves = split_at_layer(operations, 1)
    assert ([one.verb for one in halves.before], [x.columns for x in halves.crossing]) == (["embed", "a"], [5])
    assert [one.verb for one in halves.behind] == ["wide", "b", "end"]
    for layer, verbs in ((0, []), (2, ["embed", "a", "wide", "b", "end"])):
        assert [one.verb for one in split_at_layer(operations, layer).before] == verbs
    narrow = chain("embed", "a", "wide", "b", weights={"a": 0, "b": 1})
    narrow[2] = other("narrow", narrow[2].inputs, Activation(ALL, 3))
    narrow[3] = at("b", 1, (narrow[2].output,), Activation(ALL, 9))
    assert [one.verb for one in split_at_layer(narrow, 1).before] == ["embed", "a", "narrow"]
    for entangled in (chain("b", "a", weights={"a": 0, "b": 1}), chain("a", "b", weights={"a": 0, "b": 1})):
        if entangled[0].verb == "a":
            wanted_rows = Activation(WANTED, 4)
            entangled = [at("a", 0, (), wanted_rows), at("b", 1, (wanted_rows,), wanted_rows)]
        with pytest.raises(
            UnsupportedError, match=r"^the model cannot be split between GPU and CPU before layer 1: use -ngl all"
        ):
            split_at_layer(entangled, 1)


def test_squares_are_summed_once_for_all_readers_of_an_activation():
    """Check that taking the sums, by the name of each matrix, resets them."""
    x, y = Activation(ALL, 20), Activation(WANTED, 3)

    def linear(name, source):
        return Linear((source,), Activation(ALL, 1), SimpleNamespace(name=name), None)

    sums = ImatrixCollector()
    operations = [linear("a", x), other("add", (x, x), x), linear("b", x), linear("c", y)]
    watched = sums.insert_sums(operations)
    assert [one.verb for one in watched] == ["add_squares", "linear", "add", "linear", "add_squares", "linear"]
    first, last = watched[0], watched[4]
    assert (first.inputs, first.output.columns, first.output.rows, last.output.rows) == ((x,), 0, ALL, WANTED)
    assert (len(first.sums), len(last.sums)) == (32, 16)
    assert [one for one in watched if one.verb != "add_squares"] == operations
    first.sums[:] = range(32)
    taken = sums.pop_sums()
    assert {name: len(numbers) for name, numbers in taken.items()} == {"a": 20, "b": 20, "c": 3}
    assert taken["a"].tolist() == taken["b"].tolist() == [*range(20)] and taken["a"].dtype == np.float32
    assert not first.sums[:20].any() and not sums.pop_sums()["a"].any()
    sums = ImatrixCollector()
    for _ in range(2):
        sums.add("a", np.array([[1, 2], [3, 4]], np.float32))
    assert sums.pop_sums()["a"].tolist() == [20, 40]


# ---- rows of images -------------------------------------------------------------------------------------------------

ROPE = RopeParameters(8, 4, False, magnitude=2.0)
H = SimpleNamespace(vocab_size=9, width=4, row_width=8)


def test_angles_of_image_rows_follow_their_time_or_axis():
    turns = np.array([[5, 6, 7], [8, 9, 10]])
    for rope, divisors, positions in (
        (ROPE, None, [[5, 5], [8, 8]]),
        (RopeParameters(8, 4, False, magnitude=2.0, pair_axes=(1, 2)), None, [[6, 7], [9, 10]]),
        (
            RopeParameters(8, 4, False, magnitude=2.0, position_offset=3),
            np.array([2.0, 4.0], np.float32),
            [[1, 0.5], [2.5, 1.25]],
        ),
    ):
        table = np.zeros((3, 2, 2), np.float32)
        AngleTable(rope, divisors, table).fill(turns)
        angles = np.array(positions) * [1, 0.01]
        np.testing.assert_allclose(table[:2], np.stack([2 * np.cos(angles), 2 * np.sin(angles)], axis=1), rtol=1e-6)
        assert not table[2].any()


def test_layers_with_the_same_rope_share_angles():
    recorder = TabulatedRecorder(H, 64, 5)
    one, two = np.array([1.0, 2.0], np.float32), np.array([1.0, 3.0], np.float32)
    tables = [recorder._tabulate_angles(rope, divisors) for rope, divisors in (
        (ROPE, None), (ROPE, one), (ROPE, None), (ROPE, one.copy()), (ROPE, two), (RopeParameters(8, 4, True), None),
    )]  # fmt: skip
    assert [next(place for place, other in enumerate(tables) if other is table) for table in tables] == [
        0, 1, 0, 1, 4, 5,
    ]  # fmt: skip
    assert tables[0].shape == (5, 2, 2) and tables[0].dtype == np.float32 and len(recorder.angles) == 4


@pytest.mark.parametrize("is_whole", [False, True])
def test_image_rows_replace_tokens_and_deepstack_rows_follow(is_whole):
    """Check that whole images see all their rows."""
    state = PagedState(0, 1, 4, 4)

    def forward(b, w, h):
        x = b.add_deepstack(b.embed_inputs(lambda: 1 // 0, 2), 1)
        b.attend(x, x, x, state, AttentionScores(1, 1.0, lookahead=3))

    traced = trace_image_rows(forward, "weights", H, 64, is_whole)
    begin, deep, add, attend = traced.operations
    assert [one.verb for one in traced.operations] == ["external_input", "external_input", "add", "attend"]
    assert traced.rows.shape[0] == 512 and traced.rows.shape[1] >= 8 and traced.rows.dtype == np.float32
    traced.rows[0] = np.arange(traced.rows.shape[1])
    assert begin.memory[0, :4].tolist() == [0, 1, 2, 3] and begin.output.columns == 4
    assert deep.memory[0, :4].tolist() == [4, 5, 6, 7] and deep.output.columns == 4
    assert add.inputs == (begin.output, deep.output)
    assert attend.lookahead == (FULL_ATTENTION if is_whole else 3)
    assert trace_image_rows(lambda b, w, h: None, "weights", H, 64, is_whole) is None  # type: ignore[return-value]
    assert ImageRowRecorder(H, 64, is_whole).reveals is False


# ---- a model whose parts are not there


def model_with(**parts: Any) -> Model:
    model = Model.__new__(Model)
    model.session = SimpleNamespace(cache=SimpleNamespace(collect=lambda: None))
    model.__dict__.update(parts)
    return model


@pytest.mark.parametrize(
    ("free", "memory", "bytes_per_token", "places"),
    [
        (10_000, None, 10, 900), (10_000, 5000, 10, 500), (10_000, 20_000, 10, 900), (10_000, 1639, 10, 164),
        (10_000, 1650, 10, 165), (500, None, 10, 164), (10_000, 0, 10, 164), (10_000, None, 0, sys.maxsize),
    ],
)  # fmt: skip
def test_a_batch_takes_the_memory_that_weights_leave(
    monkeypatch, free: int, memory: int | None, bytes_per_token: int, places: int
):
    """Use no more than the available memory, except for the first answer."""
    monkeypatch.setattr(batch, "Scheduler", lambda *arguments: arguments)
    monkeypatch.setattr(system_memory, "get_available_memory", lambda: free)
    monkeypatch.setattr(reading, "compute_max_prefill_tokens", lambda parameters: f"chunk of {parameters}")
    file, engine = (
        SimpleNamespace(nbytes=1000, parameters=7),
        SimpleNamespace(bytes_per_token=bytes_per_token, context=100),
    )
    model = model_with(file=file, engine=engine, context=100, tokenizer="t", prefixes="kept", ngrams="before")
    arguments: Any = model.batch("requests", memory=memory)
    assert arguments == (engine, "t", "requests", 16, "chunk of 7", places, True, None)
    arguments = model.batch("requests", 3, False, True)
    assert arguments[3] == 3 and arguments[6] is False and arguments[7].ngrams == "before"


@pytest.mark.parametrize("forked", [False, True])
def test_a_model_closes_its_parts_unless_it_was_forked(monkeypatch, forked: bool):
    """Check that leaving by an error does not wait for the prefix cache."""
    calls: list[Any] = []
    monkeypatch.setattr(api, "was_forked", lambda owner: forked)

    def part(name: str) -> Any:
        return SimpleNamespace(close=lambda wait=True: calls.append((name, wait)), save=lambda: calls.append("save"))

    model = model_with(
        prefixes=part("prefixes"), ngrams=part("written"), engine=part("engine"), vision=part("vision"),
        _draft_models={"d": part("draft")}, _embedders={}, _rerankers={None: part("reader")},
    )  # fmt: skip
    all_of_them = [("prefixes", True), "save", *((name, True) for name in ("draft", "reader", "vision", "engine"))]
    model.close()
    assert calls == ([] if forked else all_of_them)
    calls.clear()
    with model as it:
        assert it is model and calls == []
    assert calls == ([] if forked else all_of_them)
    calls.clear()
    with pytest.raises(ZeroDivisionError), model:
        raise ZeroDivisionError
    assert calls == [("prefixes", False), *([] if forked else all_of_them)]
    calls.clear()
    model.prefixes = model.ngrams = None
    with pytest.raises(ZeroDivisionError), model:
        raise ZeroDivisionError
    assert calls == ([] if forked else all_of_them[2:])


def test_logits_are_computed_by_a_sequence_that_is_always_closed():
    """Compute the whole prompt at once in diffusion models."""
    calls: list[Any] = []

    def append(ids: Any, which: str, kernel_tokens: int) -> str:
        calls.append((list(ids), which, kernel_tokens))
        if len(ids) > 2:
            raise ContextError("too long")
        return "logits"

    engine = SimpleNamespace(
        hyperparameters=SimpleNamespace(is_diffusion=False), forward_full=lambda ids: ("whole", list(ids)),
        sequence=lambda: SimpleNamespace(append=append, close=lambda: calls.append("closed")),
    )  # fmt: skip
    model = model_with(engine=engine)
    assert model.logits([1, 2]) == "logits" and calls == [([1, 2], "all", PRECISE_TOKENS), "closed"]
    with pytest.raises(ContextError):
        model.logits([1, 2, 3], precise=False)
    assert calls[2:] == [([1, 2, 3], "all", 0), "closed"]
    engine.hyperparameters.is_diffusion = True
    assert model.logits([1, 2]) == ("whole", [1, 2]) and len(calls) == 4


def test_embedders_and_rerankers_are_opened_once():
    model, opened = model_with(_opening=threading.Lock(), _threads=3, context=99), list[Any]()

    def make(options: Any) -> int:
        opened.append((options.threads, options.context))
        return len(opened)

    embedders, rerankers = dict[str | None, int](), dict[str | None, int]()
    kinds: list[Any] = [(embedders, None), (embedders, "mean"), (rerankers, None)]
    assert [model._open_once(known, pooling, make) for known, pooling in [*kinds, *kinds]] == [1, 2, 3, 1, 2, 3]
    assert opened == [(3, 99)] * 3


def test_a_models_files_include_drafts_and_draft_heads():
    engine = SimpleNamespace(draft_head_path=None)
    draft = model_with(
        file=SimpleNamespace(parts=["d"]), engine=SimpleNamespace(draft_head_path="dh"), _draft_models={}
    )
    model = model_with(file=SimpleNamespace(parts=["a", "b"]), engine=engine, _draft_models={"d": draft})
    assert model.files == ["a", "b", "d", "dh"]
    engine.draft_head_path = "h"
    assert model.files == ["a", "b", "d", "dh", "h"]


@pytest.mark.parametrize(
    ("given", "device", "two_parts", "keeps", "guesses"),
    [
        ({}, "CPU", False, True, True), ({"cache": False}, "CPU", False, False, False),
        ({"backend": "reference"}, "CPU", False, False, False), ({"observer": "sums"}, "CPU", False, False, False),
        ({"backend": "auto"}, "a card", False, False, True), ({}, "CPU", True, False, True),
        ({"threads": 3, "context": 50, "kv_type": "q8_0", "gpu_layers": 7}, "CPU", False, True, True),
        ({"context": 0, "gpu_layers": "all"}, "CPU", False, True, True),
    ],
)  # fmt: skip
def test_opening_a_model_selects_its_caches_and_engine_options(
    monkeypatch, given: dict, device: str, two_parts: bool, keeps: bool, guesses: bool
):
    h = SimpleNamespace(bidirectional=False, is_diffusion=False, encode=two_parts)
    file, engine = SimpleNamespace(path="p"), SimpleNamespace(device=device, vocab_size=9)
    calls: list[Any] = []
    monkeypatch.setattr(api, "GGUFFile", SimpleNamespace(open=lambda path: file))
    monkeypatch.setattr(api, "load_architecture", lambda file: (None, h))
    monkeypatch.setattr(api, "load_tokenizer", lambda file: SimpleNamespace(pieces="pieces"))
    monkeypatch.setattr(api, "NgramCache", lambda *given: given)
    monkeypatch.setattr(api, "Model", lambda *given: given)
    monkeypatch.setattr("localllm.engine.engine.Engine", lambda *given: calls.append(given[1]) or engine)
    monkeypatch.setattr("localllm.engine.prefix_store.PrefixStore", lambda *given: given)
    monkeypatch.setattr("localllm.files.gguf.file.prefault", calls.append)
    opened: Any = api.open_model("p", **given)
    assert opened[5:] == ((engine, file) if keeps else None, (9, "pieces") if guesses else None)
    assert opened[0] is file and opened[2:5] == (engine, None, given.get("threads")) and calls[0] is file
    usual = {"context": None, "kv_type": "f16", "backend": "cpu", "gpu_layers": "auto", "observer": None}
    wanted = {**usual, **{name: value for name, value in given.items() if name in usual}}
    wanted["context"] = wanted["context"] or None
    assert {name: getattr(calls[1], name) for name in usual} == wanted


def test_the_architecture_is_checked_once(monkeypatch):
    checked: list[str] = []
    monkeypatch.setattr(arch, "require_agreement", lambda fields, tensors: checked.append(fields.arch))
    with api.open_model(builtin_model(), 1):
        assert checked == ["llama"]


def test_public_methods_pass_their_default_options(monkeypatch):
    told: list[Any] = []

    class Teller:
        """Record each call of any method."""

        def __getattr__(self, name: str) -> Any:
            return lambda *given: told.append((name, *given)) or name

    monkeypatch.setattr(
        "localllm.generation.embedding.embedder.Embedder", lambda *given: told.append(given[3:]) or Teller()
    )
    monkeypatch.setattr("localllm.generation.embedding.reranker.Reranker", lambda *given: Teller())
    stand_in: Any = Teller()
    model: Any = model_with(tokenizer=stand_in, engine=stand_in, session=stand_in, file="f", context=9, _threads=1)
    model.__dict__ |= {"_opening": threading.Lock(), "_embedders": {}, "_rerankers": {}}
    usual = GenerationOptions()
    assert usual.stop == () and usual.speculate == "auto" and usual.max_tokens is None
    calls: list[Any] = [
        (model.tokenize("x"), ("encode", "x", False, False)), (model.detokenize([1]), ("decode", [1], False)),
        (model.step([]), ("step", [], True)), (model.generate("x"), ("complete", "x", usual)),
        (model.chat([]), ("chat", [], usual)), (model.candidates("x"), ("candidates", "x", usual, 1, 0, 0.0)),
        (model.rerank("x", ["y"]), ("rerank", "x", ["y"], False)), (model.sequence(), ("sequence",)),
    ]  # fmt: skip
    assert told == [said for _, said in calls] and [made for made, _ in calls] == [said[0] for _, said in calls]
    told.clear()
    model.embed(["x"])
    assert told == [(None,), ("embed", ["x"], EmbedOptions(None, True, None, "refuse"))]
    told.clear()
    model.embed(["x"], 3, False, "query", "cut", "mean")
    assert told == [("mean",), ("embed", ["x"], EmbedOptions(3, False, "query", "cut"))]


def test_map_yields_answers_in_the_order_of_prompts():
    """Check that the first error is raised in its answer's turn, and that the batch is closed."""
    calls: list[Any] = []

    def request(prompt: str, options: Any, key: int) -> Any:
        return SimpleNamespace(key=key, answers=[f"{prompt}!"], error=LocalllmError("bad") if prompt == "bad" else None)

    class Answers:
        def __init__(self, requests: Any, *given: Any):
            calls.append(given)
            first, second, *others = requests
            self._turns = iter([[second], [], [first, *others]])

        def __iter__(self) -> Any:
            return self._turns

        def close(self) -> None:
            calls.append("closed")

    model: Any = model_with(session=SimpleNamespace(request=request), batch=Answers)
    assert list(model.map(["a", "b", "c"])) == ["a!", "b!", "c!"] and calls == [(None, True), "closed"]
    calls.clear()
    answers = model.map(["a", "b", "bad", "c"], parallel=3, precise=False)
    assert [next(answers), next(answers)] == ["a!", "b!"] and calls == [(3, False)]
    with pytest.raises(LocalllmError, match="bad"):
        next(answers)
    assert calls[1:] == ["closed"]
    with pytest.raises(UsageError, match="parallel must be"):
        next(model.map(["a", "b"], parallel=0))
