"""Adapters and control vectors in the models folder: pulled, listed, inspected, used by name, removed."""

import json
from pathlib import Path

import numpy as np
import pytest
from adapters import random_adapter, supported_names, write_adapter

import localllm
from localllm.cli.commands.serve import list_local_models
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.services.control_vectors import write_control_vector
from localllm.services.hub.catalogue import resolve_adapter
from localllm.services.hub.pull import pull_model
from localllm.services.inspection.fit import iter_local_names
from tests.unit.services.hub.test_pull import hub, models, reference_to  # noqa: F401 - fixtures

LORA, PEFT = "tiny/Poet-GGUF", "tiny/Poet"


@pytest.fixture
def files(tiny: str, tmp_path: Path) -> dict[str, bytes]:
    """Return the bytes of an adapter and of a control vector."""
    with GGUFFile.open(tiny) as file:
        adapter = random_adapter(file, [name for name in supported_names(file) if "attn_q" in name], 4)
        layers, width = file.metadata["llama.block_count"], file.tensors["token_embd.weight"].shape[1]
    write_adapter(adapter, tmp_path / "poet", 8.0)
    write_control_vector(tmp_path / "happy", "llama", np.ones((layers - 1, width), np.float32))
    return {name: (tmp_path / name).read_bytes() for name in ("poet", "happy")}


