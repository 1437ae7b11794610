"""Test the operations that a recorder records for each verb, what it refuses, and that descriptions are canonical."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from localllm.arch.layer_state import LatentState, PagedState, RecurrentLayerState
from localllm.arch.recurrent_verbs import HeadState
from localllm.arch.rope import RopeParameters
from localllm.arch.verbs import AttentionScores, NgramHash, Routing
from localllm.arch.weights import Weight
from localllm.engine.lower.activation import ALL, WANTED, Activation
from localllm.engine.operations.elementwise import Elementwise
from localllm.engine.operations.operation import Operation
from localllm.engine.operations.tokens import HiddenStateTap
from localllm.engine.prefix_store import describe_operations
from localllm.engine.trace.recorder import Recorder, trace_model
from localllm.errors import LocalllmError, ModelError
from localllm.files.gguf.file import Tensor
from localllm.files.gguf.metadata import Irregularities
from localllm.quant.formats import BY_NAME

CONTEXT, WORDS = 64, 2  # words of 32 bits that say which keys of a context count
VOCABULARY, WIDTH = 9, 8


def attended(choices: int) -> Operation:
    """Return attention of four heads in two groups, for which keys were selected `choices` times."""
    recorder = Recorder(SimpleNamespace(vocab_size=9, width=8), CONTEXT)
    q, k, v, chosen = (Activation(ALL, columns) for columns in (16, 8, 8, choices * WORDS))
    recorder.attend(q, k, v, PagedState(3, 2, 4, 4), AttentionScores(4, 0.5, chosen=chosen))
    return recorder.operations[-1]


def test_keys_are_selected_for_all_groups_together_or_for_each():
    assert [attended(choices).choices for choices in (1, 2)] == [1, 2]
    for choices in (0, 3, 4):
        with pytest.raises(ModelError, match=f"layer 3: {choices} key selections for 2 groups of heads"):
            attended(choices)


def test_descriptions_do_not_depend_on_the_order_of_arguments():
    x, y = Activation(ALL, 4), Activation(ALL, 4)
    given = {"epsilon": 1e-5, "axis": 1, "group": None}

    def of(**said: object):
        return describe_operations([Operation((), x), Elementwise((x,), y, "norm", said)])

    assert of(**given) == of(**dict(reversed(given.items()))) != of(**given | {"axis": 0})


# ---- every verb -----------------------------------------------------------------------------------------------------


def x(columns: int) -> Activation:
    return Activation(ALL, columns)


def tensor(name: str, *shape: int, first: float = 1, format: str = "F32") -> Tensor:
    """Return a tensor of consecutive values from `first` on."""
    dtype = {"F32": np.float32, "I32": np.int32, "F64": np.float64, "I64": np.int64, "I8": np.int8, "I16": np.int16}
    numbers = np.arange(np.prod(shape), dtype=dtype[format]) + dtype[format](first)
    return Tensor(name, BY_NAME[format], shape, numbers.view(np.uint8).reshape(*shape[:-1], -1))


def w(*shape: int, name: str = "w", first: float = 1, format: str = "F32", bias: int = 0, scale: int = 0) -> Weight:
    """Return a weight; its bias or scale, if any, has values from 10 on."""
    parts = (Weight(tensor(f"{name}.{kind}", size, first=10)) if size else None for kind, size in
             (("bias", bias), ("scale", scale)))  # fmt: skip
    return Weight(tensor(name, *shape, first=first, format=format), *parts)


def rows(*numbers: float) -> list[float]:
    return list(numbers)


def plain(value):
    """Return the values of an array, the name of a weight, or the argument itself."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.name if isinstance(value, Weight) else value


def given_of(one: Operation) -> dict[str, object]:
    """Return the recorded arguments besides activations; those of a formula by name."""
    names = [each.name for each in fields(one) if each.name not in ("inputs", "output", "is_stored")]
    arguments = one.numbers if isinstance(one, Elementwise) else {name: getattr(one, name) for name in names}
    return {name: plain(value) for name, value in arguments.items()}


def said(say) -> list[tuple]:
    """Return each operation: verb, columns of inputs, rows and columns of the output, and arguments."""
    recorder = Recorder(SimpleNamespace(vocab_size=VOCABULARY, width=WIDTH), CONTEXT)
    say(recorder)
    return [
        (
            one.verb, [each.columns for each in one.inputs], one.output.rows.name, one.output.columns,
            given_of(one),
        )
        for one in recorder.operations
    ]  # fmt: skip


