"""Test calls to the card, with stand-ins for the driver and NVIDIA's packages that record them."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.engine.cuda import card as cuda_device
from localllm.engine.cuda.card import CublasProduct, CudaGpu, KernelLaunch, LaunchGrid, NoGpuError
from localllm.engine.cuda.lowering import BufferSlice, encode_argument, list_kernels
from localllm.engine.lower.tape import Buffer
from localllm.errors import LocalllmError, MemoryLimitError


class Heard(list):
    """Recorded calls, in order."""

    def says(self, name: str, *values):
        """Return a function that records the name and returns the values."""

        def function(*arguments):
            self.append(name)
            return values if len(values) != 1 else values[0]

        return function


class BrokenError(Exception):
    """An error that localllm does not know, like cuda.core's CUDAError and cuBLAS's."""


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def card(heard: Heard, monkeypatch) -> CudaGpu:
    monkeypatch.setattr(cuda_device, "MAX_CHUNK_BYTES", 64)
    monkeypatch.setattr(cuda_device, "WORKSPACE", 64)
    memory = iter([np.zeros(1 << 12, np.uint8) for _ in range(20)])

    def take(size: int, flags: int = 0):
        heard.append("take")
        held.append(next(memory))
        return 0, held[-1].ctypes.data

    held: list[np.ndarray] = []
    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2), cuMemAlloc=take, cuMemHostAlloc=take,
        **{name: heard.says(name, (0,)) for name in (
            "cuMemFree", "cuMemFreeHost", "cuMemcpyHtoD", "cuMemcpyHtoDAsync", "cuMemcpyDtoH", "cuMemcpyDtoDAsync",
        )},
    )  # fmt: skip
    builder = SimpleNamespace(complete=lambda: SimpleNamespace(upload=lambda stream: None, launch=heard.says("launch")))
    builder.begin_building = builder.end_building = lambda: builder
    device = SimpleNamespace(
        name="stand-in", compute_capability=(8, 0), set_current=heard.says("use"),
        properties=SimpleNamespace(
            memory_clock_rate=1, global_memory_bus_width=8, clock_rate=1, multiprocessor_count=1
        ),
        create_stream=lambda: SimpleNamespace(
            sync=heard.says("sync"), handle=7, create_graph_builder=lambda: builder,
        ),
    )  # fmt: skip
    opened = CudaGpu(device, driver, SimpleNamespace(create=lambda: 1, destroy=heard.says("destroy")))
    heard.clear()
    return opened


def test_every_call_makes_the_device_current_in_its_thread(card: CudaGpu, heard: Heard):
    """Cover a thread that forks a sequence, which copies a page before its first run."""
    for call in (lambda: card.copy(1, 2, 3), lambda: card.allocate(8), lambda: card.allocate_pinned(8),
                 lambda: card.upload(1, np.zeros(8, np.uint8)), lambda: card.download(1, 8), card.close):  # fmt: skip
        heard.clear()
        call()
        assert heard[0] == "use"


def test_uploads_wait_until_the_bytes_have_arrived(card: CudaGpu, heard: Heard):
    """Wait after cuMemcpyHtoD, which may return before the bytes have arrived."""
    card.upload(1, np.zeros(8, np.uint8))
    assert heard[-3:] == ["cuMemcpyHtoDAsync", "sync", "sync"]


def moved(target: int, source: int, size: int, stream: int = 7) -> tuple[int]:
    assert stream == 7
    ctypes.memmove(target, source, size)
    return (0,)


def test_bytes_arrive_on_the_card_within_it_and_back(card: CudaGpu):
    for name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync", "cuMemcpyDtoH"):
        setattr(card._driver, name, moved)
    data = np.arange(40, dtype=np.uint8)
    there, elsewhere = card.allocate(40), card.allocate(40)
    card.upload(there, data)
    card.copy(elsewhere, there, 40)
    np.testing.assert_array_equal(card.download(elsewhere, 40), np.arange(40))
    card._stream.wait, card._stream.record = (lambda other: None), lambda: card._stream
    card.upload_chunks(np.split(data, 5), lambda address, chunk: None, there + 40)
    np.testing.assert_array_equal(card.download(there, 80), [*range(40), *range(40)])


@pytest.mark.parametrize("stream", ["_stream", "_copies"])
def test_a_card_that_fails_raises_one_line_and_is_closed_once(card: CudaGpu, heard: Heard, stream: str):

    def broken(*arguments) -> None:
        raise BrokenError("CUDA_ERROR_ILLEGAL_ADDRESS:\n an address is not that of any memory")

    replay = card.record([])
    getattr(card, stream).sync = broken
    line = "the GPU failed: CUDA_ERROR_ILLEGAL_ADDRESS: an address is not that of any memory"
    for call in (card.synchronize, lambda: card.download(1, 8)):
        with pytest.raises(LocalllmError) as error:
            call()
        assert str(error.value) == line
    card._stream.create_graph_builder = broken
    with pytest.raises(LocalllmError, match="ILLEGAL_ADDRESS"):
        card.record([])
    replay()
    assert heard[-1] == "launch"
    card.close()
    freed = heard.count("cuMemFree"), heard.count("cuMemFreeHost")
    assert freed == (1, 2)
    card.close()
    assert freed == (heard.count("cuMemFree"), heard.count("cuMemFreeHost"))


def test_uploading_reuses_staging_memory_only_after_it_was_read(card: CudaGpu, heard: Heard):
    stream = card._stream
    stream.wait = heard.says("wait")
    stream.record = lambda: SimpleNamespace(sync=heard.says("done"))
    card.upload_chunks([np.full(8, number, np.uint8) for number in range(3)], lambda address, chunk: None, 1)
    turns = [name for name in heard if name in ("cuMemcpyHtoDAsync", "wait", "done")]
    assert turns == ["cuMemcpyHtoDAsync", "wait"] * 2 + ["done", "cuMemcpyHtoDAsync", "wait"]
    assert bytes((ctypes.c_uint8 * 8).from_address(card._staging[0].ctypes.data)) == bytes([2] * 8)


def test_closing_a_card_frees_everything_once(card: CudaGpu, heard: Heard):
    own = card.allocate(8)
    card.free(own)
    heard.clear()
    card.close()
    assert [heard.count(name) for name in ("destroy", "cuMemFree", "cuMemFreeHost")] == [1, 1, 2]
    card.close()
    assert heard.count("destroy") == 1


def test_kernel_arguments_are_encoded_as_integers():
    """Check addresses, also within buffers, integers, and the bits of a float32; an empty buffer has address 0."""
    buffer, array = Buffer(3, 64, address=128), np.zeros(2)
    for value, expected in (
        (buffer, 5128),
        (BufferSlice(buffer, 24), 5152),
        (Buffer(0, 64, address=128), 0),
        (array, 77),
        (9, 9),
        (1.0, 0x3F800000),
        ("f16", 0),
    ):
        assert encode_argument(value, lambda array: 77, 5000) == expected


def test_only_our_own_kernels_are_compiled():
    """Leave matrix products to cuBLAS."""
    steps = [SimpleNamespace(kernel=name) for name in ("rms_norm", "product", "swiglu", "rms_norm")]
    assert list_kernels(steps) == {"rms_norm", "swiglu"}


# As their data sheets have it: kHz, bits, multiprocessors; GB per second, and billions of operations in float16.
CARDS = {
    "A100 40GB": ((8, 0), 1_215_000, 5120, 1_410_000, 108, 1555, 312_000),
    "H100 SXM": ((9, 0), 2_619_000, 5120, 1_830_000, 132, 3350, 989_400),
    "T4": ((7, 5), 5_001_000, 256, 1_590_000, 40, 320, 65_130),
    "one that is not known": ((99, 0), 1_000_000, 1024, 1_000_000, 10, 256, 0),
}


@pytest.mark.parametrize("name", CARDS)
def test_limits_of_known_cards_match_their_data_sheets(name: str):
    capability, memory_clock, width, clock, count, gb_per_s, gops = CARDS[name]
    properties = SimpleNamespace(
        memory_clock_rate=memory_clock, global_memory_bus_width=width, clock_rate=clock, multiprocessor_count=count
    )
    bandwidth, peak = cuda_device.compute_limits(properties, capability)
    assert bandwidth == pytest.approx(gb_per_s * 1e9, rel=0.01)
    assert peak == pytest.approx(gops * 1e9, rel=0.01)


def test_an_error_without_a_message_is_reported_by_its_class():
    with pytest.raises(LocalllmError, match=r"^the GPU failed: BrokenError$"), cuda_device.report_failures():
        raise BrokenError


def test_a_graph_is_recorded_once_and_replayed(card: CudaGpu, heard: Heard, monkeypatch):
    builder = card._stream.create_graph_builder()
    graph = SimpleNamespace(upload=lambda stream: heard.append(("upload", stream)),
                            launch=lambda stream: heard.append(("launch", stream)))  # fmt: skip
    builder.complete = lambda: graph
    monkeypatch.setattr(card, "_start", lambda stream, work: heard.append((stream, work)))
    replay = card.record(["a", "b"])
    assert heard == [(builder, "a"), (builder, "b"), ("upload", card._stream)]
    replay()
    replay()
    assert heard[3:] == [("launch", card._stream)] * 2


@pytest.fixture
def nvidia(monkeypatch) -> SimpleNamespace:
    """Install stand-ins for NVIDIA's packages, for one card of the oldest supported capability."""
    device = SimpleNamespace(name="stand-in", compute_capability=(7, 5), set_current=lambda: heard.append("current"))
    heard, status = Heard(), SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2)
    driver = SimpleNamespace(CUresult=status, cuInit=lambda flags: (flags,), cuDeviceGetCount=lambda: (0, 1))
    core, cublas = SimpleNamespace(Device=lambda number: device), SimpleNamespace()
    modules = {"cuda.bindings": SimpleNamespace(driver=driver), "cuda.core": core}
    modules |= {"nvmath.bindings": SimpleNamespace(cublas=cublas)}
    for name in ("cuda", "nvmath", *modules):
        monkeypatch.setitem(sys.modules, name, modules.get(name, SimpleNamespace()))
    monkeypatch.setattr(cuda_device, "has_driver", lambda: True)
    monkeypatch.setattr(cuda_device, "CudaGpu", lambda *given: given)
    return SimpleNamespace(driver=driver, core=core, device=device, cublas=cublas, heard=heard)


