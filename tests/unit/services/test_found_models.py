"""Models that other programs have downloaded, found by name, and never written to."""

import json
from pathlib import Path

import pytest

from localllm.errors import ModelError
from localllm.services.catalogue import resolve

COMMIT, OLD = "b" * 40, "a" * 40


@pytest.fixture
def home(tmp_path: Path, monkeypatch, tiny: str) -> Path:
    """A home with a cache of Hugging Face, LM Studio's folder and Ollama's store, each with the tiny model."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path / "own"))
    data = Path(tiny).read_bytes()

    def write(name: str, content: bytes = data) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    hub = ".cache/huggingface/hub/models--Ann--Tiny-GGUF"
    write(f"{hub}/refs/main", COMMIT.encode())
    write(f"{hub}/snapshots/{OLD}/Tiny-Q8_0.gguf")
    write(f"{hub}/snapshots/{COMMIT}/Tiny-Q8_0.gguf")
    write(f"{hub}/snapshots/{COMMIT}/mmproj-Tiny-F16.gguf")
    write(".lmstudio/models/bob/Other-GGUF/Other-Q4_K_M.gguf")
    write(".ollama/models/blobs/sha256-11")
    for manifest, layers in {
        "registry.ollama.ai/library/small/1b": [("projector", "22"), ("model", "11")],
        "registry.ollama.ai/ann/mine/latest": [("model", "11")],
        "hf.co/Ann/Tiny-GGUF/Q8_0": [("model", "11")],
        "registry.ollama.ai/library/gone/latest": [("model", "33")],
        "registry.ollama.ai/library/bad/latest": [("model", "../../secret")],
    }.items():
        kinds = [(f"application/vnd.ollama.image.{kind}", f"sha256:{digest}") for kind, digest in layers]
        told = [{"mediaType": kind, "digest": digest} for kind, digest in kinds]
        write(f".ollama/models/manifests/{manifest}", json.dumps({"layers": told}).encode())
    write(".ollama/models/manifests/registry.ollama.ai/library/torn/latest", b'{"layers": [')
    return tmp_path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("hf:Ann/Tiny-GGUF", f".cache/huggingface/hub/models--Ann--Tiny-GGUF/snapshots/{COMMIT}/Tiny-Q8_0.gguf"),
        ("ann/tiny-gguf:q8_0", f".cache/huggingface/hub/models--Ann--Tiny-GGUF/snapshots/{COMMIT}/Tiny-Q8_0.gguf"),
        ("hf:bob/Other-GGUF:Q4_K_M", ".lmstudio/models/bob/Other-GGUF/Other-Q4_K_M.gguf"),
        ("ollama:small:1b", ".ollama/models/blobs/sha256-11"),
        ("small:1b", ".ollama/models/blobs/sha256-11"),
        ("ann/mine", ".ollama/models/blobs/sha256-11"),
    ],
)
def test_a_name_finds_what_is_there(home: Path, name: str, path: str):
    assert resolve(name) == str(home / path)


@pytest.mark.parametrize("name", ["small", "ollama:gone", "ollama:bad", "ollama:torn", "hf:Ann/Tiny-GGUF:Q2_K"])
def test_what_is_not_there_is_not_found(home: Path, name: str):
    with pytest.raises(ModelError):
        resolve(name)


def test_list_found(home: Path, cli):
    theirs = [home / ".cache" / "huggingface", home / ".lmstudio", home / ".ollama"]
    before = [sorted(folder.rglob("*")) for folder in theirs]
    code, out, err = cli("list", "--found", "--json")
    assert code == 0, err
    told = [(model["name"], model["program"]) for model in json.loads(out)["found"]]
    assert told == [
        ("hf:Ann/Tiny-GGUF:Q8_0", "Hugging Face"),
        ("hf:bob/Other-GGUF:Q4_K_M", "LM Studio"),
        ("ollama:ann/mine:latest", "Ollama"),
        ("ollama:hf.co/Ann/Tiny-GGUF:Q8_0", "Ollama"),
        ("ollama:small:1b", "Ollama"),
    ]
    code, out, _ = cli("list", "--found")
    assert code == 0 and "LM Studio" in out and "ollama:small:1b" in out
    assert "LM Studio" not in cli("list")[1]
    assert cli("run", "small:1b", "-p", "Hi", "-n", "1", "--raw", "--temp", "0")[0] == 0
    assert [sorted(folder.rglob("*")) for folder in theirs] == before


def test_the_folder_that_the_environment_names(home: Path, monkeypatch, cli):
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "nowhere"))
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "nothing"))
    found = json.loads(cli("list", "--found", "--json")[1])["found"]
    assert [model["program"] for model in found] == ["LM Studio"]
