"""Test the header of a run, the ends of runs, and reserved memory."""

from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.layer_state import KVType, LatentState, PagedState, RecurrentLayerState
from localllm.engine import draft_head as guess_head
from localllm.engine.cuda.backend import CudaBackend
from localllm.engine.cuda.lowering import merge_quantizations
from localllm.engine.cuda.program import BufferArena
from localllm.engine.draft_head import DraftHead
from localllm.engine.lower.header import MIN_TEXT_KERNEL_TOKENS, RunHeader, SequenceSpan, TextSpan
from localllm.engine.lower.tape import Buffer, KernelStep
from localllm.engine.memory import cache as cache_module
from localllm.engine.memory.cache import KVCache, ReservedMemory
from localllm.engine.options import EngineOptions
from localllm.engine.runs import UNLIMITED, RunPlan
from localllm.errors import MemoryLimitError, ModelError
from localllm.kernels.cpu import MIN_ALL_TILES
from localllm.kernels.table import PAGE
from tests.unit.engine.trace.test_recorder import x


@pytest.mark.parametrize(("precise", "most"), [(True, 128), (False, 1)])
def test_a_header_lists_the_tokens_and_positions_of_sequences(precise, most):
    """Rotate queries by positions; store keys at offsets."""
    header, logits = RunHeader(9), np.zeros((3, 4), np.float32)
    store = SimpleNamespace(addresses=(101, 102, 103))
    other = SimpleNamespace(addresses=(201, 202, 203))
    spans = [SequenceSpan(store, 5, np.array([7, 8, 9]), 2), SequenceSpan(other, 0, np.array([4]), 0, encoded=6),
             SequenceSpan(store, 30, np.array([1, 2]), 1, ahead=10, kernel_tokens=40)]  # fmt: skip
    header.fill(spans, precise, logits)
    assert header.ids.tolist() == [7, 8, 9, 4, 1, 2, 0, 0, 0]
    assert header.positions.tolist() == [5, 6, 7, 0, 30, 31, 0, 0, 0]
    assert header.rotary_positions.tolist() == [5, 6, 7, 0, 20, 21, 0, 0, 0]
    assert header.owners.tolist()[:6] == [0, 0, 0, 1, 2, 2]
    assert header.wanted.tolist()[:3] == [1, 2, 5]
    assert header.sequences[:3].tolist() == [
        [0, 3, 8, 101, 102, 103, 0, 3], [3, 1, 1, 201, 202, 203, 6, 1], [4, 2, 32, 101, 102, 103, 0, 40],
    ]  # fmt: skip
    assert header.numbers.tolist() == [6, 3, 3, most, logits.ctypes.data, 0]
    named = (header.token_count, header.wanted_count, header.sequence_count, header.most_precise, header.logits)
    assert [each[0] for each in named] == [6, 3, 3, most, logits.ctypes.data]
    assert header.kernel_tokens.tolist() == ([40, 1] if precise else [40, 3])
    header.flaws[0] = 1
    assert header.numbers[5] == 1 and header.max_precise_stored.tolist() == [UNLIMITED]
    header.fill(spans[:1], precise, logits)
    assert header.numbers.tolist() == [3, 2, 1, most, logits.ctypes.data, 0]


@pytest.mark.parametrize("tokens", [MIN_ALL_TILES - 1, MIN_ALL_TILES])
def test_few_tokens_are_counted_below_a_limit(tokens):
    header = RunHeader()
    header.fill([SequenceSpan(SimpleNamespace(addresses=(0, 0, 0)), 0, np.zeros(tokens), 1)], True, np.zeros((1, 1)))
    assert header.few_counts.tolist() == [tokens if tokens < MIN_ALL_TILES else 0, 1]


