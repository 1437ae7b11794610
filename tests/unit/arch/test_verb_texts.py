"""Test small functions of architectures with activations that are strings of verbs, and tensors as they use them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.arch.attention import project_qkv, rotate_heads, scale_heads, select_rope_factors
from localllm.arch.decoder import DENSE, pool_texts, read_pooling
from localllm.arch.families import deepseek2, dots1, glm4, glm4moe, jina_bert, mimo2, mpt, qwen35
from localllm.arch.feed_forward import (
    apply_feed_forward_or_experts,
    apply_gated_feed_forward,
    apply_gated_shared_expert,
    apply_mixture_of_experts,
    apply_shared_expert,
    apply_ungated_feed_forward,
    collect_expert_matrices,
)
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import (
    SLACK,
    KVType,
    LatentState,
    PagedState,
    RecurrentLayerState,
    count_cache_bytes,
    count_window_tokens,
)
from localllm.arch.vision.llava import TilingRules, find_newline, get_newline_values
from localllm.arch.vision.pixtral import project
from localllm.arch.vision.vit import apply_activation, apply_feed_forward, to_matrix, transpose
from localllm.arch.weights import Weight, Weights
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import Tensor
from localllm.quant.formats import BY_NAME


class Teller:
    """A builder whose activations are strings of the verbs that compute them."""

    positions = "positions"

    def __init__(self) -> None:
        self.ignored: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        def say(*given: Any, **named: Any) -> str:
            return (
                f"{verb}({', '.join([*map(told, given), *(f'{key}={told(value)}' for key, value in named.items())])})"
            )

        return say

    def ignore(self, *weights: Weight | None) -> None:
        self.ignored += [weight.name for weight in weights if weight]


def told(value: Any) -> str:
    if isinstance(value, Weight):
        rows = f"[{value.first_row}:{value.first_row + value.shape[-2]}]" if value.first_row else ""
        return value.name.removesuffix(".weight") + rows
    return value if isinstance(value, str) else repr(value)


def tensor(name: str, *shape: int, format: str = "F32") -> Tensor:
    kind = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32}[format]
    numbers = np.arange(int(np.prod(shape)), dtype=kind).reshape(shape)
    return Tensor(name, BY_NAME[format], shape, numbers.view(np.uint8).reshape(*shape[:-1], -1))


def weights(**shapes: tuple[int, ...]) -> Weights:
    """Return weights by names with __ for dots; ".weight" is added where it is missing."""
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    names = {name if name.endswith((".bias", ".scale")) else f"{name}.weight": shape for name, shape in names.items()}
    return Weights({name: tensor(name, *shape) for name, shape in names.items()})


# ---- networks


@pytest.mark.parametrize(("shapes", "says"), [
    ({"ffn_gate": (6, 4), "ffn_up": (6, 4)}, "linear(gate(linear(x, ffn_gate), linear(x, ffn_up)), ffn_down)"),
    ({"ffn_up": (12, 4)}, "linear(gate(linear(x, ffn_up), linear(x, ffn_up[6:12])), ffn_down)"),
])  # fmt: skip
def test_gates_multiply_two_matrices_or_halves_of_one(shapes: dict[str, tuple[int, ...]], says: str):
    b: Any = Teller()
    assert apply_gated_feed_forward(b, weights(**shapes, ffn_down=(4, 6)), "x", b.gate) == says
    assert jina_bert.apply_feed_forward(b, weights(**shapes, ffn_down=(4, 6)), "x") == says.replace(
        "gate(linear", "multiply(gelu_erf(linear", 1
    ).replace("), linear", ")), linear", 1)


def test_feed_forward_without_a_gate_has_one_activation():
    b: Any = Teller()
    w = weights(ffn_up=(6, 4), ffn_down=(4, 6))
    assert apply_ungated_feed_forward(b, w, "x", b.relu) == "linear(relu(linear(x, ffn_up)), ffn_down)"
    assert jina_bert.apply_feed_forward(b, w, "x") == "linear(gelu_erf(linear(x, ffn_up)), ffn_down)"
    with pytest.raises(ModelError, match=r"no tensor ffn_gate\.weight"):
        apply_gated_feed_forward(b, w, "x", b.gate)


def of_pictures(activation: str = "gelu", exact: bool = False) -> Any:
    return SimpleNamespace(width=4, activation=activation, exact=exact, out=4, merge=1)


@pytest.mark.parametrize(("h", "says"), [
    (of_pictures(), "gelu(x)"), (of_pictures(exact=True), "gelu_erf(x)"),
    (of_pictures("silu"), "multiply(x, sigmoid(x))"), (of_pictures("silu", True), "multiply(x, sigmoid(x))"),
    (of_pictures("gelu_quick"), "multiply(x, sigmoid(scale(x, 1.702)))"),
])  # fmt: skip
def test_encoders_apply_their_activation_function(h: Any, says: str):
    assert apply_activation(Teller(), h, "x") == says


def test_encoders_recognize_swapped_and_gated_feed_forward():
    b: Any = Teller()
    w, turned = weights(ffn_up=(6, 4), ffn_down=(4, 6)), weights(ffn_up=(4, 6), ffn_down=(6, 4))
    assert apply_feed_forward(b, w, of_pictures(), "x") == "linear(gelu(linear(x, ffn_up)), ffn_down)"
    assert apply_feed_forward(b, turned, of_pictures(), "x") == "linear(gelu(linear(x, ffn_down)), ffn_up)"
    w = weights(ffn_up=(6, 4), ffn_gate=(6, 4), ffn_down=(4, 6))
    for activation, gate in (("silu", "swiglu"), ("gelu", "geglu")):
        says = f"linear({gate}(linear(x, ffn_gate), linear(x, ffn_up)), ffn_down)"
        assert apply_feed_forward(b, w, of_pictures(activation), "x") == says
    with pytest.raises(
        ModelError, match=r"^tensor ffn_gate\.weight: a gate needs an activation, clip\.use_gelu or clip\.use_silu$"
    ):
        apply_feed_forward(b, w, of_pictures("gelu_quick"), "x")


# ---- experts

ROUTER = {"ffn_gate_inp": (2, 4)}
STACKS = {"ffn_gate_exps": (2, 6, 4), "ffn_up_exps": (2, 6, 4), "ffn_down_exps": (2, 4, 6)}
SHARED = {"ffn_gate_shexp": (6, 4), "ffn_up_shexp": (6, 4), "ffn_down_shexp": (4, 6)}


class OfTwo:
    """A routing with a short name."""

    experts = 2

    def __repr__(self) -> str:
        return "R"


R: Any = OfTwo()


def mixed(bias: str = "None", gate: str = "ffn_gate_exps", up: str = "ffn_up_exps") -> str:
    choice = f"route(linear(x, ffn_gate_inp), R, {bias})"
    rows = f"gather(x, {choice})"
    both = ", ".join(f"expert_linear({rows}, {name}, {choice})" for name in (gate, up))
    return f"scatter(expert_linear(gate({both}), ffn_down_exps, {choice}), {choice})"


@pytest.mark.parametrize(("more", "says"), [
    ({}, mixed()), ({"exp_probs_b__bias": (2,)}, mixed("exp_probs_b.bias")),
    ({"exp_probs_b__bias": (1, 2)}, mixed("exp_probs_b.bias")),
])  # fmt: skip
def test_a_mixture_routes_gathers_and_scatters(more: dict[str, tuple[int, ...]], says: str):
    b: Any = Teller()
    assert apply_mixture_of_experts(b, weights(**ROUTER, **STACKS, **more), R, "x", b.gate) == says


def test_a_router_bias_of_one_row_becomes_a_vector():
    biases: list[Weight] = []
    b: Any = Teller()
    b.route = lambda logits, routing, bias: biases.append(bias) or "choice"
    for shape in ((1, 2), (2,)):
        apply_mixture_of_experts(b, weights(**ROUTER, **STACKS, exp_probs_b__bias=shape), R, "x", b.gate)
    assert [bias.shape for bias in biases] == [(2,), (2,)]


def test_fused_expert_matrices_are_split_into_gate_and_up():
    b: Any = Teller()
    fused = weights(ffn_gate_up_exps=(2, 12, 4), ffn_down_exps=(2, 4, 6))
    of_gate, up, down = collect_expert_matrices(b, fused, 2)
    assert (of_gate.shape, up.shape, up.first_row, down.name) == ((2, 6, 4), (2, 6, 4), 6, "ffn_down_exps.weight")
    biased = weights(ffn_gate_up_exps=(2, 12, 4), ffn_gate_up_exps__bias=(2, 12), ffn_down_exps=(2, 4, 6))
    with pytest.raises(UnsupportedError, match=r"tensor ffn_gate_up_exps\.bias: biases of fused experts are not"):
        collect_expert_matrices(b, biased, 2)


def test_separate_expert_tensors_are_stacked():
    b: Any = Teller()
    numbers = np.arange(6 * 3 * 2, dtype=np.float32).reshape(6, 3, 2)
    names = [f"ffn_{part}.{expert}.weight" for part in ("gate", "up", "down") for expert in (0, 1)]
    w = Weights({
        name: Tensor(name, BY_NAME["F32"], (3, 2), each.view(np.uint8))
        for name, each in zip(names, numbers, strict=True)
    })  # fmt: skip
    stacks = [np.ascontiguousarray(stack.tensor.data).view(np.float32) for stack in collect_expert_matrices(b, w, 2)]
    np.testing.assert_array_equal(np.concatenate(stacks), numbers)
    assert b.ignored == names


def test_layers_use_experts_or_a_dense_network():
    b: Any = Teller()
    dense = weights(ffn_gate=(6, 4), ffn_up=(6, 4), ffn_down=(4, 6))
    says = "linear(gate(linear(x, ffn_gate), linear(x, ffn_up)), ffn_down)"
    assert apply_feed_forward_or_experts(b, dense, R, "x", b.gate) == says
    assert apply_feed_forward_or_experts(b, dense, None, "x", b.gate, apply_shared_expert) == says
    experts = weights(**ROUTER, **STACKS, **SHARED)
    beside = "linear(gate(linear(x, ffn_gate_shexp), linear(x, ffn_up_shexp)), ffn_down_shexp)"
    assert apply_feed_forward_or_experts(b, experts, R, "x", b.gate) == mixed()
    assert apply_feed_forward_or_experts(b, experts, R, "x", b.gate, apply_shared_expert) == f"add({mixed()}, {beside})"
    gate = weights(**SHARED, ffn_gate_inp_shexp=(4,))
    assert apply_gated_shared_expert(b, gate, "x", b.gate) == f"sigmoid_gate({beside}, linear(x, ffn_gate_inp_shexp))"
    with pytest.raises(ModelError, match="ffn_gate_inp"):
        apply_feed_forward_or_experts(b, weights(**STACKS), R, "x", b.gate)


# ---- attention


def test_queries_keys_and_values_may_be_one_matrix():
    b: Any = Teller()
    h: Any = SimpleNamespace(attention=SimpleNamespace(heads=(3, 2), kv_heads=(1, 2), head_dim=2, value_dim=2))
    apart = weights(attn_q=(6, 4), attn_k=(2, 4), attn_v=(2, 4))
    assert project_qkv(b, apart, h, 0, "x") == ["linear(x, attn_q)", "linear(x, attn_k)", "linear(x, attn_v)"]
    fused = weights(attn_qkv=(10, 4))
    assert project_qkv(b, fused, h, 0, "x") == [
        "linear(x, attn_qkv)",
        "linear(x, attn_qkv[6:8])",
        "linear(x, attn_qkv[8:10])",
    ]
    with pytest.raises(ModelError, match=r"attn_qkv\.weight must have 12 rows \(found 10\)"):
        project_qkv(b, fused, h, 1, "x")


def test_rope_factors_are_read_from_one_or_two_tensors():
    b: Any = Teller()
    h: Any = SimpleNamespace(attention=SimpleNamespace(rope=SimpleNamespace(original_context=7)))
    assert select_rope_factors(b, weights(), h) is None
    assert told(select_rope_factors(b, weights(rope_freqs=(2,), rope_factors_long=(2,)), h)) == "rope_freqs"
    both = weights(rope_factors_long=(2,), rope_factors_short=(2,))
    assert told(select_rope_factors(b, both, h)) == "select_by_context(rope_factors_short, rope_factors_long, 7)"
    for less, missing in (("short", "long"), ("long", "short")):
        with pytest.raises(ModelError, match=f"no tensor rope_factors_{missing}"):
            select_rope_factors(b, weights(**{f"rope_factors_{less}": (2,)}), h)
    with pytest.raises(ModelError, match=r"rope_factors_long\.weight must have the shape \[2\] \(found \[3\]\)"):
        select_rope_factors(b, weights(rope_factors_long=(3,), rope_factors_short=(2,)), h)


def test_heads_are_rotated_by_the_layers_rope():
    b: Any = Teller()
    ropes = {0: None, 1: SimpleNamespace(by_factors=False), 2: SimpleNamespace(by_factors=True)}
    h: Any = SimpleNamespace(get_rope=ropes.get)
    assert rotate_heads(b, h, 0, "q", "k") == ("q", "k")
    for layer, factors in ((1, None), (1, "f"), (2, "f")):
        says = f"{ropes[layer]!r}, positions, {factors})"
        assert rotate_heads(b, h, layer, "q", "k", factors) == (f"rope(q, {says}", f"rope(k, {says}")
    with pytest.raises(
        ModelError, match=r"^the tensors rope_factors_long and rope_factors_short of longrope scaling are missing$"
    ):
        rotate_heads(b, h, 2, "q", "k")


class Numbers(Teller):
    """Activations are arrays [tokens, columns]."""

    def concat_heads(self, x: Any, y: Any, heads: int) -> Any:
        parts = [np.split(each, heads, axis=1) for each in (x, y)]
        return np.concatenate([part for pair in zip(*parts, strict=True) for part in pair], axis=1)

    def slice_columns(self, x: Any, first: int, end: int, period: int) -> Any:
        return x.reshape(len(x), -1, period)[:, :, first:end].reshape(len(x), -1)

    def multiply(self, x: Any, y: Any) -> Any:
        return x * y


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 7, 8, 12])
def test_each_head_is_multiplied_by_its_factor(dim: int):
    x, factors = np.arange(2.0 * 3 * dim).reshape(2, -1) + 1, np.arange(6.0).reshape(2, 3) + 1
    expected = (x.reshape(2, 3, dim) * factors[:, :, None]).reshape(2, -1)
    np.testing.assert_array_equal(scale_heads(Numbers(), x, factors, 3, dim), expected)


def test_mpt_clamps_and_normalizes_only_if_its_file_says_so():
    b: Any = Teller()
    attention = SimpleNamespace(heads=(2,), kv_heads=(2,), head_dim=2, value_dim=2)
    h: Any = SimpleNamespace(attention=attention, epsilon=0.5, limit=0.0, alibi_bias=0.0, scale=1.0, states=list)
    h.get_rope, h.get_lookahead = lambda layer: None, lambda layer: 0
    shapes = {"attn_norm": (4,), "attn_qkv": (12, 4), "attn_output": (4, 4), "ffn_norm": (4,), "ffn_up": (6, 4),
              "ffn_down": (4, 6)}  # fmt: skip
    state: Any = SimpleNamespace(layer=0)
    bare = mpt.block(b, weights(**shapes), h, state, "x")
    assert "clamp(" not in bare and "layer_norm(linear" not in bare and "slopes=()" in bare
    h.limit, h.alibi_bias = 3.0, 8.0
    full = mpt.block(b, weights(**shapes, attn_q_norm=(4,), attn_k_norm=(4,)), h, state, "x")
    for rows in ("", "[4:8]", "[8:12]"):
        assert f"clamp(linear(layer_norm(x, attn_norm, 0.5), attn_qkv{rows}), 3.0)" in full
    assert "attn_q_norm, 0.5)" in full and "attn_k_norm, 0.5)" in full
    assert "slopes=(0.0625, 0.00390625)" in full


def test_mimo_splits_fused_matrices_with_shorter_values():
    b: Any = Teller()
    attention = SimpleNamespace(heads=(2,))
    h: Any = SimpleNamespace(attention=attention, epsilon=0.5, scale=1.0, value_scale=3.0, routing=None)
    h.get_rope, h.get_lookahead = lambda layer: None, lambda layer: 0
    state: Any = SimpleNamespace(layer=0, kv_heads=1, key_dim=4, value_dim=3, window=None)
    network = {"attn_norm": (4,), "attn_output": (4, 6), "ffn_norm": (4,), "ffn_gate": (6, 4), "ffn_up": (6, 4),
               "ffn_down": (4, 6)}  # fmt: skip
    fused = mimo2.block(b, weights(**network, attn_qkv=(15, 4)), h, state, "x")
    apart = mimo2.block(b, weights(**network, attn_q=(8, 4), attn_k=(4, 4), attn_v=(3, 4)), h, state, "x")
    rows = {"attn_q": "attn_qkv", "attn_k": "attn_qkv[8:12]", "attn_v": "attn_qkv[12:15]"}
    for name, part in rows.items():
        assert f", {part})" in fused
        apart = apart.replace(f", {name})", f", {part})")
    assert fused == apart


def test_the_delta_rule_reads_strength_and_steps_from_one_or_two_matrices():
    b: Any = Teller()
    d: Any = SimpleNamespace(heads=6, key_heads=2)
    both = "linear(x, ssm_ba)"
    assert qwen35.compute_strengths_and_decays(b, weights(ssm_ba=(12, 4)), d, "x") == [
        f"slice_columns({both}, 0, 3, 6)", f"slice_columns({both}, 3, 6, 6)"
    ]  # fmt: skip
    apart = weights(ssm_beta=(6, 4), ssm_alpha=(6, 4))
    assert qwen35.compute_strengths_and_decays(b, apart, d, "x") == ["linear(x, ssm_beta)", "linear(x, ssm_alpha)"]


@pytest.mark.parametrize("family", [deepseek2, dots1, glm4, glm4moe, qwen35])
def test_mtp_layers_are_blocks_like_the_others(monkeypatch: pytest.MonkeyPatch, family: Any):
    monkeypatch.setattr(family, "apply_mtp_layer", lambda *given: given)
    assert family.draft("b", "w", "h", "made") == ("b", "w", "h", "made", family.block)


# ---- poolings


def pooling(kind: str, bidirectional: bool = True, has_gelu_classifier: bool = False) -> Any:
    before = Hyperparameters.classifier_pooling.fget(SimpleNamespace(bidirectional=bidirectional))
    return SimpleNamespace(
        pooling=kind, classifier_pooling=before, has_gelu_classifier=has_gelu_classifier, classifier_epsilon=0.25
    )


@pytest.mark.parametrize(("h", "shapes", "says", "ignored"), [
    (pooling("mean"), {"cls": (2, 4), "cls__bias": (2,), "cls__norm": (2,), "cls__output": (1, 2)}, "pool(x, mean)",
     ["cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight"]),
    (pooling("last"), {"dense_2": (3, 4), "dense_3": (5, 3)}, "linear(linear(pool(x, last), dense_2), dense_3)", []),
    (pooling("cls"), {"dense_3": (5, 4)}, "linear(pool(x, cls), dense_3)", []),
    (pooling("rank"), {"cls__output": (1, 4), "dense_2": (3, 4)}, "linear(pool(x, cls), cls.output)",
     ["dense_2.weight"]),
    (pooling("rank", False), {"cls__output": (1, 4)}, "linear(pool(x, last), cls.output)", []),
    (pooling("rank"), {"cls": (2, 4)}, "linear(pool(x, cls), cls)", []),
    (pooling("rank"), {"cls": (2, 4), "cls__output": (1, 2)},
     "linear(softcap(linear(pool(x, cls), cls), 1.0), cls.output)", []),
    (pooling("rank", has_gelu_classifier=True), {"cls": (2, 4), "cls__norm": (2,), "cls__output": (1, 2)},
     "linear(layer_norm(gelu_erf(linear(pool(x, cls), cls)), cls.norm, 0.25), cls.output)", []),
])  # fmt: skip
def test_pooling_applies_heads_and_ignores_their_unused_tensors(
    h: Any, shapes: dict[str, tuple[int, ...]], says: str, ignored: list[str]
):
    b: Any = Teller()
    assert pool_texts(b, weights(**shapes), h, "x") == says and b.ignored == ignored


def test_reranking_needs_a_head():
    with pytest.raises(ModelError, match=r"^the model has no tensor cls\.output\.weight$"):
        pool_texts(Teller(), weights(), pooling("rank"), "x")


def test_pooling_types_are_read_by_number():
    def read(number: int | None) -> str | None:
        fields: Any = SimpleNamespace(has=lambda name: number is not None, read_count=lambda name, least: number)
        fields.make_value_error = lambda name, expected: ModelError(f"{name} must be {expected}")
        return read_pooling(fields)

    assert [read(number) for number in (None, 0, 1, 2, 3, 4)] == [None, "none", "mean", "cls", "last", "rank"]
    with pytest.raises(ModelError, match=r"^pooling_type must be a number from 0 to 4$"):
        read(5)
    assert DENSE == ("dense_2", "dense_3")


# ---- tensors


def weight(*shape: int, format: str = "F32", bias: bool = False) -> Weight:
    return Weight(tensor("w", *shape, format=format), Weight(tensor("w.bias", shape[0])) if bias else None)


def test_matrices_of_encoders_are_transposed_and_flattened():
    turned = transpose(weight(2, 3))
    assert turned.shape == (3, 2) and turned.tensor.data.view(np.float32).tolist() == [[0, 3], [1, 4], [2, 5]]
    for wrong in (weight(3), weight(2, 3, format="I32")):
        with pytest.raises(ModelError, match=r"^tensor w must be a matrix of F32, F16 or BF16$"):
            transpose(wrong)
    assert to_matrix(weight(5, 3, 2, 2), 12).shape == (5, 12)
    for shape, columns in (((5, 3, 2, 2), 11), ((12,), 1)):
        with pytest.raises(ModelError, match=r"^tensor w must have rows of "):
            to_matrix(weight(*shape), columns)


def test_newline_embeddings_must_have_the_width_of_rows():
    whole = TilingRules(((2, 2),), True)
    for name in ("v.image_newline", "model.image_newline"):
        w = Weights({name: tensor(name, 3)})
        assert find_newline(w, TilingRules(), 3).name == name and get_newline_values(w, whole, 3).tolist() == [0, 1, 2]
        with pytest.raises(ModelError, match=r"must have the shape \[4\] \(found \[3\]\)"):
            find_newline(w, whole, 4)
    assert (
        find_newline(Weights({}), TilingRules(), 3) is None
        and get_newline_values(Weights({}), TilingRules(), 3).tolist() == [0] * 3
    )
    with pytest.raises(ModelError, match=r"^the model has no tensor v\.image_newline$"):
        find_newline(Weights({}), whole, 3)


@pytest.mark.parametrize(("merge", "says"), [(1, "x"), (2, "linear(x, mm.patch_merger)")])
def test_pixtral_merges_patches_before_projecting(merge: int, says: str):
    b: Any = Teller()
    shapes = {"mm.patch_merger.weight": (4, 16), "mm.1.weight": (4, 4), "mm.2.weight": (4, 4)}
    tensors = {name: tensor(name, *shape) for name, shape in shapes.items()}
    h: Any = SimpleNamespace(out=4, merge=merge)
    end = "v.token_embd.img_break"
    w = Weights({**tensors, end: tensor(end, 4)})
    assert project(b, w, h, "x") == f"linear(gelu_erf(linear({says}, mm.1)), mm.2)" and b.ignored == [end]
    with pytest.raises(ModelError, match=r"img_break must have 4 elements \(found the shape \[5\]\)$"):
        project(b, Weights({**tensors, end: tensor(end, 5)}), h, "x")


# ---- what is kept


def test_cache_sizes_follow_from_types_windows_and_states():
    assert [count_window_tokens(tokens, 8) for tokens in (7, 8 + 2 * SLACK, 9 + 2 * SLACK)] == [7, 1032, 1032]
    assert count_window_tokens(5000, None) == 5000
    full, mixed = KVType("f32", "f32"), KVType("q8_0", "f16")
    keys_and_values, latent = PagedState(0, 2, 64, 32), LatentState(1, 96, 64)
    assert (keys_and_values.count_bytes(10, full), keys_and_values.count_bytes(10, mixed)) == (
        10 * 2 * 4 * 96, 10 * 2 * (68 + 64)
    )  # fmt: skip
    assert PagedState(0, 2, 64, 32, window=8).count_bytes(5000, full) == 1032 * 2 * 4 * 96
    assert (latent.count_bytes(10, full), latent.count_bytes(10, mixed)) == (10 * 4 * 96, 10 * 102)
    assert LatentState(1, 96, 64, window=8).count_bytes(5000, full) == 1032 * 4 * 96
    states = RecurrentLayerState(2, ((3, 4), (5,)))
    assert states.count_bytes(1, full) == states.count_bytes(5000, mixed) == 4 * 17
    assert count_cache_bytes([keys_and_values, latent, states], 10, full) == 7680 + 3840 + 68
    assert (keys_and_values.chunked, keys_and_values.window, latent.is_index, latent.period, latent.window) == (
        False, None, False, 1, None
    )  # fmt: skip


def test_cache_rotations_follow_from_types_and_head_sizes():
    few, many = KVType("q4_0", "f16"), KVType("q4_1", "q4_0")
    assert (PagedState(0, 1, 96, 64).find_rotation_sizes(few), PagedState(0, 1, 96, 64).find_rotation_sizes(many)) == (
        (32, 1),
        (32, 64),
    )
    assert (LatentState(0, 96, 64).find_rotation_sizes(few), LatentState(0, 96, 64).find_rotation_sizes(KVType())) == (
        (32, 32),
        (1, 1),
    )


def test_hyperparameters_have_defaults():
    h = Hyperparameters("x", 2, 8, 9, 10)
    assert (h.mtp_layers, h.pooling, h.bidirectional, h.is_diffusion, h.has_gelu_classifier) == (
        0,
        None,
        False,
        False,
        False,
    )
    assert (h.row_width, h.classifier_pooling, h.encode, h.start_token, h.classifier_epsilon) == (
        8,
        "last",
        None,
        None,
        1e-5,
    )
    with pytest.raises(NotImplementedError):
        h.list_states()
