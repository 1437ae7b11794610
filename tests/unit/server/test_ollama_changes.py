"""Test changes of models by Ollama's API: what they write, what they refuse, and who may ask."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, serving
from tiny_model import write_tiny_model

from localllm.cli.commands.serve import list_local_models, locate_by_name
from localllm.server import ollama_changes
from localllm.server.guard import AccessRules
from localllm.server.http import ClientLimits
from localllm.server.model_pool import NameOptions
from localllm.services.hub.name_values import load_name_values
from localllm.services.hub.pull import PullProgress

PAGE = "https://page.example"
LAYER = "application/vnd.ollama.image."


@pytest.fixture
def models(tmp_path: Path, monkeypatch) -> Path:
    """Put one model into the models folder; the working folder has another."""
    folder = tmp_path / "models"
    folder.mkdir()
    write_tiny_model(folder / "base.gguf")
    write_tiny_model(tmp_path / "outside.gguf", seed=1)
    monkeypatch.setenv("LOCALLLM_MODELS", str(folder))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return folder


def find(names: Any, wanted: str = "") -> Iterator[tuple[str, str, NameOptions]]:
    """Find local models as `serve` does, without the options of its command line."""
    listed = [(wanted, locate_by_name(wanted))] if wanted else [(each.name, each.path) for each in list_local_models()]
    for name, path in listed:
        if name not in names:
            yield name, path, NameOptions(load_name_values(name).defaults)


@pytest.fixture
def served(models: Path) -> Iterator[Served]:
    rules = AccessRules(origins=[PAGE])
    with serving({"base": str(models / "base.gguf")}, rules, ClientLimits(allows_pull=True)) as served:
        served.service.pool.find = find
        yield served


def send(served: Served, change: str, body: dict[str, Any], **headers: str) -> Any:
    method = "DELETE" if change == "delete" else "POST"
    return served.ask(
        method, f"/api/{change}", json.dumps(body).encode(), {"Content-Type": "application/json"} | headers
    )


def list_names(served: Served) -> list[str]:
    return [model["name"] for model in served.get("/api/tags").json["models"]]


def test_a_created_name_is_served_with_its_settings(served: Served, models: Path):
    body = {
        "model": "mario", "from": "base", "system": "Be Mario.", "parameters": {"num_predict": 2, "stop": ["x", "y"]},
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "license": ["MIT"],
    }  # fmt: skip
    lines = send(served, "create", body).body.splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["reading model metadata", "writing manifest", "success"]
    assert list_names(served) == ["base", "mario"]
    assert (
        served.post("/api/generate", {"model": "mario:latest", "prompt": "Hi", "stream": False}).json["eval_count"] == 2
    )
    shown = served.post("/api/show", {"model": "mario"}).json
    assert (shown["system"], shown["license"]) == ("Be Mario.", "MIT") and "PARAMETER stop y\n" in shown["modelfile"]
    assert shown["parameters"] == "num_predict 2\nstop x\nstop y"
    assert send(served, "create", {"model": "mario", "from": "base", "stream": False}).json == {"status": "success"}
    assert "SYSTEM" not in served.post("/api/show", {"model": "mario"}).json["modelfile"]


def test_names_are_copied_and_deleted(served: Served, models: Path):
    send(served, "create", {"model": "mario", "from": "base", "system": "Be Mario."})
    assert send(served, "copy", {"source": "mario", "destination": "luigi"}).status == 200
    assert served.post("/api/generate", {"model": "mario"}).json["done_reason"] == "load"
    assert send(served, "delete", {"model": "mario"}).status == 200
    assert list_names(served) == ["base", "luigi"] and (models / "base.gguf").exists()
    assert served.post("/api/generate", {"model": "base", "prompt": "Hi", "options": {"num_predict": 1}}).status == 200
    assert send(served, "delete", {"model": "base"}).status == 200
    assert not (models / "base.gguf").exists() and "base" not in list_names(served)


def test_a_model_in_use_is_not_deleted(served: Served, models: Path):
    served.service.pool.entries["base"].active_requests = 1
    reply = send(served, "delete", {"model": "base"})
    assert reply.status == 409 and "is in use" in reply.json["error"] and (models / "base.gguf").exists()
    served.service.pool.entries["base"].active_requests = 0


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ("create", {"model": "evil", "from": "{outside}"}),
        ("create", {"model": "evil", "from": "outside.gguf"}),
        ("create", {"model": "evil", "from": "./outside.gguf"}),
        ("create", {"model": "evil", "from": "{models}/../outside.gguf"}),
        ("create", {"model": "evil", "from": "~/outside.gguf"}),
        ("create", {"model": "evil", "from": "/etc/passwd\u0000"}),
        ("create", {"model": "../evil", "from": "base"}),
        ("create", {"model": "{outside}", "from": "base"}),
        ("create", {"model": "evil", "modelfile": "FROM {outside}"}),
        ("create", {"model": "evil", "modelfile": "FROM base\nADAPTER {outside}"}),
        ("create", {"model": "evil", "modelfile": "FROM base\nFROM mmproj-{outside}"}),
        ("create", {"model": "evil", "from": "base", "system": '"""\nADAPTER {outside}'}),
        ("create", {"model": "evil", "from": "base\nADAPTER {outside}"}),
        ("create", {"model": "evil", "from": "base", "parameters": {"seed": "1\nADAPTER {outside}"}}),
        ("create", {"model": "evil", "from": "base", "parameters": {"heat\nADAPTER x": 1}}),
        ("create", {"model": "evil", "from": "base", "messages": [{"role": "tool", "content": "x"}]}),
        ("create", {"model": "evil", "from": "base", "files": {"a": "sha256:0"}}),
        ("create", {"model": "base", "from": "base"}),
        ("copy", {"source": "{outside}", "destination": "evil"}),
        ("copy", {"source": "base", "destination": "{outside}"}),
        ("copy", {"source": "none", "destination": "evil"}),
        ("delete", {"model": "{outside}"}),
        ("delete", {"model": "outside.gguf"}),
        ("delete", {"model": "../outside"}),
        ("delete", {"model": "none"}),
        ("pull", {"model": "{outside}"}),
        ("pull", {"model": "outside.gguf"}),
        ("pull", {}),
    ],
)
def test_paths_and_damaged_values_change_nothing(served: Served, models: Path, change: str, fields: dict[str, Any]):
    text = json.dumps(fields).replace("{outside}", str(models.parent / "outside.gguf")).replace("{models}", str(models))
    reply = send(served, change, json.loads(text))
    assert reply.status in (400, 404)
    assert os.listdir(models) == ["base.gguf"] and (models.parent / "outside.gguf").exists()
    assert list_names(served) == ["base"]


