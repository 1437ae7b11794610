"""Reading a checkpoint's config.json: every kind of value from both sides, and how positions are rotated."""

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import write_safetensors

from localllm.arch import ARCHITECTURES
from localllm.arch.checkpoint import CheckpointDeclaration
from localllm.convert import files, folder, safetensors_files, sentence_transformers
from localllm.convert.clip import read_vocabulary
from localllm.convert.config import CheckpointConfig
from localllm.convert.families.cohere import mark_windows_beyond_dense
from localllm.convert.families.exaone import mark_exaone4_windows
from localllm.convert.families.llama import stack_head_norms
from localllm.convert.records import find_family, load_records, make_family
from localllm.convert.rope_scaling import (
    RopeScaling,
    compute_llama3_factors,
    find_rope_parameters,
    read_rope,
    read_sections,
    read_yarn,
)
from localllm.convert.sentencepiece import parse_message, parse_varint
from localllm.convert.tensor_mapping import CheckpointTensor
from localllm.convert.transforms import from_array
from localllm.errors import ModelError
from localllm.quant.formats import BY_NAME
from localllm.quant.recipes import find_recipe

KINDS = ("linear", "yarn", "llama3", "longrope")


def config(**content: Any) -> CheckpointConfig:
    return CheckpointConfig(content, Path("config.json"))


def refused(read: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ModelError, match=r"^config\.json: ") as error:
        read(*arguments, **named)
    return str(error.value).removeprefix("config.json: ")


# ---- values


def test_count_reads_whole_numbers_and_refuses_others():
    settings = config(a=1, b=5, null=None, zero=0, flag=True, text="7", real=2.0)
    assert (
        settings.read_count("a"),
        settings.read_count("b", maximum=5),
        settings.read_count("missing", 0),
        settings.read_count("null", 9),
    ) == (1, 5, 0, 9)
    assert settings.read_count("zero", 0) == 0  # as good as silence
    for name in ("zero", "flag", "text", "real", "missing"):
        assert refused(settings.read_count, name).startswith(f"{name} must be an integer from 1 to ")
    assert refused(settings.read_count, "b", maximum=4) == "b must be an integer from 1 to 4 (found 5)"


def test_number_reads_positive_numbers_and_refuses_others():
    settings = config(a=1, b=0.5, zero=0.0, minus=-1.0, flag=True, huge=1e38, text="1", null=None)
    assert (settings.read_number("a"), settings.read_number("b"), settings.read_number("null", 2.5)) == (1.0, 0.5, 2.5)
    for name in ("zero", "minus", "flag", "huge", "text", "missing"):
        assert refused(settings.read_number, name).startswith(f"{name} must be a positive number")
    assert config(x=[1, 2.5]).read_numbers("x", 2) == [1.0, 2.5]
    for odd in ([1], [1, 2, 3], 5, None):
        assert refused(config(x=odd).read_numbers, "x", 2) == "x must be a list of 2 numbers"
    assert refused(config(x=[1, 0]).read_numbers, "x", 2) == "x must be a positive number (found 0)"


def test_flags_and_choices_refuse_other_values():
    settings = config(yes=True, no=False, one=1, null=None, act="silu")
    assert (
        settings.read_flag("yes"),
        settings.read_flag("no", True),
        settings.read_flag("null"),
        settings.read_flag("missing", True),
    ) == (
        True,
        False,
        False,
        True,
    )
    assert refused(settings.read_flag, "one") == "one must be true or false (found 1)"
    settings.require_value("act", "gelu", "silu")
    settings.require_value("null", "gelu")
    settings.require_value("missing")
    assert refused(settings.require_value, "act", "gelu") == 'act must be "gelu" (found "silu")'


def test_sections_are_objects_and_updates_leave_the_original():
    settings = config(a=1, inner={"b": 2}, odd=[], null=None)
    assert (
        settings.get_section("inner").read_count("b") == 2
        and settings.get_section("null").content == settings.get_section("none").content == {}
    )
    assert refused(settings.get_section, "odd") == "odd must be an object"
    updated = settings.update(a=3, c=4)
    assert (updated.read_count("a"), updated.read_count("c"), settings.read_count("a")) == (
        3,
        4,
        1,
    ) and updated.warnings is settings.warnings


