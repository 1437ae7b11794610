"""Test the launches that are asked of a GPU, by the number of tokens; no kernel runs."""

from types import SimpleNamespace

import numpy as np
import pytest
from simulated import SimulatedCard

from localllm.arch.layer_state import KVType, LatentState, PagedState, RecurrentLayerState
from localllm.arch.verbs import AttentionScores, Routing
from localllm.arch.weights import Weight
from localllm.engine.cuda import lowering as products
from localllm.engine.cuda import program as card_program
from localllm.engine.cuda import weights as card_weights
from localllm.engine.cuda.cache import CudaCache, GpuStateLayout
from localllm.engine.cuda.card import CublasProduct, KernelLaunch
from localllm.engine.cuda.lowering import convert_step, lower_to_gpu
from localllm.engine.cuda.program import (
    CudaProgram,
    PinnedHeader,
    SizedProgram,
    UnplacedWeights,
    count_header_words,
    round_program_size,
)
from localllm.engine.cuda.weights import GpuWeights, iterate_chunks
from localllm.engine.lower.activation import ALL, WANTED, Activation
from localllm.engine.lower.header import RunHeader, SequenceSpan, TextSpan
from localllm.engine.lower.steps import StepMemory
from localllm.engine.lower.tape import KernelStep
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.operations.operation import MatrixOperation, Operation
from localllm.engine.trace.recorder import Recorder
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import Tensor
from localllm.kernels.cuda import MAX_SELECTION_BLOCKS, list_parameters
from localllm.kernels.table import PAGE
from localllm.quant.formats import BY_NAME
from tests.unit.engine.trace.test_recorder import tensor


class Somewhere(UnplacedWeights):
    """Place every matrix at the same address."""

    def __init__(self, capability=(8, 0)):
        self.capability = capability

    def get_address(self, weight: Weight) -> int:
        return 77


def steps_of(say, tokens: int, states=(), kv_type: str = "f16", capability=(8, 0)) -> list[KernelStep]:
    """Return the steps of an architecture, say(builder, rows), where rows maps a number of columns to an input."""
    builder = Recorder(SimpleNamespace(vocab_size=9, width=8), 64)
    say(builder, lambda columns: builder.external_input(np.zeros((tokens, columns), np.float32), columns))
    places = StepMemory(KVCache(states, PAGE, KVType.parse(kv_type), (1,)), None, RunHeader(tokens))
    steps = lower_to_gpu(builder.operations, places, Somewhere(capability), (tokens, 1), {})
    for step in steps:  # what kernels take, no more and no less
        assert isinstance(convert_step(step, lambda array: 0, 0), KernelLaunch | CublasProduct)
    return [step for step in steps if step.kernel not in ("slice_columns", "logits")]


def attending(state, *, heads=4, chosen=False, **given):
    def say(b, rows):
        new = (rows(state.kv_heads * state.key_dim), rows(state.kv_heads * state.value_dim))
        k, v = new if isinstance(state, PagedState) else (new[0], None)
        scores = AttentionScores(heads, 0.5, chosen=rows(2) if chosen else None, **given)
        b.attend(rows(heads * state.key_dim), k, v, state, scores)

    return say


PAGED = PagedState(0, 2, 16, 32)


