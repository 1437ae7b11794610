"""Test that redundant metadata must agree, and the range of every key, from both sides."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from localllm.arch.metadata import NO_LIMIT as MOST
from localllm.arch.metadata import HyperparameterReader, require_agreement, require_types
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.metadata_reader import is_number


class Shaped(NamedTuple):
    name: str
    shape: tuple[int, ...]


DENSE = {"token_embd.weight": (50, 8), **{f"blk.{n}.{name}": shape for n in range(4) for name, shape in {
    "attn_k.weight": (4, 8), "attn_v.weight": (6, 8), "ffn_down.weight": (8, 16)}.items()}}  # fmt: skip
HEADS = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 2,
    "attention.value_length": 3,
}
PLAIN = {"block_count": 4, "embedding_length": 8, "feed_forward_length": 16, **HEADS}
ROUTED = {"ffn_gate_inp.weight": (5, 8), "ffn_down_exps.weight": (5, 8, 12), "ffn_down_shexp.weight": (8, 24)}
MIXED = {**{name: shape for name, shape in DENSE.items() if "ffn" not in name or name.startswith("blk.0")},
         **{f"blk.{n}.{name}": shape for n in range(1, 4) for name, shape in ROUTED.items()}}  # fmt: skip
EXPERTS = {**PLAIN, "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 12,
           "expert_shared_count": 2, "leading_dense_block_count": 1}  # fmt: skip


def fields_of(metadata: dict[str, Any], arch: str = "llama") -> HyperparameterReader:
    named = {f"{arch}.{key}": value for key, value in metadata.items() if value is not None}
    return HyperparameterReader({"general.architecture": arch, **named}, "model.gguf", 50)


def refusal(metadata: dict[str, Any], shapes: dict[str, tuple[int, ...] | None], arch: str = "llama") -> str:
    """Return why metadata and tensors do not agree; "" if they do."""
    tensors = {name: Shaped(name, shape) for name, shape in shapes.items() if shape is not None}
    try:
        require_agreement(fields_of(metadata, arch), tensors)
    except ModelError as error:
        return str(error).removeprefix("model.gguf: llama.")
    return ""


def test_consistent_metadata_are_accepted():
    assert refusal(PLAIN, DENSE) == refusal(EXPERTS, MIXED) == refusal({**PLAIN, "embedding_length": 7}, {}) == ""
    by_layer = {**PLAIN, "feed_forward_length": np.array([16] * 4, np.int32)}
    assert refusal(by_layer, DENSE) == ""
    less = {name: shape for name, shape in DENSE.items() if "attn_" not in name}  # of layers that do not attend, say
    assert refusal(PLAIN, less) == ""
    assert refusal({**PLAIN, "embedding_length": 9}, {**DENSE, "token_embd.weight": None}) == ""


@pytest.mark.parametrize(("changes", "key"), [
    ({"embedding_length": 9}, "embedding_length 9"), ({"attention.key_length": 3}, "attention.key_length 3"),
    ({"attention.value_length": 2}, "attention.value_length 2"),
    ({"attention.head_count_kv": 3}, "attention.key_length 2"),
    ({"attention.head_count_kv": None}, "attention.key_length 2"),
    ({"feed_forward_length": 15}, "feed_forward_length 15"),
    ({"feed_forward_length": np.array([16, 16, 16, 8], np.int32)}, "feed_forward_length"),
    ({"expert_used_count": 2}, "expert_used_count is 2, but llama.expert_count is 0"),
    ({"expert_shared_count": 1}, "expert_shared_count"), ({"expert_count": 2}, "expert_count is 2, but no layer"),
    ({"attention.q_lora_rank": 4}, "attention.q_lora_rank is 4, but the tensor blk.0.attn_q_a.weight is missing"),
    ({"nextn_predict_layers": 5}, "nextn_predict_layers is 5, but there are only 4 layers"),
    ({"leading_dense_block_count": 5}, "leading_dense_block_count is 5, but there are only 4 layers"),
    ({"interleave_moe_layer_step": 5}, "interleave_moe_layer_step is 5, but there are only 4 layers"),
])  # fmt: skip
def test_metadata_that_contradict_the_tensors_are_refused(changes: dict[str, Any], key: str):
    assert key in refusal({**PLAIN, **changes}, DENSE)


@pytest.mark.parametrize("changes", [
    {"attention.key_length": 3, "attention.key_length_mla": 2}, {"attention.key_length": 3,
    "attention.key_length_swa": 2},
    {"attention.key_length": None, "attention.value_length": None}, {"expert_used_count": 0, "expert_count": 0},
    {"nextn_predict_layers": 0}, {"leading_dense_block_count": 4}, {"attention.q_lora_rank": 0},
])  # fmt: skip
def test_harmless_differences_are_accepted(changes: dict[str, Any]):
    assert refusal({**PLAIN, **changes}, DENSE) == ""


@pytest.mark.parametrize(("changes", "shapes", "key"), [
    ({"expert_feed_forward_length": 13}, {}, "expert_feed_forward_length 13"),
    ({"expert_count": 6}, {}, "expert_count 6"),
    ({"expert_shared_count": 3}, {}, "expert_shared_count 3"),
    ({"expert_shared_count": 1}, {}, "expert_shared_count 1"),
    ({"expert_shared_feed_forward_length": 23}, {}, "expert_shared_feed_forward_length 23"),
    ({"leading_dense_block_count": 2}, {}, "leading_dense_block_count is 2, but layer 1 has experts"),
    ({"leading_dense_block_count": 0}, {}, "leading_dense_block_count is 0, but layer 0 has no experts"),
    ({"interleave_moe_layer_step": 2}, {}, "interleave_moe_layer_step is 2, but layer 2 has experts"),
    ({}, {f"blk.{n}.ffn_down_shexp.weight": None for n in range(1, 4)},
     "expert_shared_count is 2, but the tensor blk.1."),
    ({"expert_feed_forward_length": None, "expert_shared_count": None}, {}, "feed_forward_length 16"),
    ({}, {"blk.3.ffn_gate_inp.weight": (6, 8)}, "expert_count 5"),
    ({}, {"blk.3.ffn_down_exps.weight": ()}, "expert_feed"),
])  # fmt: skip
def test_expert_metadata_that_contradict_the_tensors_are_refused(
    changes: dict[str, Any], shapes: dict[str, tuple[int, ...] | None], key: str
):
    assert key in refusal({**EXPERTS, **changes}, {**MIXED, **shapes})


def test_mtp_dense_and_windowed_expert_layers_are_accepted():
    assert refusal({**EXPERTS, "expert_shared_feed_forward_length": 24, "expert_shared_count": 1}, MIXED) == ""
    guessing = {name: shape for name, shape in MIXED.items() if not name.startswith("blk.3.ffn")}
    assert refusal({**EXPERTS, "nextn_predict_layers": 1}, guessing) == ""
    assert "layer 3 has no experts" in refusal(EXPERTS, guessing)
    every_second = {name: shape for name, shape in MIXED.items() if not name.startswith("blk.2.ffn")}
    assert refusal({**EXPERTS, "leading_dense_block_count": None, "interleave_moe_layer_step": 2}, every_second) == ""
    early = {**DENSE, "blk.1.ffn_down.0.weight": (8, 16)}  # an old file has a matrix for each expert
    assert refusal({**PLAIN, "expert_count": 2}, early) == ""
    swa = {
        **EXPERTS,
        "expert_shared_count": None,
        "expert_feed_forward_length": 13,
        "expert_feed_forward_length_swa": 12,
    }
    assert refusal(swa, MIXED) == ""


@pytest.mark.parametrize(("arch", "changes", "agrees"), [
    ("qwen", {"feed_forward_length": 32}, True), ("qwen", {}, False), ("qwen", {"feed_forward_length": 33}, True),
    ("hunyuan-dense", {"expert_count": 1, "expert_used_count": 1}, True),
    ("hunyuan-dense", {"expert_used_count": 1}, True),
    ("hunyuan-dense", {"expert_count": 2}, False), ("granitehybrid", {"expert_used_count": 2}, True),
    ("deepseek2", {"expert_shared_count": 2}, True), ("llama", {"expert_group_count": 2}, False),
])  # fmt: skip
def test_families_with_other_conventions_are_checked_by_theirs(arch: str, changes: dict[str, Any], agrees: bool):
    assert (refusal({**PLAIN, **changes}, DENSE, arch) == "") == agrees


def test_deepseek_and_granite_reject_inconsistent_shared_experts():
    shared = {**EXPERTS, "expert_shared_count": 3}
    assert "expert_shared_count" in refusal(shared, MIXED, "deepseek2") and refusal(EXPERTS, MIXED, "deepseek2") == ""
    few = {name: shape for name, shape in MIXED.items() if not name.endswith("shexp.weight")}
    assert "but the tensor blk.1." in refusal(EXPERTS, few, "granitehybrid")


def test_arctic_stores_the_experts_length_as_feed_forward_length():
    metadata = {**EXPERTS, "feed_forward_length": 12, "expert_feed_forward_length": None, "expert_shared_count": None}
    both = {**DENSE, **{f"blk.{n}.{name}": shape for n in range(1, 4) for name, shape in ROUTED.items()}}
    assert refusal(metadata, both, "arctic") == "" and "feed_forward_length 12" in refusal(metadata, both)


# ---- kinds


def kept(arch: str = "llama", **values: Any) -> str:
    """Return why a hyperparameter is refused, or ""; two underscores are a dot."""
    try:
        require_types(
            fields_of({"block_count": 2, **{key.replace("__", "."): value for key, value in values.items()}}, arch)
        )
    except ModelError as error:
        assert isinstance(error, UnsupportedError) == ("must be true:" in str(error))
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "fine", "wrong"), [
    ("expert_used_count", [0, 5, MOST], [-1, MOST + 1, True, 1.0, "5", np.array([1, 1])]),
    ("feed_forward_length", [0, MOST, np.array([1, 2])], [-1, np.array([1]), np.array([1, 2, 3]), np.array([1, -1])]),
    ("attention__layer_norm_rms_epsilon", [1e-20, 1e-5, 0.1], [0.0, 0.11, -1e-5, 0.9e-20, "x", float("nan")]),
    ("rope__freq_base", [1.0, 10000, 1e12], [0.99, 0.0, 1.1e12, -1.0, True]),
    ("rope__scaling__factor", [1e-3, 1e6, 1], [0.0, 0.9e-3, 1.1e6]),
    ("logit_scale", [0.0, 1e-6, 1e6], [0.9e-6, 1.1e6, -1.0, "1"]), ("expert_weights_norm", [True, False], [1, 0, "x"]),
    ("attention__recurrent_layers", [0, 3, np.array([True, False]), np.array([0, 1])],
     [-1, np.array([0, 2]), np.array([1]), np.array([0.0, 1.0])]),
    ("attention__sliding_window_pattern", [6, np.array([1, 0])], [np.array([-1, 0]), "x"]),
    ("rope__scaling__type", ["none", "linear", "yarn", "longrope"], ["ntk", 3]), ("tensor_data_layout", ["x"], [5]),
    ("rope__dimension_sections", [np.array([1, 2, 0, MOST]), np.array([1])],
     [np.array([1, 1, 1, 1, 1]), np.array([-1]), np.array([MOST + 1]), np.array([1.0]), 5]),
    ("unheard_of", [1.5, "x", -1, np.array([1.0])], [float("inf"), np.array([1.0, np.nan])]),
    ("activation_sparsity_scale", [np.array([-np.inf, 1.0])], []),
])  # fmt: skip
def test_every_key_accepts_its_range_only(name: str, fine: list[Any], wrong: list[Any]):
    for value in fine:
        assert kept(**{name: value}) == "", value
    for value in wrong:
        assert name.replace("__", ".") in kept(**{name: value}) or f"rope scaling {value}" in kept(**{name: value}), (
            value
        )


def test_only_encoders_may_attend_to_later_tokens():
    assert kept(attention__causal=True) == kept("bert", attention__causal=False) == ""
    assert "bidirectional attention is not supported in llama models" in kept(attention__causal=False)


def test_values_must_be_normal_float32_or_zero():
    tiny = float(np.finfo(np.float32).tiny)
    assert is_number(0.0) and is_number(tiny) and is_number(3e38)
    assert (
        not is_number(tiny / 2) and not is_number(-1.0) and not is_number(float("inf")) and not is_number(float("nan"))
    )
