"""Test names as Ollama writes them, and suggestions for unknown names."""

import re
from pathlib import Path

import pytest

from localllm.errors import ModelError
from localllm.services.hub.catalogue import MissingError, find_registered, load_registry, parse_name, resolve_model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty models folder and no Ollama store."""
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2.5-coder:1.5b-instruct-q4_K_M", "qwen2.5-coder-1.5b:Q4_K_M"), ("qwen2.5-coder", "qwen2.5-coder-7b"),
        ("llama3.2:latest", "llama-3.2-3b"), ("llama3.2", "llama-3.2-3b"), ("llama3.2:1b", "llama-3.2-1b"),
        ("registry.ollama.ai/library/llama3.1:8b-instruct-fp16", "llama-3.1-8b:F16"), ("library/qwen3", "qwen3-8b"),
        ("qwen3:4b-q8_0", "qwen3-4b:Q8_0"), ("qwen3:30b-a3b-q4_K_M", "qwen3-30b-a3b:Q4_K_M"),
        ("qwen3:4b-instruct-2507-q4_K_M", "qwen3-4b-2507:Q4_K_M"), ("qwen3-4b:latest", "qwen3-4b"),
        ("gemma3:4b-it-q4_K_M", "gemma-3-4b:Q4_K_M"), ("gemma3n:e2b", "gemma-3n-e2b"), ("gemma3:270m", "gemma-3-270m"),
        ("embeddinggemma", "embeddinggemma-300m"), ("embeddinggemma:300m-bf16", "embeddinggemma-300m:BF16"),
        ("nomic-embed-text:v1.5", "nomic-embed-text-1.5"), ("bge-m3:567m-fp16", "bge-m3:F16"),
        ("phi3.5:3.8b-mini-instruct-q4_K_M", "phi-3.5-mini:Q4_K_M"), ("phi4:latest", "phi-4"),
        ("mistral:7b-instruct-v0.3-q4_0", "mistral-7b:Q4_0"), ("mistral-small3.2:24b", "mistral-small-3.2-24b"),
        ("deepseek-r1:7b-qwen-distill-q4_K_M", "deepseek-r1-7b:Q4_K_M"), ("gpt-oss:20b", "gpt-oss-20b"),
        ("granite4:350m-h", "granite-4.0-h-350m"), ("smollm2:135m-instruct-q4_1", "smollm2-135m:Q4_1"),
    ],
)  # fmt: skip
def test_a_full_tag_selects_model_and_format(name: str, expected: str):
    with pytest.raises(MissingError) as missing:
        resolve_model(name)
    assert f"`localllm pull {expected}`" in str(missing.value)


def test_every_known_model_is_found_by_its_ollama_names():
    models = load_registry().values()
    for model in models:
        assert find_registered(model.name, models) == model.name
        for name in model.ollama:
            assert find_registered(name, models) == model.name, name


def test_ollama_names_are_unique():
    names = [parse_name(name)[:2] for model in load_registry().values() for name in (model.name, *model.ollama)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name", ["qwen:34b", "gemma3:4b-it-qat", "qwen2.5-coder:1.5b-base", "llama3.2:3b-text", "mixtral"]
)
def test_other_models_are_not_taken_for_known_ones(name: str):
    assert find_registered(name, load_registry().values()) is None


def test_a_local_file_is_found_with_the_tag_latest(folder: Path):
    (folder / "qwen.gguf").touch()
    assert resolve_model("qwen:latest") == resolve_model("qwen") == str(folder / "qwen.gguf")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen2.5-coder:0.5b", "in the size 0.5b; there are qwen2.5-coder-1.5b, qwen2.5-coder-7b, qwen2.5-coder-14b,"),
        ("qwen2.5-coder-0.5b", "in the size 0.5b; there are qwen2.5-coder-1.5b,"),
        ("deepseek-r1:8b", "in the size 8b; there are deepseek-r1-1.5b, deepseek-r1-7b,"),
        ("deepseek-r1", "did you mean deepseek-r1-1.5b or deepseek-r1-7b or"),
        ("llama3:8b", "did you mean llama-3.1-8b?"),
        ("llama3", "did you mean llama-3.2-1b or llama-3.2-3b or llama-3.1-8b or llama-3.3-70b?"),
        ("phi3", "did you mean phi-3.5-mini?"), ("gemma3:4b-it-qat", "did you mean gemma-3-4b?"),
        ("qwen2.5-coder:1.5b-base", "did you mean qwen2.5-coder-1.5b?"), ("codellama:7b", "no model of that name (`"),
        ("qwen3-4", "did you mean qwen3-4b"), ("qwen4:4b", "did you mean qwen3-4b"),
    ],
)  # fmt: skip
def test_a_suggestion_has_the_requested_size(name: str, end: str):
    with pytest.raises(ModelError) as unknown:
        resolve_model(name)
    assert end in str(unknown.value)
    suggested = re.findall(r"[a-z]+[\w.]*-[\w.-]+", str(unknown.value).partition("did you mean")[2])
    size = parse_name(name).size
    assert all(size in ("", parse_name(each).size) for each in suggested if each in load_registry())


# ---- files in the models folder by Ollama's names


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put files with usual names into the models folder."""
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    for name in (
        "qwen2.5-coder-0.5b-instruct-q4_k_m", "Meta-Llama-3-8B-Instruct.Q4_K_M", "Meta-Llama-3-8B-Instruct.Q8_0",
        "zephyr-3b-Q5_0", "zephyr-3b-Q8_0", "gemma-3-270m-it-F16",
    ):  # fmt: skip
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qwen2.5-coder:0.5b", "qwen2.5-coder-0.5b-instruct-q4_k_m"),
        ("qwen2.5-coder:0.5b-instruct-q4_K_M", "qwen2.5-coder-0.5b-instruct-q4_k_m"),
        ("llama3", "Meta-Llama-3-8B-Instruct.Q4_K_M"),
        ("llama3:latest", "Meta-Llama-3-8B-Instruct.Q4_K_M"),
        ("library/llama3:8b-instruct-q8_0", "Meta-Llama-3-8B-Instruct.Q8_0"),
        ("zephyr:3b-q8_0", "zephyr-3b-Q8_0"),
        ("gemma3:270m", "gemma-3-270m-it-F16"),
    ],
)
def test_an_ollama_name_finds_the_file_of_its_family_size_and_quantization(local: Path, name: str, file: str):
    assert resolve_model(name) == str(local / f"{file}.gguf")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zephyr:3b", "did you mean zephyr-3b-Q5_0 or zephyr-3b-Q8_0"),
        ("qwen2.5-coder", r"pull qwen2.5-coder-7b` .*; of its family, qwen2.5-coder-0.5b-instruct-q4_k_m is here$"),
        ("qwen2.5-coder:1.5b", r"pull qwen2.5-coder-1.5b` .*; of its family, qwen2.5-coder-0.5b-instruct-q4_k_m is"),
        ("qwen2.5-coder:9b", "in the size 9b; there are qwen2.5-coder-0.5b-instruct-q4_k_m, qwen2.5-coder-1.5b"),
    ],
)
def test_files_of_the_family_are_suggested(local: Path, name: str, message: str):
    with pytest.raises(ModelError, match=message):
        resolve_model(name)
