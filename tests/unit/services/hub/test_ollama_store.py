"""Test models in Ollama's store: adapters, parameters, templates and messages beside their files."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from adapters import random_adapter, supported_names, write_adapter

import localllm
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.services.hub.catalogue import find_model, resolve_model
from localllm.services.hub.name_settings import read_messages
from localllm.services.hub.ollama_store import MAX_LAYER, find_stored

Put = Callable[..., None]
PARAMETERS = {
    "temperature": 0, "top_k": 9, "stop": ["X"], "num_predict": 4, "num_ctx": 64, "num_batch": 2, "tfs_z": 1.0,
    "seed": 5, "repeat_penalty": 1.5, "num_gpu": 0, "mirostat_tau": 3.0,
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]


@pytest.fixture
def write_name(tmp_path: Path, monkeypatch, tiny: str) -> Put:
    """Return a function that writes a name of Ollama's store, with layers beside the tiny model's."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path / "none"))
    (tmp_path / "blobs").mkdir()

    def write(name: str, **layers: object) -> None:
        parts = {"model": Path(tiny).read_bytes(), **{kind: as_bytes(value) for kind, value in layers.items()}}
        listed = []
        for kind, content in parts.items():
            digest = hashlib.sha256(content).hexdigest()
            (tmp_path / "blobs" / f"sha256-{digest}").write_bytes(content)
            listed.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
        model, _, tag = name.partition(":")
        manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / model / (tag or "latest")
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"layers": listed}))

    return write


def as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else (value if isinstance(value, str) else json.dumps(value)).encode()


@pytest.mark.parametrize("name", ["lora", "lora:latest", "ollama:lora", "registry.ollama.ai/library/lora:latest"])
def test_a_name_with_an_adapter_in_another_format_is_refused(write_name: Put, cli, name: str):
    write_name("lora", adapter="x")
    code, out, err = cli("run", name, "-p", "Hi")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "ollama:lora:latest has an adapter that is not a GGUF adapter" in err
    with pytest.raises(ModelError, match="has an adapter that is not"):
        localllm.open(name)
    assert cli("list", "--found")[0] == 0


def test_a_name_with_a_gguf_adapter_answers_with_it(write_name: Put, cli, tiny: str, tmp_path: Path):
    with GGUFFile.open(tiny) as file:
        adapter = random_adapter(file, supported_names(file), 4, 0)
    path = write_adapter(adapter, tmp_path / "poet.gguf", 60.0)
    write_name("bare")
    write_name("poet", adapter=path.read_bytes())
    asked = ["-p", "tell me", "-n", "12", "--temp", "0"]
    ways = ["bare"], ["poet"], [tiny, "--lora", str(path)]
    bare, named, adapted = (cli("run", *words, *asked)[1] for words in ways)
    assert named == adapted != bare
    with localllm.open("poet") as model:
        assert len(model.engine.adapters) == 1


def test_parameters_and_system_text_are_defaults_of_options(write_name: Put, cli):
    write_name("tuned", params=PARAMETERS, system="Answer in French.")
    rows = {line.split(" ")[0]: line for line in cli("config", "run", "tuned")[1].splitlines()}
    expected = {
        "--system": "Answer in French.",
        "--context": " 64 ",
        "--max-tokens": " 4 ",
        "--stop": "X",
        "--temp": "0",
    }
    for option, value in expected.items():
        assert value in rows[option] and rows[option].endswith("ollama:tuned:latest in Ollama's store")
    code, out, err = cli("run", "tuned", "-p", "Hi", "--json")
    answer = json.loads(out)
    assert (code, answer["seed"]) == (0, 5) and answer["completion_tokens"] <= 4
    assert "ignored parameters (not supported): tfs_z\n" in err
    assert json.loads(cli("run", "tuned", "-p", "Hi", "--json", "-s", "6", "-n", "2")[1])["seed"] == 6


def test_a_prompt_has_the_system_text_and_messages_of_its_name(write_name: Put, cli, tmp_path: Path):
    write_name("tuned", system="Answer in French.", messages=MESSAGES)
    write_name("bare")
    counts = {}
    for name in ("bare", "tuned"):
        counts[name] = [json.loads(cli("run", name, "-p", "Hi", "-n", "1", "--json")[1])["prompt_tokens"]]
        counts[name] += [json.loads(cli("map", name, "-p", "{line}", "-n", "1", stdin=b"Hi\n")[1])["prompt_tokens"]]
        with localllm.open(name) as model:
            counts[name].append(model.count_tokens([{"role": "user", "content": "Hi"}]))
    assert len(set(counts["bare"])) == len(set(counts["tuned"])) == 1 and counts["bare"] < counts["tuned"]
    raw = [
        json.loads(cli("run", name, "-p", "Hi", "-n", "1", "--json", "--raw")[1])["prompt_tokens"] for name in counts
    ]
    assert raw[0] == raw[1]
    with localllm.open("tuned") as model:
        prompt = model.detokenize(model.chat([{"role": "user", "content": "Hi"}], max_tokens=1).prompt)
        assert [prompt.index(text) for text in ("French", "ping", "pong", "Hi")] == sorted(
            prompt.index(text) for text in ("French", "ping", "pong", "Hi")
        )


def test_config_toml_overrides_the_store(write_name: Put, tmp_path: Path, monkeypatch, cli):
    write_name("tuned", params={"temperature": 0.5, "top_k": 3})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "localllm").mkdir()
    (tmp_path / "localllm" / "config.toml").write_text("[defaults]\ntop-k = 4\n[model.tuned]\ntemp = 0.1\n")
    for name in ("tuned", "tuned:latest", "ollama:tuned"):
        rows = {line.split(" ")[0]: line for line in cli("config", "run", name)[1].splitlines()}
        assert "config.toml, line 4" in rows["--temp"] and "Ollama's store" in rows["--top-k"]


