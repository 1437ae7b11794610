"""Hyperparameters: what is read from metadata, what is refused, and how fast the pairs of a head turn."""

import math

import numpy as np
import pytest

from localllm.arch.config import Config, Rope
from localllm.errors import ModelError

METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 4096,
    "llama.block_count": 3,
    "llama.embedding_length": 96,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 100,
}


def config(**changes) -> Config:
    """From METADATA with changes; `rope_freq_base=…` changes "llama.rope.freq_base" (see NAMES), None removes a key."""
    metadata = METADATA | {NAMES[name]: value for name, value in changes.items()}
    return Config.from_metadata({key: value for key, value in metadata.items() if value is not None}, "model.gguf")


NAMES = {
    "architecture": "general.architecture",
    "tokens": "tokenizer.ggml.tokens",
    "context": "llama.context_length",
    "layers": "llama.block_count",
    "width": "llama.embedding_length",
    "vocab_size": "llama.vocab_size",
    "heads": "llama.attention.head_count",
    "kv_heads": "llama.attention.head_count_kv",
    "key_length": "llama.attention.key_length",
    "value_length": "llama.attention.value_length",
    "epsilon": "llama.attention.layer_norm_rms_epsilon",
    "experts": "llama.expert_count",
    "rope_dims": "llama.rope.dimension_count",
    "rope_base": "llama.rope.freq_base",
    "scaling_type": "llama.rope.scaling.type",
    "scaling_factor": "llama.rope.scaling.factor",
    "scale_linear": "llama.rope.scale_linear",
    "attn_factor": "llama.rope.scaling.attn_factor",
    "original_context": "llama.rope.scaling.original_context_length",
}


# ---- what is read ---------------------------------------------------------------------------------------------------


def test_plain_metadata():
    read = config()
    assert (read.arch, read.context, read.layers, read.width) == ("llama", 4096, 3, 96)
    assert (read.heads, read.kv_heads, read.head_dim, read.vocab_size) == (6, 2, 16, 100)
    assert (read.epsilon, read.experts) == (1e-5, 0)
    assert read.rope == Rope(16, 10000.0, 1.0, False, 4096, 1.0)


def test_defaults_and_overrides():
    assert config(kv_heads=None).kv_heads == 6
    assert config(key_length=40, value_length=40).head_dim == 40
    assert config(key_length=40, value_length=40).rope.dims == 40
    assert config(rope_dims=8).rope.dims == 8
    assert config(vocab_size=None, tokens=["a", "b"]).vocab_size == 2
    assert config(experts=4).experts == 4


def test_one_value_per_layer_counts_if_all_are_the_same():
    assert config(kv_heads=np.array([3, 3, 3], np.int32)).kv_heads == 3
    with pytest.raises(ModelError, match="head_count_kv"):
        config(kv_heads=np.array([3, 2, 3], np.int32))


@pytest.mark.parametrize(
    ("changes", "factor", "yarn"),
    [
        ({"scaling_factor": 4.0}, 4.0, False),  # a factor without a type means linear
        ({"scaling_type": "linear", "scaling_factor": 4.0}, 4.0, False),
        ({"scale_linear": 2.0}, 2.0, False),  # an old name
        ({"scaling_type": "none", "scaling_factor": 4.0}, 1.0, False),
        ({"scaling_type": "yarn", "scaling_factor": 4.0}, 4.0, True),
        ({"scaling_type": "linear", "scaling_factor": 0.0}, 1.0, False),
    ],
)
def test_rope_scaling(changes, factor, yarn):
    rope = config(**changes).rope
    assert (rope.factor, rope.yarn) == (factor, yarn)


def test_magnitude_of_yarn():
    assert config(scaling_type="yarn", scaling_factor=4.0).rope.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    assert config(scaling_type="yarn", scaling_factor=4.0, attn_factor=0.5).rope.magnitude == pytest.approx(
        0.5 * (1 + 0.1 * math.log(4))
    )
    assert config(scaling_factor=4.0).rope.magnitude == 1


# ---- what is refused ------------------------------------------------------------------------------------------------

HUGE = 1 << 40
COUNTS = [
    0,
    -1,
    HUGE,
    1.5,
    True,
    "8",
    "8\n\x1b[2J",
    [],
    ["a"] * 5000,
    np.zeros(0, np.int32),
    np.arange(500),
    np.ones(3),
]


@pytest.mark.parametrize("name", ["context", "layers", "width", "heads", "kv_heads", "key_length", "vocab_size"])
@pytest.mark.parametrize("value", COUNTS, ids=lambda value: repr(value)[:16].strip())
def test_counts_must_be_numbers_of_sensible_size(name, value):
    assert NAMES[name] in refusal(**{name: value})


@pytest.mark.parametrize("name", ["context", "layers", "width", "heads", "vocab_size", "epsilon"])
def test_missing_keys(name):
    assert NAMES[name] in refusal(**{name: None})


