"""Test an engine on Numba's simulated GPU: sequences, layers on both sides, memory, and missing cards."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from adapters import random_adapter, supported_names
from engines import SingleEngine
from guarded import model as small_model
from simulated import SimulatedCard

from localllm.arch.layer_state import KVType, PagedState
from localllm.arch.weights import Weight
from localllm.engine import backend as opening
from localllm.engine.adapters import rename_matrix, transpose_rows
from localllm.engine.cuda import backend as cuda_backend
from localllm.engine.cuda import devices
from localllm.engine.cuda import lowering as cuda_attention
from localllm.engine.cuda.cache import CudaCache
from localllm.engine.cuda.card import NoGpuError, compute_limits
from localllm.engine.cuda.devices import (
    MARGIN,
    GpuSizes,
    add_adapters,
    compute_gpu_bytes,
    compute_sizes,
    compute_spare,
    compute_state_bytes,
    count_fitting_layers,
    require_memory,
)
from localllm.engine.cuda.lowering import BufferSlice, CudaTarget, ProductFactor, append_product
from localllm.engine.cuda.weights import GpuWeights
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.lower.tape import Buffer
from localllm.engine.options import EngineOptions
from localllm.errors import MemoryLimitError, UsageError
from localllm.files.gguf.file import Tensor
from localllm.quant.formats import BY_NAME

CONTEXT = 128


@pytest.fixture
def card(monkeypatch) -> SimulatedCard:
    """Open a simulated card in place of a GPU."""
    simulated = SimulatedCard()
    monkeypatch.setattr(devices, "open_card", lambda number: simulated)
    return simulated


def small(format: str = "F32"):
    """Return a llama of two layers, 32 wide, that Engine takes as a file."""
    return small_model((32, 2, 1, 16, 32, 33), format, False, 0)


def engine(backend: str, format: str = "F32", **options):
    return SingleEngine(small(format), EngineOptions(2, CONTEXT, "f32", backend, **options))


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the normalized mean square error."""
    assert got.shape == expected.shape
    return float(((got - expected) ** 2).sum() / (expected**2).sum())


def test_uploading_weights_reports_progress_in_bytes(card):
    """Check every matrix of the file, in blocks, once."""
    reported = list[tuple[int, int]]()
    engine("cuda", "Q8_0", on_upload=lambda done, total: reported.append((done, total))).close()
    matrices = {name: tensor for name, tensor in small("Q8_0").tensors.items() if len(tensor.shape) > 1}
    sizes = sorted(tensor.nbytes for tensor in matrices.values())
    steps = np.diff([0, *(done for done, _ in reported)])
    assert (
        {total for _, total in reported} == {reported[-1][0]}
        and set(steps.tolist()) <= set(sizes)
        and (steps > 0).all()
    )


@pytest.mark.sampled
def test_stepping_sequences_and_forks_together_agrees_with_the_reference(card):
    """Step two prompts and a fork together, then truncate one."""
    rows = {}
    for backend in ("reference", "cuda"):
        model = engine(backend)
        first, second = model.sequence(), model.sequence()
        prompt = first.append(list(range(9)))  # by the library
        model.step([(first, [1]), (second, [2])])
        fork = first.fork()
        together = np.concatenate(model.step([(first, [3]), (second, [4]), (fork, [5])]))
        assert first.truncate(9) == 9
        again = first.append([1])
        rows[backend] = np.concatenate([prompt, together, again])
        model.close()
    assert nmse(rows["cuda"], rows["reference"]) < 1e-9