@pytest.mark.parametrize(
    ("tokens", "state", "kv_type", "given", "kernel"),
    [
        (16, PAGED, "f16", {}, "attend_few-F16-F16-2-16-32"),
        (17, PAGED, "f16", {}, "attend_many-F16-F16-16-32-16"),
        (17, PAGED, "q8_0", {}, "attend_many-Q8_0-Q8_0-16-32-16"),
        (17, PAGED, "f32", {}, "attend_few-F32-F32-2-16-32"),
        (17, PAGED, "k=f16,v=f32", {}, "attend_few-F16-F32-2-16-32"),
        (17, PAGED, "f16", {"logs": True}, "attend_few-F16-F16-2-16-32"),
        (17, PAGED, "f16", {"chosen": True}, "attend_few-F16-F16-2-16-32-chosen"),
        (17, PagedState(0, 1, 256, 256), "f16", {}, "attend_many-F16-F16-256-256-16"),
        (17, PagedState(0, 1, 272, 16), "f16", {}, "attend_few-F16-F16-4-272-16"),
        (17, PagedState(0, 1, 16, 272), "f16", {}, "attend_few-F16-F16-4-16-272"),
        (17, LatentState(0, 32, 16), "f16", {}, "attend_many-F16-F16-32-16-16"),
        (17, LatentState(0, 32, 16, period=2), "f16", {}, "attend_few-F16-F16-4-32-16"),
    ],
)
def test_attention_selects_a_kernel_by_tokens_type_and_head_size(tokens, state, kv_type, given, kernel):
    steps = steps_of(attending(state, **given), tokens, [state], kv_type)
    *_, attends = [step for step in steps if step.kernel.startswith("attend")]
    assert attends.kernel == kernel
    assert attends.parts == tokens
    if "few" in kernel:
        merge = steps[steps.index(attends) + 1]
        assert (merge.kernel, merge.parts, merge.reads) == ("merge_few", tokens, attends.writes)
        (partial,) = attends.writes
        assert partial.rows == tokens * 4 * attends.arguments["parts"]
        assert partial.stride == attends.arguments["partial_bytes"] >= 4 * (state.value_dim + 2)
    else:
        assert attends.writes == [attends.arguments["y"]]
    assert steps_of(attending(PAGED), 17, [PAGED], capability=(7, 5))[-1].kernel.endswith("-16-32-8")


@pytest.mark.parametrize(("tokens", "kv_heads", "parts"), [(8, 2, 132), (9, 2, 15), (16, 2, 9), (16, 1, 17)])
def test_contexts_are_divided_so_that_all_multiprocessors_work(tokens, kv_heads, parts):
    """Divide a decode of few tokens as if each were alone."""
    state = PagedState(0, kv_heads, 16, 32)
    (few,) = [step for step in steps_of(attending(state), tokens, [state]) if step.kernel.startswith("attend")]
    assert few.arguments["parts"] == parts


@pytest.mark.parametrize("tokens", [16, 17])
def test_results_are_rotated_back_where_the_cache_is_rotated(tokens):
    wide = PagedState(0, 2, 64, 64)
    kernels = [step.kernel.partition("-")[0] for step in steps_of(attending(wide), tokens, [wide], "q4_0")]
    assert kernels[:5] == ["hadamard", "hadamard", "store", "store", "hadamard"] and kernels[-1] == "hadamard"


@pytest.mark.parametrize("given", [{"cross_attention": True}, {"biases": np.zeros((4, 3), np.float32)}])
def test_attention_of_encoders_is_refused_on_a_gpu(given):
    with pytest.raises(UnsupportedError, match="encoder models run on the CPU only: use --device cp"):
        steps_of(attending(PAGED, **given), 1, [PAGED])


@pytest.mark.parametrize(("tokens", "rows"), [(2, 2), (4096, MAX_SELECTION_BLOCKS)])
def test_selecting_keys_limits_its_scratch_memory(tokens, rows):
    index = LatentState(0, 16, 16, is_index=True)

    def say(b, rows):
        b.select_keys(rows(48), rows(16), rows(3), index, 5)
        b.select_keys(rows(48), rows(16), None, index, 5)
        b.select_key_blocks(rows(48), rows(16), index, 5, 2, 1)

    steps = [step for step in steps_of(say, tokens, [index]) if step.kernel.startswith("select_key")]
    assert [step.kernel for step in steps] == ["select_keys-F16", "select_keys-F16", "select_key_blocks-F16"]
    for step, words in zip(steps, (2, 2, 6), strict=True):
        _, scores = step.writes
        assert step.parts == tokens and scores.stride == step.arguments["scratch_bytes"] == 4 * 32 * words
        assert scores is step.arguments["scratch"] and scores.rows == rows
    assert steps[1].arguments["weights"].tolist() == [1, 1, 1] and steps[1].arguments["weights_stride"] == 0
    assert steps[0].arguments["weights_stride"] > 0 and steps[2].arguments["choice_stride"] == 8


# ---- products -------------------------------------------------------------------------------------------------------


def matrix(format: str, rows: int, columns: int, bias: bool = False) -> Weight:
    data = np.zeros((rows, BY_NAME[format].row_bytes(columns)), np.uint8)
    return Weight(Tensor("w", BY_NAME[format], (rows, columns), data), Weight(tensor("b", rows)) if bias else None)


