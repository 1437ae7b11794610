"""Test details of families beyond the goldens: golden models with other metadata or tensors."""

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from engines import bound
from models import write_model

from localllm.arch import ARCHITECTURES, load_architecture, load_family
from localllm.arch.metadata import HyperparameterReader
from localllm.arch.weights import Weights
from localllm.engine.engine import Engine
from localllm.engine.lower.activation import ALL, Activation
from localllm.engine.options import EngineOptions
from localllm.engine.trace.recorder import trace_model
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.quant.encode import encode
from localllm.quant.formats import BY_NAME

TOKENS = np.arange(40) * 7 % 250


@pytest.fixture
def golden(model_path) -> Callable[[str], GGUFFile]:
    return lambda name: GGUFFile.open(model_path(name))


def change(file: GGUFFile, **fields) -> GGUFFile:
    """Change metadata; keys come without the architecture's name, with __ for dots."""
    arch = file.metadata["general.architecture"]
    file.metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in fields.items()}
    return file


def encoded(name: str, values: np.ndarray, format: str) -> Tensor:
    values = values.astype(np.float32)
    data = values.view(np.uint8) if format == "F32" else encode(format, values)
    return Tensor(name, BY_NAME[format], values.shape, data.reshape(*values.shape[:-1], -1))


def put(file: GGUFFile, name: str, values: np.ndarray, format: str = "F32") -> None:
    tensor = encoded(name, np.atleast_1d(values), format)
    file.tensors[name] = replace(tensor, data=tensor.data.reshape(-1)) if len(tensor.shape) == 1 else tensor


def values(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    return np.asarray(tensor.data).reshape(-1).view(np.float32).reshape(tensor.shape)


def logits(file: GGUFFile, backend: str = "cpu", context: int = 128, steps: bool = False) -> np.ndarray:
    """Return the logits of TOKENS, computed in one run or one by one."""
    engine = Engine(file, EngineOptions(2, context, "f32", backend))
    sequence = engine.sequence()
    tokens = [[token] for token in TOKENS] if steps else [TOKENS]
    rows = [sequence.append(some, "all") for some in tokens]
    engine.close()
    return np.concatenate(rows)


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


def assert_same_everywhere(file: GGUFFile, most: float | None = None) -> None:
    """Check that both backends agree, in one run and token by token."""
    exact, most = logits(file, "reference"), most or bound(1e-10, in_tiles=1e-8)
    assert nmse(logits(file, "reference", steps=True), exact) < 1e-10
    assert nmse(logits(file), exact) < most
    assert nmse(logits(file, steps=True), exact) < most


# ---- fused matrices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "F16"])
def test_fused_matrices_equal_separate_ones(golden, format):
    """Fuse queries, keys and values, or gate and up, as rows of one matrix of any type."""
    fused, apart = golden("phi3_longrope"), golden("phi3_longrope")
    for layer in range(2):
        for name in ("attn_qkv", "ffn_up"):
            matrix = values(fused, f"blk.{layer}.{name}.weight")
            put(fused, f"blk.{layer}.{name}.weight", matrix, format)
            del apart.tensors[f"blk.{layer}.{name}.weight"]
            names, counts = (("attn_q", "attn_k", "attn_v"), (128, 64, 64)), (("ffn_gate", "ffn_up"), (64, 64))
            names, counts = names if name == "attn_qkv" else counts
            for part, rows in zip(names, np.split(matrix, np.cumsum(counts)[:-1]), strict=True):
                put(apart, f"blk.{layer}.{part}.weight", rows, format)
    np.testing.assert_array_equal(logits(fused), logits(apart))
    assert_same_everywhere(fused, most=1e-7)


def test_a_fused_matrix_of_other_rows_is_refused(golden):
    file = change(golden("phi3_longrope"), attention__head_count_kv=1)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_qkv\.weight must have 192 rows \(found 256\)"):
        logits(file)


# ---- positions ------------------------------------------------------------------------------------------------------


def test_longrope_factors_follow_the_context(golden):
    """Compare the context with the original one, 1024."""
    swapped = golden("phi3_longrope")
    kinds = [f"rope_factors_{kind}.weight" for kind in ("short", "long")]
    arrays = [values(swapped, name).copy() for name in kinds]
    for name, array in zip(kinds, reversed(arrays), strict=True):
        put(swapped, name, array)
    for backend in ("cpu", "reference"):
        short, long = (logits(golden("phi3_longrope"), backend, context) for context in (1024, 1025))
        assert nmse(long, short) > 1e-4
        np.testing.assert_array_equal(long, logits(swapped, backend, 1024))


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3"])
def test_missing_longrope_factors_are_refused(golden, name):
    file = change(golden(name), rope__scaling__type="longrope")
    with pytest.raises(ModelError, match="of longrope scaling are missing"):
        logits(file)
    if name == "phi3":
        put(file, "rope_factors_short.weight", np.ones(16))
        with pytest.raises(ModelError, match=r"no tensor rope_factors_long\.weight"):
            logits(file)


def test_positions_beyond_a_table_are_refused(golden):
    assert np.isfinite(logits(golden("gpt2"), context=128)).all()
    with pytest.raises(ModelError, match=r"must be at most 128, the positions of the model \(found 129\)"):
        logits(golden("gpt2"), context=129)


@pytest.mark.parametrize(("heads", "bias"), [(8, 8.0), (4, 4.0), (2, 16.0)])
def test_alibi_agrees_for_any_number_of_heads(golden, heads, bias):
    file = change(golden("mpt"), attention__head_count=heads, attention__head_count_kv=heads)
    assert_same_everywhere(change(file, attention__max_alibi_bias=bias))


def test_alibi_slopes_are_powers_of_two():
    from localllm.arch.families.mpt import compute_alibi_slopes

    assert compute_alibi_slopes(8, 8.0) == tuple(2.0**-i for i in range(1, 9))
    assert compute_alibi_slopes(12, 8.0)[8:] == (2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5)


def test_temperature_of_mistral_3_starts_behind_the_original_context(golden):
    plain, tempered = change(golden("mistral3"), attention__temperature_scale=0.0), golden("mistral3")
    plain, tempered = logits(plain), logits(tempered)
    assert nmse(plain[:16], tempered[:16]) < 1e-12
    assert nmse(plain[16:], tempered[16:]) > 1e-6


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, layers, defaults", [
    ("gemma3", 7, "wwwwwaw"), ("cohere2", 4, "wwwa"), ("olmo3", 4, "wwwa"), ("gemma2", 4, "wawa"),
])  # fmt: skip
def test_window_patterns_follow_the_metadata(golden, name, layers, defaults):
    def pattern(file):
        return "".join("w" if state.window else "a" for state in load_architecture(file)[1].list_states())

    file, key = golden(name), "attention__sliding_window_pattern"
    assert pattern(file) == defaults
    assert pattern(change(file, **{key: 2})) == ("wa" * layers)[:layers]
    assert pattern(change(file, **{key: 1})) == "a" * layers
    assert pattern(change(file, **{key: 0})) == "w" * layers
    layers_with_window = np.arange(layers) % 3 == 1
    assert pattern(change(file, **{key: layers_with_window})) == ("awa" * layers)[:layers]
    assert_same_everywhere(file)
    for wrong in (np.ones(layers + 1, bool), True, "wwa", -1, 2.0):
        with pytest.raises(ModelError, match="sliding_window_pattern"):
            pattern(change(file, **{key: wrong}))