@pytest.mark.sampled
@pytest.mark.parametrize(("layers", "format", "adapted_format", "most"), [
    (1, "F32", "F32", 1e-9), (2, "F32", "F32", 1e-9), (2, "Q8_0", "F32", 1e-5), (2, "F32", "F16", 1e-9),
])  # fmt: skip
def test_adapters_on_the_card_agree_with_the_reference(card, layers, format, adapted_format, most):
    """Check two sequences with other scales in one run; the output matrix has an odd number of rows."""
    file, rows = small(format), {}
    adapter = random_adapter(file, supported_names(file), 3, format=adapted_format)
    for backend in ("reference", "cuda"):
        model = engine(backend, format, gpu_layers=layers, lora=((adapter, 1.0),))
        first, second = model.sequence(), model.sequence()
        second.set_adapter_scales([-0.5])
        prompts = [first.append([1, 2, 3], "all"), second.append([1, 2, 3], "all")]
        rows[backend] = np.concatenate([*prompts, *model.step([(first, [4]), (second, [5])])])
        model.close()
    assert nmse(rows["cuda"], rows["reference"]) < most and not card.memory


@pytest.mark.sampled
@pytest.mark.parametrize("layers", [1, 2])
def test_layers_on_cpu_and_card_agree_with_the_reference(card, layers):
    """Compute the first layer on the CPU and the second on the card, or both there."""
    rows = {}
    for backend in ("reference", "cuda"):
        model = engine(backend, gpu_layers=layers)
        sequence = model.sequence()
        rows[backend] = np.concatenate([sequence.append([1, 2, 3], "all"), sequence.fork().append([4])])
        assert model.device == ("CPU" if backend == "reference" else f"Numba's simulator, {layers} of 2 layers")
        model.close()
    assert nmse(rows["cuda"], rows["reference"]) < 1e-9


def test_more_sequences_than_tables_run_in_groups(card, monkeypatch):
    """The CPU's layers leave other activations for the second group than for the first."""
    monkeypatch.setattr(cuda_backend, "MAX_SEQUENCES", 1)
    rows = {}
    for backend in ("reference", "cuda"):
        model = engine(backend, gpu_layers=1)
        rows[backend] = np.concatenate(model.step([(model.sequence(), [1]), (model.sequence(), [2])]))
        model.close()
    assert nmse(rows["cuda"], rows["reference"]) < 1e-9


@pytest.mark.sampled
@pytest.mark.parametrize(("format", "experts", "prompt"), [("Q8_0", 0, 9), ("F32", 3, 2)])
def test_a_layer_on_the_card_agrees_with_the_reference(card, monkeypatch, format, experts, prompt):
    """Compute a prompt, the longer one on tensor cores, and a token. Few parts and one layer are little to simulate."""
    monkeypatch.setattr(cuda_attention, "BLOCKS", 3)
    rows = {}
    for backend in ("reference", "cuda"):
        file = small_model((32, 2, 1, 16, 32, 33), format, False, experts)
        model = SingleEngine(file, EngineOptions(2, CONTEXT, "f32", backend, gpu_layers=1))
        rows[backend] = np.concatenate([model.forward(list(range(prompt)), 0), model.forward([11], prompt)])
        model.close()
    assert nmse(rows["cuda"], rows["reference"]) < 1e-5
    assert not card.memory


@pytest.mark.sampled
@pytest.mark.parametrize("format", ["Q8_0", "BF16"])
def test_quantized_weights_on_the_card_agree_with_the_reference(card, format):
    """Compute a prompt in float16 or BF16, and a token with the weights as they are."""
    rows = {}
    for backend in ("reference", "cuda"):
        model = engine(backend, format)
        rows[backend] = np.concatenate([model.forward(list(range(10)), 0), model.forward([11], 10)])
        model.close()
    assert nmse(rows["cuda"], rows["reference"]) < 1e-5  # float16 has 11 bits: 1e-6 measured


def test_closing_an_engine_frees_all_memory_of_the_card(card):
    model = engine("cuda")
    model.forward([1, 2], 0)
    assert card.memory
    model.close()
    assert not card.memory