@pytest.mark.parametrize(
    ("format", "few", "many"),
    [
        ("F32", ["linear_plain-8-F32"], [("product", "f32", False)]),
        ("F16", ["linear_plain-8-F16"], ["halve", ("product", "f16", False), "scale_rows"]),
        ("BF16", ["linear_plain-8-BF16"], ["split_bf16", ("product", "bf16", False), ("product", "bf16", True)]),
        ("Q8_0", ["quantize_planes", "linear_planes-8-Q8_0"],
         ["halve", "unpack-Q8_0", ("product", "f16", False), "scale_rows"]),
        ("IQ2_XXS", ["quantize_planes", "linear_planes-8-Q8_0"],
         ["halve", "unpack-Q8_0", ("product", "f16", False), "scale_rows"]),
    ],
)  # fmt: skip
def test_products_select_kernels_by_type_and_number_of_rows(format, few, many):
    """Up to eight rows use the weights as they are; fewer may be wanted."""

    def kernels(say, tokens):
        return [(step.kernel, step.arguments["kind"], step.arguments["adds"]) if step.kernel == "product"
                else step.kernel for step in steps_of(say, tokens)]  # fmt: skip

    def say(b, rows):
        b.linear(rows(256), matrix(format, 6, 256, bias=True))

    def for_wanted(b, rows):
        b.linear(b.select(rows(256), WANTED), matrix(format, 6, 256))

    assert kernels(say, 8) == [*few, "add"]
    assert kernels(say, 9) == [*many, "add"]
    assert kernels(for_wanted, 9)[1:] == [kernel.replace("-8-", "-1-") for kernel in few]


def test_large_matrices_are_unpacked_in_slices_of_rows(monkeypatch):
    monkeypatch.setattr(products, "UNPACKED_BYTES", 2 * 256 * 2)
    steps = steps_of(lambda b, rows: b.linear(rows(256), matrix("Q8_0", 5, 256)), 9)
    unpacked = [step for step in steps if step.kernel == "unpack-Q8_0"]
    multiplied = [step for step in steps if step.kernel == "product"]
    assert [(step.arguments["first"], step.arguments["rows"], step.parts) for step in unpacked] == [
        (0, 2, 2), (2, 2, 2), (4, 1, 1),
    ]  # fmt: skip
    assert [(step.arguments["m"], step.arguments["c"].offset, step.arguments["a_stride"]) for step in multiplied] == [
        (2, 0, 256), (2, 8, 256), (1, 16, 256),
    ]  # fmt: skip
    assert [step.reads[1] for step in multiplied] == [step.writes[0] for step in unpacked]
    assert all(buffer.stride == 512 for step in unpacked for buffer in step.writes)
    monkeypatch.setattr(products, "UNPACKED_BYTES", 1)
    assert len(steps_of(lambda b, rows: b.linear(rows(256), matrix("Q8_0", 5, 256)), 9)) == 2 + 2 * 5


def test_experts_are_routed_planned_multiplied_and_scattered():
    """Check biases, and the limit of experts."""

    def say(b, rows, experts=3, bias=True):
        choice, data = b.route(rows(experts), Routing(experts, 2)), np.zeros((experts, 6, 272), np.uint8)
        weight = Weight(Tensor("w", BY_NAME["Q8_0"], (experts, 6, 256), data))
        weight = Weight(weight.tensor, Weight(tensor("b", experts, 6)) if bias else None)
        b.scatter(b.expert_linear(b.gather(rows(256), choice), weight, choice), choice)

    steps = steps_of(say, 9)
    assert [step.kernel for step in steps] == [
        "route", "plan_experts", "gather", "quantize_planes", "linear_planes-8-Q8_0", "add_by_expert", "scatter",
    ]  # fmt: skip
    product = next(step for step in steps if step.kernel.startswith("linear_planes"))
    assert product.arguments["experts"] == 3 and product.arguments["expert_bytes"] == 6 * product.arguments["row_bytes"]
    assert [step.kernel for step in steps_of(lambda b, rows: say(b, rows, bias=False), 9)].count("add_by_expert") == 0
    most = products.MAX_EXPERTS
    steps_of(lambda b, rows: say(b, rows, most), 2)
    with pytest.raises(UnsupportedError, match=rf"^a GPU supports at most {most} experts \(found {most + 1}\)"):
        steps_of(lambda b, rows: say(b, rows, most + 1), 2)