def test_exaone_4_rotates_windowed_layers_only_if_there_are_any(golden):
    def ropes(file):
        h = load_architecture(file)[1]
        return [h.get_rope(layer) is not None for layer in range(h.layers)]

    assert ropes(golden("exaone4")) == [True, True]
    file = change(golden("exaone4"), attention__sliding_window=8, attention__sliding_window_pattern=2)
    assert ropes(file) == [True, False]
    assert_same_everywhere(file)


# ---- gemma 4 --------------------------------------------------------------------------------------------------------


def gemma4(file: GGUFFile, kinds: str, shared: int) -> GGUFFile:
    """Build a model of layers w and a, the last `shared` of which have no keys and values of their own."""
    sources = {"w": 0, "a": 2}
    layers = {
        f"blk.{layer}{name[5:]}": replace(tensor, name=f"blk.{layer}{name[5:]}")
        for layer, kind in enumerate(kinds)
        for name, tensor in file.tensors.items()
        if name.startswith(f"blk.{sources[kind]}.") and name.split(".")[2] not in ("inp_gate", "proj", "post_norm")
    }
    file.tensors = {name: t for name, t in file.tensors.items() if not name.startswith(("blk.", "per_layer"))} | layers
    change(file, block_count=len(kinds), embedding_length_per_layer_input=0, attention__shared_kv_layers=shared)
    return change(file, attention__sliding_window_pattern=np.array([kind == "w" for kind in kinds]))