@pytest.mark.parametrize(
    ("template", "source", "differs"),
    [
        ("<|im_start|>user\n{{ .Prompt }}<|im_end|>", "<|im_start|>{{ role }}<|im_end|>", False),
        (
            "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>{{ end }}",
            "<|im_start|><|im_end|>",
            False,
        ),
        ("[INST] {{ .Prompt }} [/INST]", "<|im_start|><|im_end|>", True),
        ("### Instruction:\n{{ .Prompt }}\n### Response:", "<|im_start|>", True),
        ("USER: {{ .Prompt }} ASSISTANT:", "USER: ASSISTANT:", False),
        ("{{ .Prompt }}", "<|im_start|>", True),
        ("<|im_start|>{{ .Prompt }}", None, True),
    ],
)
def test_a_template_with_other_markers_is_reported(write_name: Put, template: str, source: str | None, differs: bool):
    write_name("other", template=template)
    stored = find_stored("other")
    assert stored is not None
    assert [("differs from the model's chat template" in line) for line in stored.describe_unused(source, False)] == [
        True
    ] * differs
    assert stored.describe_unused(source, True) == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("params", b"{"), ("params", b"[]"), ("messages", b"[1]"), ("system", b"\xff"),
        ("system", b" " * (MAX_LAYER + 1)),
    ],
)  # fmt: skip
def test_a_damaged_layer_is_refused_by_name(write_name: Put, cli, kind: str, content: bytes):
    write_name("torn", **{kind: content})
    code, _, err = cli("run", "torn", "-p", "Hi")
    assert code == 3 and f"ollama:torn:latest: its {kind} layer in Ollama's store is damaged or missing" in err


def test_a_layer_as_large_as_the_limit_is_read(write_name: Put):
    write_name("large", system=b" " * MAX_LAYER)
    stored = find_stored("large")
    assert stored is not None and stored.read_text("system") == " " * MAX_LAYER


def test_other_names_have_no_messages(write_name: Put, tiny: str):
    write_name("tuned", messages=MESSAGES)
    assert (read_messages("tuned"), read_messages(tiny), read_messages("no such name")) == (MESSAGES, [], [])
    stored = find_model("tuned").stored
    assert stored is not None and str(stored.path) == resolve_model("tuned")


def test_unused_files_beside_a_model_are_reported(write_name: Put, tmp_path: Path, monkeypatch, tiny: str, cli):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--Ann--Tiny-GGUF" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "Tiny-Q8_0.gguf").symlink_to(tiny)
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    (snapshot / "params").write_text("{}")
    err = cli("run", "hf:Ann/Tiny-GGUF", "-p", "Hi", "-n", "1")[2]
    assert f"{snapshot}/chat_template.jinja is not used, but differs from the model's chat template" in err
    assert f"{snapshot}/params is not used" in err
    with pytest.warns(UserWarning, match="chat_template.jinja is not used"), localllm.open("hf:Ann/Tiny-GGUF") as model:
        assert len(model.warnings) == 2


COMMIT, OLD = "b" * 40, "a" * 40


@pytest.fixture
def home(tmp_path: Path, monkeypatch, tiny: str) -> Path:
    """Make a home with Hugging Face's cache, LM Studio's folder and Ollama's store, each with the tiny model."""
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
def test_models_of_other_programs_are_found_by_name(home: Path, name: str, path: str):
    assert resolve_model(name) == str(home / path)


@pytest.mark.parametrize("name", ["small", "ollama:gone", "ollama:bad", "ollama:torn", "hf:Ann/Tiny-GGUF:Q2_K"])
def test_missing_and_damaged_models_of_other_programs_are_refused(home: Path, name: str):
    with pytest.raises(ModelError):
        resolve_model(name)


def test_list_found_shows_models_of_other_programs(home: Path, cli):
    theirs = [home / ".cache" / "huggingface", home / ".lmstudio", home / ".ollama"]
    before = [sorted(folder.rglob("*")) for folder in theirs]
    code, out, err = cli("list", "--found", "--json")
    assert code == 0, err
    listed = [(model["name"], model["program"]) for model in json.loads(out)["found"]]
    assert listed == [
        ("hf:Ann/Tiny-GGUF:Q8_0", "Hugging Face"),
        ("hf:bob/Other-GGUF:Q4_K_M", "LM Studio"),
        ("ollama:ann/mine:latest", "Ollama"),
        ("ollama:hf.co/Ann/Tiny-GGUF:Q8_0", "Ollama"),
        ("ollama:small:1b", "Ollama"),
    ]
    code, out, _ = cli("list", "--found")
    assert code == 0 and "LM Studio" in out and "ollama:small:1b" in out
    code, without, err = cli("list")
    assert (code, without) == (0, out) and "but these of other programs" in err, "the models folder is empty"
    assert cli("run", "small:1b", "-p", "Hi", "-n", "1", "--raw", "--temp", "0")[0] == 0
    assert [sorted(folder.rglob("*")) for folder in theirs] == before


def test_environment_variables_move_the_folders_of_other_programs(home: Path, monkeypatch, cli):
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "nowhere"))
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "nothing"))
    models_found = json.loads(cli("list", "--found", "--json")[1])["found"]
    assert [model["program"] for model in models_found] == ["LM Studio"]