def test_text_config_takes_precedence_except_for_tying():
    both = config(a=1, tie_word_embeddings=False, text_config={"a": 2, "tie_word_embeddings": True}).merge_text_config(
        {"a": 9, "b": 8}
    )
    assert (both.read_count("a"), both.read_count("b"), both.read_flag("tie_word_embeddings")) == (2, 8, False)
    inner = config(text_config={"tie_word_embeddings": True}).merge_text_config({})
    assert inner.read_flag("tie_word_embeddings")


def test_the_first_architecture_counts():
    assert config(architectures=["A", "B"]).architecture == "A"
    for odd in ({}, {"architectures": []}, {"architectures": "A"}, {"architectures": [5]}):
        assert config(**odd).architecture == ""


def test_windows_must_lie_in_the_usual_layers():
    types = ["sliding_attention", "full_attention"]
    config(layer_types=types).require_windows([True, False])
    config().require_windows([True])
    for expected in ([False, True], [True], [True, False, True]):
        assert "sliding_attention in the usual layers only" in refused(
            config(layer_types=types).require_windows, expected
        )


# ---- rotations


def rope(kinds: tuple[str, ...] = KINDS, dims: int = 8, context: int = 4096, **content: Any) -> RopeScaling:
    return read_rope(config(**content), dims, context, kinds)


def test_rotations_without_scaling_have_a_base_only():
    assert rope().metadata == {"freq_base": 10000.0} and rope(rope_theta=5e5).metadata == {"freq_base": 5e5}
    assert rope(rope_scaling={"type": "default", "factor": 4.0}).metadata == {"freq_base": 10000.0}
    assert "llama3, longrope (found dynamic)" in refused(rope, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert rope(rope_theta=1e4, rope_parameters={"rope_theta": 2e4}).metadata == {"freq_base": 2e4}
    assert refused(rope, rope_theta=0).startswith("rope_theta must be")


def test_rope_parameters_are_read_from_new_and_old_places():
    inner = {"rope_theta": 7.0, "rope_type": "linear"}
    assert (
        find_rope_parameters(config(rope_parameters={"full_attention": inner, "sliding_attention": {}})).get(
            "rope_theta"
        )
        == 7.0
    )
    old = find_rope_parameters(
        config(rope_scaling={"type": "linear"}, partial_rotary_factor=0.5, original_max_position_embeddings=64)
    )
    assert (old.get("type"), old.get("partial_rotary_factor"), old.get("original_max_position_embeddings")) == (
        "linear",
        0.5,
        64,
    )


def test_an_unsupported_rope_scaling_type_is_refused():
    linear = {"rope_type": "linear", "factor": 4.0}
    assert rope(rope_scaling=linear).metadata == {"freq_base": 10000.0, "scaling.type": "linear", "scaling.factor": 4.0}
    assert "default, yarn (found linear)" in refused(rope, ("yarn",), rope_scaling=linear)
    assert "longrope (found [5])" in refused(rope, rope_scaling={"type": [5]})
    assert "factor must be" in refused(rope, rope_scaling={"rope_type": "linear"})


def test_yarn_writes_its_magnitude_and_borders():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    plain = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024}
    assert rope(rope_scaling=scaling).metadata == {"freq_base": 10000.0, **plain}
    usual = 1 + 0.1 * math.log(4)
    assert read_yarn(config(**scaling, attention_factor=1.0), 64)["scaling.attn_factor"] == pytest.approx(1 / usual)
    assert "scaling.attn_factor" not in read_yarn(config(**scaling, attention_factor=usual), 64)
    both = read_yarn(config(**scaling, mscale=2.0, mscale_all_dim=1.0), 64)["scaling.attn_factor"]
    assert both == pytest.approx((1 + 0.2 * math.log(4)) / usual / usual)
    assert "scaling.attn_factor" not in read_yarn(config(**scaling, mscale=2.0), 64)  # both or none
    assert read_yarn(config(factor=0.5), 64)["scaling.attn_factor"] == pytest.approx(1 / (1 + 0.1 * math.log(0.5)))
    assert read_yarn(config(factor=2.0), 64)["scaling.original_context_length"] == 64
    borders = read_yarn(config(factor=2.0, beta_fast=16, beta_slow=2.0), 64)
    assert (borders["scaling.yarn_beta_fast"], borders["scaling.yarn_beta_slow"]) == (16.0, 2.0)


