"""Compare the steps of every operation (arguments, indices, buffers, reads, writes) with tests/goldens/steps.txt.


A person has reviewed that file; scripts/record/record_steps.py writes it anew, for another review.
"""

from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace

import numpy as np
import pytest
from project import GOLDENS

from localllm.arch.layer_state import KVType, LatentState, PagedState, RecurrentLayerState
from localllm.arch.recurrent_verbs import HeadState
from localllm.arch.rope import RopeParameters
from localllm.arch.verbs import AttentionScores, NgramHash, Routing
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import ALL, WANTED, Activation
from localllm.engine.lower.header import RunHeader
from localllm.engine.lower.steps import StepBuilder, StepMemory
from localllm.engine.lower.tape import SCRATCH_BYTES, Buffer, KernelCall
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.recurrent import StateLayout
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.experts import ExpertLinear
from localllm.engine.operations.key_selection import SelectKeys
from localllm.engine.operations.linear import AddSquares
from localllm.engine.operations.operation import lower_operations
from localllm.engine.operations.tokens import HiddenStateTap
from localllm.engine.trace.recorder import Recorder
from localllm.kernels.table import PAGE
from tests.unit.engine.trace.test_recorder import LATENT, ROPE, tensor, w


def attend(steps: StepBuilder, operation: Attend, target: object) -> None:
    attention = operation.prepare(steps)
    steps.append("attend", attention.arguments, 1, attention.reads, [attention.y])
    operation.finish(steps, attention)


def choose(steps: StepBuilder, operation: SelectKeys, target: object) -> None:
    arguments, reads, y, kernel = operation.prepare(steps)
    steps.append(kernel, arguments, 1, reads, [y])


def expert_linear(steps: StepBuilder, operation: ExpertLinear, target: object) -> None:
    """Lower the biases only."""
    steps.allocate(operation.output)
    operation.add_bias(steps)


TARGET = SimpleNamespace(
    tokens=7, buffer_rows=8, wanted_rows=3, expert_rows=2, threads=2,
    verbs={"attend": attend, "select_keys": choose, "select_key_blocks": choose, "expert_linear": expert_linear},
    matrix=lambda weight: f"matrix {weight.name}", get_layout=lambda weight: ("KIND", 99),
    build_scratch_arguments=lambda size: {"scratch": size}, divide_rows=lambda rows, count: (f"by {rows} rows", count),
    parts=lambda wanted, rows: f"by {wanted} of {rows} rows",
)  # fmt: skip


NAMES = [f"{before}{letter}" for before in ("", "a", "b") for letter in "abcdefghijklmnopqrstuvwxyz"]


class Told:
    """Print steps: buffers are named in order, with rows and bytes of a row at their first use."""

    def __init__(self, places: StepMemory):
        self.buffers, self.places = dict[int, str](), places
        self.numbers = {id(value): name for name, value in vars(places.header).items() if isinstance(value, np.ndarray)}

    def value(self, value) -> str:
        if isinstance(value, Buffer):
            is_new = id(value) not in self.buffers
            name = self.buffers.setdefault(id(value), NAMES[len(self.buffers)])
            return f"{name}[{value.rows}x{value.stride}]" if is_new else name
        if isinstance(value, np.ndarray):
            shape = "x".join(map(str, value.shape))
            if shape == "1" and not value[0]:
                self.numbers.setdefault(id(value), f"number{len(self.numbers)}")
            return self.numbers.get(id(value)) or f"{value.dtype}[{shape}]({short(value)})"
        if value is SCRATCH_BYTES:
            return "a thread's"
        if isinstance(value, KernelCall):
            return f"{value.kernel}({' '.join(f'{name}={self.value(each)}' for name, each in value.arguments.items())})"
        memory = self.places.cache._memory
        if isinstance(value, int) and 0 <= value - memory.address < len(memory.bytes):
            return f"cache+{value - memory.address}"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def step(self, step) -> str:
        arguments = " ".join(f"{name}={self.value(value)}" for name, value in step.arguments.items())
        reads, writes = (" ".join(map(self.value, some)) for some in (step.reads, step.writes))
        limit = "" if step.count is None else f" of {self.value(step.count)}"
        return " ".join(f"{step.kernel} {step.parts}{limit}: {arguments} | {reads} -> {writes}".split())