def test_gemma_4_layers_may_share_keys_and_values(golden):
    """Check with and without their unused tensors in the file."""
    file = gemma4(golden("gemma4"), "wawwaw", 3)
    h = load_architecture(file)[1]
    assert [h.find_state(layer).layer for layer in range(6)] == [0, 1, 2, 2, 1, 2]
    assert_same_everywhere(file)
    expected = logits(file)
    for layer in (3, 4, 5):
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            del file.tensors[f"blk.{layer}.{name}.weight"]
    np.testing.assert_array_equal(logits(file), expected)
    with pytest.raises(ModelError, match="shared_kv_layers"):
        logits(gemma4(golden("gemma4"), "wwwa", 1))


def test_gemma_4_layers_without_values_use_their_keys(golden):
    file = golden("gemma4")
    for layer in range(3):
        del file.tensors[f"blk.{layer}.attn_v.weight"]
    assert_same_everywhere(file)


# ---- and more -------------------------------------------------------------------------------------------------------


def test_scales_of_matrices_equal_scaled_matrices(golden):
    """Use BitNet, whose matrices have scales."""
    file, scaled = golden("bitnet"), golden("bitnet")
    for layer in range(2):
        for name in ("attn_q", "attn_output", "ffn_gate", "ffn_down"):
            put(file, f"blk.{layer}.{name}.weight", 1.5 * values(file, f"blk.{layer}.{name}.weight"))
            put(scaled, f"blk.{layer}.{name}.scale", np.array([1.5]))
    assert nmse(logits(scaled), logits(file)) < bound(1e-10, in_tiles=1e-8)
    assert_same_everywhere(scaled)
    put(scaled, "blk.0.attn_q.scale", np.ones(2))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.scale must have one element"):
        logits(scaled)


def test_norms_of_heads_may_have_a_row_each(golden):
    """Use Command R+ and StableLM 12B, which have such norms."""
    file = golden("command_r")
    for layer in range(2):
        for name in ("attn_q_norm", "attn_k_norm"):
            weights = np.random.default_rng(layer).uniform(0.5, 2, (3, 32))
            put(file, f"blk.{layer}.{name}.weight", weights)
    assert_same_everywhere(file)


@pytest.mark.parametrize("name, extra", [("llama", "attn_norm.bias"), ("qwen2", "attn_sub_norm.weight")])
def test_tensors_without_a_meaning_are_refused(golden, name, extra):
    file = golden(name)
    for layer in range(file.metadata[f"{name}.block_count"]):
        put(file, f"blk.{layer}.{extra}", np.ones(file.metadata[f"{name}.embedding_length"]))
    with pytest.raises(ModelError, match=rf"blk\.0\.{extra} and .* more: not part of this architecture"):
        logits(file)