@pytest.mark.parametrize("change", ["create", "copy", "delete", "pull"])
def test_pages_of_other_sites_change_nothing(served: Served, models: Path, change: str):
    body = {"model": "base", "from": "base", "source": "base", "destination": "x"}
    assert send(served, change, body, Origin=PAGE).status == 403
    assert send(served, change, body, Host="rebound.example").status == 403
    assert os.listdir(models) == ["base.gguf"] and served.get("/api/tags", Origin=PAGE).status == 200


@pytest.mark.parametrize("change", ["create", "copy", "delete", "pull"])
def test_a_server_of_certain_models_does_not_change_them(served: Served, models: Path, change: str):
    served.service.pool.find = None
    body = {"model": "base" if change == "delete" else "other", "from": "base", "source": "base", "destination": "x"}
    assert send(served, change, body).status == 403 and os.listdir(models) == ["base.gguf"]


def test_an_alias_is_not_deleted_with_its_model(served: Served, models: Path, tmp_path: Path):
    (tmp_path / "config" / "localllm").mkdir(parents=True)
    config = tmp_path / "config" / "localllm" / "config.toml"
    config.write_text('[aliases]\nsmall = "base"\n[model.small]\ntop-k = 3\n')
    assert list_names(served) == ["base", "small"]
    assert send(served, "delete", {"model": "small"}).status == 403 and (models / "base.gguf").exists()


def test_a_name_with_settings_of_its_own_is_not_answered_by_another_name_of_its_file(served: Served, tmp_path: Path):
    assert send(served, "create", {"model": "mario", "from": "base", "parameters": {"num_predict": 2}}).status == 200
    store = tmp_path / "ollama"
    (store / "blobs").mkdir(parents=True)
    layers = {"model": (tmp_path / "models" / "base.gguf").read_bytes(), "params": b'{"num_predict": 3}'}
    for name, kinds in {"plain": ["model"], "short": ["model", "params"]}.items():
        digests = {kind: hashlib.sha256(layers[kind]).hexdigest() for kind in kinds}
        for kind, digest in digests.items():
            (store / "blobs" / f"sha256-{digest}").write_bytes(layers[kind])
        rows = [{"mediaType": LAYER + kind, "digest": f"sha256:{digest}"} for kind, digest in digests.items()]
        manifest = store / "manifests" / "registry.ollama.ai" / "library" / name / "latest"
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"layers": rows}))
    (tmp_path / "config" / "localllm").mkdir(parents=True)
    (tmp_path / "config" / "localllm" / "config.toml").write_text('[aliases]\nluigi = "mario"\n')
    body = {"prompt": "Hi", "stream": False, "raw": True, "options": {"temperature": 0}}
    counts = {
        name: served.post("/api/generate", {**body, "model": name}).json["eval_count"]
        for name in ("luigi", "plain", "short")
    }
    assert (counts["luigi"], counts["short"]) == (2, 3) and counts["plain"] > 3
    assert list_names(served) == ["base", "mario", "luigi", "plain", "short"]