def short(numbers: np.ndarray) -> str:
    """Return the values that are not 0, with their indices."""
    flat = numbers.reshape(-1)
    return " ".join(f"{place}:{number:g}" for place, number in enumerate(flat.tolist()) if number)[:100]


def steps_of(say, states=(), kv_type: str = "f32") -> list[str]:
    """Return the steps of an architecture, say(builder, rows), where rows maps a number of columns to an input."""
    builder = Recorder(SimpleNamespace(vocab_size=9, width=8), 64)
    say(builder, lambda columns: builder.external_input(np.zeros((9, columns), np.float32), columns))
    recurrent = [state for state in states if isinstance(state, RecurrentLayerState)]
    cache = KVCache([state for state in states if state not in recurrent], PAGE, KVType.parse(kv_type), (1,))
    places = StepMemory(cache, StateLayout(recurrent) if recurrent else None, RunHeader(7))
    steps, printer = lower_operations(builder.operations, TARGET, places), Told(places)
    lines = [printer.step(step) for step in steps.all]
    return [line for line in lines if "x=float32[9x" not in line and not line.startswith("logits ")]


PAGED, INDEX = PagedState(0, 2, 16, 32), LatentState(0, 16, 16, is_index=True)
WINDOW, WIDE = PagedState(0, 1, 16, 16, 5, True), PagedState(0, 2, 64, 64)
NEIGHBOURS = RopeParameters(8, 4, True, magnitude=2.0, position_offset=3)
SCANNED = RecurrentLayerState(2, ((1, 20), (20, 2), (2, 4, 20)))
ACROSS = AttentionScores(4, 0.5, cross_attention=True)
BROAD, STRETCHED = RecurrentLayerState(2, ((2, 300), (20, 40))), RecurrentLayerState(2, ((1, 80),))
HEADS = HeadState(SCANNED, 2, w(2, name="rates"), 1, 2)


def adapted_experts(b, rows):
    choice = b.route(rows(6), Routing(6, 2))
    x = b.gather(rows(4), choice)
    b.scatter(
        b.add_scaled(b.expert_linear(x, w(6, 3, 4), choice), b.expert_linear(x, w(6, 3, 4), choice), 2, 0.5, choice),
        choice,
    )


def attending(state=PAGED, heads=4, **given):
    def say(b, rows):
        new = (rows(state.kv_heads * state.key_dim), rows(state.kv_heads * state.value_dim))
        k, v = new if isinstance(state, PagedState) else (new[0], None)
        b.attend(rows(heads * state.key_dim), k, v, state, AttentionScores(heads, 0.5, **given))

    return say


def chosen(b, rows):
    """Attend to the keys that were selected for each group of heads."""
    which = b.select_key_blocks(rows(32), rows(16), INDEX, 5, 2, 1)
    b.attend(rows(64), rows(32), rows(64), PAGED, AttentionScores(4, 0.5, chosen=which))


def chosen_for_all(b, rows):
    which = b.select_keys(rows(32), rows(16), rows(2), INDEX, 5, 2)
    b.attend(rows(64), rows(32), rows(64), PAGED, AttentionScores(4, 0.5, chosen=which))


def kept(b, rows):
    b.write_kv(rows(128), rows(128), WIDE)
    b.attend(rows(256), None, None, WIDE, AttentionScores(4, 0.5))


def selective(b, rows):
    b.selective_scan(rows(2), rows(2), rows(20), rows(20), w(2, 20), w(2), SCANNED)


def selective_in_parts(b, rows):
    b.selective_scan(rows(40), rows(40), rows(20), rows(20), w(40, 20), w(40), BROAD)


def of_heads(verb, *given):
    """Record a verb of recurrent heads; integers are columns of inputs, other arguments pass unchanged."""

    def say(b, rows):
        getattr(b, verb)(*(rows(each) if isinstance(each, int) else each for each in given), SCANNED, 2)

    return say


def experts(b, rows, **given):
    routing = Routing(18, 2, **given)
    choice = b.route(rows(18), routing, w(18), w(9, 2, first=0, format="I32"))
    matrices = routing.matrices
    weight = Weight(tensor("w", matrices, 20, 4), Weight(tensor("b", matrices, 20)))
    b.scatter(b.expert_linear(b.gather(rows(4), choice), weight, choice), choice)