def test_a_launch_without_all_arguments_is_refused():
    step = KernelStep("scale_rows", {"x": 1}, 1, None, [], [])
    with pytest.raises(TypeError, match=r"^scale_rows: columns, count, scales, stride, x, y$"):
        convert_step(step, lambda array: 0, 0)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_a_gpu_cache_stores_the_same_bytes_as_the_cpu_cache():
    """Check also that only enough memory makes room for a second context."""
    states = [PagedState(0, 2, 16, 32, window=20), LatentState(1, 64, 32)]
    here, card = KVCache(states, 2 * PAGE, KVType.parse("f16"), (1,)), SimulatedCard()
    there = CudaCache(card, states, 2 * PAGE, KVType.parse("f16"), 0)
    assert (there.sequences, there.pages, there.bytes_per_token) == ((1,), here.pages, here.bytes_per_token)
    assert CudaCache(card, states, 2 * PAGE, KVType.parse("f16"), 1 << 29).sequences == (2,)
    pages, random = np.array([2, 0]), np.random.default_rng(0)
    assert len(there.copy_pages(np.zeros(0, np.int64), True)) == 0
    for local in (False, True):
        content = random.integers(1, 256, 2 * here.get_page_bytes(local), np.uint8)
        for cache in (here, there):
            cache.fill(pages, local, content)
            np.testing.assert_array_equal(cache.copy_pages(pages, local), content)
            with pytest.raises(ValueError, match=rf"^{len(content) - 1} bytes for {len(content)}$"):
                cache.fill(pages, local, content[1:])
    for cache in (here, there):
        cache.fill(np.array([1]), False, np.zeros(here.get_page_bytes(False), np.uint8))
        cache.fill(np.array([1]), True, np.zeros(here.get_page_bytes(True), np.uint8))
        cache.copy(2, 1, 7)
    there.use([0])
    there.give_back([0])
    for local in (False, True):
        np.testing.assert_array_equal(there.copy_pages(np.arange(3), local), here.copy_pages(np.arange(3), local))


def test_states_of_a_gpu_are_freed_with_their_last_reference():
    states, card = [RecurrentLayerState(0, ((3, 2), (17,)))], SimulatedCard()
    layout, here = GpuStateLayout(card, states), StateLayout(states)
    assert layout.get_offset(0, 1) == here.get_offset(0, 1)
    assert not layout.view_bytes(layout.zeros).any() and len(layout.view_bytes(layout.zeros)) == here.zeros.nbytes
    content = np.arange(here.zeros.nbytes, dtype=np.uint8)
    one, other = layout.from_bytes(content), layout.allocate()
    assert layout.view_bytes(one).tolist() == content.tolist()
    assert layout.get_address(one) != layout.get_address(other) and layout.nbytes == here.nbytes
    assert len(card.memory) == 3
    del one, other
    assert [*card.memory] == [layout.get_address(layout.zeros)]
    with pytest.raises(ValueError, match=r"^1 bytes for 320$"):
        layout.from_bytes(content[:1])


def test_texts_fill_the_gpu_header_as_the_cpu_header():
    """Check that tables of pages lie behind the header in the GPU's memory."""
    card = SimulatedCard()
    there, here, pages = PinnedHeader(card, 200, 4), RunHeader(200), np.array([5, 7, 6, 9])
    there.base = 10_000
    assert len(there.words) == count_header_words(200) + card_program.MAX_SEQUENCES * 4
    texts = [TextSpan(np.arange(PAGE + 1), 3), TextSpan(np.array([8]), 1), TextSpan(np.arange(9), 9)]
    rows = np.zeros((3, 2), np.float32)
    for header in (there, here):
        header.describe_texts(texts, pages, rows, False)
    for name in ("numbers", "ids", "positions", "rotary_positions", "kinds", "owners", "wanted", "few_counts"):
        np.testing.assert_array_equal(getattr(there, name), getattr(here, name))
    for number, table in enumerate(([5, 7], [6], [9])):
        assert there.sequences[number, :3].tolist() == here.sequences[number, :3].tolist()
        place = (int(there.sequences[number, 3]) - 10_000) // 8
        assert there.words[place : place + len(table)].tolist() == table
        assert place == count_header_words(200) + 4 * number
    assert there.find_offset(there.ids) == 8 * 6 and there.find_offset(there.words) == 0
    assert there.find_offset(np.zeros(1)) is None


