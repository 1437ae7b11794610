"""Test hyperparameters: what metadata gives, what is refused, and RoPE frequencies."""

import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import model
from readings import metadata_of
from readings import read as read_again

from localllm.arch import ARCHITECTURES, REFUSED, load_architecture
from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.families import llama
from localllm.arch.layer_state import PagedState
from localllm.arch.metadata import HyperparameterReader, require_general
from localllm.arch.rope import RopeParameters, add_sections
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.metadata import Irregularities

METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 4096,
    "llama.block_count": 3,
    "llama.embedding_length": 96,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def read(**changes) -> TransformerHyperparameters:
    """Parse METADATA with changes; `rope_base=…` changes "llama.rope.freq_base" (see NAMES), None removes a key."""
    metadata = METADATA | {NAMES[name]: value for name, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return llama.read(HyperparameterReader(metadata, "model.gguf", 100))


NAMES = {
    "architecture": "general.architecture",
    "context": "llama.context_length",
    "layers": "llama.block_count",
    "width": "llama.embedding_length",
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


def test_plain_metadata_give_the_hyperparameters():
    h = read()
    assert (h.arch, h.context, h.layers, h.width, h.vocab_size, h.epsilon) == ("llama", 4096, 3, 96, 100, 1e-5)
    assert (h.attention.heads, h.attention.kv_heads, h.attention.head_dim) == ((6, 6, 6), (2, 2, 2), 16)
    assert h.attention.rope == RopeParameters(16, 16, True, 10000.0, 1.0, False, 4096, 1.0)
    assert h.list_states() == [PagedState(layer, 2, 16, 16) for layer in range(3)]


def test_missing_keys_have_defaults():
    assert read(kv_heads=None).attention.kv_heads == (6, 6, 6)
    wide = read(key_length=40, value_length=40).attention
    assert (wide.head_dim, wide.rope.head_dim, wide.rope.dims) == (40, 40, 40)
    assert read(experts=0) == read()


def test_layers_may_have_different_head_counts():
    h = read(heads=np.array([6, 3, 6], np.int32), kv_heads=np.array([3, 1, 2], np.int32))
    assert (h.attention.heads, h.attention.kv_heads) == ((6, 3, 6), (3, 1, 2))
    assert [state.kv_heads for state in h.list_states()] == [3, 1, 2]
    assert read(kv_heads=np.array([3, 3, 3], np.int32)).attention.kv_heads == (3, 3, 3)
    for values in ([3, 3], [3, 3, 3, 3], [3, 4, 3], [3, 0, 3]):
        refusal(kv_heads=np.array(values, np.int32))


def test_values_by_layer_are_one_value_if_all_are_equal():
    assert read(key_length=np.array([8, 8, 8], np.int32), value_length=8).attention.head_dim == 8
    assert NAMES["key_length"] in refusal(key_length=np.array([8, 4, 8], np.int32))


@pytest.mark.parametrize(
    ("changes", "factor", "yarn"),
    [
        ({"scaling_factor": 4.0}, 4.0, False),  # a factor without a type means linear
        ({"scaling_type": "linear", "scaling_factor": 4.0}, 4.0, False),
        ({"scale_linear": 2.0}, 2.0, False),  # an old name
        ({"scaling_type": "none", "scaling_factor": 4.0}, 1.0, False),
        ({"scaling_type": "yarn", "scaling_factor": 4.0}, 4.0, True),
    ],
)
def test_rope_scaling_follows_type_and_factor(changes, factor, yarn):
    rope = read(**changes).attention.rope
    assert (rope.factor, rope.yarn) == (factor, yarn)


def test_yarn_raises_the_magnitude_by_its_factor():
    stretched = {"scaling_type": "yarn", "scaling_factor": 4.0}
    assert read(**stretched).attention.rope.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    halved = read(**stretched, attn_factor=0.5).attention.rope.magnitude
    assert halved == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    assert read(scaling_factor=4.0).attention.rope.magnitude == 1


# ---- the vocabulary -------------------------------------------------------------------------------------------------


OF_NO_FILE = {"path": "model.gguf", "oddities": Irregularities(), "tensors": {}}


def fields_of(rows: int | None, tokens: object = None, vocab_size: object = None) -> HyperparameterReader:
    """Return the fields of a file whose embedding matrix has `rows` rows (None: no matrix)."""
    metadata = METADATA | {"tokenizer.ggml.tokens": tokens, "llama.vocab_size": vocab_size}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tensors = {} if rows is None else {"token_embd.weight": SimpleNamespace(shape=(rows, 96))}
    return HyperparameterReader.from_file(SimpleNamespace(metadata=metadata, **{**OF_NO_FILE, "tensors": tensors}))


def test_the_vocabulary_has_the_rows_of_the_embedding():
    assert fields_of(100).vocab_size == 100
    assert fields_of(3, ["a", "b", "c"], 3).vocab_size == 3
    assert fields_of(None, ["a", "b"]).vocab_size == 2  # a vocabulary only


@pytest.mark.parametrize(
    "arguments",
    [
        (100, ["a", "b"]), (2, ["a", "b"], 0), (100, None, 99), (100, None, "100"), (100, None, 0), (100, None, -1),
        (100, None, 1 << 40), (100, None, [100]),
    ],
    ids=repr,
)  # fmt: skip
def test_contradictory_vocabularies_are_refused(arguments):
    with pytest.raises(ModelError, match=r"^model\.gguf: ") as error:
        llama.read(fields_of(*arguments))
    assert str(error.value).isprintable()


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


@pytest.mark.parametrize("name", ["context", "layers", "width", "heads", "kv_heads", "key_length"])
@pytest.mark.parametrize("value", COUNTS, ids=lambda value: repr(value)[:16].strip())
def test_invalid_counts_are_refused(name, value):
    assert NAMES[name] in refusal(**{name: value})


@pytest.mark.parametrize("name", ["context", "layers", "width", "heads", "epsilon"])
def test_missing_keys_are_named(name):
    assert NAMES[name] in refusal(**{name: None})


@pytest.mark.parametrize("value", [-1e-5, math.nan, math.inf, "1e-5", [], np.ones(3)], ids=repr)
@pytest.mark.parametrize("name", ["epsilon", "rope_base", "scaling_factor", "attn_factor"])
def test_infinite_or_negative_values_are_refused(name, value):
    assert NAMES[name] in refusal(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": None},
        {"architecture": 7},
        {"kv_heads": 4},  # 6 heads cannot share 4
        {"kv_heads": 12},
        {"width": 4},  # less than a dimension per head
        {"rope_dims": 8},  # no llama rotates a part of a head
        {"rope_dims": 15},
        {"rope_dims": 18},
        {"rope_dims": 0},
        {"rope_base": 1.0},
        {"rope_base": 0.0},
        {"value_length": 32},  # and no length of keys
        {"scaling_type": "ntk"},
        {"scaling_type": 3},
        {"scaling_type": np.array([1, 2])},
        {"scaling_type": ["linear"]},
        {"experts": -1},
        {"experts": 4},
        {"original_context": 0},
    ],
    ids=repr,
)
def test_invalid_llama_metadata_is_refused(changes):
    refusal(**changes)


@pytest.mark.parametrize("name", ["lla\x1b[2Jma", "lla\nma", "x" * 10**6, "clip", "", None, 7])
def test_other_architectures_are_refused_in_printable_lines(name):
    file = SimpleNamespace(
        metadata=METADATA | {"general.architecture": name}, path="model.gguf", oddities=Irregularities(), tensors={}
    )
    with pytest.raises(ModelError, match=r"^model\.gguf: ") as error:
        load_architecture(file)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(("changes", "noted"), [
    ({}, []), ({"name": "x", "tags": ["a"], "languages": [], "file_type": 0}, []),
    ({"name": 5, "license.link": ["a"]}, ["general.license.link is not a string", "general.name is not a string"]),
    ({"tags": 5, "datasets": 5}, [f"general.{name} is not a list of strings" for name in ("datasets", "tags")]),
    ({"file_type": -1, "quantization_version": "2", "parameter_count": 1 << 63}, [
        f"general.{name} is not a non-negative integer"
        for name in ("file_type", "parameter_count", "quantization_version")]),
])  # fmt: skip
def test_general_metadata_of_an_unexpected_type_is_reported(changes, noted):
    metadata = {f"general.{name}": value for name, value in {"architecture": "llama", **changes}.items()}
    file = SimpleNamespace(metadata=metadata, path="model.gguf", oddities=Irregularities())
    assert require_general(file) == "llama"
    assert (
        file.oddities.format_lines()
        == [f"the file has irregularities that do not change its meaning: {'; '.join(noted)}"][: len(noted)]
    )


@pytest.mark.parametrize(("changes", "problem"), [
    ({}, ""), ({"name": "x", "tags": ["a"], "languages": [], "file_type": 0, "type": "vocab"}, ""),
    ({"tags": "x"}, ""), ({"parameter_count": (1 << 63) - 1}, ""),
    ({"type": "adapter"}, "this is an adapter, not a model: use its model with --lora FILE"),
    ({"type": 3}, "general.type must be a string (found 3)"),
    ({"architecture": "x" * 63}, ""), ({"architecture": "x" * 64}, "must be an architecture's name"),
    ({"architecture": "-x"}, "general.architecture must be an architecture's name (found -x)"),
    ({"architecture": "0.a_b-c"}, ""), ({"architecture": "X"}, "name (found X)"),
])  # fmt: skip
def test_invalid_general_types_and_architectures_are_refused(changes, problem):
    metadata = {f"general.{name}": value for name, value in {"architecture": "llama", **changes}.items()}
    file = SimpleNamespace(metadata=metadata, path="model.gguf", oddities=Irregularities())
    if problem:
        with pytest.raises(ModelError) as error:
            require_general(file)
        assert str(error.value).startswith("model.gguf: ") and problem in str(error.value)
    else:
        assert require_general(file) == metadata["general.architecture"]


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_are_not_supported_say_why(name):
    file = SimpleNamespace(metadata={"general.architecture": name}, **OF_NO_FILE)
    with pytest.raises(UnsupportedError) as error:
        load_architecture(file)
    assert str(error.value) == f"model.gguf: architecture {name} is not supported: {REFUSED[name]}"


def test_an_unknown_architecture_is_refused_by_name():
    """It may have all of llama's keys; their meaning is unknown."""
    metadata = {key.replace("llama.", "unheard."): value for key, value in METADATA.items()}
    file = SimpleNamespace(
        metadata=metadata | {"general.architecture": "unheard"},
        path="model.gguf",
        oddities=Irregularities(),
        tensors={},
    )
    with pytest.raises(UnsupportedError, match=r"^model\.gguf: architecture unheard is not supported \(docs/what-runs"):
        load_architecture(file)


@pytest.mark.parametrize(("name", "changes", "problem"), [
    ("apertus", {"xielu.beta": np.float32([0.5])}, "xielu.beta must be 2 numbers from -10000 to 10000 (found"),
    ("apertus", {"xielu.beta": np.float32([0.5, 10001])}, "xielu.beta must be 2 numbers"),
    ("apertus", {"xielu.beta": np.float32([0.5, -10000])}, ""),
    ("apertus", {"xielu.beta": np.float32([0.5, np.nan])}, "xielu.beta must be 2 numbers"),
    ("apertus", {"xielu.beta": np.int32([1, 1])}, "xielu.beta must be 2 numbers"),
    ("apertus", {"xielu.beta": 10000.0}, ""), ("apertus", {"xielu.beta": 1}, "xielu.beta must be 2 numbers"),
    ("apertus", {"xielu.beta": "x"}, "xielu.beta must be 2 numbers"),
    ("apertus", {"xielu.beta": None}, "found missing"),
    ("graniteswitch", {"adapters.token_ids_activate": np.int32([5, 6, 5])}, "a different token for each adapter"),
    ("graniteswitch", {"adapters.token_ids_activate": np.int32([0, 1, 271])}, ""),
    ("graniteswitch", {"adapters.token_ids_activate": np.int32([0, 1, 272])}, "3 token ids up to 271 (found"),
    ("graniteswitch", {"adapters.token_ids_activate": np.int32([0, 1, -1])}, "3 token ids up to 271 (found"),
    ("hunyuan_alpha", {"attention.key_length": 2, "attention.value_length": 2, "rope.dimension_count": 2},
     "rope.scaling.alpha needs a head dimension above 2 (found 2)"),
    ("hunyuan_alpha", {"attention.key_length": 4, "attention.value_length": 4, "rope.dimension_count": 4}, ""),
])  # fmt: skip
def test_family_specific_values_are_checked(name, changes, problem):
    metadata = {**metadata_of(name), **changes}
    result = read_again(name, {key: value for key, value in metadata.items() if value is not None})
    assert problem in result if isinstance(result, str) and problem else isinstance(result, dict) and not problem, (
        result
    )


def test_gemma_2_alternates_windows_and_scales_27b_by_width(model_path):
    with GGUFFile.open(model_path("gemma2")) as file:
        h = load_architecture(file)[1]
    windows = [state.window for state in h.list_states()]
    assert windows[::2] == [16] * len(windows[::2]) and not any(windows[1::2])
    assert h.scale == h.attention.head_dim**-0.5
    large = replace(h, layers=46)
    assert large.scale == (h.width / h.attention.heads[0]) ** -0.5


def of_size(name: str, vocab: int = 272, **sizes) -> Any:
    """Read a tiny model's metadata with the sizes of a real one; None removes a key."""
    declared = model(name)
    changed = {f"{declared.arch}.{key.replace('__', '.')}": value for key, value in sizes.items()}
    metadata = {key: value for key, value in (declared.metadata | changed).items() if value is not None}
    module = import_module(f"localllm.arch.families.{ARCHITECTURES[declared.arch]}")
    return module.read(HyperparameterReader(metadata, "model.gguf", vocab))


STRETCHED = 1 + 0.1 * math.log(8)  # YaRN's attention factor


@pytest.mark.parametrize(
    ("scaling", "multiplier", "magnitude"),
    [("linear", None, STRETCHED), ("linear", 0.05, STRETCHED * (1 + 0.05 * math.log(8))),
     ("yarn", None, STRETCHED), ("yarn", 0.05, 1 + 0.05 * math.log(8))],
)  # fmt: skip
def test_scores_of_latent_attention_grow_with_a_stretched_context(scaling, multiplier, magnitude):
    keys = {"type": scaling, "factor": 8.0, "original_context_length": 64, "yarn_log_multiplier": multiplier}
    h = of_size("deepseek2_v3", **{f"rope__scaling__{key}": value for key, value in keys.items()})
    assert h.scale == pytest.approx(magnitude**2 * of_size("deepseek2_v3", rope__scaling__type="none").scale)


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "length", "scalar"),
    [
        ("gemma2", 46, 4608, 32, 128, 144), ("gemma2", 42, 3584, 16, 256, 256), ("gemma2", 26, 2304, 8, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168), ("gemma3", 48, 3840, 16, 256, 256), ("gemma3", 34, 2560, 8, 256, 256),
    ],
)  # fmt: skip
def test_queries_of_published_gemmas_have_their_scale(name, layers, width, heads, length, scalar):
    """The scalar is query_pre_attn_scalar of their config.json."""
    shape = {"attention__key_length": length, "attention__value_length": length, "rope__dimension_count": None}
    sizes = {"block_count": layers, "embedding_length": width, "attention__head_count": heads}
    assert of_size(name, **sizes, **shape, attention__head_count_kv=heads // 2).scale == scalar**-0.5


@pytest.mark.parametrize(("layers", "windows"), [(64, [4096, 4096, 4096, None] * 16), (30, [None] * 30)])
def test_only_the_large_exaone_4_has_windows(layers, windows):
    """The first files of the 32B model do not say so; the 1.2B model has none."""
    assert [*of_size("exaone4", block_count=layers).windows] == windows


def test_rotated_layers_depend_on_windows_and_experts():
    """Cohere also rotates layers without experts and MTP layers; others rotate where they have a window."""
    windows = {"attention__sliding_window_pattern": np.array([False, True, True, True, False])}
    h = replace(of_size("cohere2moe", **windows), windows=(None, 4, None, 4, None), dense=2)
    for layers, rotated in ((5, "ry-y-"), (4, "ry-yr"), (3, "ry-rr")):
        rotates = [replace(h, layers=layers).get_rope(layer) is not None for layer in range(5)]
        assert rotates == [letter != "-" for letter in rotated]
    of_two = {
        ("exaone4", (4, None)): "r-", ("exaone4", (None, None)): "rr", ("llama4", (4, None)): "r-",
        ("llama4", (None, None)): "rr", ("cohere2", (4, None)): "r-",
    }  # fmt: skip
    for (name, seen), rotated in of_two.items():
        h = replace(of_size(name), windows=seen)
        assert [h.get_rope(layer) is not None for layer in range(2)] == [letter == "r" for letter in rotated], name


def test_llama_4_with_128_experts_normalizes_no_queries():
    """Maverick has 128; Scout, with 16, normalizes."""
    assert [of_size("llama4", expert_count=count).normed for count in (16, 127, 128, 129)] == [True, True, False, True]


def test_first_files_of_glm_4_7_flash_use_sigmoid_scores():
    """They are recognized by the size of their vocabulary."""
    routings = [of_size("deepseek2_v3", vocab, expert_gating_func=None).routing for vocab in (154879, 154880)]
    assert [routing.sigmoid for routing in routings] == [False, True]


def refusal(**changes) -> str:
    """Return the message that refuses the metadata: one printable, short line that begins with the path."""
    with pytest.raises(ModelError) as error:
        read(**changes)
    message = str(error.value)
    assert message.startswith("model.gguf: ")
    assert message.isprintable()
    assert len(message) < 1000
    return message


# ---- how fast the pairs of a head turn ------------------------------------------------------------------------------


def rope(dims=64, base=10000.0, factor=1.0, yarn=False, original_context=4096) -> RopeParameters:
    return RopeParameters(dims, dims, True, base, factor, yarn, original_context)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize(("dims", "base"), [(2, 10000.0), (64, 10000.0), (128, 500000.0), (10, 1.5)])
def test_rope_frequencies_are_powers_of_the_base(dims, base, factor):
    """Pair i rotates by base^(-2 i / dims) per position (Su et al. 2021); interpolation divides positions."""
    got = rope(dims, base, factor).compute_frequencies()
    expected = [math.pow(base, -2 * i / dims) / factor for i in range(dims // 2)]
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_rope_factors_divide_the_frequencies():
    factors = np.linspace(1, 8, 32)
    np.testing.assert_allclose(rope().compute_frequencies(factors), rope().compute_frequencies() / factors, rtol=1e-15)
    both = rope(factor=4.0).compute_frequencies(factors)
    np.testing.assert_allclose(both, rope().compute_frequencies() / factors / 4, rtol=1e-15)


@pytest.mark.parametrize(("dims", "base", "original"), [(64, 10000.0, 4096), (128, 1e6, 32768), (32, 10000.0, 512)])
def test_yarn_blends_by_the_turns_within_the_original_context(dims, base, original):
    """Peng et al. 2023: pairs of at least 32 turns stay, those of up to one are stretched, with a ramp in between."""
    factor = 8.0
    plain, got = rope(dims, base).compute_frequencies(), rope(dims, base, factor, True, original).compute_frequencies()
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


def test_yarn_agrees_with_an_example_by_hand():
    """dims 64, base 10000, original context 4096: 32 turns at pair 10.48, 1 turn at 22.52, so the ramp is 10 to 23."""
    got = rope(64, 10000.0, 4.0, True, 4096).compute_frequencies()
    plain = 10000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(got[:11], plain[:11], rtol=1e-12)
    np.testing.assert_allclose(got[23:], plain[23:] / 4, rtol=1e-12)
    np.testing.assert_allclose(got[11], plain[11] * (12 / 13 + 1 / 13 / 4), rtol=1e-12)
    np.testing.assert_allclose(got[22], plain[22] * (1 / 13 + 12 / 13 / 4), rtol=1e-12)


def test_yarn_ends_the_ramp_at_dims_minus_1_as_llama_cpp():
    """dims 8, base 10, original context 700: 32 turns at pair 2.17, 1 turn at 8.19; the ramp ends at 7, dims - 1.


    llama.cpp does the same, though the last pair is number 3.
    """
    got = rope(8, 10.0, 4.0, True, 700).compute_frequencies()
    plain = 10.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(got[:3], plain[:3], rtol=1e-12)
    np.testing.assert_allclose(got[3], plain[3] * (4 / 5 + 1 / 5 / 4), rtol=1e-12)


def test_removing_rope_scaling_restores_frequencies_and_magnitude():
    """Some layers of Gemma 3 and OLMo 3 are not scaled."""
    scaled = replace(rope(64, 10000.0, 8.0, True, 512), magnitude=1.2, yarn_betas=(16.0, 2.0))
    unscaled = scaled.remove_scaling(5000.0)
    np.testing.assert_array_equal(unscaled.compute_frequencies(), rope(64, 5000.0).compute_frequencies())
    assert unscaled.magnitude == 1
    assert (unscaled.dims, unscaled.head_dim, unscaled.interleaved) == (64, 64, True)


@pytest.mark.parametrize("original", [1, 6, 1 << 24])
@pytest.mark.parametrize("base", [1.0000001, 10000.0, 1e30])
@pytest.mark.parametrize("dims", [2, 128])
def test_yarn_with_extreme_values_stays_finite(original, base, dims):
    got = rope(dims, base, 4.0, True, original).compute_frequencies()
    assert np.isfinite(got).all()
    assert (got > 0).all()


@pytest.mark.parametrize(
    ("sections", "mixed", "still", "axes"),
    [
        (None, False, (), ()),
        ([2, 1, 1, 0], False, (), (0, 0, 1, 2, 0, 0, 1, 2)),
        ([1, 1, 1, 1], False, (3, 7), (0, 1, 2, 2, 0, 1, 2, 2)),  # over and over
        ([3, 2, 2, 1], False, (7,), (0, 0, 0, 1, 1, 2, 2, 2)),
        ([3, 2, 3, 0], True, (7,), (0, 1, 2, 0, 1, 2, 0, 1)),  # in turn: the height has no third one
        ([3, 3, 2, 0], True, (), (0, 1, 2, 0, 1, 2, 0, 1)),
        ([1, 3, 3, 0], True, (3, 6), (0, 1, 2, 0, 1, 2, 0, 0)),
    ],
)
def test_pairs_rotate_by_image_axes_except_those_of_the_fourth(sections, mixed, still, axes):
    metadata = (
        METADATA if sections is None else METADATA | {"llama.rope.dimension_sections": np.array(sections, np.int32)}
    )
    turned = rope(dims=16)
    assert add_sections(HyperparameterReader(metadata, "model.gguf", 100), turned, mixed) == replace(
        turned, unrotated=still, pair_axes=axes
    )


@pytest.mark.parametrize("sections", [[1, 2, 3], [1, 2, 3, 4, 5], [0, 0, 0, 0], [1, -1, 1, 0], 3])
def test_invalid_rope_sections_are_refused(sections):
    values = np.array(sections, np.int32) if isinstance(sections, list) else sections
    with pytest.raises(ModelError, match="dimension_sections"):
        add_sections(
            HyperparameterReader(METADATA | {"llama.rope.dimension_sections": values}, "model.gguf", 100), rope()
        )