@pytest.fixture
def folder(files, tiny: str, tmp_path: Path, monkeypatch) -> Path:
    """Put a model, an adapter and a control vector into the models folder."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "base.gguf").symlink_to(tiny)
    for name, data in files.items():
        (folder / f"{name}.gguf").write_bytes(data)
    monkeypatch.setenv("LOCALLLM_MODELS", str(folder))
    return folder


# ---- the models folder


def test_list_tells_adapters_from_models(folder: Path, cli):
    rows = [line.rsplit("  ", 1)[0].split("B  ") for line in cli("list")[1].splitlines()[1:]]
    assert [(row[0].split()[0], row[-1].strip()) for row in rows] == [
        ("base", "F32"), ("happy", "F32 control vector"), ("poet", "F32 adapter"),
    ]  # fmt: skip
    kinds = {row["name"]: row["kind"] for row in json.loads(cli("list", "--json")[1])["models"]}
    assert kinds == {"base": "model", "happy": "control vector", "poet": "adapter"}


def test_only_models_are_served_and_ranked(folder: Path):
    assert [model.name for model in list_local_models()] == ["base"]
    assert {"base"} == {"base", "poet", "happy"} & {*iter_local_names()}


def test_inspect_describes_adapters(folder: Path, cli):
    code, out, _ = cli("inspect", "poet", "--check")
    assert code == 0 and "adapter       LoRA for llama models\nrank          4, alpha 8\nchanges       2 matr" in out
    facts = json.loads(cli("inspect", "poet", "--json")[1])
    assert (facts["supported"], facts["valid"], facts["reason"]) == (True, True, None)
    assert facts["adapter"] == {
        "type": "lora", "architecture": "llama", "ranks": [4], "alpha": 8.0, "matrices": {"attn_q": 2},
        "invocation_tokens": [], "memory_bytes": facts["weight_bytes"],
    }  # fmt: skip
    facts = json.loads(cli("inspect", "happy", "--json")[1])
    assert facts["adapter"] == {"type": "control vector", "architecture": "llama", "layers": [1], "widths": [64]}
    assert cli("inspect", "base", "--json")[1].count('"adapter": null') == 1


def test_a_damaged_adapter_is_invalid(folder: Path, cli):
    data = (folder / "poet.gguf").read_bytes()
    (folder / "poet.gguf").write_bytes(data.replace(b"blk.0.attn_q.weight.lora_a", b"blk.0.attn_q.weight.lora_c"))
    code, out, err = cli("inspect", "poet")
    assert code == 3 and "not usable" in out and "tensor blk.0.attn_q.weight.lora_c is not part of a LoRA" in err


def test_adapters_are_used_by_their_names(folder: Path, cli):
    words = ("run", "base", "-p", "Hi", "--temp", "0", "-n", "8")
    answers = [cli(*words, *more) for more in (
        (), ("--lora", "poet:40"), ("--lora", f"{folder}/poet.gguf:40"), ("--control-vector", "happy:9"))]  # fmt: skip
    assert [code for code, _, _ in answers] == [0] * 4
    assert answers[1] == answers[2] != answers[0] != answers[3]
    with localllm.open("base", lora={"poet": 0.5}, control_vector="happy") as model:
        assert model.engine.adapters[0].path == str(folder / "poet.gguf")
    code, _, err = cli(*words, "--lora", "nobody")
    assert (code, err) == (3, "localllm: error: nobody: the file does not exist\n")
    code, _, err = cli(*words, "--lora", "hf:some/Body-GGUF:0.5")
    assert code == 3 and "hf:some/Body-GGUF: not on this computer; download it with `localllm pull hf:some/" in err


@pytest.mark.parametrize(("words", "message"), [
    (["run", "poet", "-p", "Hi"], "poet.gguf: this is an adapter, not a model: use its model with --lora FILE"),
    (["run", "happy", "-p", "Hi"], "this is a control vector, not a model: use its model with --control-vector FILE"),
    (["fit", "poet"], "this is an adapter, not a model"),
    (
        ["quantize", "poet", "x.gguf", "Q8_0"],
        "must be a model, not an adapter; add --adapter to write it in another type",
    ),
    (["quantize", "happy", "x.gguf", "Q8_0"], "must be a model, not a control vector; these files are always F32"),
    (["fit", "base", "--lora", "happy"], "this is a control vector: use --control-vector"),
    (["fit", "--all", "--lora", "poet"], "--lora needs MODEL, which the adapters are for"),
])  # fmt: skip
def test_adapters_in_place_of_models_are_refused(folder: Path, cli, words: list[str], message: str):
    names = {"poet": f"{folder}/poet.gguf", "happy": f"{folder}/happy.gguf"}
    words = [names.get(word, word) if words[0] == "quantize" else word for word in words]
    code, out, err = cli(*words)
    assert code in (2, 3) and out == "" and err.count("\n") == 1 and message in err


def test_fit_counts_the_adapters(folder: Path, cli, monkeypatch):
    monkeypatch.setattr("localllm.services.inspection.fit.measure_bandwidth", lambda: 1e9)
    alone, both = (json.loads(cli("fit", "base", *more, "--json")[1]) for more in ((), ("--lora", "poet:0.5")))
    size = both["adapter_bytes"]
    assert alone["adapter_bytes"] == 0 < size == json.loads(cli("inspect", "poet", "--json")[1])["weight_bytes"]
    for first, second in zip(alone["rows"], both["rows"], strict=True):
        assert second["needed_bytes"] - first["needed_bytes"] == size
        assert second["tokens_per_s"] < first["tokens_per_s"]
    assert "adapters      " in cli("fit", "base", "--lora", "poet")[1]


def test_rm_removes_an_adapter(folder: Path, cli):
    assert cli("rm", "--force", "poet")[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["base.gguf", "happy.gguf"]


# ---- the hub


def test_an_adapter_is_pulled(hub, files, cli, monkeypatch):  # noqa: F811
    notes = list[str]()
    monkeypatch.setattr("localllm.cli.commands.pull.say_dim", notes.append)
    hub.repositories[LORA] = {"poet-f16.gguf": files["poet"]}
    code, out, _ = cli("pull", f"hf:{LORA}")
    assert code == 0 and Path(out.strip()).read_bytes() == files["poet"]
    assert notes == [f"this is an adapter: use it with its model and --lora hf:{LORA}"]
    assert resolve_adapter(f"hf:{LORA}") == out.strip()


def test_an_adapter_of_peft_is_refused_with_the_way_to_use_it(hub, files):  # noqa: F811
    hub.repositories[PEFT] = {"README.md": b"# Poet", "adapter_model.safetensors": b"0" * 100}
    with pytest.raises(ModelError) as refused:
        pull_model(reference_to(f"hf:{PEFT}"))
    assert str(refused.value) == (
        f"hf:{PEFT} is a PEFT adapter, not a GGUF file: download it with `hf download {PEFT} --local-dir FOLDER`, "
        "then use --lora FOLDER"
    )