@pytest.mark.parametrize(
    ("backend", "layers", "driver", "kind", "is_told"),
    [
        ("cpu", "auto", True, "cpu", False),
        ("reference", 3, True, "reference", False),
        ("auto", "auto", True, "card", False),
        ("auto", "auto", False, "cpu", False),
        ("auto", 0, False, "cpu", False),
        ("auto", 3, False, "cpu", True),
        ("cuda", "auto", False, "card", False),
    ],
)
def test_the_backend_follows_from_options_and_the_driver(backend, layers, driver, kind, is_told):
    """A missing driver is noted for layers that were asked for; a named card fails later by itself."""
    choice = opening.choose_backend(EngineOptions(backend=backend, gpu_layers=layers), lambda: driver)
    assert (choice.kind, choice.note is not None) == (kind, is_told)


def test_zero_gpu_layers_select_the_cpu(card):
    model = engine("cuda", gpu_layers=0)
    assert model.device == "CPU"
    model.close()


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CUDA", "cuda:1234"])
def test_unknown_device_names_are_refused(device):
    with pytest.raises(UsageError, match="unknown device"):
        engine(device)


def test_a_card_without_room_is_an_error_or_falls_back_to_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "open_card", lambda number: SimulatedCard(MARGIN + 1000))
    with pytest.raises(MemoryLimitError, match=r"2 layers need 0\.\d GB of GPU memory; 0\.4 GB are free"):
        engine("cuda", gpu_layers="all")
    with pytest.raises(MemoryLimitError, match="too little for one layer"):
        engine("cuda")
    monkeypatch.setattr("localllm.engine.backend.has_driver", lambda: True)
    model = engine("auto")
    assert model.device == "CPU" and "the CPU computes: Numba's simulator has 0.4 GB free" in model.warning
    model.close()


def test_a_broken_card_falls_back_to_the_cpu_unless_it_was_named(monkeypatch):
    def broken(number: int) -> None:
        raise NoGpuError("GPU 0 cannot be used: it is on fire")

    monkeypatch.setattr(devices, "open_card", broken)
    monkeypatch.setattr("localllm.engine.backend.has_driver", lambda: True)
    model = engine("auto")
    assert model.warning == "the CPU computes: GPU 0 cannot be used: it is on fire"
    model.close()
    with pytest.raises(NoGpuError):
        engine("cuda")


def test_without_a_driver_no_cuda_module_is_imported(monkeypatch):
    monkeypatch.setattr("localllm.engine.backend.has_driver", lambda: False)
    monkeypatch.delitem(sys.modules, "localllm.engine.cuda.devices")
    model = engine("auto")
    assert model.device == "CPU" and model.warning is None
    assert "localllm.engine.cuda.devices" not in sys.modules
    model.close()
    model = engine("auto", gpu_layers=1)  # who asks for layers on a card hears that there is none
    assert model.device == "CPU" and model.warning == "the CPU computes: no NVIDIA driver found"
    model.close()


def test_a_card_gets_all_layers_that_fit():
    needed = GpuSizes([10, 10, 10, 30], 5)
    fitting = {free: count_fitting_layers(needed, MARGIN + free) for free in (0, 34, 35, 44, 45, 64, 65, 1000)}
    assert fitting == {0: 0, 34: 0, 35: 1, 44: 1, 45: 2, 64: 3, 65: 4, 1000: 4}
    require_memory(needed, 2, MARGIN + 45)
    with pytest.raises(MemoryLimitError, match="3 layers need"):
        require_memory(needed, 3, MARGIN + 45)
    large = GpuSizes([2 * 10**9, 10**9, 3 * 10**9], 10**9)
    with pytest.raises(MemoryLimitError, match=r"2 layers need 5\.0 GB of GPU memory; 4\.0 GB are free"):
        require_memory(large, 2, 4 * 10**9)


