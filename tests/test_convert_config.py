"""What is read of a checkpoint's config.json: every kind of value from both sides, and how positions are rotated."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert.config import Config
from localllm.convert.rope_scaling import RopeScaling, llama3_factors, read_rope, rope_parameters, sections, yarn
from localllm.errors import ModelError

KINDS = ("linear", "yarn", "llama3", "longrope")


def config(**content: Any) -> Config:
    return Config(content, Path("config.json"))


def refused(read: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ModelError, match=r"^config\.json: ") as error:
        read(*arguments, **named)
    return str(error.value).removeprefix("config.json: ")


# ---- values


def test_counts():
    given = config(a=1, b=5, null=None, zero=0, flag=True, text="7", real=2.0)
    assert (given.count("a"), given.count("b", most=5), given.count("missing", 0), given.count("null", 9)) == (
        1,
        5,
        0,
        9,
    )
    assert given.count("zero", 0) == 0  # as good as silence
    for name in ("zero", "flag", "text", "real", "missing"):
        assert refused(given.count, name).startswith(f"{name} should be a number from 1 to ")
    assert refused(given.count, "b", most=4) == "b should be a number from 1 to 4, is 5"


def test_numbers():
    given = config(a=1, b=0.5, zero=0.0, minus=-1.0, flag=True, huge=1e38, text="1", null=None)
    assert (given.number("a"), given.number("b"), given.number("null", 2.5)) == (1.0, 0.5, 2.5)
    for name in ("zero", "minus", "flag", "huge", "text", "missing"):
        assert refused(given.number, name).startswith(f"{name} should be a positive number")
    assert config(x=[1, 2.5]).numbers("x", 2) == [1.0, 2.5]
    for odd in ([1], [1, 2, 3], 5, None):
        assert refused(config(x=odd).numbers, "x", 2) == "x should be a list of 2 numbers"
    assert refused(config(x=[1, 0]).numbers, "x", 2) == "x should be a positive number, is 0"


def test_flags_and_choices():
    given = config(yes=True, no=False, one=1, null=None, act="silu")
    assert (given.flag("yes"), given.flag("no", True), given.flag("null"), given.flag("missing", True)) == (
        True,
        False,
        False,
        True,
    )
    assert refused(given.flag, "one") == "one should be true or false, is 1"
    given.only("act", "gelu", "silu")
    given.only("null", "gelu")
    given.only("missing")
    assert refused(given.only, "act", "gelu") == "act silu is not supported"


def test_sections_and_defaults():
    given = config(a=1, inner={"b": 2}, odd=[], null=None)
    assert (
        given.section("inner").count("b") == 2 and given.section("null").content == given.section("none").content == {}
    )
    assert refused(given.section, "odd") == "odd: expected an object"
    more = given.plus(a=3, c=4)
    assert (more.count("a"), more.count("c"), given.count("a")) == (3, 4, 1) and more.warnings is given.warnings


def test_the_part_for_the_language_model():
    both = config(a=1, tie_word_embeddings=False, text_config={"a": 2, "tie_word_embeddings": True}).of_text(
        {"a": 9, "b": 8}
    )
    assert (both.count("a"), both.count("b"), both.flag("tie_word_embeddings")) == (2, 8, False)
    inner = config(text_config={"tie_word_embeddings": True}).of_text({})
    assert inner.flag("tie_word_embeddings")


def test_architectures():
    assert config(architectures=["A", "B"]).architecture == "A"
    for odd in ({}, {"architectures": []}, {"architectures": "A"}, {"architectures": [5]}):
        assert config(**odd).architecture == ""


def test_windows():
    types = ["sliding_attention", "full_attention"]
    config(layer_types=types).windows([True, False])
    config().windows([True])
    for expected in ([False, True], [True], [True, False, True]):
        assert "windows in other layers than usual" in refused(config(layer_types=types).windows, expected)


# ---- rotations


def rope(kinds: tuple[str, ...] = KINDS, dims: int = 8, context: int = 4096, **content: Any) -> RopeScaling:
    return read_rope(config(**content), dims, context, kinds)


def test_plain_rotations():
    assert rope().metadata == {"freq_base": 10000.0} and rope(rope_theta=5e5).metadata == {"freq_base": 5e5}
    for kind in ("default", "dynamic"):
        assert rope(rope_scaling={"type": kind, "factor": 4.0}).metadata == {"freq_base": 10000.0}
    assert rope(rope_theta=1e4, rope_parameters={"rope_theta": 2e4}).metadata == {"freq_base": 2e4}
    assert refused(rope, rope_theta=0).startswith("rope_theta should be")


def test_where_parameters_stand():
    inner = {"rope_theta": 7.0, "rope_type": "linear"}
    assert (
        rope_parameters(config(rope_parameters={"full_attention": inner, "sliding_attention": {}})).get("rope_theta")
        == 7.0
    )
    old = rope_parameters(
        config(rope_scaling={"type": "linear"}, partial_rotary_factor=0.5, original_max_position_embeddings=64)
    )
    assert (old.get("type"), old.get("partial_rotary_factor"), old.get("original_max_position_embeddings")) == (
        "linear",
        0.5,
        64,
    )


def test_kinds_of_scaling():
    linear = {"rope_type": "linear", "factor": 4.0}
    assert rope(rope_scaling=linear).metadata == {"freq_base": 10000.0, "scaling.type": "linear", "scaling.factor": 4.0}
    assert "linear is not supported" in refused(rope, ("yarn",), rope_scaling=linear)
    assert "[5] is not supported" in refused(rope, rope_scaling={"type": [5]})
    assert "factor should be" in refused(rope, rope_scaling={"rope_type": "linear"})


def test_yarn():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    plain = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024}
    assert rope(rope_scaling=scaling).metadata == {"freq_base": 10000.0, **plain}
    usual = 1 + 0.1 * math.log(4)
    assert yarn(config(**scaling, attention_factor=1.0), 64)["scaling.attn_factor"] == pytest.approx(1 / usual)
    assert "scaling.attn_factor" not in yarn(config(**scaling, attention_factor=usual), 64)
    both = yarn(config(**scaling, mscale=2.0, mscale_all_dim=1.0), 64)["scaling.attn_factor"]
    assert both == pytest.approx((1 + 0.2 * math.log(4)) / usual / usual)
    assert "scaling.attn_factor" not in yarn(config(**scaling, mscale=2.0), 64)  # both or none
    assert yarn(config(factor=0.5), 64)["scaling.attn_factor"] == pytest.approx(1 / (1 + 0.1 * math.log(0.5)))
    assert yarn(config(factor=2.0), 64)["scaling.original_context_length"] == 64
    borders = yarn(config(factor=2.0, beta_fast=16, beta_slow=2.0), 64)
    assert (borders["scaling.yarn_beta_fast"], borders["scaling.yarn_beta_slow"]) == (16.0, 2.0)


def test_what_yarn_may_say():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    for usual in ({"truncate": True}, {"beta_fast": 32}, {"beta_slow": 1}):
        assert rope(rope_scaling={**scaling, **usual}).metadata["scaling.type"] == "yarn"
    for other in ({"truncate": False}, {"beta_fast": 16}, {"beta_slow": 2}):
        assert "is not supported" in refused(rope, rope_scaling={**scaling, **other})
    rope((*KINDS, "untruncated"), rope_scaling={**scaling, "truncate": False})
    bordered = rope((*KINDS, "bordered"), rope_scaling={**scaling, "beta_fast": 16, "beta_slow": 2})
    assert bordered.metadata["scaling.yarn_beta_fast"] == 16


def test_factors_of_llama_3():
    """At 8192 tokens, base 500000 and 8 numbers: 1304 turns, 49, 1.84 and 0.07; between 1 and 4 they are blended."""
    found = llama3_factors(config(factor=8.0), 5e5, 8)
    kept = (8192 / (2 * math.pi) * 5e5**-0.5 - 1) / 3
    np.testing.assert_allclose(found, [1, 1, 1 / ((1 - kept) / 8 + kept), 8], rtol=1e-6)
    assert found.dtype == np.float32 and 0 < kept < 1
    wide = llama3_factors(config(factor=8.0, low_freq_factor=0.01, high_freq_factor=0.05), 5e5, 8)
    np.testing.assert_allclose(wide, 1)
    short = llama3_factors(config(factor=8.0, original_max_position_embeddings=6), 5e5, 8)
    np.testing.assert_allclose(short, 8)
    for high in (1.0, 0.5):
        assert "should be above low_freq_factor" in refused(
            llama3_factors, config(factor=8.0, high_freq_factor=high), 5e5, 8
        )
    assert set(rope(rope_scaling={"rope_type": "llama3", "factor": 8.0}).tensors) == {"rope_freqs.weight"}


def test_long_rope():
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    found = rope(rope_scaling=scaling, original_max_position_embeddings=1024)
    assert found.metadata["scaling.attn_factor"] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
    assert {name: values.tolist() for name, values in found.tensors.items()} == {
        "rope_factors_long.weight": [1, 2, 3, 4], "rope_factors_short.weight": [1] * 4}  # fmt: skip
    assert rope(rope_scaling=scaling).metadata["scaling.attn_factor"] == 1
    said = rope(rope_scaling={**scaling, "attention_factor": 1.5}, original_max_position_embeddings=1024)
    assert said.metadata["scaling.attn_factor"] == 1.5
    assert "should be a list of 4 numbers" in refused(rope, rope_scaling={**scaling, "long_factor": [1.0] * 3})


def test_sections_of_several_positions():
    assert sections(config(mrope_section=[2, 1, 1]), 8) == [2, 1, 1, 0]
    for odd in ([2, 1], [2, 1, 0], [2.0, 1, 1], [True, 2, 1], None, [2, 1, 1, 0]):
        assert refused(sections, config(mrope_section=odd), 8) == "mrope_section should be three numbers"
    assert refused(sections, config(mrope_section=[2, 1, 1]), 10) == "mrope_section: 4 pairs; expected 5"
    found = rope((*KINDS, "mrope"), rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})
    assert found.metadata == {"freq_base": 10000.0, "dimension_sections": [2, 1, 1, 0]}
    assert "rope scaling mrope is not supported" in refused(
        rope, rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}
    )
