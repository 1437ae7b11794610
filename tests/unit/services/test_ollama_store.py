"""A name in Ollama's store is more than its file."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import localllm
from localllm.errors import ModelError
from localllm.services.catalogue import locate, resolve
from localllm.services.name_settings import messages_of
from localllm.services.ollama_store import find_stored

Put = Callable[..., None]
PARAMETERS = {
    "temperature": 0, "top_k": 9, "stop": ["X"], "num_predict": 4, "num_ctx": 64, "num_batch": 2, "tfs_z": 1.0,
    "seed": 5, "repeat_penalty": 1.5, "num_gpu": 0, "mirostat_tau": 3.0,
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]


@pytest.fixture
def put(tmp_path: Path, monkeypatch, tiny: str) -> Put:
    """Writes a name of Ollama's store, with layers besides the tiny model's."""
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
def test_a_name_with_an_adapter_is_refused(put: Put, cli, name: str):
    put("lora", adapter="x")
    code, out, err = cli("run", name, "-p", "Hi")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "ollama:lora:latest has an adapter" in err and "adapters of Ollama's store are not supported yet" in err
    with pytest.raises(ModelError, match="has an adapter"):
        localllm.open(name)
    assert cli("list", "--found")[0] == 0


def test_parameters_and_system_text_are_defaults_of_options(put: Put, cli):
    put("tuned", params=PARAMETERS, system="Answer in French.")
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
    assert "parameters that are not supported are ignored: tfs_z\n" in err
    assert json.loads(cli("run", "tuned", "-p", "Hi", "--json", "-s", "6", "-n", "2")[1])["seed"] == 6


def test_a_prompt_has_the_system_text_and_the_messages_of_its_name(put: Put, cli, tmp_path: Path):
    put("tuned", system="Answer in French.", messages=MESSAGES)
    put("bare")
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


def test_config_toml_wins_over_the_store(put: Put, tmp_path: Path, monkeypatch, cli):
    put("tuned", params={"temperature": 0.5, "top_k": 3})
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
def test_a_template_of_other_marks_is_told(put: Put, template: str, source: str | None, differs: bool):
    put("other", template=template)
    stored = find_stored("other")
    assert stored is not None
    assert [("its own template differs" in line) for line in stored.unused(source, False)] == [True] * differs
    assert stored.unused(source, True) == []


@pytest.mark.parametrize(
    ("kind", "content"), [("params", b"{"), ("params", b"[]"), ("messages", b"[1]"), ("system", b"\xff")]
)
def test_a_damaged_layer_is_refused_by_name(put: Put, cli, kind: str, content: bytes):
    put("torn", **{kind: content})
    code, _, err = cli("run", "torn", "-p", "Hi")
    assert code == 3 and f"ollama:torn:latest: its {kind} layer in Ollama's store is damaged or missing" in err


def test_other_names_have_no_messages(put: Put, tiny: str):
    put("tuned", messages=MESSAGES)
    assert (messages_of("tuned"), messages_of(tiny), messages_of("no such name")) == (MESSAGES, [], [])
    stored = locate("tuned").stored
    assert stored is not None and str(stored.path) == resolve("tuned")


def test_files_beside_a_model_that_are_not_used_are_told(put: Put, tmp_path: Path, monkeypatch, tiny: str, cli):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--Ann--Tiny-GGUF" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "Tiny-Q8_0.gguf").symlink_to(tiny)
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    (snapshot / "params").write_text("{}")
    err = cli("run", "hf:Ann/Tiny-GGUF", "-p", "Hi", "-n", "1")[2]
    assert f"{snapshot}/chat_template.jinja differs from the file's chat template and is not used" in err
    assert f"{snapshot}/params is not used" in err
    with pytest.warns(UserWarning, match="chat_template.jinja differs"), localllm.open("hf:Ann/Tiny-GGUF") as model:
        assert len(model.warnings) == 2