def test_opening_a_card_makes_it_current(nvidia):
    assert cuda_device.open_card(0) == (nvidia.device, nvidia.driver, nvidia.cublas)
    assert nvidia.heard == ["current"]
    nvidia.driver.cuDeviceGetCount = lambda: (0, 2)
    assert cuda_device.open_card(1)


def failing(error: Exception):
    def function(*given):
        raise error

    return function


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda n, m: m.setattr(cuda_device, "has_driver", lambda: False),
         "no NVIDIA driver found: install it, or use --device cpu"),
        (lambda n, m: m.setitem(sys.modules, "nvmath.bindings", None),
         "no nvmath.bindings: pip install 'localllm[cuda]'"),
        (lambda n, m: setattr(n.driver, "cuDeviceGetCount", lambda: (0, 0)), "GPU 0 does not exist; found 0"),
        (lambda n, m: setattr(n.device, "compute_capability", (7, 4)),
         "stand-in is of compute capability 7.4; 7.5 or greater is needed"),
        (lambda n, m: setattr(n.driver, "cuInit", lambda flags: (SimpleNamespace(name="TOO_OLD"),)),
         "GPU 0 cannot be used: the GPU failed: TOO_OLD"),
        (lambda n, m: setattr(n.driver, "cuDeviceGetCount", lambda: (2,)),
         "GPU 0 cannot be used: not enough GPU memory: use fewer --gpu-layers, or a shorter context"),
        (lambda n, m: setattr(n.core, "Device", failing(BrokenError("a\n b"))), "GPU 0 cannot be used: a b"),
        (lambda n, m: setattr(n.device, "set_current", failing(BrokenError())),
         "GPU 0 cannot be used: BrokenError"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_be_used_says_why(nvidia, monkeypatch, change, problem):
    change(nvidia, monkeypatch)
    with pytest.raises(NoGpuError) as error:
        cuda_device.open_card(0)
    assert str(error.value) == problem


def test_driver_results_are_unpacked_or_raised(card: CudaGpu):
    driver = card._driver
    assert cuda_device.check_call(driver, (0,)) is None
    assert cuda_device.check_call(driver, (0, 5, 6)) == 5
    with pytest.raises(MemoryLimitError, match=r"^not enough GPU memory: use fewer --gpu-layers"):
        cuda_device.check_call(driver, (2, 5))
    with pytest.raises(LocalllmError, match=r"^the GPU failed: LOST$"):
        cuda_device.check_call(driver, (SimpleNamespace(name="LOST"), 5))
    driver.cuMemGetInfo = lambda: (0, 5, 6)
    assert card.get_free_bytes() == 5
    driver.cuMemGetInfo = lambda: (SimpleNamespace(name="LOST"), 5, 6)
    with pytest.raises(LocalllmError, match="LOST"):
        card.get_free_bytes()


def test_chunks_are_converted_where_they_arrive(card: CudaGpu, heard: Heard, monkeypatch):
    """Check that two buffers take turns and are freed, and that chunks without a conversion go to their address at
    once.
    """
    done, began = SimpleNamespace(sync=lambda: None), []
    card._stream.wait, card._stream.record = (lambda other: None), lambda: done
    monkeypatch.setattr(card, "_start", lambda stream, work: began.append((stream, work)))
    card._driver.cuMemcpyHtoDAsync = lambda target, source, size, stream: heard.append((target, size)) or (0,)
    heard.clear()
    chunks = [np.zeros(size, np.uint8) for size in (8, 16, 24, 32)]

    def work_on(address, chunk):
        return f"{address} {len(chunk)}" if len(chunk) < 32 else None

    card.upload_chunks(chunks, work_on, 1000)
    moves = [call for call in heard if isinstance(call, tuple)]
    first, second = moves[0][0], moves[1][0]
    assert first != second and moves == [(first, 8), (second, 16), (first, 24), (1048, 32)]
    assert began == [(card._stream, f"{room} {size}") for room, size in ((first, 8), (second, 16), (first, 24))]
    last = max(place for place, call in enumerate(heard) if call == "sync")
    assert heard[last:] == ["sync", "use", "cuMemFree", "use", "cuMemFree"]


def test_kernels_are_launched_and_products_sent_to_cublas(card: CudaGpu, heard: Heard, monkeypatch):
    """Load kernels once; give cuBLAS the matrices in column order."""
    asked, launched = [], []

    def machine_code(missing, capability, progress, warn):
        asked.append((missing, capability, progress))
        warn("slow")
        return {name: (name.upper(), f"entry of {name}") for name in missing}

    core = SimpleNamespace(
        ObjectCode=SimpleNamespace(from_cubin=lambda code: SimpleNamespace(get_kernel=lambda entry: (code, entry))),
        LaunchConfig=lambda grid, block: (grid, block), launch=lambda *given: launched.append(given),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setitem(sys.modules, "localllm.kernels.cuda.build", SimpleNamespace(build_machine_code=machine_code))
    card.prepare({"a"}, None)
    card.prepare({"a", "b"}, len)
    assert asked == [({"a"}, (8, 0), None), ({"b"}, (8, 0), len)]
    assert card.warning == "slow"
    for name in ("set_stream", "set_workspace", "gemm_ex"):
        setattr(card._cublas, name, lambda *given, name=name: heard.append((name, *given)))
    card._cublas.Operation = SimpleNamespace(T=11, N=12)
    card._cublas.ComputeType, card._cublas.GemmAlgo = SimpleNamespace(COMPUTE_32F=13), SimpleNamespace(DEFAULT=14)
    card._stream.__cuda_stream__ = lambda: (0, 77)
    kinds = {"f16": 2, "bf16": 14, "f32": 0}
    heard.clear()
    for kind in kinds:
        card.launch([CublasProduct(kind, 101, 102, 103, 5, 6, 7, 21, 22, 23, adds=kind == "f32"),
                 KernelLaunch("b", LaunchGrid(3, 4, 32), (1, 2))])  # fmt: skip
    one, zero = card._one.ctypes.data, card._zero.ctypes.data
    assert (card._one.tolist(), card._zero.tolist()) == ([1], [0])
    product = "gemm_ex", 1, 11, 12, 5, 6, 7, one, 101
    assert heard == [call for kind, number in kinds.items() for call in (
        ("set_stream", 1, 77), ("set_workspace", 1, card._workspace, 64),
        (*product, number, 21, 102, number, 22, one if kind == "f32" else zero, 103, 0, 23, 13, 14),
    )]  # fmt: skip
    assert launched == [(card._stream, ((3, 4), 32), ("B", "entry of b"), 1, 2)] * 3