ONES = rows(1, 1, 1, 1)
ROPE = RopeParameters(4, 4, False)
PAGED, LATENT = PagedState(3, 2, 4, 3), LatentState(5, 4, 2)
CONVOLVED, SCANNED = RecurrentLayerState(1, ((2, 3),)), RecurrentLayerState(2, ((1, 3), (2, 3), (2, 4, 3)))
HEADS = HeadState(SCANNED, 2, w(2, name="rates"), 1, 2)
ROUTING = Routing(4, 2)
UNSAID = {
    "slopes": (),
    "sinks": None,
    "lookahead": 0,
    "biases": None,
    "cross_attention": False,
    "windowed": False,
    "logs": False,
}
ATTENDS = {"state": PAGED, "heads": 4, "scale": 0.5, "softcap": 0.0, **UNSAID, "choices": 0}
BIASES = np.zeros((4, 3), np.float32)
SAID = {
    "embed": (lambda r: r.embed(w(9, 5), ALL), ("embed", [], "all", 5, {"weight": "w"})),
    "embed what was made": (lambda r: r.embed(w(9, 5), x(2)), ("embed", [2], "all", 5, {"weight": "w"})),
    "replace_ids": (
        lambda r: r.replace_ids(ALL, np.arange(9)[::-1]),
        ("replace_ids", [], "all", 2, {"table": [8, 7, 6, 5, 4, 3, 2, 1, 0]}),
    ),
    "embed_positions": (
        lambda r: r.embed_positions(w(64, 8), ALL), ("embed_positions", [], "all", 8, {"weight": "w"}),
    ),
    "embed_kinds": (lambda r: r.embed_kinds(w(2, 8), ALL), ("embed_kinds", [], "all", 8, {"weight": "w"})),
    "select": (lambda r: r.select(x(4), WANTED), ("select", [4], "wanted", 4, {})),
    "columns": (lambda r: r.slice_columns(x(12), 1, 3), ("slice_columns", [12], "all", 2, {"first": 1, "groups": 1})),
    "columns of groups": (
        lambda r: r.slice_columns(x(12), 1, 3, 4),
        ("slice_columns", [12], "all", 6, {"first": 1, "groups": 3}),
    ),
    "all columns": (
        lambda r: r.slice_columns(x(12), 0, 6, 6),
        ("slice_columns", [12], "all", 12, {"first": 0, "groups": 2}),
    ),
    "one column": (
        lambda r: r.slice_columns(x(12), 11, 12), ("slice_columns", [12], "all", 1, {"first": 11, "groups": 1})
    ),
    "join": (
        lambda r: r.concat_heads(x(4), x(6), 2),
        ("concat_heads", [4, 6], "all", 10, {"heads": 2, "shared": False}),
    ),
    "join shared": (
        lambda r: r.concat_heads(x(4), x(3), 2, True),
        ("concat_heads", [4, 3], "all", 10, {"heads": 2, "shared": True}),
    ),
    "rms_norm": (
        lambda r: r.rms_norm(x(4), w(4), 0.5),
        ("rms_norm", [4], "all", 4, {"vector": rows(1, 2, 3, 4), "group": 4, "epsilon": 0.5, "weight": "w"}),
    ),
    "rms_norm of groups": (
        lambda r: r.rms_norm(x(4), w(2), 0.5, 2),
        ("rms_norm", [4], "all", 4, {"vector": rows(1, 2, 1, 2), "group": 2, "epsilon": 0.5, "weight": "w"}),
    ),
    "rms_norm of groups by row": (
        lambda r: r.rms_norm(x(4), w(4), 0.5, 2),
        ("rms_norm", [4], "all", 4, {"vector": rows(1, 2, 3, 4), "group": 2, "epsilon": 0.5, "weight": "w"}),
    ),
    "rms_norm without weights": (
        lambda r: r.rms_norm(x(4), None, 0.5),
        ("rms_norm", [4], "all", 4, {"vector": ONES, "group": 4, "epsilon": 0.5, "weight": None}),
    ),
    "layer_norm": (
        lambda r: r.layer_norm(x(2), w(2, bias=2), 0.5),
        ("layer_norm", [2], "all", 2,
         {"vector": rows(1, 2), "group": 2, "epsilon": 0.5, "weight": "w", "bias": rows(10, 11)}),
    ),
    "layer_norm without bias": (
        lambda r: r.layer_norm(x(4), w(2), 0.5, 2),
        ("layer_norm", [4], "all", 4,
         {"vector": rows(1, 2, 1, 2), "group": 2, "epsilon": 0.5, "weight": "w", "bias": rows(0, 0, 0, 0)}),
    ),
    "layer_norm without weights": (
        lambda r: r.layer_norm(x(4), None, 0.5),
        ("layer_norm", [4], "all", 4,
         {"vector": ONES, "group": 4, "epsilon": 0.5, "weight": None, "bias": rows(0, 0, 0, 0)}),
    ),
    "linear": (lambda r: r.linear(x(3), w(2, 3)), ("linear", [3], "all", 2, {"weight": "w", "bias": None})),
    "add_low_rank": (
        lambda r: r.add_low_rank(x(3), x(2), w(2, 3), 1, 0.5),
        ("add_low_rank", [3, 2], "all", 3, {"weight": "w", "adapter": 1, "factor": 0.5}),
    ),
    "add_scaled": (
        lambda r: r.add_scaled(x(3), x(3), 1, 0.5),
        ("add_scaled", [3, 3], "all", 3, {"adapter": 1, "factor": 0.5}),
    ),
    "linear with a bias": (
        lambda r: r.linear(x(3), w(2, 3, bias=2)), ("linear", [3], "all", 2, {"weight": "w", "bias": rows(10, 11)}),
    ),
    "linear with a scale": (
        lambda r: r.linear(x(3), w(2, 3, scale=1)),
        ("linear", [3], "all", 2, {"weight": "w", "bias": None}),
        ("scale", [2], "all", 2, {"factor": 10.0}),
    ),
    "rope": (
        lambda r: r.rope(x(8), ROPE, WANTED, w(2, name="f")),
        ("rope", [8], "wanted", 8, {"rope": ROPE, "factors": "f", "divisors": rows(1, 2), "table": None}),
    ),
    "rope without factors": (
        lambda r: r.rope(x(8), ROPE, ALL),
        ("rope", [8], "all", 8, {"rope": ROPE, "factors": None, "divisors": None, "table": None}),
    ),
    "attend": (
        lambda r: r.attend(x(16), x(8), x(6), PAGED, AttentionScores(4, 0.5)),
        ("attend", [16, 8, 6], "all", 12, ATTENDS),
    ),
    "attend to what is there": (
        lambda r: r.attend(x(16), None, None, PAGED, AttentionScores(4, 0.5, 2.0, rows(1, 2), w(4), 7)),
        ("attend", [16], "all", 12,
         ATTENDS | {"softcap": 2.0, "slopes": rows(1, 2), "sinks": rows(1, 2, 3, 4), "lookahead": 7}),
    ),
    "attend with logs": (
        lambda r: r.attend(x(16), x(8), x(6), PAGED, AttentionScores(4, 0.5, biases=BIASES, cross_attention=True,
        logs=True)),
        ("attend", [16, 8, 6], "all", 16, ATTENDS | {"biases": BIASES.tolist(), "cross_attention": True, "logs": True}),
    ),
    "attend in windows": (
        lambda r: r.attend(x(16), x(8), x(6), PAGED, AttentionScores(4, 0.5, chosen=x(2 * WORDS), windowed=True)),
        ("attend", [16, 8, 6, 4], "all", 12, ATTENDS | {"windowed": True, "choices": 2}),
    ),
    "attend to one row": (
        lambda r: r.attend(x(16), x(4), None, LATENT, AttentionScores(4, 0.5)),
        ("attend", [16, 4], "all", 8, ATTENDS | {"state": LATENT}),
    ),
    "keep": (lambda r: r.write_kv(x(8), x(6), PAGED), ("write_kv", [8, 6], "all", 0, {"state": PAGED})),
    "pool": (lambda r: r.pool(x(4), "mean"), ("pool", [4], "wanted", 4, {"kind": "mean"})),
    "select_keys": (
        lambda r: r.select_keys(x(12), x(4), x(3), LATENT, 5),
        ("select_keys", [12, 4, 3], "all", WORDS, {"state": LATENT, "most": 5, "block": 1, "heads": 3}),
    ),
    "choose without weights": (
        lambda r: r.select_keys(x(12), x(4), None, LATENT, 5, 2),
        ("select_keys", [12, 4], "all", WORDS, {"state": LATENT, "most": 5, "block": 2, "heads": 3}),
    ),
    "select_key_blocks": (
        lambda r: r.select_key_blocks(x(12), x(4), LATENT, 5, 2, 1),
        ("select_key_blocks", [12, 4], "all", 3 * WORDS,
         {"state": LATENT, "most": 5, "block": 2, "local": 1, "heads": 3}),
    ),
    "rowwise": (lambda r: r.add(x(4), x(4)), ("add", [4, 4], "all", 4, {})),
    "rowwise with numbers": (lambda r: r.softcap(x(4), 30), ("softcap", [4], "all", 4, {"cap": 30.0})),
    "sigmoid_gate": (lambda r: r.sigmoid_gate(x(4), x(1)), ("sigmoid_gate", [4, 1], "all", 4, {})),
    "scale": (lambda r: r.scale(x(4), 3), ("scale", [4], "all", 4, {"factor": 3.0})),
    "scale by a tensor": (lambda r: r.scale(x(4), w(1)), ("scale", [4], "all", 4, {"factor": 1.0})),
    "scale_columns": (
        lambda r: r.scale_columns(x(4), w(2, 2)), ("scale_columns", [4], "all", 4, {"vector": rows(1, 2, 3, 4)}),
    ),
    "lerp": (lambda r: r.lerp(x(4), x(4), w(1, 4)), ("lerp", [4, 4], "all", 4, {"vector": rows(1, 2, 3, 4)})),
    "multiply_heads": (lambda r: r.multiply_heads(x(6), x(3)), ("multiply_heads", [6, 3], "all", 6, {"heads": 3})),
    "softmax": (lambda r: r.softmax(x(4)), ("softmax", [4], "all", 4, {})),
    "sinkhorn": (
        lambda r: r.sinkhorn(x(9), 3, 5, 0.5),
        ("sinkhorn", [9], "all", 9, {"size": 3, "iterations": 5, "epsilon": 0.5}),
    ),
    "head_dots": (lambda r: r.head_dots(x(6), x(6), 3), ("head_dots", [6, 6], "all", 3, {"heads": 3})),
    "mix": (lambda r: r.mix_streams(x(12), x(6), 3), ("mix_streams", [12, 6], "all", 8, {"streams": 3})),
    "add_vector": (lambda r: r.add_vector(x(2), w(2)), ("add_vector", [2], "all", 2, {"vector": rows(1, 2)})),
    "add_vector of numbers": (
        lambda r: r.add_vector(x(2), np.array([3, 4])), ("add_vector", [2], "all", 2, {"vector": rows(3, 4)}),
    ),
    "scale_by_position": (
        lambda r: r.scale_by_position(x(4), ALL, 0.5, 7),
        ("scale_by_position", [4], "all", 4, {"slope": 0.5, "length": 7, "offset": 0}),
    ),
    "as_column": (lambda r: r.as_column(ALL), ("as_column", [], "all", 1, {})),
    "embed_hashed": (
        lambda r: r.embed_hashed(w(12, 5), x(2), NgramHash((3, 5), 10, 2, 0)),
        ("embed_hashed", [2], "all", 5, {"weight": "w", "hashing": NgramHash((3, 5), 10, 2, 0)}),
    ),
    "given": (
        lambda r: r.external_input(np.zeros((1, 4)), 3),
        ("external_input", [], "all", 3, {"memory": [rows(0, 0, 0, 0)]}),
    ),
    "softplus": (lambda r: r.softplus(x(2), w(2)), ("softplus", [2], "all", 2, {"bias": rows(1, 2)})),
    "softplus without bias": (lambda r: r.softplus(x(2)), ("softplus", [2], "all", 2, {"bias": rows(0, 0)})),
    "convolve": (
        lambda r: r.convolve(x(3), w(3, 3, bias=3), CONVOLVED),
        ("convolve", [3], "all", 3, {
            "state": CONVOLVED, "number": 0, "taps": [rows(1, 2, 3), rows(4, 5, 6), rows(7, 8, 9)],
            "bias": rows(10, 11, 12), "silu": True,
        }),
    ),
    "convolve at a distance": (
        lambda r: r.convolve(x(3), w(3, 2), CONVOLVED, silu=False, dilation=2),
        ("convolve", [3], "all", 3, {
            "state": CONVOLVED, "number": 0, "taps": [rows(1, 0, 2), rows(3, 0, 4), rows(5, 0, 6)],
            "bias": rows(0, 0, 0), "silu": False,
        }),
    ),
    "previous": (
        lambda r: r.previous(x(3), SCANNED, 0),
        ("convolve", [3], "all", 3,
         {"state": SCANNED, "number": 0, "taps": [rows(1, 0)] * 3, "bias": rows(0, 0, 0), "silu": False}),
    ),
    "mean": (
        lambda r: r.mean(x(3), SCANNED, 0),
        ("convolve", [3], "all", 3,
         {"state": SCANNED, "number": 0, "taps": [rows(0.5, 0.5)] * 3, "bias": rows(0, 0, 0), "silu": False}),
    ),
    "gated_mean": (
        lambda r: r.gated_mean(x(4), w(2, 2), RecurrentLayerState(1, ((1, 4),))),
        ("gated_mean", [4], "all", 2,
         {"state": RecurrentLayerState(1, ((1, 4),)), "number": 0, "places": [rows(1, 2), rows(3, 4)], "stretches": 1}),
    ),
    "gated_mean in two stretches": (
        lambda r: r.gated_mean(x(4), w(2, 2), RecurrentLayerState(1, ((3, 4),)), stretches=2),
        ("gated_mean", [4], "all", 1,
         {"state": RecurrentLayerState(1, ((3, 4),)), "number": 0, "places": [rows(1), rows(3), rows(2), rows(4)],
          "stretches": 2}),
    ),
    "selective_scan": (
        lambda r: r.selective_scan(x(3), x(3), x(2), x(2), w(3, 2), w(3), SCANNED),
        ("selective_scan", [3, 3, 2, 2], "all", 3,
         {"state": SCANNED, "number": 1, "rates": [rows(1, 2), rows(3, 4), rows(5, 6)], "skip": rows(1, 2, 3)}),
    ),
    "state_space": (
        lambda r: r.state_space(x(6), x(2), x(4), x(4), w(2, 1, first=5), HEADS),
        ("state_space", [6, 2, 4, 4], "all", 6,
         {"state": SCANNED, "number": 2, "rates": rows(1, 2), "key_heads": 1, "repeat": 2, "skip": rows(5, 6)}),
    ),
    "delta_rule": (
        lambda r: r.delta_rule(x(4), x(4), x(6), x(2), x(2), HEADS),
        ("delta_rule", [4, 4, 6, 2, 2], "all", 6,
         {"state": SCANNED, "number": 2, "rates": rows(1, 2), "key_heads": 1, "repeat": 2}),
    ),
    "lightning_attention": (
        lambda r: r.lightning_attention(x(8), x(8), x(6), [0.5, 2], SCANNED, 2),
        ("lightning_attention", [8, 8, 6], "all", 6,
         {"rates": rows(-0.5, -2), "key_heads": 2, "state": SCANNED, "number": 2, "repeat": 1}),
    ),
    "gated_linear_attention": (
        lambda r: r.gated_linear_attention(x(8), x(8), x(6), x(8), SCANNED, 2),
        ("gated_linear_attention", [8, 8, 6, 8], "all", 6, {"state": SCANNED, "number": 2}),
    ),
    "wkv6": (
        lambda r: r.wkv6(x(8), x(8), x(6), x(8), w(2, 4), SCANNED, 2),
        ("wkv6", [8, 8, 6, 8], "all", 6, {"state": SCANNED, "number": 2, "first": rows(1, 2, 3, 4, 5, 6, 7, 8)}),
    ),
    "wkv7": (
        lambda r: r.wkv7(x(8), x(8), x(8), x(6), x(8), x(8), SCANNED, 2),
        ("wkv7", [8, 8, 8, 6, 8, 8], "all", 6, {"state": SCANNED, "number": 2}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_verbs_are_recorded_with_their_arguments(case):
    say, *expected = SAID[case]
    assert said(say) == expected


FIT = "the model's tensors do not fit together: "
INDEXER = "layer 5: indexer queries and keys do not fit"
SMALL = "must have values of at least 0.001 (found 0.0)"


def misfit(name: str, columns: int, found: int) -> str:
    return f"{name} must have {columns} columns (found {found})"


def unlike(problem: str, first: int, second: int) -> str:
    return f"{problem} (found {first} and {second} columns)"


REFUSED = [
    (lambda r: r.embed(w(8, 5), ALL), "tensor w must have 9 rows, one per token (found 8)"),
    (lambda r: r.embed(w(9), ALL), "tensor w must be a matrix (found the shape [9])"),
    (lambda r: r.replace_ids(ALL, np.arange(8)), "the table must have 9 ids, one per token (found 8)"),
    (lambda r: r.embed_positions(w(63, 8), ALL),
     "the context must be at most 63, the positions of the model (found 64)"),
    (lambda r: r.embed_positions(w(64, 9), ALL), "tensor w must have 8 columns (found 9)"),
    (lambda r: r.slice_columns(x(12), -1, 2), f"{FIT}columns -1 to 2 of 12"),
    (lambda r: r.slice_columns(x(12), 2, 2), f"{FIT}columns 2 to 2 of 12"),
    (lambda r: r.slice_columns(x(12), 2, 13), f"{FIT}columns 2 to 13 of 12"),
    (lambda r: r.slice_columns(x(12), 2, 5, 4), f"{FIT}columns 2 to 5 of 12"),
    (lambda r: r.slice_columns(x(12), 2, 4, 5), f"{FIT}columns 2 to 4 of 12"),
    (lambda r: r.concat_heads(x(5), x(6), 2), f"{FIT}5, 6 columns, 2 heads"),
    (lambda r: r.concat_heads(x(4), x(5), 2), f"{FIT}4, 5 columns, 2 heads"),
    (lambda r: r.concat_heads(x(5), x(4), 2, True), f"{FIT}5, 4 columns, 2 heads"),
    (lambda r: r.head_linear(x(7), w(2, 3, 4)), "tensor w must fit 7 columns, and have neither bias nor scale"),
    (lambda r: r.head_linear(x(8), w(2, 3, 4, bias=6)), "tensor w must fit 8 columns, and have neither bias nor scale"),
    (lambda r: r.head_linear(x(8), w(2, 3, 4, scale=1)),
     "tensor w must fit 8 columns, and have neither bias nor scale"),
    (lambda r: r.rms_norm(x(4), w(4), 0.5, 3), "4 columns cannot be divided into groups of 3"),
    (lambda r: r.rms_norm(x(4), w(3), 0.5), "tensor w must have 4 weights (found 3)"),
    (lambda r: r.rms_norm(x(4), w(3), 0.5, 2), "tensor w must have 2 weights (found 3)"),
    (lambda r: r.layer_norm(x(4), w(2, bias=2), 0.5, 2), "tensor w.bias must have 4 weights (found 2)"),
    (lambda r: r.linear(x(4), w(2, 3)), "tensor w must have 4 columns (found 3)"),
    (lambda r: r.linear(x(3), w(2, 3, bias=3)), "tensor w.bias must have 2 weights (found 3)"),
    (lambda r: r.linear(x(3), w(2, 3, bias=2, scale=1)),
     "tensor w: a scale and a bias together are not supported"),
    *((lambda r, kind=kind: r.linear(x(3), w(2, 3, format=kind)),
       f"tensor w: format {kind} is not supported for matrices") for kind in ("I8", "I16", "I32", "I64", "F64")),
    (lambda r: r.scale(x(3), w(2)), "tensor w must have one element (found the shape [2])"),
    (lambda r: r.rope(x(6), ROPE, ALL), "6 columns cannot be divided into heads of 4"),
    (lambda r: r.rope(x(8), ROPE, ALL, w(4)), "tensor w must have 2 weights (found 4)"),
    (lambda r: r.rope(x(8), ROPE, ALL, w(2, first=0)), f"tensor w {SMALL}"),
    (lambda r: r.select_by_context(w(2), w(2, first=0, name="l"), 64), f"tensor l {SMALL}"),
    (lambda r: r.select_by_context(w(2, first=0), w(2, name="l"), 1), f"tensor w {SMALL}"),
    (lambda r: r.attend(x(15), x(8), x(6), PAGED, AttentionScores(4, 1.0)),
    "layer 3: q must have 16 columns (found 15)"),
    (lambda r: r.attend(x(16), x(6), x(6), PAGED, AttentionScores(4, 1.0)), "layer 3: k must have 8 columns (found 6)"),
    (lambda r: r.attend(x(16), x(8), x(8), PAGED, AttentionScores(4, 1.0)), "layer 3: v must have 6 columns (found 8)"),
    (lambda r: r.attend(x(16), x(8), x(6), PAGED, AttentionScores(4, 1.0, sinks=w(2))),
     "tensor w must have 4 weights (found 2)"),
    (lambda r: r.attend(x(16), x(8), x(6), PAGED, AttentionScores(4, 1.0, biases=BIASES[:3])),
     "layer 3: biases must have 4 heads and an odd width (found (3, 3))"),
    (lambda r: r.attend(x(16), x(8), x(6), PAGED, AttentionScores(4, 1.0, biases=BIASES[:, :2])),
     "layer 3: biases must have 4 heads and an odd width (found (4, 2))"),
    (lambda r: r.write_kv(x(7), x(6), PAGED), unlike("layer 3: keys and values do not fit the layer", 7, 6)),
    (lambda r: r.write_kv(x(8), x(7), PAGED), unlike("layer 3: keys and values do not fit the layer", 8, 7)),
    (lambda r: r.select_keys(x(13), x(4), None, LATENT, 5), unlike(INDEXER, 13, 4)),
    (lambda r: r.select_keys(x(12), x(5), None, LATENT, 5), unlike(INDEXER, 12, 5)),
    (lambda r: r.select_keys(x(12), x(4), x(4), LATENT, 5), unlike(INDEXER, 12, 4)),
    (lambda r: r.select_key_blocks(x(13), x(4), LATENT, 5, 2, 1), unlike(INDEXER, 13, 4)),
    (lambda r: r.select_key_blocks(x(12), x(5), LATENT, 5, 2, 1), unlike(INDEXER, 12, 5)),
    (lambda r: r.route(x(3), ROUTING), "the router must have 4 columns, one per expert (found 3)"),
    (lambda r: r.route(x(4), ROUTING, w(3)), "tensor w must have 4 weights (found 3)"),
    (lambda r: r.route(x(4), Routing(27, 3), table=w(9, 3, format="I32")),
     "the router must have 27 columns, one per expert (found 4)"),
    (lambda r: r.route(x(26), Routing(26, 3), table=w(9, 3, first=0, format="I32")),
     "tensor w must have expert indices below 26"),
    (lambda r: r.route(x(27), Routing(27, 3), table=w(9, 3, first=-1, format="I32")),
     "tensor w must have expert indices below 27"),
    (lambda r: r.route(x(27), Routing(27, 3), table=w(9, 2, format="I32")),
     "tensor w must have the shape [9, 3] (found [9, 2])"),
    (lambda r: r.expert_linear(x(3), w(4, 5), r.route(x(4), ROUTING)),
     "tensor w must have matrices of 3 columns for 4 experts (found the shape [4, 5])"),
    (lambda r: r.expert_linear(x(3), w(3, 2, 3), r.route(x(4), ROUTING)),
     "tensor w must have matrices of 3 columns for 4 experts (found the shape [3, 2, 3])"),
    (lambda r: r.expert_linear(x(3), w(4, 3, 2), r.route(x(4), ROUTING)),
     "tensor w must have matrices of 3 columns for 4 experts (found the shape [4, 3, 2])"),
    (lambda r: r.expert_linear(x(3), w(4, 2, 3, format="I32"), r.route(x(4), ROUTING)),
     "tensor w: format I32 is not supported for matrices"),
    (lambda r: r.expert_linear(x(3), w(4, 2, 3, scale=1), r.route(x(4), ROUTING)),
     "tensor w.scale: scales of experts are not supported"),
    (lambda r: r.expert_linear(x(3), w(4, 2, 3, bias=8), r.route(x(4), ROUTING)),
     "tensor w.bias must have the shape [4, 2]"),
    (lambda r: r.add(x(4), x(5)), f"{FIT}two inputs must have the same columns (found 4 and 5)"),
    (lambda r: r.sigmoid_gate(x(4), x(2)), f"{FIT}a gate of 2 columns"),
    (lambda r: r.scale_columns(x(4), w(3)), "tensor w must have 4 weights (found 3)"),
    (lambda r: r.lerp(x(4), x(3), w(4)), f"{FIT}two inputs must have the same columns (found 4 and 3)"),
    (lambda r: r.lerp(x(4), x(4), w(3)), "tensor w must have 4 weights (found 3)"),
    (lambda r: r.multiply_heads(x(6), x(4)), f"{FIT}4 gates of 6 columns"),
    (lambda r: r.sinkhorn(x(8), 3, 5, 0.5), f"{FIT}8 columns, 3 streams"),
    (lambda r: r.head_dots(x(6), x(5), 3), f"{FIT}two inputs must have the same columns (found 6 and 5)"),
    (lambda r: r.head_dots(x(6), x(6), 4), f"{FIT}6 columns, 4 heads"),
    (lambda r: r.mix_streams(x(11), x(6), 3), f"{FIT}11 columns, 6 weights, 3 streams"),
    (lambda r: r.mix_streams(x(12), x(5), 3), f"{FIT}12 columns, 5 weights, 3 streams"),
    (lambda r: r.add_vector(x(2), w(3)), "tensor w must have 2 weights (found 3)"),
    (lambda r: r.add_vector(x(2), np.zeros(3)), f"{FIT}the vector must have 2 numbers (found 3)"),
    (lambda r: r.embed_hashed(w(11, 5), x(2), NgramHash((3, 5), 10, 2, 0)),
     "tensor w must have 12 rows (found 11)"),
    (lambda r: r.embed_hashed(w(12, 5), x(1), NgramHash((3, 5), 10, 2, 0)), "hashes of 2 tokens, but only 1 is known"),
    (lambda r: r.softplus(x(2), w(3)), "tensor w must have 2 weights (found 3)"),
    (lambda r: r.convolve(x(2), w(3, 3), CONVOLVED), f"{FIT}w must have 3 columns (found 2)"),
    (lambda r: r.convolve(x(3), w(3, 2), CONVOLVED), "tensor w must have the shape [3, 3] (found [3, 2])"),
    (lambda r: r.convolve(x(3), w(3, 3, bias=2), CONVOLVED), "tensor w.bias must have 3 weights (found 2)"),
    (lambda r: r.previous(x(2), SCANNED, 0), f"{FIT}x must have 3 columns (found 2)"),
    (lambda r: r.mean(x(2), SCANNED, 0), f"{FIT}x must have 3 columns (found 2)"),
    (lambda r: r.gated_mean(x(3), w(2, 2), RecurrentLayerState(1, ((1, 4),))), f"{FIT}w must have 4 columns (found 3)"),
    (lambda r: r.gated_mean(x(4), w(4), RecurrentLayerState(1, ((1, 4),))),
     "tensor w must have the shape [2, 2] (found [4])"),
    *((lambda r, sizes=sizes: r.selective_scan(*map(x, sizes), w(3, 2), w(3), SCANNED), f"{FIT}{name}")
      for sizes, name in (((2, 3, 2, 2), misfit("x", 3, 2)), ((3, 2, 2, 2), misfit("dt", 3, 2)),
                          ((3, 3, 3, 2), misfit("b", 2, 3)), ((3, 3, 2, 3), misfit("c", 2, 3)))),
    (lambda r: r.selective_scan(x(3), x(3), x(2), x(2), w(2, 3), w(3), SCANNED),
     "tensor w must have the shape [3, 2] (found [2, 3])"),
    (lambda r: r.selective_scan(x(3), x(3), x(2), x(2), w(3, 2), w(2), SCANNED),
     "tensor w must have the shape [3] (found [2])"),
    *((lambda r, sizes=sizes: r.state_space(*map(x, sizes), w(2), HEADS), f"{FIT}{name}")
      for sizes, name in (((4, 2, 4, 4), misfit("x", 6, 4)), ((6, 3, 4, 4), misfit("dt", 2, 3)),
                          ((6, 2, 8, 4), misfit("b", 4, 8)), ((6, 2, 4, 8), misfit("c", 4, 8)))),
    (lambda r: r.state_space(x(6), x(2), x(4), x(4), w(3), HEADS), "tensor w must have the shape [2] (found [3])"),
    *((lambda r, sizes=sizes: r.delta_rule(*map(x, sizes), HEADS), f"{FIT}{name}")
      for sizes, name in (((8, 4, 6, 2, 2), misfit("q", 4, 8)), ((4, 8, 6, 2, 2), misfit("k", 4, 8)),
                          ((4, 4, 8, 2, 2), misfit("v", 6, 8)), ((4, 4, 6, 6, 2), misfit("dt", 2, 6)),
                          ((4, 4, 6, 2, 6), misfit("strength", 2, 6)))),
    *((lambda r, sizes=sizes: r.lightning_attention(*map(x, sizes), [1, 2], SCANNED, 2), f"{FIT}{name}")
      for sizes, name in (((6, 8, 6), misfit("q", 8, 6)), ((8, 6, 6), misfit("k", 8, 6)),
                          ((8, 8, 8), misfit("v", 6, 8)))),
    *((lambda r, sizes=sizes: r.gated_linear_attention(*map(x, sizes), SCANNED, 2), f"{FIT}{name}")
      for sizes, name in (((6, 8, 6, 8), misfit("q", 8, 6)), ((8, 6, 6, 8), misfit("k", 8, 6)),
                          ((8, 8, 8, 8), misfit("v", 6, 8)), ((8, 8, 6, 6), misfit("w", 8, 6)))),
    *((lambda r, sizes=sizes: r.wkv6(*map(x, sizes), w(2, 4), SCANNED, 2), f"{FIT}{name}")
      for sizes, name in (((6, 8, 6, 8), misfit("r", 8, 6)), ((8, 6, 6, 8), misfit("k", 8, 6)),
                          ((8, 8, 8, 8), misfit("v", 6, 8)), ((8, 8, 6, 6), misfit("w", 8, 6)))),
    (lambda r: r.wkv6(x(8), x(8), x(6), x(8), w(2, 3), SCANNED, 2),
     "tensor w must have the shape [2, 4] (found [2, 3])"),
    *((lambda r, sizes=sizes: r.wkv7(*map(x, sizes), SCANNED, 2), f"{FIT}{name}")
      for sizes, name in (((6, 8, 8, 6, 8, 8), misfit("r", 8, 6)), ((8, 6, 8, 6, 8, 8), misfit("w", 8, 6)),
                          ((8, 8, 6, 6, 8, 8), misfit("k", 8, 6)), ((8, 8, 8, 8, 8, 8), misfit("v", 6, 8)),
                          ((8, 8, 8, 6, 6, 8), misfit("a", 8, 6)), ((8, 8, 8, 6, 8, 6), misfit("b", 8, 6)))),
]  # fmt: skip


@pytest.mark.parametrize(("say", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_verbs_refuse_tensors_that_do_not_fit(say, problem):
    with pytest.raises(LocalllmError) as error:
        said(say)
    assert str(error.value) == problem


def test_heads_are_recorded_as_experts_of_every_token():
    """Plan them once for equal head counts of the same rows."""

    def say(r):
        r.head_linear(x(8), w(2, 3, 4))
        r.head_linear(x(6), w(2, 5, 3))
        r.head_linear(x(8), w(4, 3, 2))
        r.head_linear(r.select(x(8), WANTED), w(2, 3, 4))

    def product(rows, before, columns, behind, heads):
        return [
            ("to_heads", [before, heads], "heads", columns, {}),
            ("expert_linear", [columns, heads], "heads", behind, {"weight": "w", "bias": None}),
            ("from_heads", [behind, heads], rows, heads * behind, {}),
        ]

    of_two, of_four = ("every_head", [], "all", 2, {}), ("every_head", [], "all", 4, {})
    assert said(say) == [
        of_two, *product("all", 8, 4, 3, 2), *product("all", 6, 3, 5, 2), of_four, *product("all", 8, 2, 3, 4),
        ("select", [8], "wanted", 8, {}), ("every_head", [], "wanted", 2, {}), *product("wanted", 8, 4, 3, 2),
    ]  # fmt: skip


def test_experts_are_recorded_with_routing_tables_and_biases():
    routing, biases = Routing(28, 3, together=2), Weight(tensor("b", 14, 3))

    def say(r):
        choice = r.route(r.select(x(28), WANTED), routing, w(28), w(9, 3, first=0, format="I32"))
        assert (choice.routed.name, choice.routed.routing, choice.routed.of) == ("routed", routing, WANTED)
        y = r.expert_linear(r.gather(x(2), choice), Weight(tensor("w", 14, 3, 2), biases), choice)
        r.scatter(r.expert_linear(y, w(14, 5, 3), choice), choice)

    numbers = np.arange(42)
    assert said(say)[1:] == [
        ("route", [28], "wanted", 3,
         {"routing": routing, "bias": (numbers[:28] + 1).tolist(), "table": numbers[:27].reshape(9, 3).tolist()}),
        ("gather", [2, 3], "routed", 2, {}),
        ("expert_linear", [2, 3], "routed", 3, {"weight": "w", "bias": (numbers + 1).reshape(14, 3).tolist()}),
        ("expert_linear", [3, 3], "routed", 5, {"weight": "w", "bias": None}),
        ("scatter", [5, 3], "wanted", 5, {}),
    ]  # fmt: skip


@pytest.mark.parametrize(("original", "name"), [(63, "long"), (64, "short"), (65, "short")])
def test_rope_factors_follow_the_context_and_count_as_used(original, name):
    recorder = Recorder(SimpleNamespace(vocab_size=VOCABULARY, width=WIDTH), CONTEXT)
    short, long = w(2, name="short", first=1e-3), w(2, name="long")
    assert recorder.select_by_context(short, long, original).name == name
    recorder.ignore(None)
    recorder.require_all_used(["short", "long"])


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["w", "blk.0.attn_rot_embd.weight", "blk.1.attn.rope_freqs"], None),
        (["y", "w"], "tensor y: not part of this architecture as localllm supports it"),
        (["v", "w", "y", "z"], "tensor v and 2 more: not part of this architecture as localllm supports it"),
    ],
)
def test_tensors_that_no_verb_used_are_refused(names, problem):
    recorder = Recorder(SimpleNamespace(vocab_size=VOCABULARY, width=WIDTH), CONTEXT)
    recorder.linear(x(3), w(2, 3))
    if problem is None:
        recorder.require_all_used(names)
        return
    with pytest.raises(ModelError) as error:
        recorder.require_all_used(names)
    assert str(error.value) == problem


def test_hashed_embeddings_need_a_vocabulary_that_floats_can_count():
    for vocabulary, is_supported in ((2**24 - 1, True), (2**24, False)):
        recorder = Recorder(SimpleNamespace(vocab_size=vocabulary, width=WIDTH), CONTEXT)
        if is_supported:
            assert recorder.as_column(ALL).columns == 1
        else:
            with pytest.raises(LocalllmError, match="n-gram hashes are not supported for a vocabulary of 16777216"):
                recorder.as_column(ALL)


@pytest.mark.parametrize(
    ("layers", "entered", "columns"),
    [((), (0, 1, 2), 4), ((1,), (0, 1, 2), 4), ((2, 0), (0, 1, 2), 8), ((2, 2), (0, 2), 8)],
)
def test_inputs_of_tapped_layers_are_joined_and_exported(layers, entered, columns):
    """Concatenate them in the requested order, as soon as all exist."""
    memory = np.zeros((1, 16), np.float32)
    recorder = Recorder(SimpleNamespace(vocab_size=VOCABULARY, width=WIDTH), CONTEXT, HiddenStateTap(memory, layers))
    assert recorder.reveals == (not layers)
    went_in = {layer: x(4) for layer in entered}
    for layer, activation in went_in.items():
        assert recorder.tap_layer_input(activation, layer) is activation
    done = recorder.operations
    if not layers:
        assert done == []
        recorder.export_hidden(went_in[0])
        recorder.tap_layer_input(went_in[0], 0)
    assert [one.verb for one in done] == ["concat_heads"] * (len(layers) - 1) + ["export_hidden"]
    assert done[0].inputs == tuple(went_in[layer] for layer in layers or (0,))
    assert all((one.heads, one.shared) == (1, False) for one in done[:-1])
    assert done[-1].memory is memory
    assert done[-1].output.columns == done[-1].inputs[0].columns == columns


def test_recorders_of_text_ignore_image_inputs():
    recorder = Recorder(SimpleNamespace(vocab_size=VOCABULARY, width=WIDTH), CONTEXT)
    assert (recorder.begins, recorder.reveals) == (False, False)
    y = x(4)
    assert recorder.embed_inputs(lambda: y) is y
    assert recorder.add_deepstack(y, 1) is y
    assert recorder.begins
    assert recorder.tap_layer_input(y, 0) is y
    assert recorder.operations == []


def test_tracing_an_architecture_records_its_encoder_first():
    """Check also that errors name the file."""
    file = SimpleNamespace(path="m.gguf", tensors={"w": None, "e": None}, oddities=Irregularities())

    def of(encodes=True, pooling=None, columns=9, uses=("w", "e")):
        def encode(r, weights, h):
            assert (weights, h) == ("weights", hyperparameters)
            r.linear(x(3), w(2, 3, name="e"))

        def forward(r, weights, h):
            assert (weights, h) == ("weights", hyperparameters)
            for name in uses:
                y = r.linear(x(3), w(columns, 3, name=name))
            return y

        hyperparameters = SimpleNamespace(
            vocab_size=VOCABULARY, width=WIDTH, encode=encode if encodes else None, pooling=pooling
        )
        return trace_model(file, forward, "weights", hyperparameters, CONTEXT)

    both = of(uses=("w",))
    assert [[one.weight.name for one in some] for some in (both.encoding, both.operations)] == [["e"], ["w"]]
    assert of(encodes=False).encoding == []
    assert of(pooling="mean", columns=5).operations[-1].output.columns == 5
    for wrong, problem in (
        ({"encodes": False, "uses": "w"}, "m.gguf: tensor e: not part of this architecture as localllm supports it"),
        ({"columns": 8}, "m.gguf: the model must have 9 logits (found 8)"),
        ({"columns": 10}, "m.gguf: the model must have 9 logits (found 10)"),
    ):
        with pytest.raises(ModelError) as error:
            of(**wrong)
        assert str(error.value) == problem