def test_a_softcap_of_0_does_not_limit_the_logits(golden):
    capped = logits(change(golden("muse_glimmer"), final_logit_softcapping=3.0), "reference")
    free = logits(change(golden("muse_glimmer"), final_logit_softcapping=0.0), "reference")
    assert np.abs(free).max() > 3
    np.testing.assert_allclose(capped, 3 * np.tanh(free / 3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_fused_bias_must_have_its_matrix_rows(golden, more):
    file = golden("gptneox")
    rows, _ = file.tensors["blk.0.attn_qkv.weight"].shape
    put(file, "blk.0.attn_qkv.bias", np.zeros(rows + more))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_qkv\.bias"):
        Weights(file.tensors).get_layer(0).attn_qkv.split(rows - 1, 1)


def refused(file, fields, problem):
    """Check that a file with these fields is refused with this message."""
    file.metadata |= {f"{file.metadata['general.architecture']}.{key}": value for key, value in fields.items()}
    with pytest.raises(ModelError, match=problem):
        load_architecture(file)


@pytest.mark.parametrize("name, fields, problem", [
    ("granite", {"expert_count": 4}, "expert_count is 4, but no layer has experts"),
    ("granite", {"logit_scale": 0.0}, "logit_scale must not be 0"),
    ("bitnet", {"hidden_act": "relu2"}, "hidden_act must be silu"),
    ("gptneox", {"use_parallel_residual": 1}, "must be true or false"),
    ("qwen2", {"attention.causal": False}, "bidirectional attention is not supported"),
    ("glm4", {"rope.dimension_sections": np.array([8, 4, 4])}, "sections must be four integers"),
    ("gemma4", {"attention.shared_kv_layers": 3}, "shared_kv_layers"),
    ("gemma4", {"attention.value_length_swa": 16}, "the key length"),
    ("qwen3", {"rope.scaling.type": "su"}, "rope scaling su"),
    ("baichuan_7b", {"block_count": 31}, "must be 32 or 40"),
    ("cogvlm", {"rope.freq_base": 5e5}, "whole heads with the base 10000"),
    ("deepseek2_ocr", {"rope.freq_base": 5e5}, "must have the base 10000"),
    ("qwen2vl", {"rope.dimension_sections": np.array([8, 8])}, "sections must be four integers"),
    ("hunyuan", {"rope.dimension_sections": np.array([4, 4, 4, 4])}, "dimension_sections is not supported in"),
    ("maincoder", {"rope.scaling.alpha": 2.0}, "rope.scaling.alpha is not supported in"),
    ("nanbeige", {"num_loops": 65}, "num_loops must be a number from 1 to 64"),
    ("muse_glimmer", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "must be linear or none"),
    ("step35", {"swiglu_clamp_exp": 0.1}, "each 0 or at least 0.3"),
    ("step35", {"rope.dimension_count_swa": 20}, "dimension_count_swa is not supported in"),
    ("laguna", {"attention.key_length_swa": 32}, "key_length_swa is not supported in"),
    ("granite_swa", {"deepstack_mapping": np.array([-1, 0, -1])}, "deepstack_mapping must name no layer"),
    ("granite_swa", {"attention.rope_pattern": np.array([1, 2, 1])}, "yes or no for each of 3 layers"),
    ("deci", {"attention.head_count_kv": np.array([3, 0, 0, 4, 0, 1])}, "must be divisible by attention.head_count_kv"),
    ("hunyuan", {"expert_count": 2}, "expert_count is 2, but no layer has experts"),
    ("bailingmoe3", {"kda.safe_gate": False}, "safe_gate must be true"),
    ("bailingmoe3", {"expert_gating_func": 3}, "expert_gating_func must be 1 or 2"),
    ("cogvlm", {"attention.head_count_kv": 1}, "must equal attention.head_count"),
    ("deci", {"attention.value_length": 8}, "value_length must equal attention.key_length"),
    ("deci", {"rope.dimension_count": 8}, "rope.dimension_count must be"),
    ("deepseek4", {"rope.scaling.type": "longrope"}, "rope scaling longrope is not supported"),
    ("dots3note", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "must be linear or none"),
    ("mimo2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "must be linear or none"),
    ("step35", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "this RoPE is not supported in"),
    ("qwen3", {"rope.scaling.type": "yarn"}, "rope.scaling.factor must be a positive number"),
    ("gemma3n", {"attention.shared_kv_layers": 100}, "must leave layers of both types"),
    ("gemma3n", {"altup.num_inputs": 5}, "altup.num_inputs must be 4"),
    ("gemma3n", {"altup.active_idx": 1}, "altup.active_idx must be 0"),
    ("gemma4", {"rope.dimension_count_swa": 500}, "rope.dimension_count_swa 500 must be even and at most"),
    ("gemma4", {"rope.dimension_count_swa": 3}, "rope.dimension_count_swa 3 must be even and at most"),
    ("gemma2", {"attention.sliding_window_pattern": np.array([True])}, "yes or no for each of 4 layers"),
    ("glm5_next", {"rope.dimension_count": 8}, "rope.dimension_count must be 0"),
    ("glm5_next", {"attention.indexer.kpool_select_tail": False}, "kpool_select_tail must be true"),
    ("kimi_k3", {"kda.gate_lower_bound": 0.5}, "a number from -1000 to 0"),
    ("kimi_k3", {"kda.gate_lower_bound": -1001.0}, "a number from -1000 to 0"),
    ("kimi_k3", {"activation.situ_linear_beta": 1.1e6}, "situ_linear_beta must be a number"),
    ("grok", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor must be"),
    ("grok", {"rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor must be 1"),
    ("hrm_text", {"hrm.h_cycles": 7}, "must equal the layers of 7 cycles of"),
    ("kimi_linear", {"expert_gating_func": 3}, "expert_gating_func must be 1 or 2"),
    ("kimi_linear", {"attention.key_length": 39}, "attention.key_length must be 64"),
    ("llama4", {"attention.sliding_window": 64}, r"sliding_window must be 8192 or 0 \(found 64\)"),
    ("minimax_m2", {"expert_gating_func": 3}, "expert_gating_func must be 1 or 2"),
    ("modern_bert", {"hidden_activation": "relu"}, "hidden_activation must be gelu or silu"),
    ("plamo2", {"ssm.group_count": 1}, "must be divisible by ssm.time_step_rank"),
    ("plamo2", {"attention.value_length": 8}, "value_length must equal attention.key_length"),
    ("bert", {"pooling_type": 5}, "pooling_type must be a number from 0 to 4"),
    ("qwen35", {"attention.recurrent_layers": np.array([True])}, "yes or no for each of 4 layers"),
    ("qwen35", {"attention.recurrent_layers": 4}, r"must be a list of layers \(found 4\)"),
    ("qwen4exp", {"ssm.state_size": 8}, "dimensions of the delta rule must be equal"),
    ("rwkv6", {"wkv.head_size": 7}, "is not divisible by the head size 7"),
    ("smallthinker", {"expert_gating_func": 3}, "expert_gating_func must be 1 or 2"),
    ("laguna", {"rope.dimension_count_swa": 500}, "dimension_count_swa must be even and at most"),
    ("laguna", {"rope.dimension_count_swa": 3}, "dimension_count_swa must be even and at most"),
    ("rwkv6qwen2", {"attention.head_count_kv": 5}, "6 heads are not divisible by attention.head_count_kv 5"),
])  # fmt: skip
def test_unsupported_metadata_of_families_is_refused(golden, name, fields, problem):
    refused(golden(name), fields, problem)


@pytest.mark.parametrize("name, fields, problem", [
    ("arctic", {"expert_count": 0}, r"expert_count must be a number from 1 to 16777216 \(found 0\)"),
    ("chameleon", {"vocab_size": 8195}, "at least 8196 tokens"),
    ("deepseek4", {"expert_count": 0}, "expert_count is missing"),
    ("graniteswitch", {"expert_count": 4, "expert_used_count": 2}, "expert_count must be 0"),
    ("llada", {"expert_count": 4, "expert_used_count": 2}, "expert_count must be 0 in llada models"),
    ("llada_moe", {"expert_count": 0}, "expert_count must be above 0 in llada-moe models"),
    ("minicpm", {"expert_count": 4}, r"expert_count must be 0 \(found 4\)"),
    ("minimax_01", {"expert_count": 0}, "expert_count is missing"),
])  # fmt: skip
def test_families_refuse_metadata_before_tensors_are_compared(golden, name, fields, problem):
    file = golden(name)
    arch, vocab = file.metadata["general.architecture"], fields.pop("vocab_size", 8496)
    read = import_module(f"localllm.arch.families.{ARCHITECTURES[arch]}").read
    read(HyperparameterReader(file.metadata, "m", 8496))
    with pytest.raises(ModelError, match=problem):
        read(
            HyperparameterReader(file.metadata | {f"{arch}.{key}": value for key, value in fields.items()}, "m", vocab)
        )


@pytest.mark.parametrize("name, fields, problem", [
    ("deepseek2_v3", {"attention.key_length_mla": 32}, "32 must exceed rope.dimension_count 32"),
    ("deepseek2_v3", {"attention.head_count_kv": 4}, "attention.head_count_kv be 1"),
    ("deepseek2_v3", {"attention.key_length": 95}, "key_length must be 96"),
    ("deepseek2_v3", {"attention.value_length": 63}, "value_length must be 64"),
    ("deepseek2_v3", {"expert_used_count": 9}, "expert_used_count 9 must be at most expert_count 8"),
    ("deepseek2_v3", {"expert_used_count": 5}, "is too small for 5 used experts"),
    ("deepseek2_v3", {"expert_group_count": 3}, "expert_group_count 3"),
    ("deepseek2_v3", {"expert_group_count": 8}, "expert_group_count 8"),
    ("deepseek2_v3", {"expert_group_used_count": 5}, "expert_group_used_count 5"),
    ("deepseek32", {"attention.indexer.key_length": 15}, "key_length 15 is too small for rope.dimension_count 16"),
    ("glm_dsa_shared", {"attention.indexer.types": np.array([0, 1, 1])}, "yes or no for each of 3 layers"),
    ("glm_dsa_shared", {"attention.indexer.types": np.array([1, 1])}, "yes or no for each of 3 layers"),
    ("deepseek4", {"attention.indexer.key_length": 16}, "16 must be below the head dimensions 32 and 16"),
    ("deepseek4", {"attention.head_count_kv": 2}, "16 must be below the head dimensions 32 and 64"),
    ("dots3note", {"attention.key_length_mla": 16}, "rope.dimension_count 16 must be below the key dimension, 16"),
    ("dots3note", {"attention.key_length_mla_swa": 16}, "rope.dimension_count 16 must be below the key dimension, 16"),
    ("glm5_next", {"attention.indexer.top_k": 13}, "top_k 13"),
    ("glm5_next", {"attention.indexer.kpool": 1}, "top_k 12"),
    ("grovemoe", {"experts_per_group": 3}, "8 must be divisible by experts_per_group 3"),
    ("kimi_linear", {"attention.key_length_mla": 16}, "16 must be even and below the key dimension 16"),
    ("kimi_linear", {"attention.head_count_kv": np.array([0, 0, 2, 0])}, "attention.head_count_kv 0 or 1"),
    ("kimi_linear", {"rope.dimension_count": 15}, "rope.dimension_count 15 must be even"),
    ("minimax_m3", {"attention.indexer.key_length": 15}, "key_length 15"),
    ("minimax_m3", {"attention.indexer.head_count": 2}, "head_count 2, key_length 24"),
    ("minimax_m3", {"attention.indexer.local_blocks": 5}, "local_blocks 5"),
    ("plm", {"attention.key_length": 16}, "16 must exceed rope.dimension_count 16"),
    ("plm", {"attention.head_count_kv": 2}, "attention.head_count_kv be 4"),
    ("qwen4exp", {"attention.indexer.key_length": 15}, "key_length 15 is too small for rope.dimension_count 16"),
    ("qwen4exp", {"attention.indexer.top_k": 130, "attention.compress_ratios": np.array([0, 0, 0, 65])},
     "compress_ratios must be integers from 0 to 64 that divide 130"),
    ("qwen4exp", {"attention.indexer.top_k": 129, "attention.compress_ratios": np.array([0, 0, 0, 64])},
     "that divide 129"),
    ("glm5_next", {"hyper_connection.count": 17}, "hyper_connection.count must be at most 16"),
    ("glm5_next", {"hyper_connection.sinkhorn_iterations": 1001}, "and sinkhorn_iterations at most 1000"),
])  # fmt: skip
def test_sizes_that_contradict_each_other_are_refused(golden, name, fields, problem):
    refused(golden(name), fields, problem)


def test_the_largest_consistent_sizes_are_accepted(golden):
    keys = {"attention__indexer__top_k": 128, "attention__compress_ratios": np.array([0, 0, 0, 64])}
    blocks = load_architecture(change(golden("qwen4exp"), **keys))[1].blocks
    assert (blocks.tokens, [*blocks.sizes]) == (128, [0, 0, 0, 64])
    keys = {"hyper_connection__count": 16, "hyper_connection__sinkhorn_iterations": 1000}
    streams = load_architecture(change(golden("glm5_next"), **keys))[1].streams
    assert (streams.count, streams.iterations) == (16, 1000)


def test_deci_layers_without_feed_forward_are_skipped(golden):
    """Skip them as llama.cpp does, even if the file has their attention's tensors."""
    file = golden("deci")
    assert [state.layer for state in load_architecture(file)[1].list_states()] == [0, 5]
    assert_same_everywhere(file)


def test_layers_that_run_twice_have_two_states(golden):
    states = load_architecture(golden("nanbeige"))[1].list_states()
    assert [state.layer for state in states] == [0, 1, 2, 3]


@pytest.mark.parametrize("name, still", [("qwen2vl", range(12, 16)), ("qwen3vl", (9, 12, 14, 15))])
def test_pairs_without_an_axis_are_not_rotated(golden, name, still):
    """Assign 3, 5 and 4 of 16 pairs to the axes of an image, in sequence or interleaved."""
    assert load_architecture(golden(name))[1].attention.rope.unrotated == tuple(still)


OF_EXPERTS = "gate_inp", "gate_exps", "up_exps", "down_exps"

# Biases that a model must have: without one it would be another model, and nothing would tell.
BIASES = {
    "afmoe": ["exp_probs_b"], "bailingmoe3": ["exp_probs_b"], "bloom": ["token_embd_norm", "output_norm"],
    "deepseek32": ["indexer.k_norm"], "glm4moe": ["exp_probs_b"],
    "glm5_next": ["indexer.k_norm", "ssm_dt", "exp_probs_b"],
    "gpt_oss": [f"{name}" for name in ("attn_output", *(f"ffn_{of}" for of in OF_EXPERTS))],
    "kimi_k3": ["ssm_dt", "exp_probs_b"], "kimi_linear": ["ssm_dt", "exp_probs_b"],
    "mamba": ["ssm_conv1d", "ssm_dt"], "mamba2": ["ssm_conv1d", "ssm_dt"],
    "minimax_m2": ["exp_probs_b"], "minimax_m3": ["exp_probs_b"],
    "nemotron_h_moe": ["exp_probs_b"], "phi2": ["output"], "plamo2": ["ssm_dt"], "qwen35": ["ssm_dt"],
    "phimoe": ["output", "output_norm", "attn_norm", "attn_output", "ffn_norm"],
    "rwkv6": ["token_embd_norm", "attn_norm", "attn_norm_2", "time_mix_ln"],
    "rwkv7": ["time_mix_ln"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "bias"), [(name, bias) for name, biases in BIASES.items() for bias in biases])
def test_missing_biases_are_refused(golden, name, bias):
    """Remove them from all layers; a file in which only some layers lack one is refused by another check."""
    file = golden(name)
    its_name = rf"(blk\.\d\.)?{re.escape(bias)}\.bias"
    for tensor in [each for each in file.tensors if re.fullmatch(its_name, each)]:
        del file.tensors[tensor]
    module, h = load_architecture(file)
    with pytest.raises(ModelError, match=f"the model has no tensor {its_name}$"):
        trace_model(file, module.forward, Weights(file.tensors), h, 128)


# Others that a model must have, though verbs could do without them.
NEEDED = {
    "output.weight": ["apertus", "gptneox", "jais", "maple", "mimo2", "nemotron", "stablelm", "step35", "talkie"],
    "ssm_norm.weight": ["granitehybrid", "nemotron_h"],
}


@pytest.mark.parametrize(("name", "lost"), [(name, lost) for lost, names in NEEDED.items() for name in names])
def test_missing_tensors_are_refused(golden, name, lost):
    file = golden(name)
    file.tensors = {
        each: tensor for each, tensor in file.tensors.items() if not re.fullmatch(rf"(blk\.\d+\.)?{lost}", each)
    }
    module, h = load_architecture(file)
    with pytest.raises(ModelError, match=rf": the model has no tensor (blk\.\d+\.)?{lost}$"):
        trace_model(file, module.forward, Weights(file.tensors), h, 128)


def trace_operations(file) -> list:
    """Return a family's operations for a file, without comparing its tensors with metadata."""
    arch = file.metadata["general.architecture"]
    module = load_family(arch)
    h = module.read(HyperparameterReader(file.metadata, file.path, file.tensors["token_embd.weight"].shape[0]))
    return trace_model(file, module.forward, Weights(file.tensors), h, 128).operations


@pytest.mark.parametrize(("name", "key", "verb", "counts"), [
    ("dbrx", "attention.clamp_kqv", "clamp", (0, 6)), ("olmo", "attention.clamp_kqv", "clamp", (0, 6)),
    ("mpt", "attention.clamp_kqv", "clamp", (0, 6)), ("gemma2", "final_logit_softcapping", "softcap", (0, 1)),
    ("gemma3", "final_logit_softcapping", "softcap", (0, 1)),
    ("muse_glimmer", "final_logit_softcapping", "softcap", (0, 1)),
])  # fmt: skip
def test_clamps_and_softcaps_are_applied_only_if_given(golden, name, key, verb, counts):
    for limit, count in zip((0.0, 3.0), counts, strict=True):
        file = change(golden(name), **{key.replace(".", "__"): limit})
        limited = [each for each in trace_operations(file) if each.verb == verb]
        assert len(limited) == count and all(3.0 in each.numbers.values() for each in limited)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_softcaps_of_attention_follow_the_metadata(golden, name):
    for limit in (0.0, 2.0):
        file = change(golden(name), attn_logit_softcapping=limit)
        scores = [each.softcap for each in trace_operations(file) if each.verb == "attend"]
        assert scores and set(scores) == {limit}


@pytest.mark.parametrize("name", ["gemma3n", "glm5_next", "hy_v4", "deepseek4", "llama"])
def test_mtp_layers_are_skipped_if_their_input_matrix_fits(golden, name):
    """Turn the last layer into an MTP layer."""
    file = golden(name)
    last = file.metadata[f"{file.metadata['general.architecture']}.block_count"] - 1
    width = file.tensors["token_embd.weight"].shape[-1]
    change(file, nextn_predict_layers=1)
    if name == "hy_v4":  # which has a list of the others
        change(file, attention__indexer__types=file.metadata["hy_v4.attention.indexer.types"][:last])
    matrix = f"blk.{last}.nextn.eh_proj.weight"
    with pytest.raises(ModelError, match=re.escape(f"has no tensor {matrix}")):
        trace_operations(file)
    put(file, matrix, np.ones((width, width)))
    with pytest.raises(ModelError, match=re.escape(f"{matrix} must have the shape [{width}, {2 * width}]")):
        trace_operations(file)
    put(file, matrix, np.ones((width, 2 * width)))
    assert trace_operations(file)


def test_biases_of_image_experts_are_accepted(golden):
    file = golden("deepseek4")
    for name in [name for name in file.tensors if name.endswith("ffn_gate_inp.weight")]:
        put(file, name.replace("ffn_gate_inp.weight", "exp_probs_b_vl.bias"), np.ones(file.tensors[name].shape[0]))
    assert trace_operations(file)


@pytest.mark.parametrize(("name", "tensor", "problem"), [
    ("graniteswitch", "blk.0.attn_q.lora_a", "must have the shape"),
    ("graniteswitch", "blk.0.attn_q.lora_b", "must have the shape"),
    ("qwen4exp", "per_layer_token_embd.weight", "must have rows of "),
    ("jamba", "blk.1.ssm_dt_norm.weight", "ssm_dt_norm"),
])  # fmt: skip
def test_tensors_of_other_sizes_are_refused(golden, name, tensor, problem):
    file = golden(name)
    shape = file.tensors[tensor].shape
    if len(shape) == 1:
        del file.tensors[tensor]
    else:
        put(file, tensor, np.ones((*shape[:-1], shape[-1] + 32)))
    with pytest.raises(ModelError, match=problem):
        trace_operations(file)


def test_decay_slopes_of_minimax_depend_on_the_layer(golden):
    from localllm.arch.families import minimax_01

    file = golden("minimax_01")
    h: Any = load_architecture(file)[1]
    for layers in (1, 2, 5):
        of_layers = replace(h, layers=layers, attention=replace(h.attention, heads=(4,) * layers))
        for layer in range(layers):
            slower = 1 - (layer / (layers - 1) if layers > 1 else 0) + 1e-5
            assert minimax_01.MiniMax01Hyperparameters.compute_slopes(of_layers, layer) == [
                slower * 2.0 ** (-2 * n) for n in (1, 2, 3, 4)
            ]


@pytest.mark.parametrize("lost", ["ffn_gate_inp.scale", "ffn_down_exps.scale"])
def test_gemma_4_needs_scales_of_its_experts(golden, lost):
    file = golden("gemma4_experts")
    file.tensors = {name: tensor for name, tensor in file.tensors.items() if not name.endswith(lost)}
    module, h = load_architecture(file)
    with pytest.raises(ModelError, match=r"ffn_gate_inp\.weight and blk\.0\.ffn_down_exps\.weight must have a scale$"):
        trace_model(file, module.forward, Weights(file.tensors), h, 128)


@pytest.mark.parametrize(("experts", "normed"), [(127, True), (128, False), (129, True)])
def test_only_llama_4_with_128_experts_does_not_normalize_queries(tmp_path, experts, normed):
    path = write_model("llama4", tmp_path / "model.gguf", expert_hidden=32, experts=experts)
    assert load_architecture(GGUFFile.open(path))[1].normed is normed


@pytest.mark.parametrize(("context", "choosing"), [(2**20 - 1, range(7)), (2**20, (0, 1, 2, 6))])
def test_glm_has_an_indexer_in_every_fourth_layer_of_long_contexts(tmp_path, context, choosing):
    """Accept a file that lists the layers with an indexer, too."""
    file = GGUFFile.open(write_model("glm_dsa", tmp_path / "model.gguf", layers=7))
    assert load_architecture(change(file, context_length=context))[1].indexer.layers == tuple(choosing)


def test_queries_of_llama_4_grow_by_0_1_of_the_logarithm(golden):
    file = golden("llama4")
    module, h = load_architecture(file)
    operations = trace_model(file, module.forward, Weights(file.tensors), h, 128).operations
    tempered = [operation for operation in operations if operation.verb == "scale_by_position"]
    assert tempered and all((each.slope, each.length) == (0.1, 8192) for each in tempered)


def test_granite_treats_missing_and_zero_scales_as_1(golden):
    """Rotate positions unless the file says otherwise."""
    file = golden("granite")
    assert load_architecture(file)[1].get_rope(0) is not None
    assert load_architecture(change(file, rope__scaling__finetuned=False))[1].get_rope(0) is None
    for trace_operations in (0.0, None):
        file = golden("granite")
        for key in ("embedding_scale", "residual_scale", "attention.scale"):
            del file.metadata[f"granite.{key}"]
            file.metadata |= {} if trace_operations is None else {f"granite.{key}": trace_operations}
        h = load_architecture(file)[1]
        assert (h.embedding_scale, h.residual_scale, h.scale) == (1.0, 1.0, h.attention.head_dim**-0.5)
        assert h.get_rope(0) is not None and not h.has_shared


def test_previous_tokens_must_have_the_columns_of_their_state(golden):
    module, h = load_architecture(file := golden("rwkv6"))
    recorder = trace_model(file, module.forward, Weights(file.tensors), h, 128)
    state = h.list_states()[0]
    with pytest.raises(ModelError, match=r"x must have 96 columns \(found 3\)"):
        recorder.previous(Activation(ALL, 3), state, 1)