@pytest.mark.parametrize("value", [-1e-5, math.nan, math.inf, "1e-5", [], np.ones(3)], ids=repr)
@pytest.mark.parametrize("name", ["epsilon", "rope_base", "scaling_factor", "attn_factor"])
def test_numbers_must_be_finite_and_positive(name, value):
    assert NAMES[name] in refusal(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": None},
        {"architecture": 7},
        {"kv_heads": 4},  # 6 heads cannot share 4
        {"kv_heads": 12},
        {"width": 4},  # less than a dimension per head
        {"key_length": 32, "value_length": 16},
        {"value_length": 32},
        {"rope_dims": 15},
        {"rope_dims": 18},
        {"rope_dims": 0},
        {"rope_base": 1.0},
        {"rope_base": 0.0},
        {"scaling_type": "ntk"},
        {"scaling_type": 3},
        {"scaling_type": np.array([1, 2])},
        {"scaling_type": ["linear"]},
        {"vocab_size": None, "tokens": 5},
        {"experts": -1},
        {"original_context": 0},
    ],
    ids=repr,
)
def test_what_makes_no_sense_is_refused(changes):
    refusal(**changes)


@pytest.mark.parametrize("name", ["lla\x1b[2Jma", "lla\nma", "x" * 10**6])
def test_strange_names_do_not_reach_the_terminal(name):
    refusal(architecture=name)


def refusal(**changes) -> str:
    """The message with which the metadata is refused: one printable line of sane length that begins with the path."""
    with pytest.raises(ModelError) as error:
        config(**changes)
    message = str(error.value)
    assert message.startswith("model.gguf: ")
    assert message.isprintable()
    assert len(message) < 1000
    return message


# ---- how fast the pairs of a head turn ------------------------------------------------------------------------------


def rope(dims=64, base=10000.0, factor=1.0, yarn=False, original_context=4096) -> Rope:
    return Rope(dims, base, factor, yarn, original_context, 1.0)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize(("dims", "base"), [(2, 10000.0), (64, 10000.0), (128, 500000.0), (10, 1.5)])
def test_linear_frequencies(dims, base, factor):
    """Pair i turns by base^(-2 i / dims) per position (Su et al. 2021); interpolation divides positions."""
    got = rope(dims, base, factor).frequencies()
    expected = [math.pow(base, -2 * i / dims) / factor for i in range(dims // 2)]
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_factors_divide_the_frequencies():
    factors = np.linspace(1, 8, 32)
    np.testing.assert_allclose(rope().frequencies(factors), rope().frequencies() / factors, rtol=1e-15)
    both = rope(factor=4.0).frequencies(factors)
    np.testing.assert_allclose(both, rope().frequencies() / factors / 4, rtol=1e-15)


@pytest.mark.parametrize(("dims", "base", "original"), [(64, 10000.0, 4096), (128, 1e6, 32768), (32, 10000.0, 512)])
def test_yarn_blends_by_the_turns_within_the_original_context(dims, base, original):
    """Peng et al. 2023: pairs that turn 32 times or more stay, up to once are stretched, in between is a ramp."""
    factor = 8.0
    plain, got = rope(dims, base).frequencies(), rope(dims, base, factor, True, original).frequencies()
    turns = original * plain / (2 * math.pi)
    stretched = plain / factor
    share = (got - stretched) / (plain - stretched)  # how much of the plain frequency is left
    spacing = np.log(base) * 2 / dims  # of pairs, on the logarithmic scale of turns; the ramp's ends are whole pairs
    assert share[np.log(turns) > np.log(32) + spacing] == pytest.approx(1)
    assert share[np.log(turns) < -spacing] == pytest.approx(0)
    assert (np.diff(share) <= 1e-12).all()
    ramp = share[(share > 1e-9) & (share < 1 - 1e-9)]
    assert len(ramp) >= 3
    np.testing.assert_allclose(np.diff(ramp, 2), 0, atol=1e-9)


def test_yarn_of_one_model_by_hand():
    """dims 64, base 10000, original context 4096: 32 turns at pair 10.48, 1 turn at 22.52, so the ramp is 10 to 23."""
    got = rope(64, 10000.0, 4.0, True, 4096).frequencies()
    plain = 10000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(got[:11], plain[:11], rtol=1e-12)
    np.testing.assert_allclose(got[23:], plain[23:] / 4, rtol=1e-12)
    np.testing.assert_allclose(got[11], plain[11] * (12 / 13 + 1 / 13 / 4), rtol=1e-12)
    np.testing.assert_allclose(got[22], plain[22] * (1 / 13 + 12 / 13 / 4), rtol=1e-12)


@pytest.mark.parametrize("original", [1, 6, 1 << 24])
@pytest.mark.parametrize("base", [1.0000001, 10000.0, 1e30])
@pytest.mark.parametrize("dims", [2, 128])
def test_yarn_with_extreme_values_stays_finite(original, base, dims):
    got = rope(dims, base, 4.0, True, original).frequencies()
    assert np.isfinite(got).all()
    assert (got > 0).all()