CASES = {
    "embed": (lambda b, rows: b.embed(w(9, 5), b.ids),),
    "embed_positions": (lambda b, rows: b.embed_positions(w(64, 8), b.positions),),
    "embed_kinds": (lambda b, rows: b.embed_kinds(w(2, 5), b.kinds),),
    "replace_ids": (lambda b, rows: b.embed(w(9, 5), b.replace_ids(b.ids, np.arange(9))),),
    "embed_hashed": (lambda b, rows: b.embed_hashed(w(12, 5), b.as_column(b.ids), NgramHash((3,), 10, 2, 1)),),
    "select": (lambda b, rows: b.select(rows(20), WANTED),),
    "pool": (lambda b, rows: b.pool(rows(20), "last"),),
    "columns": (lambda b, rows: b.slice_columns(rows(20), 1, 3, 4),),
    "join": (lambda b, rows: b.concat_heads(rows(4), rows(6), 2),),
    "join shared": (lambda b, rows: b.concat_heads(rows(4), rows(6), 2, True),),
    "head_dots": (lambda b, rows: b.head_dots(rows(20), rows(20), 4),),
    "mix": (lambda b, rows: b.mix_streams(rows(12), rows(6), 3),),
    "add_vector": (lambda b, rows: b.add_vector(rows(2), w(2)),),
    "scale_by_position": (lambda b, rows: b.scale_by_position(rows(20), b.positions, 0.5, 7, 3),),
    "rope, twice alike": (lambda b, rows: b.rope(b.rope(rows(8), ROPE, b.positions), ROPE, b.positions),),
    "rope of neighbours": (lambda b, rows: b.rope(rows(8), NEIGHBOURS, b.positions, w(2)),),
    "what is needed once more": (lambda b, rows: (lambda x: b.add(b.softcap(x, 30), x))(rows(20)),),
    "what is needed no more": (lambda b, rows: b.rms_norm(rows(20), w(20, first=0), 0.5),),
    "add": (lambda b, rows: b.add(rows(20), rows(20)),),
    "sigmoid_gate": (lambda b, rows: b.sigmoid_gate(rows(20), rows(1)),),
    "experts": (experts,),
    "experts together": (lambda b, rows: experts(b, rows, weighs_inputs=True, together=3),),
    "low rank": (lambda b, rows: b.add_low_rank(rows(20), rows(4), w(4, 20), 1, 0.5),),
    "low rank of experts": (adapted_experts,),
    "heads": (lambda b, rows: b.head_linear(rows(8), w(2, 20, 4)),),
    "attend": (attending(), [PAGED]),
    "attend with slopes": (attending(heads=6, slopes=(1, 2, 3, 4, 5, 6), sinks=w(6), logs=True), [PAGED], "f16"),
    "attend with biases": (attending(WINDOW, biases=np.arange(12).reshape(4, 3), lookahead=2), [WINDOW]),
    "attend to rows": (attending(LATENT), [LATENT]),
    "attend with more biases": (attending(WINDOW, biases=np.arange(20).reshape(4, 5)), [WINDOW]),
    "attend turned": (attending(WIDE), [WIDE], "q4_0"),
    "attend, keys turned": (attending(), [PAGED], "k=q4_0,v=f16"),
    "attend, values turned": (attending(), [PAGED], "k=f16,v=q4_0"),
    "attend to another run": (lambda b, rows: b.attend(rows(64), None, None, PAGED, ACROSS), [PAGED]),
    "select_keys": (lambda b, rows: b.select_keys(rows(48), rows(16), rows(3), INDEX, 5), [INDEX]),
    "choose without weights": (lambda b, rows: b.select_keys(rows(48), rows(16), None, INDEX, 5, 2), [INDEX]),
    "attend to what is chosen": (chosen, [PAGED, INDEX]),
    "attend to what is chosen for all": (chosen_for_all, [PAGED, INDEX]),
    "keep for later": (kept, [WIDE], "q4_0"),
    "convolve": (lambda b, rows: b.convolve(rows(20), w(20, 2, bias=20), SCANNED), [SCANNED]),
    "convolve in many parts": (lambda b, rows: b.convolve(rows(300), w(300, 3, bias=300), BROAD), [BROAD]),
    "gated_mean": (lambda b, rows: b.gated_mean(rows(20), w(2, 10), SCANNED), [SCANNED]),
    "gated_mean in parts": (lambda b, rows: b.gated_mean(rows(80), w(2, 40), STRETCHED), [STRETCHED]),
    "selective_scan": (selective, [SCANNED]),
    "selective_scan in parts": (selective_in_parts, [BROAD]),
    "state_space": (lambda b, rows: b.state_space(rows(40), rows(2), rows(4), rows(4), w(2), HEADS), [SCANNED]),
    "delta_rule": (lambda b, rows: b.delta_rule(rows(4), rows(4), rows(40), rows(2), rows(2), HEADS), [SCANNED]),
    "lightning_attention": (of_heads("lightning_attention", 8, 8, 40, [1, 2]), [SCANNED]),
    "gated_linear_attention": (of_heads("gated_linear_attention", 8, 8, 40, 8), [SCANNED]),
    "wkv6": (of_heads("wkv6", 8, 8, 40, 8, w(2, 4)), [SCANNED]),
    "wkv7": (of_heads("wkv7", 8, 8, 8, 40, 8, 8), [SCANNED]),
}
FILE = GOLDENS / "steps.txt"


