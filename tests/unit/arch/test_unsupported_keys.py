"""Test keys that a family does not read: they are refused by name if they would change the result."""

from copy import copy
from pathlib import Path

import pytest
from models import write_model

from localllm.arch import load_architecture
from localllm.arch.metadata import NEUTRAL
from localllm.errors import UnsupportedError
from localllm.files.gguf.file import GGUFFile


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(str(write_model("llama", tmp_path_factory.mktemp("models") / "llama.gguf")))


def with_setting(file: GGUFFile, name: str, value: object) -> GGUFFile:
    changed = copy(file)
    changed.metadata = {**file.metadata, f"{file.metadata['general.architecture']}.{name}": value}
    return changed


OF_EXPERTS = {"expert_weights_scale", "expert_group_count"}  # the first llama reads, the second needs experts


@pytest.mark.parametrize("name", sorted(NEUTRAL.keys() - OF_EXPERTS))
def test_an_unread_key_that_matters_is_refused(llama: GGUFFile, name: str):
    value = True if name == "ssm.dt_b_c_rms" else 2 if isinstance(NEUTRAL[name][0], int) else 0.5
    with pytest.raises(UnsupportedError, match=rf"llama\.{name} \S+ is not supported in llama models"):
        load_architecture(with_setting(llama, name, value))


@pytest.mark.parametrize("name", sorted(NEUTRAL.keys() - OF_EXPERTS))
def test_an_unread_key_with_its_neutral_value_is_accepted(llama: GGUFFile, name: str):
    for value in NEUTRAL[name]:
        load_architecture(with_setting(llama, name, value))


def test_a_window_shorter_than_the_context_is_refused(llama: GGUFFile):
    context = llama.metadata["llama.context_length"]
    for length in (0, context, context + 1):
        load_architecture(with_setting(llama, "attention.sliding_window", length))
    with pytest.raises(UnsupportedError, match=rf"sliding_window {context - 1} is not supported"):
        load_architecture(with_setting(llama, "attention.sliding_window", context - 1))


def test_a_window_that_llama_cpp_ignores_is_ignored(tmp_path: Path):
    file = GGUFFile.open(str(write_model("phi3", tmp_path / "phi3.gguf")))
    load_architecture(with_setting(file, "attention.sliding_window", 16))


def test_unknown_keys_without_effect_are_accepted(llama: GGUFFile):
    load_architecture(with_setting(llama, "tensor_data_layout", "Meta AI original pth"))
    load_architecture(with_setting(llama, "a_name_from_the_future", 3))