def test_yarn_accepts_other_borders_only_where_allowed():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    for usual in ({"truncate": True}, {"beta_fast": 32}, {"beta_slow": 1}):
        assert rope(rope_scaling={**scaling, **usual}).metadata["scaling.type"] == "yarn"
    for other in ({"truncate": False}, {"beta_fast": 16}, {"beta_slow": 2}):
        assert "must be" in refused(rope, rope_scaling={**scaling, **other})
    rope((*KINDS, "untruncated"), rope_scaling={**scaling, "truncate": False})
    bordered = rope((*KINDS, "bordered"), rope_scaling={**scaling, "beta_fast": 16, "beta_slow": 2})
    assert bordered.metadata["scaling.yarn_beta_fast"] == 16


def test_llama_3_factors_blend_between_the_two_borders():
    """Expect at 8192 tokens, base 500000 and 8 numbers: 1304 turns, 49, 1.84 and 0.07; from 1 to 4 they are blended."""
    factors = compute_llama3_factors(config(factor=8.0), 5e5, 8)
    kept = (8192 / (2 * math.pi) * 5e5**-0.5 - 1) / 3
    np.testing.assert_allclose(factors, [1, 1, 1 / ((1 - kept) / 8 + kept), 8], rtol=1e-6)
    assert factors.dtype == np.float32 and 0 < kept < 1
    wide = compute_llama3_factors(config(factor=8.0, low_freq_factor=0.01, high_freq_factor=0.05), 5e5, 8)
    np.testing.assert_allclose(wide, 1)
    short = compute_llama3_factors(config(factor=8.0, original_max_position_embeddings=6), 5e5, 8)
    np.testing.assert_allclose(short, 8)
    for high in (1.0, 0.5):
        assert "must be above low_freq_factor" in refused(
            compute_llama3_factors, config(factor=8.0, high_freq_factor=high), 5e5, 8
        )
    assert set(rope(rope_scaling={"rope_type": "llama3", "factor": 8.0}).tensors) == {"rope_freqs.weight"}


def test_long_rope_writes_its_factors_and_magnitude():
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    scaled = rope(rope_scaling=scaling, original_max_position_embeddings=1024)
    assert scaled.metadata["scaling.attn_factor"] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
    assert {name: values.tolist() for name, values in scaled.tensors.items()} == {
        "rope_factors_long.weight": [1, 2, 3, 4], "rope_factors_short.weight": [1] * 4}  # fmt: skip
    assert rope(rope_scaling=scaling).metadata["scaling.attn_factor"] == 1
    explicit = rope(rope_scaling={**scaling, "attention_factor": 1.5}, original_max_position_embeddings=1024)
    assert explicit.metadata["scaling.attn_factor"] == 1.5
    assert "must be a list of 4 numbers" in refused(rope, rope_scaling={**scaling, "long_factor": [1.0] * 3})


def test_sections_of_positions_must_be_three_numbers_that_fit():
    assert read_sections(config(mrope_section=[2, 1, 1]), 8) == [2, 1, 1, 0]
    for odd in ([2, 1], [2, 1, 0], [2.0, 1, 1], [True, 2, 1], None, [2, 1, 1, 0]):
        assert refused(read_sections, config(mrope_section=odd), 8) == "mrope_section must be three integers"
    assert (
        refused(read_sections, config(mrope_section=[2, 1, 1]), 10) == "mrope_section must add up to 5 pairs (found 4)"
    )
    scaled = rope((*KINDS, "mrope"), rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})
    assert scaled.metadata == {"freq_base": 10000.0, "dimension_sections": [2, 1, 1, 0]}
    assert "longrope (found mrope)" in refused(rope, rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})


# ---- which layers have a window


def letters(windows: list[bool]) -> str:
    return "".join("w" if window else "a" for window in windows)


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, "wwwawww"), ({"sliding_window_pattern": 2}, "wawawaw"), ({"sliding_window_pattern": 1}, "aaaaaaa"),
    ({"sliding_window_pattern": "LLG"}, "wwawwaw"), ({"sliding_window_pattern": "L"}, "wwwwwww"),
    ({"sliding_window_pattern": 2, "layer_types": ["sliding_attention"] * 6 + ["full_attention"]}, "wwwwwwa"),
])  # fmt: skip
def test_exaone_windows_follow_a_list_or_a_pattern(settings: dict[str, Any], expected: str):
    assert letters(mark_exaone4_windows(config(**settings), 7)) == expected