@pytest.mark.parametrize("format", ["Q4_K", "IQ2_XXS", "IQ2_S", "BF16"])
def test_the_counted_size_of_a_layer_is_what_gets_allocated(format):
    """Check types that are converted: IQ2_XXS becomes Q8_0, IQ2_S float16."""
    data = np.zeros((64, BY_NAME[format].row_bytes(256)), np.uint8)
    tensor = Tensor("blk.0.ffn_up.weight", BY_NAME[format], (64, 256), data)
    allocated: list[int] = []
    weights = GpuWeights(SimpleNamespace(capability=(8, 0), allocate=allocated.append), [], None)
    weights._upload_planes = weights._upload_rows = lambda *arguments: None
    weights.get_address(Weight(tensor))
    needed = compute_sizes({tensor.name: tensor}, [], 1, 64, KVType(), 0)
    assert (needed.layers, needed.rest) == (allocated, 0)


@pytest.mark.parametrize("format", ["F32", "F16"])
def test_the_counted_size_of_an_adapter_is_what_gets_allocated(format):
    model = small()
    names = ["blk.1.attn_q.weight", "output.weight"]
    adapter = random_adapter(model, names, 4, format=format)
    allocated: list[int] = []
    weights = GpuWeights(SimpleNamespace(capability=(8, 0), allocate=allocated.append), [], None)
    weights._upload_planes = weights._upload_rows = lambda *arguments: None
    for low_rank in adapter.low_ranks.values():
        weights.get_address(rename_matrix(low_rank.a, 0))
        weights.get_address(transpose_rows(low_rank.b, 0, low_rank.b.shape[0], 0))
    sizes = add_adapters(GpuSizes([10, 20], 30), [adapter])
    assert sizes == GpuSizes([10, 20 + sum(allocated[:2])], 30 + sum(allocated[2:])) and min(allocated) > 0


def test_layers_with_adapters_leave_room_for_fewer(monkeypatch):
    """Place as many layers as fit with the bytes of an adapter, also of one outside of layers."""
    file, free = small(), []
    adapter = random_adapter(file, ["blk.0.attn_q.weight", "output.weight"], 8)
    states = [PagedState(layer, 1, 16, 16) for layer in range(2)]
    card = SimpleNamespace(name="one", get_free_bytes=lambda: free[0], close=lambda: None)
    monkeypatch.setattr(devices, "open_card", lambda number: card)
    sizes = compute_sizes(file.tensors, states, 2, 64, KVType(), 0)
    changed = add_adapters(sizes, [adapter])
    for lora, needed in ((), sizes), (((adapter, 1.0),), changed):
        options = EngineOptions(1, backend="cuda", lora=lora)
        total = MARGIN + needed.rest + sum(needed.layers)
        for free[:], count in ([total], 2), ([total - 1], 1):
            assert devices.place_layers(options, file, states, 2, 64, lambda *_: 0).layers == count
    assert changed.rest > sizes.rest and changed.layers[0] > sizes.layers[0] and changed.layers[1] == sizes.layers[1]


@pytest.mark.parametrize("contexts", [1, 2])
def test_the_counted_size_leaves_room_for_weights_behind_the_cache(monkeypatch, contexts):
    """Check that neither a second context nor a window takes the room of weights."""
    model, states, context = small(), [PagedState(layer, 1, 16, 16, window=4) for layer in range(2)], 1 << 15
    needed = compute_sizes(model.tensors, states, 2, context, KVType(), 0)
    room = needed.rest + sum(needed.layers)
    room += (contexts - 1) * sum(compute_state_bytes(state, context, KVType()) for state in states)
    card = SimulatedCard(room)
    cache = CudaCache(card, states, context, KVType(), compute_spare(needed, 2, MARGIN + room))
    assert cache.sequences == (contexts,)
    card.allocate(sum(map(compute_gpu_bytes, model.tensors.values())))