@pytest.mark.parametrize(("precise", "tokens", "most"), [(True, 3, 128), (True, 130, 135), (False, 130, 128)])
def test_a_header_lists_texts_on_pages_of_their_own(precise, tokens, most):
    """Give the second text of a pair another token type."""
    header, rows, pages = RunHeader(200), np.zeros((3, 4), np.float32), np.arange(10, 20)
    texts = [TextSpan(np.array([7, 8]), 1), TextSpan(np.arange(tokens), tokens), TextSpan(np.array([4, 5, 6]), 2)]
    header.describe_texts(texts, pages, rows, precise)
    count, own = 5 + tokens, -(-tokens // PAGE)
    assert header.ids[:count].tolist() == [7, 8, *range(tokens), 4, 5, 6]
    assert (
        header.positions[:count].tolist() == [0, 1, *range(tokens), 0, 1, 2] == header.rotary_positions[:count].tolist()
    )
    assert header.kinds[:count].tolist() == [0, 1, *[0] * tokens, 0, 0, 1]
    assert header.owners[:count].tolist() == [0, 0, *[1] * tokens, 2, 2, 2]
    assert header.wanted[:3].tolist() == [1, 1 + tokens, 4 + tokens]
    tables = [pages.ctypes.data + 8 * place for place in (0, 1, 1 + own)]
    assert header.sequences[:3].tolist() == [
        [0, 2, 2, tables[0], 0, 0, 0, 2], [2, tokens, tokens, tables[1], 0, 0, 0, tokens],
        [2 + tokens, 3, 3, tables[2], 0, 0, 0, 3],
    ]  # fmt: skip
    assert header.numbers.tolist() == [count, 3, 3, max(most, count) if precise else 128, rows.ctypes.data, 0]
    assert header.kernel_tokens.tolist() == [max(tokens, MIN_TEXT_KERNEL_TOKENS), MIN_TEXT_KERNEL_TOKENS]
    header.describe_windows(np.array([2, 5, 6]))
    assert header.window_count.tolist() == [3]
    assert header.windows[:3].tolist() == [
        [0, 2, 2, tables[0], 0, 0, 0, 2], [2, 3, 5, tables[0], 0, 0, 2, 3], [5, 1, 6, tables[0], 0, 0, 5, 1],
    ]  # fmt: skip


def test_runs_end_at_multiples_of_their_length():
    runs = RunPlan()
    assert [runs.find_last_end(length) for length in (0, 511, 512, 1024, 2047, 2048, 2303, 2304)] == [
        0, 0, 512, 1024, 1536, 2048, 2048, 2304,
    ]  # fmt: skip
    assert [runs.find_next_end(place) for place in (0, 511, 512, 1535, 1536, 2047, 2048, 2303, 2304)] == [
        512, 512, 1024, 1536, 2048, 2048, 2304, 2304, 2560,
    ]  # fmt: skip


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_a_failed_memory_reservation_suggests_a_smaller_context(monkeypatch):
    calls = []

    def refuse(*given):
        calls.append(given)
        raise errors[-1]

    errors = [OSError()]
    for error in (OSError(), OverflowError(), ValueError()):
        errors.append(error)
        with monkeypatch.context() as context, pytest.raises(MemoryLimitError) as caught:
            context.setattr(cache_module, "MemoryRegion", refuse)
            ReservedMemory(2_500_000_000, whole=False, is_context=True)
        assert str(caught.value) == "cannot reserve 2.50 GB of memory; use a smaller context"
    assert calls == [(2_500_000_000, False)] * 3
    with monkeypatch.context() as context:
        context.setattr(cache_module, "MemoryRegion", refuse)
        context.setattr(cache_module, "describe_limit", lambda size: "`ulimit -v` leaves 0.31 GB of it" * (size > 5))
        for size, is_context, advice in (
            (9, False, ": `ulimit -v` leaves 0.31 GB of it; raise this limit"),
            (9, True, ": `ulimit -v` leaves 0.31 GB of it; use a smaller context or raise this limit"),
            (5, False, "; close other programs"),
        ):
            with pytest.raises(MemoryLimitError) as caught:
                ReservedMemory(size, is_context=is_context)
            calls.pop()
            assert str(caught.value) == f"cannot reserve 0.00 GB of memory{advice}"
    reserved = ReservedMemory(10)
    errors.append(OSError())
    assert len(reserved.bytes) == 10 and reserved.is_whole and reserved.bytes.ctypes.data == reserved.address
    reserved._region = SimpleNamespace(use=refuse, give_back=refuse)
    for call, message in (
        (reserved.use, "not enough memory for the KV cache; use a smaller context"),
        (reserved.give_back, "cannot return 7 bytes of memory to the system"),
    ):
        with pytest.raises(MemoryLimitError) as caught:
            call(2, 9)
        assert str(caught.value) == message
    assert calls[3:] == [(2, 9)] * 2


def test_a_cache_reserves_as_many_contexts_as_memory_allows(monkeypatch):
    """Reserve the maximum without attention, where positions cost no memory."""
    states, sizes, limits = [PagedState(0, 1, 16, 16)], [], []
    one = (2 * 16 * 4) * PAGE

    def reserve(self, size):
        sizes.append(size)
        if size > limits[-1]:
            raise MemoryLimitError("no")
        return SimpleNamespace(is_whole=True)

    monkeypatch.setattr(KVCache, "_reserve", reserve)
    for room, most, contexts, tried in (
        (1 << 40, 1 << 40, 16, [33]), (1 << 40, 9 * one, 4, [33, 9]), (1 << 40, 3 * one, 1, [33, 9, 3]),
        (2 * 33 * one, 1 << 40, 16, [33]), (2 * 33 * one - 2, 1 << 40, 4, [9]), (0, 1 << 40, 1, [3]),
    ):  # fmt: skip
        sizes.clear()
        limits.append(most)
        monkeypatch.setattr(cache_module, "get_address_room", lambda room=room: room)
        cache = KVCache(states, 2 * PAGE, KVType.parse("f32"))
        assert (cache.sequences, cache.pages, [size // one for size in sizes]) == ((contexts,), 2 * contexts | 1, tried)
    limits.append(0)
    with pytest.raises(MemoryLimitError):
        KVCache(states, 2 * PAGE, KVType.parse("f32"))
    limits.append(1)
    assert KVCache([], 2 * PAGE, KVType.parse("f32")).sequences == (1024,) and sizes[-1] == 1
    with pytest.raises(ModelError, match=r"^a recurrent state is not supported yet \(layer 7\)$"):
        KVCache([RecurrentLayerState(7, ())], PAGE, KVType.parse("f32"))


def test_an_arena_grows_and_keeps_earlier_addresses():
    allocated = []
    arena = BufferArena(SimpleNamespace(allocate=lambda size: allocated.append(size) or 1000 * len(allocated)))
    assert [arena.reserve(size) for size in (0, 5, 5, 4, 6, 6)] == [1000, 2000, 2000, 2000, 3000, 3000]
    assert allocated == [1, 5, 6]


# ---- what a card does in one launch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maker", "group", "between", "kernels"),
    [
        ("rms_norm", 16, False, "norm_quantize"), ("rms_norm", 8, False, "rms_norm quantize_planes"),
        ("swiglu", None, False, "swiglu_quantize"), ("geglu", None, False, "geglu quantize_planes"),
        ("rms_norm", 16, True, "norm_quantize scale"), (None, None, True, "scale quantize_planes"),
    ],
)  # fmt: skip
def test_quantizing_is_merged_into_the_step_before_if_rows_match(maker, group, between, kernels):
    output = Buffer(4, 64)
    done = (
        [KernelStep(maker, {"y": output} | ({"group": group} if group else {}), 5, None, [], [output])] if maker else []
    )
    done += [KernelStep("scale", {}, 1, None, [output], [Buffer(1, 1)])] if between else []
    codes = [Buffer(1, size) for size in (1, 2, 3)]
    arguments = dict(zip(("codes", "scales", "sums"), codes, strict=True))
    quantize = KernelStep("quantize_planes", arguments | {"x": output, "columns": 16}, 7, None, [output], codes)
    merged = merge_quantizations([*done, quantize])
    assert " ".join(step.kernel for step in merged) == kernels
    if "_quantize" in kernels:
        assert merged[0].arguments == done[0].arguments | arguments and merged[0].writes == [output, *codes]
        assert (merged[0].parts, merged[0].reads) == (5, [])
    else:
        assert merged[-1] is quantize


# ---- a card and the CPU, a head that guesses ------------------------------------------------------------------------


@pytest.mark.parametrize("on_cpu", [0, 1])
def test_gpu_and_cpu_layers_have_their_own_caches_and_share_activations(monkeypatch, on_cpu):
    """Expect activations that cross between them in the host's memory."""
    module, calls = "localllm.engine.cuda.backend", {}

    def keep(name, value=None):
        monkeypatch.setattr(f"{module}.{name}", lambda *given, **named: [calls.setdefault(name, given), value][1])

    states = [PagedState(0, 1, 16, 16), LatentState(1, 16, 16), PagedState(2, 1, 16, 16)]
    card = SimpleNamespace(
        warning="slow card", allocate_pinned=lambda size: np.zeros(size, np.uint8), close=lambda: None
    )
    cache = SimpleNamespace(pages=3, window=0, bytes_per_token=5, sequences=(1,))
    halves = SimpleNamespace(before=["before"], behind=["behind"], crossing=[x(20)])
    front = SimpleNamespace(warning="slow kernels")
    for name, value in (("CudaCache", cache), ("KVCache", cache), ("CudaProgram", None), ("split_at_layer", halves),
                        ("compile_program", front)):  # fmt: skip
        keep(name, value)
    options = EngineOptions(threads=3)
    backend = CudaBackend(card, ["operations"], states, 64, options, on_cpu, 9)
    assert calls["CudaCache"] == (card, states[on_cpu:], 64, options.kv_cache_type, 9)
    operations = ["behind"] if on_cpu else ["operations"]
    *program, taken = calls["CudaProgram"]
    assert program == [card, operations, cache, None, 64, options]
    assert backend.warning == ("slow kernels" if on_cpu else "slow card")
    assert backend.bytes_per_token == (10 if on_cpu else 5)
    if on_cpu:
        assert calls["split_at_layer"] == (["operations"], 1) and calls["KVCache"] == (
            states[:1],
            64,
            options.kv_cache_type,
            (1,),
        )
        before, places, threads, progress, crossing = calls["compile_program"]
        assert (before, places.cache, threads, progress, crossing) == (["before"], cache, 3, None, taken)
        assert [(key.columns, rows.shape, rows.dtype) for key, rows in taken.items()] == [(20, (512, 48), np.float32)]
    else:
        assert taken == {} and backend._cpu_program is None


def head_source(**changed):
    known = {
        "path": "head.gguf", "hyperparameters": SimpleNamespace(vocab_size=9, width=4), "columns": 12, "layers": (1,),
        "tokens": np.array([3, 5]), "state": PagedState(0, 1, 4, 4), "weights": "weights", "names": [],
        "fuse": lambda b, w, h, rows: b.slice_columns(rows, 0, 4), "draft": guess(2),
    }  # fmt: skip
    return SimpleNamespace(**known | changed)


def guess(tokens: int):
    def say(b, weights, h, rows):
        hidden = b.scale(rows, 2.0)
        return SimpleNamespace(hidden=hidden, logits=b.slice_columns(b.concat_heads(hidden, hidden, 1), 0, tokens))

    return say


@pytest.mark.parametrize("fuses", [True, False])
def test_a_draft_head_compiles_its_program_and_its_fusion(monkeypatch, fuses):
    compiled = []
    backend = SimpleNamespace(compile_second=lambda operations: compiled.append(operations) or "beside")
    monkeypatch.setattr(guess_head, "CpuBackend", lambda *given: compiled.append(given) or backend)
    source = head_source() if fuses else head_source(
        fuse=None, columns=4, tokens=None, draft=guess(8), hyperparameters=(
        SimpleNamespace(vocab_size=8, width=4)))  # fmt: skip
    head = DraftHead(source, 300, "options")
    (operations, states, context, options), *beside = compiled
    assert [one.verb for one in operations] == [
        "external_input",
        "scale",
        "concat_heads",
        "export_hidden",
        "slice_columns",
    ]  # logits come last
    assert operations[0].memory is head._previous_hidden and operations[3].memory is head._new_hidden
    assert operations[3].inputs == (operations[1].output,)
    assert (states, context, options) == ([source.state], 300, "options")
    if fuses:
        (fusing,) = beside
        assert [one.verb for one in fusing] == ["external_input", "slice_columns"] and fusing[0].memory is head._tapped
        head._fuse = SimpleNamespace(
            compute_rows=lambda count, pages: (count, len(pages), head._tapped[:2, :12].tolist())
        )
        rows = np.arange(24, dtype=np.float32).reshape(2, 12)
        assert head.fuse_hidden_states(rows) == (2, 512 // PAGE, rows.tolist())
    else:
        assert beside == [] and head.fuse_hidden_states("rows") == "rows"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": RecurrentLayerState(0, ())}, "head.gguf: draft heads without attention are not supported"),
        (
            {"fuse": lambda b, w, h, rows: b.slice_columns(rows, 0, 5)},
            "head.gguf: rows of 5 columns; the layer expects 4",
        ),
        ({"draft": guess(3)}, "head.gguf: the draft head must have 2 logits (found 3)"),
        ({"tokens": None}, "head.gguf: the draft head must have 9 logits (found 2)"),
        ({"names": ["a"]}, "head.gguf: tensor a: not part of this architecture as localllm supports it"),
    ],
)
def test_a_draft_head_of_other_dimensions_is_refused(monkeypatch, changed, message):
    monkeypatch.setattr(guess_head, "CpuBackend", lambda *given: 1 // 0)
    with pytest.raises(ModelError) as error:
        DraftHead(head_source(**changed), 300, "options")
    assert str(error.value) == message