@pytest.mark.parametrize(("settings", "problem"), [
    ({"layer_types": ["sliding_attention"] * 6}, "layer_types must be sliding_attention or full_attention for each"),
    ({"layer_types": ["full"] * 7}, "layer_types must be sliding_attention or full_attention for each layer"),
    ({"layer_types": 7, "sliding_window_pattern": "L"}, "layer_types must be"),
    ({"sliding_window_pattern": "LX"}, "sliding_window_pattern must be an integer from 1"),
    ({"sliding_window_pattern": ""}, "sliding_window_pattern must be an integer from 1"),
])  # fmt: skip
def test_exaone_windows_refuse_nonsense(settings: dict[str, Any], problem: str):
    assert refused(mark_exaone4_windows, config(**settings), 7).startswith(problem)


@pytest.mark.parametrize(("leading", "expected"), [(0, "wwwawwwaw"), (1, "awwwawwwa"), (3, "aaawwwaww"), (9, "a" * 9)])
def test_sliding_windows_start_after_the_first_layers(leading: int, expected: str):
    assert letters(mark_windows_beyond_dense(config(), 9, leading)) == expected
    types = ["full_attention", "sliding_attention"] * 4 + ["full_attention"]
    assert letters(mark_windows_beyond_dense(config(layer_types=types), 9, leading)) == "awawawawa"


@pytest.mark.parametrize(("kind", "shape"), [("q", ("heads", "head_dim")), ("k", ("kv_heads", "head_dim"))])
def test_norms_stored_head_by_head_become_one_tensor(kind: str, shape: tuple[str, ...]):
    norms = stack_head_norms(kind, 3)
    assert norms.dimensions == shape
    assert norms.of == {f"self_attn.{kind}_layernorm.norms.{head}.weight": ("head_dim",) for head in range(3)}
    built = norms.build([from_array(np.float32([head, head + 0.5])) for head in range(3)], (3, 2), {})
    assert built.read_rows(1, 3).view(np.float32).tolist() == [[1, 1.5], [2, 2.5]]


# ---- files of strangers


def test_reading_a_small_file_refuses_large_and_unreadable_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a":1}')
    for most in (7, 8):
        monkeypatch.setattr(files, "MAX_BYTES", most)
        assert files.read_json(path) == {"a": 1}
    monkeypatch.setattr(files, "MAX_BYTES", 6)
    with pytest.raises(ModelError, match=r"x\.json: the file must have at most 6 bytes \(found 7\)$"):
        files.read_bytes(path)
    assert files.read_bytes(tmp_path) is None and files.read_text(tmp_path / "none") is None

    def fail(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "MAX_BYTES", 7)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ModelError, match=r"x\.json: cannot be read: Input/output error$"):
        files.read_text(path)


@pytest.mark.parametrize(("names", "expected"), [
    ([], "model.safetensors is missing"), (["a.bin"], "PyTorch pickles"), (["a.pt"], "PyTorch pickles"),
    (["a.pth", "consolidated.safetensors"], "PyTorch pickles"),
    (["consolidated.safetensors", "x.gguf"], "the weights are in Mistral's own layout"),
    (["x.gguf"], "model.safetensors is missing; name the GGUF file itself"),
])  # fmt: skip
def test_a_folder_without_weights_is_refused_with_the_reason(tmp_path: Path, names: list[str], expected: str):
    for name in names:
        (tmp_path / name).touch()
    reason = safetensors_files.describe_missing_weights(tmp_path)
    assert (reason == expected) if expected.startswith("there") else expected in reason
    with pytest.raises(ModelError) as error:
        safetensors_files.list_weight_files(tmp_path)
    assert str(error.value) == f"{tmp_path}: {reason}"


def test_parts_of_weights_are_found_by_index_or_numbers(tmp_path: Path):
    """Keep their order, whatever the folder's is; expect all that the last numbers say; prefer the index."""
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name in (names[2], names[0]):
        (tmp_path / name).touch()
    missing = rf"{names[1]}: this file is missing; it is file 2 of 3$"
    with pytest.raises(ModelError, match=missing):
        safetensors_files.list_weight_files(tmp_path)
    (tmp_path / names[1]).touch()
    assert [path.name for path in safetensors_files.list_weight_files(tmp_path)] == names
    index = {"a": names[2], "b": names[0], "c": names[2]}
    (tmp_path / safetensors_files.INDEX).write_text(json.dumps({"weight_map": index}))
    assert [path.name for path in safetensors_files.list_weight_files(tmp_path)] == [names[0], names[2]]
    (tmp_path / safetensors_files.WHOLE).touch()
    assert safetensors_files.list_weight_files(tmp_path) == [tmp_path / safetensors_files.WHOLE]