def test_another_name_of_a_served_file_reaches_it(served: Served, models: Path):
    (models / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf").write_bytes((models / "base.gguf").read_bytes())
    answer = served.post("/api/generate", {"model": "qwen2.5-coder:0.5b", "prompt": "a", "stream": False,
                                           "options": {"num_predict": 1}}).json  # fmt: skip
    assert answer["model"] == "qwen2.5-coder-0.5b-instruct-q4_k_m"
    assert served.post("/api/show", {"model": str(models.parent / "outside.gguf")}).status == 404


# ---- pull


@pytest.fixture
def hub(models: Path, monkeypatch) -> list[str]:
    """Replace the hub: a pull reports progress and writes the model; return what was pulled."""
    pulled = list[str]()

    def pull(reference: Any, progress: PullProgress) -> None:
        progress.report_lookup("the list of files")
        for done in (10, 20):
            progress.report_download("x.gguf", done, 20)
            time.sleep(0.1)  # until the server has shown it
        pulled.append(reference.text)
        write_tiny_model(models / "fetched.gguf", seed=2)

    monkeypatch.setattr(ollama_changes, "pull_model", pull)
    monkeypatch.setattr(ollama_changes, "PROGRESS_SECONDS", 0.01)
    return pulled


def test_a_download_is_reported_in_ollamas_statuses(served: Served, hub: list[str], models: Path, monkeypatch):
    monkeypatch.setattr(served.service.pool, "add_found", lambda name: None)
    lines = [json.loads(line) for line in send(served, "pull", {"model": "qwen3-0.6b"}).body.splitlines()]
    shown = [line["status"] for line in lines]
    assert shown[0] == "pulling manifest" and shown[-2:] == ["writing manifest", "success"]
    assert {"status": "pulling x.gguf", "digest": "x.gguf", "total": 20, "completed": 20} in lines
    assert hub == ["qwen3-0.6b"] and list_names(served) == ["base", "fetched"]
    assert send(served, "pull", {"model": "qwen3-1.7b", "stream": False}).json == {"status": "success"}


def test_a_failing_download_is_an_error_in_the_stream(served: Served, monkeypatch):
    def pull(reference: Any, progress: PullProgress) -> None:
        raise ollama_changes.LocalllmError("the network is gone")

    monkeypatch.setattr(ollama_changes, "pull_model", pull)
    lines = send(served, "pull", {"model": "qwen3-0.6b"}).body.splitlines()
    assert json.loads(lines[-1]) == {"error": "the network is gone"}
    assert send(served, "pull", {"model": "qwen3-0.6b", "stream": False}).status == 500


def test_downloads_need_a_server_that_allows_them(models: Path, hub: list[str]):
    with serving({"base": str(models / "base.gguf")}) as served:
        served.service.pool.find = find
        reply = send(served, "pull", {"model": "qwen3-0.6b"})
    assert reply.status == 501 and "--allow-pull" in reply.json["error"] and not hub


def test_a_pull_serves_a_model_of_ollamas_store(served: Served, models: Path, tmp_path: Path):
    data, store = (models / "base.gguf").read_bytes(), tmp_path / "ollama"
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "stored" / "latest"
    manifest.parent.mkdir(parents=True)
    (store / "blobs").mkdir()
    (store / "blobs" / "sha256-0a").write_bytes(data)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0a"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    assert served.chat("Hi", model="other").json["model"] == "base", "a single model answers to any name"
    assert send(served, "pull", {"model": "stored", "stream": False}).json == {"status": "success"}
    assert list_names(served) == ["base", "stored"]


def test_requests_reach_models_of_ollamas_store_and_the_base_of_a_created_name(
    served: Served, models: Path, tmp_path: Path
):
    store = tmp_path / "ollama"
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "stored" / "latest"
    manifest.parent.mkdir(parents=True)
    (store / "blobs").mkdir()
    (store / "blobs" / "sha256-0a").write_bytes((models / "base.gguf").read_bytes())
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0a"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    assert send(served, "create", {"model": "mario", "from": "stored", "system": "Be Mario."}).status == 200
    for name in ("mario", "stored", "base"):
        assert served.chat("Hi", model=name, max_tokens=1).json["model"] == name
    counts = [
        served.chat("Hi", model=name, max_tokens=1).json["usage"]["prompt_tokens"] for name in ("mario", "stored")
    ]
    assert counts[0] > counts[1], "only mario has a system message"