def test_sequences_fill_the_gpu_header_as_the_cpu_header():
    """Check that each table of pages has its own memory behind the header."""
    card = SimulatedCard()
    header, here, logits = PinnedHeader(card, 9, 4), RunHeader(9), np.zeros((2, 4), np.float32)
    header.base = 10_000
    assert len(header.words) == count_header_words(9) + 9 * 4 and not header.words.any()
    tables = [np.array(table) for table in ([5, 7, 6, 9], [8], [3, 1])]
    spans = [SequenceSpan(SimpleNamespace(addresses=(100 + number, 200, 300), table=table), 5, np.arange(number + 1), 1)
             for number, table in enumerate(tables)]  # fmt: skip
    header.fill(spans, True, logits)
    here.fill(spans, True, logits)
    for name in ("numbers", "ids", "positions", "rotary_positions", "owners", "wanted", "few_counts"):
        np.testing.assert_array_equal(getattr(header, name), getattr(here, name))
    for number, table in enumerate(tables):
        place = count_header_words(9) + 4 * number
        assert header.words[place : place + 4].tolist() == [*table, *[0] * (4 - len(table))]
        expected = here.sequences[number].tolist()
        assert header.sequences[number].tolist() == [*expected[:3], 10_000 + 8 * place, *expected[4:]]
    header.fill(spans[1:], True, logits)  # one that is shorter, where the first was
    assert header.words[count_header_words(9) :][:5].tolist() == [8, 7, 6, 9, 3]
    assert (
        header.find_offset(header.words[-1:]) == header.words.nbytes - 8 and header.find_offset(header.words[:1]) == 0
    )
    around = np.zeros(4, np.int64)
    header.words = around[1:3]
    assert [header.find_offset(around[number:]) for number in range(4)] == [None, 0, 8, None]


def test_matrices_are_uploaded_before_programs_are_built(monkeypatch):
    """Check that all of them count for the progress."""
    done = []

    class Known:
        def __init__(self, card, matrices, on_upload):
            done.append((matrices, on_upload))

        def get_address(self, weight):
            done.append(weight)

    monkeypatch.setattr(card_program, "GpuWeights", Known)
    monkeypatch.setattr(card_program, "SizedProgram", lambda model, size, progress: done.append(size))
    x = Activation(ALL, 3)
    operations = [MatrixOperation((), x, "a"), Operation((), x), MatrixOperation((), x, "b")]
    options = SimpleNamespace(on_upload="uploading", progress=None)
    program = CudaProgram("card", operations, "cache", "layout", 64, options, "taken")
    assert done == [(["a", "b"], "uploading"), "a", "b", (512, 1), (1, 1)] and program._logits.shape == (0, 3)
    assert program._model[:4] == ("card", operations, "cache", "layout") and program._model[5:7] == (64, "taken")


def test_estimating_buffers_counts_the_longest_run_and_three_chunks(monkeypatch):
    calls = []
    monkeypatch.setattr(card_program, "lower_to_gpu", lambda *given: calls.append(given) or [])
    monkeypatch.setattr(card_program, "plan_offsets", lambda steps: 1000)
    recurrent = RecurrentLayerState(1, ((2, 3),))
    estimated = card_program.compute_buffer_bytes(["operation"], [PAGED, recurrent], KVType.parse("f16"))
    assert estimated == 1000 + 3 * (32 << 20)
    card_program.compute_buffer_bytes(["operation"], [PAGED], KVType.parse("f16"))
    for (operations, places, weights, size, taken), recurs in zip(calls, (True, False), strict=True):
        assert (operations, size, taken) == (["operation"], (512, 1), {}) and len(places.header.ids) == 512
        assert (
            (places.layout is not None) == recurs and places.cache.get_sides(PAGED) and places.cache.sequences == (1,)
        )
        assert weights.capability == (8, 0) and weights.get_address(None) == 0