@pytest.mark.parametrize("content", [
    {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../a.safetensors"}},
    {"weight_map": {"a": "a.bin"}}, {"weight_map": {"a": "a:b.safetensors"}}, {"weight_map": {"a": ".safetensors"}},
])  # fmt: skip
def test_an_index_without_file_names_is_refused(tmp_path: Path, content: dict[str, Any]):
    (tmp_path / safetensors_files.INDEX).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"must have a weight_map$|expected the name of a safetensors file, found "):
        safetensors_files.read_index(tmp_path)


def test_a_stored_tensor_reads_its_rows_and_reports_damage(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(30)))
    entry: Any = {"dtype": "BF16", "shape": [3, 2], "data_offsets": [4, 16]}
    stored = safetensors_files.make_tensor(path, "t", entry, 10)
    assert (stored.name, stored.dtype, stored.shape, stored.start) == ("t", "BF16", (3, 2), 14)
    assert stored.read_rows(1, 3).tolist() == [[18, 19, 20, 21], [22, 23, 24, 25]]
    assert safetensors_files.make_tensor(path, "t", entry | {"dtype": "F8"}, 10).shape == (
        3,
        2,
    )  # of a kind that is listed only
    for end in (15, 17):
        with pytest.raises(ValueError, match=rf"^tensor t: expected 12 bytes, found {end - 4}$"):
            safetensors_files.make_tensor(path, "t", entry | {"data_offsets": [4, end]}, 10)
    path.write_bytes(bytes(25))
    assert stored.read_rows(0, 2).shape == (2, 4)
    with pytest.raises(ModelError, match=r"x: the file was truncated while it was read$"):
        stored.read_rows(1, 3)
    path.unlink()
    with pytest.raises(ModelError, match=r"x: cannot be read: No such file"):
        stored.read_rows(0, 1)
    with pytest.raises(ModelError, match=r"x: cannot be read: |x: not a valid safetensors file: "):
        safetensors_files.read_header(path)


def test_checkpoint_files_leave_out_folders_and_gguf_files(tmp_path: Path):
    for name in ("b.json", "a.safetensors", "x.gguf", "c"):
        (tmp_path / name).touch()
    (tmp_path / "folder.json").mkdir()
    assert folder.list_files(tmp_path) == [str(tmp_path / name) for name in ("a.safetensors", "b.json", "c")]


def tensor(format: str, *shape: int) -> CheckpointTensor:
    return CheckpointTensor(f"{format} of {shape}", BY_NAME[format], shape, None)


@pytest.mark.parametrize(("formats", "vectors", "expected"), [
    (["F16", "BF16", "F16"], 9, "F16"), (["BF16"], 9, "BF16"), (["F32", "F16", "F32"], 0, "F32"),
    (["F16", "BF16"], 0, "BF16"), (["F16", "MXFP4", "F16"], 0, "MXFP4"),
])  # fmt: skip
def test_the_format_of_a_checkpoint_is_that_of_most_matrices(formats: list[str], vectors: int, expected: str):
    tensors = [*(tensor("F32", 4) for _ in range(vectors)), *(tensor(format, 4, 4) for format in formats)]
    assert folder.choose_file_type(tensors) == find_recipe(expected).number
    checkpoint = folder.Checkpoint("path", [], {"a": 1}, tensors, [])
    assert checkpoint.parts == [sorted({each.name for each in tensors})] and checkpoint.packed == {"a": 1}


@pytest.mark.parametrize(("vocab", "merges", "problem"), [
    ({"a": 0, "b": 1}, "#version: 0.2\na b\n\n", ""), ({"b": 1, "a": 0}, "a b", ""),
    ({"a": 0, "b": 2}, "a b", "the ids of the vocabulary must run from 0 to 1"), ({}, "a b", "must have a vocabulary"),
    ({"a": 0}, None, "must have a vocabulary with merges"), ([], "a b", "expected a JSON object"),
])  # fmt: skip
def test_clip_vocabularies_are_read_from_either_tokenizer_file(
    tmp_path: Path, vocab: Any, merges: str | None, problem: str
):
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    if merges is not None:
        (tmp_path / "merges.txt").write_text(merges)
    if problem:
        with pytest.raises(ModelError, match=problem):
            read_vocabulary(tmp_path)
    else:
        assert read_vocabulary(tmp_path) == {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 1, "y": 0}, "merges": [["y", "x"]]}}))
    assert read_vocabulary(tmp_path) == {"tokenizer.ggml.tokens": ["y", "x"], "tokenizer.ggml.merges": ["y x"]}