def test_limits_of_an_h100_match_its_data_sheet():
    """Compare with NVIDIA's figures: 3.35 TB/s, 989 TFLOPS."""
    properties = SimpleNamespace(
        memory_clock_rate=2_619_000, global_memory_bus_width=5120, clock_rate=1_830_000, multiprocessor_count=132
    )
    assert compute_limits(properties, (9, 0)) == pytest.approx((3.35e12, 989e12), rel=2e-3)
    assert compute_limits(properties, (42, 0))[1] == 0


def test_a_backend_runs_cpu_and_card_layers_in_groups_of_tables(card, monkeypatch):
    """Check also that it prepares the CPU's kernels and ends its threads."""
    calls_made, made = list[object](), cuda_backend.CudaBackend.__new__(cuda_backend.CudaBackend)
    parts = {name: lambda name=name: calls_made.append(name) for name in ("prepare_all", "close")}

    def front(spans, precise):
        calls_made.append(([(span.position, span.wanted) for span in spans], precise))

    def behind(spans, precise):
        assert calls_made[-1] == ([(span.position, 0) for span in spans], precise)
        return np.array([[span.position] for span in spans for _ in range(span.wanted)])

    made._cpu_program, made._card = (
        SimpleNamespace(run=front, **parts),
        SimpleNamespace(close=lambda: calls_made.append("card")),
    )
    made._program = SimpleNamespace(run=behind)
    monkeypatch.setattr(cuda_backend, "MAX_SEQUENCES", 2)
    spans = [SequenceSpan(None, number, np.zeros(1, np.int64), 1) for number in range(5)]
    for count, calls in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3)):
        calls_made.clear()
        assert made.run(spans[:count], count > 2).ravel().tolist() == list(range(count))
        assert len(calls_made) == calls
    calls_made.clear()
    made.prepare_all()
    made.close()
    assert calls_made == ["prepare_all", "close", "card"]
    made._cpu_program = None
    made.prepare_all()
    made.close()
    assert calls_made[3:] == ["card"]
    assert not made.rotates_keys


def test_products_start_at_the_given_offset_and_may_accumulate():
    appended = list[tuple]()
    steps = SimpleNamespace(max_rows=lambda rows: 7, append=lambda *given: appended.append(given))
    a, b, y, x = Buffer(3, 64), Buffer(5, 128), Buffer(7, 256), SimpleNamespace(rows=None, columns=48)
    append_product(steps, "f16", ProductFactor(a, 32), ProductFactor(b, 64), x, y, 9)
    append_product(steps, "f16", ProductFactor(12, 32), ProductFactor(b, 64), x, BufferSlice(y, 40), 9, adds=True)
    same = {"kind": "f16", "m": 9, "n": 7, "k": 48, "a_stride": 32, "b_stride": 64, "c_stride": 64, "b": b}
    assert appended == [
        ("product", same | {"a": a, "c": BufferSlice(y, 0), "adds": False}, 0, [b, a], [y]),
        ("product", same | {"a": 12, "c": BufferSlice(y, 40), "adds": True}, 0, [b], [y]),
    ]


@pytest.mark.parametrize(("capability", "depth"), [((7, 5), 8), ((8, 0), 16), ((9, 0), 16)])
def test_cuda_targets_choose_sizes_by_the_cards_capability(capability, depth):
    weights = SimpleNamespace(capability=capability, get_address=lambda weight: 77)
    target = CudaTarget(9, 3, weights, {})
    assert (target.tokens, target.buffer_rows, target.wanted_rows, target.depth) == (9, 9, 3, depth)
    assert (target.expert_rows, target.threads) == (1, 1)
    assert target.divide_rows(7, np.zeros(1)) == (7, None)
    assert target.parts(99, 7) == 7
    assert target.build_scratch_arguments(99) == {"scratch": 0, "scratch_bytes": 0}
    tensor = Tensor("w", BY_NAME["IQ2_S"], (2, 256), np.zeros(0, np.uint8))
    assert (target.matrix(Weight(tensor)), target.get_layout(Weight(tensor))) == (77, ("F16", 512))