def said() -> dict[str, list[str]]:
    return {name: steps_of(say, *given) for name, (say, *given) in CASES.items()}


def read(path: Path) -> dict[str, list[str]]:
    """Parse a recorded file into its steps by case."""
    cases = dict[str, list[str]]()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            lines = cases.setdefault(line[2:], [])
        elif line.startswith(" "):
            lines[-1] += line[2:]
        else:
            lines.append(line)
    return cases


def written(path: Path, cases: dict[str, list[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for case, lines in cases.items():
            print(f"# {case}", file=file)
            for line in lines:
                print(*wrap(line, 118, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False),
                      sep="\n", file=file)  # fmt: skip


@pytest.fixture(scope="module")
def known() -> dict[str, list[str]]:
    return read(FILE)


def test_every_generic_case_is_recorded(known):
    assert [*known] == [*CASES]


@pytest.mark.parametrize("case", CASES)
def test_operations_are_lowered_to_the_recorded_generic_steps(known, case):
    say, *given = CASES[case]
    assert steps_of(say, *given) == known[case]


def test_imported_activations_come_first_and_exported_ones_last():
    """Check that without an exported one the last operation writes the logits."""
    builder = Recorder(SimpleNamespace(vocab_size=9, width=8), 64)
    memory, came, goes = (np.zeros((9, 32), np.float32) for _ in range(3))
    x = builder.external_input(memory, 20)
    y, taken = builder.scale(x, 3.0), Activation(ALL, 20)
    builder._tap = HiddenStateTap(memory)
    builder.add(builder.export_hidden(y), taken)
    sums = np.zeros(80, np.float32)
    builder.operations.append(AddSquares((y,), Activation(ALL, 80), sums))
    places = StepMemory(KVCache([], PAGE, KVType.parse("f32"), (1,)), None, RunHeader(7))
    steps, header = lower_operations(builder.operations, TARGET, places, {taken: came}, {y: goes}).all, places.header
    assert [step.kernel for step in steps] == [
        "fetch",
        "slice_columns",
        "scale",
        "slice_columns",
        "add",
        "add_squares",
        "slice_columns",
    ]
    fetch, first, _, shown, _, squares, last = steps
    assert fetch.arguments == {"source": came.ctypes.data, "target": fetch.writes[0], "words": 8 * 192 // 8}
    assert (fetch.parts, fetch.reads, fetch.writes[0].rows, fetch.writes[0].stride) == (0, [], 8, 192)
    same = {"count": header.token_count, "x_stride": 192, "first": 0, "groups": 1, "period": 20, "columns": 20}
    sliced = first.writes[0]
    assert first.arguments == same | {"x": memory, "x_stride": 128, "y": sliced, "stride": 192}
    for step, rows in ((shown, memory), (last, goes)):
        assert step.arguments == same | {"x": sliced, "y": rows, "stride": 128}
        assert step.reads == [sliced] and [buffer.rows for buffer in step.writes] == [0]
    assert squares.arguments["sums"] is sums and squares.parts == "by 1 of 8 rows"
    builder.operations.clear()
    builder.slice_columns(builder.external_input(memory, 20), 0, 3)
    *_, out = lower_operations(builder.operations, TARGET, places).all
    expected = {"y": header.logits, "flaws": header.flaws, "count": header.token_count, "stride": 64, "columns": 3}
    assert (out.kernel, out.parts, out.arguments) == ("logits", "by 8 of 8 rows", expected | {"x": out.reads[0]})