@pytest.mark.parametrize(("settings", "matrix", "problem"), [
    ({}, (3, 2), ""), ({"bias": True}, (3, 2), "Dense module"), ({"bias": None}, (3, 2), ""),
    ({"activation_function": "torch.nn.modules.activation.Tanh"}, (3, 2), "Dense module"),
    ({"in_features": 3}, (3, 2), "linear.weight must exist"), ({}, None, "linear.weight must exist"),
    ({"out_features": 2}, (3, 2), "linear.weight must exist"),
])  # fmt: skip
def test_projections_take_plain_dense_modules_only(tmp_path: Path, settings: dict[str, Any], matrix: Any, problem: str):
    usual = {"in_features": 2, "out_features": 3, "bias": False, "activation_function": "torch.nn.Identity"}
    for place in ("2_Dense", "3_Dense"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps({**usual, **settings}))
        tensors = [("linear.weight", "F32", np.ones(matrix, np.float32))] if matrix else [("x", "F32", np.ones(2))]
        write_safetensors(tmp_path / place / "model.safetensors", tensors)
    kinds = [{"type": "x.Dense", "path": place} for place in ("2_Dense", "3_Dense")]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": "1_Pooling"}, *kinds]))
    if problem:
        with pytest.raises(ModelError, match=problem):
            sentence_transformers.load_projections(tmp_path, True)
    else:
        found = sentence_transformers.load_projections(tmp_path, True)
        assert {name: tensor.shape for name, tensor in found.items()} == {"dense_2": (3, 2), "dense_3": (3, 2)}
    with pytest.raises(ModelError, match="and its architecture one"):
        sentence_transformers.load_projections(tmp_path, False)
    (tmp_path / "modules.json").write_text(json.dumps([*kinds, kinds[1]]))
    with pytest.raises(ModelError, match=r"a Dense module must|linear.weight must"):
        sentence_transformers.load_projections(tmp_path, True)


def test_protobuf_numbers_and_fields_are_read_or_refused():
    for number, data in ((0, b"\0"), (127, b"\x7f"), (128, b"\x80\1"), ((1 << 70) - 1, b"\xff" * 9 + b"\x7f")):
        assert parse_varint(data, 0) == (number, len(data)) and parse_varint(b"x" + data + b"y", 1) == (
            number,
            len(data) + 1,
        )
    for wrong in (b"", b"\x80", b"\xff" * 10 + b"\1"):
        with pytest.raises(ValueError, match=r"^not a SentencePiece model$"):
            parse_varint(wrong, 0)
    fields = b"\x08\x05" + b"\x11" + bytes(range(8)) + b"\x1a\2ab" + b"\x25\1\0\0\0" + b"\x2a\0"
    assert [*parse_message(fields)] == [
        (1, 5),
        (2, int.from_bytes(bytes(range(8)), "little")),
        (3, b"ab"),
        (4, 1),
        (5, b""),
    ]
    for wrong in (b"\x1a\3ab", b"\x11" + bytes(7), b"\x25\0\0\0", b"\x0b", b"\x0c\0"):
        with pytest.raises(ValueError, match=r"^not a SentencePiece model$"):
            [*parse_message(wrong)]


def test_llava_reads_the_text_model_by_its_kind():
    """Take what transformers takes where text_config is silent; the end of a line belongs to the projector."""
    for kind, hidden in ({}, 11008), ({"model_type": "mistral"}, 14336):
        family = find_family(config(architectures=["LlavaForConditionalGeneration"], text_config=kind))
        assert family.sees and family.defaults["intermediate_size"] == hidden and family.unread
        ends = ("image_newline", "model.image_newline", "image_newlines", "model.norm.weight")
        assert [bool(family.unread.fullmatch(name)) for name in ends] == [True, True, False, False]
    with pytest.raises(ModelError, match="text_config: model_type x is not supported"):
        find_family(config(architectures=["LlavaForConditionalGeneration"], text_config={"model_type": "x"}))


def test_each_class_has_one_record_with_known_fields_only():
    names = [name for families in map(checkpoints_of, {*ARCHITECTURES.values()}) for name in families]
    assert len(names) == len({*names}) == len(load_records())
    for name, (arch, record) in load_records().items():
        assert arch in ARCHITECTURES and record.keys() <= CheckpointDeclaration.__annotations__.keys(), name
        assert make_family(name).arch == arch  # the functions and groups that it names exist


def checkpoints_of(module: str) -> list[str]:
    family = import_module(f"localllm.arch.families.{module}")
    return [name for names in getattr(family, "CHECKPOINTS", {}) for name in names.split()]