def test_programs_are_built_on_demand_for_powers_of_two(monkeypatch):
    """Check also that results are copies."""
    built, filled, pinned = [], [], []

    class Sized:
        def __init__(self, model, size, progress):
            built.append((size, progress))
            self.size = size

        def run(self, fill):
            fill(SimpleNamespace(fill=lambda *given: filled.append((self.size, "spans", *given)),
                                 describe_texts=lambda *given: filled.append((self.size, "texts",
                                 *given))))  # fmt: skip

    monkeypatch.setattr(card_program, "SizedProgram", Sized)
    used = []
    card = SimpleNamespace(capability=(8, 0), use=lambda: used.append(1),
                           allocate_pinned=lambda size: pinned.append(size) or np.zeros(size, np.uint8))  # fmt: skip
    operations = [Operation((), Activation(ALL, 3))]
    options = SimpleNamespace(on_upload=None, progress="shown")
    program = CudaProgram(card, operations, None, None, 64, options, {})
    assert built == [((512, 1), "shown"), ((1, 1), "shown")]
    texts = [TextSpan(np.zeros(count, np.int64), count) for count in (3, 2, 4)]
    rows = program.read(texts, "pages")
    size, kind, *given, logits, precise = filled.pop()
    assert (size, kind, given, precise) == ((16, 4), "texts", [texts, "pages"], False)
    assert rows.shape == logits.shape == (3, 3) and not np.shares_memory(rows, logits)
    assert pinned == [4 * 4 * 3] and built[2:] == [((16, 4), None)]
    spans = [SimpleNamespace(ids=[1] * count, wanted=wanted) for count, wanted in ((5, 0), (4, 0))]
    assert program.run(spans, True).shape == (0, 3)
    assert filled.pop()[:2] == ((16, 1), "spans") and len(used) == 2
    program.read(texts, "pages")
    assert len(built) == 4 and len(pinned) == 1
    program.read([*texts, *texts[:2]], "pages")
    assert pinned[1:] == [4 * 8 * 3]
    assert [round_program_size(tokens) for tokens in (1, 2, 3, 4, 5, 8, 9, 512)] == [1, 2, 4, 4, 8, 8, 16, 512]


