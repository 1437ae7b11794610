"""Test RoPE scaling options: they act like metadata of the file."""

import math
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from tiny_model import write_tiny_model

import localllm
from localllm.arch.rope_scaling import RopeScaling
from localllm.errors import UnsupportedError, UsageError

IDS = [*range(3, 120)]


def logits(path: Path | str, **options) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the context is longer than the trained one
        with localllm.open(path, context=128, cache=False, **options) as model:
            return model.logits(IDS)


@pytest.mark.parametrize(
    ("scaling", "metadata", "context"),
    [
        (RopeScaling("yarn", 4.0, None, 64), {"type": "yarn", "factor": 4.0}, 256),
        (RopeScaling("linear", 2.0), {"type": "linear", "factor": 2.0}, 64),
        (RopeScaling(None, 2.0), {"factor": 2.0}, 64),
        (RopeScaling(None, None, 5000.0), {"freq_base": 5000.0}, 64),
        (RopeScaling("none", 3.0), {}, 64),
    ],
)
def test_rope_scaling_options_have_the_same_effect_as_file_metadata(
    tmp_path: Path, scaling: RopeScaling, metadata: dict, context: int
):
    names = {name: "rope.freq_base" if name == "freq_base" else f"rope.scaling.{name}" for name in metadata}
    keys = {f"llama.{names[name]}": value for name, value in metadata.items()}
    plain = write_tiny_model(tmp_path / "plain.gguf", 64)
    edited = write_tiny_model(tmp_path / "edited.gguf", 64, metadata=keys)
    there = logits(edited)
    here = logits(plain, rope=scaling)
    np.testing.assert_array_equal(here, there)
    with localllm.open(plain, cache=False, rope=scaling) as model:
        assert model.context == context
    if metadata:
        assert not np.array_equal(here, logits(plain))


def test_a_rope_factor_stored_in_the_file_is_not_applied_twice(tmp_path: Path):
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    path = write_tiny_model(tmp_path / "yarn.gguf", 64, metadata=keys)
    own, same = logits(path), logits(path, rope=RopeScaling("yarn", 4.0))
    np.testing.assert_array_equal(own, same)
    assert not np.array_equal(own, logits(path, rope=RopeScaling("none")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "longrope"}, "rope_scaling must be none, linear or yarn, not 'longrope'"),
        ({"factor": -1.0}, "rope_scale must be from"),
        ({"factor": math.nan}, "rope_scale must be from"),
        ({"base": 1.0}, "rope_freq_base must be above 1"),
        ({"original_context": 0}, "yarn_orig_ctx must be at least 1 token"),
    ],
)
def test_invalid_rope_scaling_options_are_refused(tiny: str, options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        localllm.open(tiny, rope=RopeScaling(**options))
    assert asdict(RopeScaling(**options)).keys() == {"kind", "factor", "base", "original_context"}


def test_models_with_windows_refuse_rope_scaling(model_path):
    with pytest.raises(UnsupportedError, match="the RoPE scaling of models with attention windows cannot be changed"):
        localllm.open(model_path("gemma2"), rope=RopeScaling("linear", 2.0))


CARD = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "64")  # as Qwen's model cards write it


def test_the_options_of_a_qwen_model_card_extend_the_context(cli, tmp_path: Path):
    path = write_tiny_model(tmp_path / "model.gguf", 64)
    words = ("run", path, "-p", "hello " * 100, "--raw", "-n", "3", "--temp", "0")
    code, _, err = cli(*words)
    assert code == 4 and "the context holds only 64" in err, err
    code, out, err = cli(*words, *CARD, "--receipt", tmp_path / "receipt.json")
    assert code == 0 and out, err
    assert cli(*words, "--rope-scaling", "yarn", "--rope-freq-scale", "0.25", "--yarn-orig-ctx", "64")[:2] == (0, out)
    assert cli("replay", tmp_path / "receipt.json")[:2] == (0, "the same text\n")


def test_contradictory_or_negative_rope_scales_are_refused(cli, tiny: str):
    code, _, err = cli("run", tiny, "-p", "Hi", "--rope-scale", "4", "--rope-freq-scale", "0.25")
    assert (code, err) == (2, "localllm: error: give either --rope-scale or --rope-freq-scale, not both\n")
    code, _, err = cli("run", tiny, "-p", "Hi", "--rope-scale", "-4")
    assert (code, err) == (2, "localllm: error: --rope-scale must be from 0.001 to 1000000, not -4\n")