@pytest.mark.parametrize(
    ("chunk", "counts"), [(1, [1] * 5), (271, [1] * 5), (272, [1] * 5), (544, [2, 2, 1]), (9999, [5])]
)
def test_rows_are_uploaded_in_chunks_of_at_least_one(monkeypatch, chunk, counts):
    monkeypatch.setattr(card_weights, "MAX_CHUNK_BYTES", chunk)
    data = np.random.default_rng(0).integers(0, 256, (5, 272), np.uint8)
    weights = Tensor("w", BY_NAME["Q8_0"], (5, 256), data)
    chunks = [*iterate_chunks(weights, "Q8_0")]
    assert [len(piece) // 272 for piece in chunks] == counts
    np.testing.assert_array_equal(np.concatenate(chunks), data.reshape(-1))


def test_weights_without_kernels_are_converted(monkeypatch):
    """Check float16, and blocks that are encoded."""
    weights = Tensor("w", BY_NAME["F32"], (2, 32), np.arange(64, dtype=np.float32).view(np.uint8).reshape(2, 128))
    (converted,) = iterate_chunks(weights, "F16")
    assert converted.view(np.float16).tolist() == [*range(64)]
    monkeypatch.setattr("localllm.quant.encode.encode", lambda kind, numbers: (numbers + len(kind)).astype(np.uint8))
    (converted,) = iterate_chunks(weights, "Q8_0")
    assert converted.tolist() == [*range(4, 68)]


class Fed:
    """A GPU that records the data that it receives."""

    capability = (8, 0)

    def __init__(self):
        self.allocated, self.fed, self.prepared = [], [], []

    def allocate(self, size: int) -> int:
        self.allocated.append(size)
        return 1000 * len(self.allocated)

    def prepare(self, kernels, progress) -> None:
        self.prepared.append((kernels, progress))

    def upload_chunks(self, chunks, work, place: int) -> None:
        for number, chunk in enumerate(chunks):
            self.fed.append((place, chunk.tolist(), work(number, chunk)))


def test_each_matrix_is_uploaded_once_in_planes_or_padded_rows(monkeypatch):
    """Pad rows of plain values to 16 bytes; let a kernel unpack blocks."""
    card, progress = Fed(), []
    plain = Tensor("plain", BY_NAME["F16"], (2, 20), np.arange(80, dtype=np.uint8).reshape(2, 40))
    blocks = Tensor("blocks", BY_NAME["Q8_0"], (3, 64), np.arange(3 * 68, dtype=np.uint8).reshape(3, 68))
    matrices = [Weight(plain), Weight(blocks), Weight(plain)]
    weights = GpuWeights(card, matrices, lambda done, total: progress.append((done, total)))
    monkeypatch.setattr(card_weights, "MAX_CHUNK_BYTES", 200)
    assert [weights.get_address(weight) for weight in matrices] == [1000, 2000, 1000]
    assert card.allocated[0] == 2 * 48 and len(card.allocated) == 2
    (place, rows, nothing), *chunks = card.fed
    padding = [0] * 8
    assert (place, nothing) == (1000, None) and rows == [*range(40), *padding, *range(40, 80), *padding]
    assert progress == [(80, 284), (80 + 136, 284), (284, 284)]
    assert card.prepared == [({"to_planes-Q8_0"}, None)]
    assert [(place, len(data)) for place, data, _ in chunks] == [(2000, 136), (2000, 68)]
    for number, (_, _, launch) in enumerate(chunks):
        launched = dict(zip(list_parameters("to_planes-Q8_0"), launch.arguments, strict=True))
        assert (launch.kernel, launched["blocks"], launched["planes"], launched["columns"]) == (
            "to_planes-Q8_0",
            number,
            2000,
            64,
        )
        assert (launched["first"], launched["last"]) == ((0, 128), (128, 192))[number]
        assert launched["row_bytes"] * 3 == card.allocated[1]
    assert weights.unpacked == {} and weights.capability == (8, 0)
    part = Weight(Tensor("plain", BY_NAME["F16"], (1, 20), plain.data[1:]), first_row=1)
    assert weights.get_address(part) == 3000 and weights.get_address(part) == 3000
    unknown = Tensor("x", BY_NAME["IQ2_S"], (1, 256), np.zeros((1, BY_NAME["IQ2_S"].row_bytes(256)), np.uint8))
    monkeypatch.setattr(card_weights, "convert_weights", lambda tensor, kind: np.zeros((1, 256), np.float16))
    GpuWeights(card, [], None).get_address(Weight(unknown))
    weights.get_address(Weight(unknown))
    assert weights.unpacked == {"IQ2_S": "F16"} and progress[-1] == (284, 284)


def test_a_program_replays_a_graph_that_begins_with_the_header(monkeypatch):
    """Check that constants are uploaded once, and that flaws lie where the host sees them."""
    card, recorded, calls = SimulatedCard(), [], []
    card.prepare = lambda kernels, progress: calls.append((kernels, progress))
    card.record = lambda works: recorded.append(works) or (lambda: calls.append("replay"))
    card.synchronize = lambda: calls.append("synchronize")
    steps = [SimpleNamespace(kernel="a", reads=[], writes=[]), SimpleNamespace(kernel="product", reads=[], writes=[])]
    lowered = []
    monkeypatch.setattr(card_program, "lower_to_gpu", lambda *known: lowered.append(known) or steps)
    monkeypatch.setattr(card_program, "convert_step", lambda step, place, memory: (step.kernel, memory))
    monkeypatch.setattr(card_program, "plan_offsets", lambda steps: 77)
    arena = SimpleNamespace(reserve=lambda size: 1000 + size)
    model = card_program.GpuContext(card, ["operation"], "cache", "layout", "weights", 130, "taken", arena)
    program = SizedProgram(model, (4, 1), "progress")
    header = program.header
    ((operations, places, weights, size, taken),) = lowered
    assert (operations, weights, size, taken) == (["operation"], "weights", (4, 1), "taken")
    assert (places.cache, places.layout, places.header) == ("cache", "layout", header)
    assert header._tables.shape == (4, 3) and header.base in card.memory
    assert calls == [({"a", "fetch"}, "progress")] and [step.stage for step in steps] == [0, 0]
    ((fetch, *works),) = recorded
    assert works == [("a", 1077), ("product", 1077)]
    assert fetch.kernel == "fetch" and [*fetch.arguments] == [
        {"source": header.words.ctypes.data, "target": header.base, "words": len(header.words)}[name]
        for name in list_parameters("fetch")
    ]  # fmt: skip
    assert program._place(header.flaws) == program._flaws.ctypes.data
    assert program._place(header.positions) == header.base + header.positions.ctypes.data - header.words.ctypes.data
    constant, other = np.arange(6, dtype=np.int16).reshape(2, 3).T, np.zeros(0)
    place = program._place(constant)
    assert program._place(constant) == place != program._place(other) == program._place(other)
    assert card.download(place, 12).view(np.int16).tolist() == [0, 3, 1, 4, 2, 5]
    calls.clear()
    program._flaws[0] = 1
    program.run(lambda told: calls.append(told is header and not program._flaws[0]))
    assert calls == [True, "replay", "synchronize"]
    card.synchronize = lambda: program._flaws.fill(1)
    with pytest.raises(ModelError):
        program.run(lambda told: None)
