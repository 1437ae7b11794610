"""Test names that the user creates from a Modelfile, and commands that bring, copy and remove them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from adapters import random_adapter, write_adapter

import localllm
from localllm.cli.commands import rm
from localllm.cli.commands.serve import list_local_models
from localllm.files.gguf.file import GGUFFile
from localllm.services.hub.name_settings import read_messages
from localllm.services.hub.name_values import load_name_values
from tests.unit.cli.test_command import parsed
from tests.unit.services.hub.test_modelfile import CHATML, GEMMA, LLAMA3, MISTRAL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch, tiny: str) -> Path:
    """Put a model `base` into the models folder; return the working folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.gguf").symlink_to(tiny)
    return tmp_path


def create(cli: Any, text: str, name: str = "mario") -> tuple[int, str]:
    """Create a name from a Modelfile; return the exit code and what stderr has."""
    Path("Modelfile").write_text(text)
    code, out, err = cli("create", name)
    assert out == ""
    return code, err


# Twelve Modelfiles of usual kinds: the text, the options of the name, and the end of what stderr has.
KINDS = {
    "parameters": (
        "FROM base\nPARAMETER temperature 0.2\nPARAMETER num_ctx 2048\nPARAMETER top_k 30\nPARAMETER top_p 0.8\n",
        {"temperature": 0.2, "context": 2048, "top_k": 30, "top_p": 0.8}, "",
    ),
    "persona": ('FROM base\nSYSTEM """You are a pirate.\nSay arr."""\n', {"system": "You are a pirate.\nSay arr."}, ""),
    "conversation": (
        "FROM base\nMESSAGE system Be brief.\nMESSAGE user Is Rome in Italy?\nMESSAGE assistant yes\n", {}, "",
    ),
    "stops": (
        'FROM base\nPARAMETER stop "###"\nPARAMETER stop </end>\nPARAMETER num_predict 40\nPARAMETER seed 7\n',
        {"stop": ["###", "</end>"], "max_tokens": 40, "seed": 7}, "",
    ),
    "unlimited": ("FROM base\nPARAMETER num_predict -1\nPARAMETER repeat_last_n 32\n", {"repeat_last_n": 32}, ""),
    "speed": (
        "FROM base\nPARAMETER num_gpu 20\nPARAMETER num_thread 2\nPARAMETER num_keep 5\n", {"threads": 2},
        "warning: num_gpu, num_keep: ignored (no effect)\n",
    ),
    "license": ('FROM base:latest\nLICENSE """Free\nfor all."""\nLICENSE second\n', {}, ""),
    "file": ("# from a file\nFROM ./models/base.gguf\nparameter min_p 0.1\n", {"min_p": 0.1}, ""),
    "chatml": (
        f'FROM base\nTEMPLATE """{CHATML}"""\nPARAMETER stop <|im_end|>\n', {"stop": ["<|im_end|>"]}, "model's own",
    ),
    "llama3": (f'FROM base\nTEMPLATE """{LLAMA3}"""\n', {}, "'llama3'"),
    "gemma": (f'FROM base\nTEMPLATE """{GEMMA}"""\n', {}, "'gemma'"),
    "mistral": (f'FROM base\nTEMPLATE """{MISTRAL}"""\nPARAMETER mirostat 2\n', {"mirostat": 2}, "'mistral-v3'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_created_name_has_the_settings_of_its_modelfile(folder: Path, cli, kind: str):
    text, options, told = KINDS[kind]
    code, err = create(cli, text)
    assert code == 0 and told in err and (told or not err)
    run, plain = parsed("run", "mario"), parsed("run", "base")
    assert {name: run[name] for name in options} == options
    assert {name for name in run if run[name] != plain[name]} - {"model"} == (
        options.keys() | ({"chat_template"} if "built-in" in err else set())
    )


def test_a_name_has_priority_over_a_file_of_that_name(folder: Path, cli):
    create(cli, "FROM base\nPARAMETER num_predict 2\n")
    (folder / "mario").mkdir()
    assert json.loads(cli("run", "mario", "-p", "Hi", "--json")[1])["completion_tokens"] == 2
    assert [each.path for each in list_local_models()] == [str(folder / "models" / "base.gguf")] * 2
    assert cli("run", "./mario", "-p", "Hi")[0] == 3


def test_a_name_and_its_model_are_not_pulled_again(folder: Path, cli):
    create(cli, "FROM base\n")
    assert cli("pull", "mario") == cli("pull", "base") == (0, f"{folder}/models/base.gguf\n", "")


def test_messages_begin_each_conversation(folder: Path, cli):
    create(cli, KINDS["conversation"][0])
    assert [message["content"] for message in read_messages("mario")] == ["Be brief.", "Is Rome in Italy?", "yes"]
    assert load_name_values("mario").defaults.messages == read_messages("mario") and not read_messages("base")


def test_a_name_works_in_commands_in_python_and_in_the_server(folder: Path, cli):
    create(cli, "FROM base\nPARAMETER num_predict 3\nPARAMETER num_ctx 64\nSYSTEM Be brief.\n")
    answer = json.loads(cli("run", "Mario:latest", "-p", "Hi", "--json")[1])
    assert answer["completion_tokens"] == 3
    with localllm.open("mario") as model:
        assert (model.context, model.session.defaults.system) == (64, "Be brief.")
    assert [each.name for each in list_local_models()] == ["base", "mario"]
    assert cli("list")[1].splitlines()[-1].split() == ["mario", "name", "of", "base"]
    assert json.loads(cli("list", "--json")[1])["names"] == {"mario": "base"}
    assert "mario.modelfile" in cli("config", "run", "mario")[1]


def test_names_of_one_model_keep_their_own_settings(folder: Path, cli):
    create(cli, "FROM base\nSYSTEM You are Mario.\nPARAMETER top_k 5\n")
    create(cli, "FROM mario\nSYSTEM You are Luigi.\n", "luigi")
    rows = {name: parsed("run", name) for name in ("base", "mario", "luigi")}
    assert [row["system"] for row in rows.values()] == [None, "You are Mario.", "You are Luigi."]
    assert [row["top_k"] for row in rows.values()] == [None, 5, 5]


def test_config_overrides_a_created_name(folder: Path, cli):
    create(cli, "FROM base\nPARAMETER top_k 5\nPARAMETER top_p 0.5\n")
    (folder / "config" / "localllm").mkdir(parents=True)
    (folder / "config" / "localllm" / "config.toml").write_text("[model.mario]\ntop-k = 9\n[model.base]\ntop-p = 0.1\n")
    row = parsed("run", "mario")
    assert (row["top_k"], row["top_p"]) == (9, 0.5)


def test_an_adapter_belongs_to_the_name(folder: Path, cli, tiny: str):
    with GGUFFile.open(tiny) as file:
        write_adapter(random_adapter(file, ["blk.0.attn_q.weight"]), folder / "poet.gguf", 1.0)
    assert create(cli, "FROM base\nADAPTER ./poet.gguf\n") == (0, "")
    with localllm.open("mario") as model:
        assert [adapter.name for adapter in model.engine.adapters] == ["poet"]
    with localllm.open("base") as model:
        assert not model.engine.adapters


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mario", "FROM ./none.gguf", "Modelfile: the file "),
        ("mario", "FROM nosuchmodel", "nosuchmodel: no such file"),
        ("mario", "FROM .", "is a folder: make a file of it with `localllm quantize"),
        ("mario", "FROM mario", "is the name itself"),
        ("mario", "FROM base\nADAPTER none.gguf", "does not exist: correct its path"),
        ("mario", "FROM base\nPARAMETER temperature hot", "temperature must be a number"),
        ("mario", 'FROM base\nTEMPLATE """{{ .Prompt }}"""', "TEMPLATE does not use the control tokens"),
        ("../mario", "FROM base", "is not a valid name"),
        ("base", "FROM base", "the name of a file in the models folder"),
        ("qwen3-4b", "FROM base", "the name of a known model"),
    ],
)
def test_models_that_cannot_be_created_are_refused_in_one_line(folder: Path, cli, name: str, text: str, message: str):
    code, err = create(cli, text, name)
    assert code in (2, 3) and err.count("\n") == 1 and message in err
    assert os.listdir(folder / "models") == ["base.gguf"]


def test_a_copy_is_independent_of_the_first_name(folder: Path, cli):
    create(cli, "FROM base\nSYSTEM One.\n")
    assert cli("cp", "mario", "luigi") == (0, "", "") and cli("cp", "base", "other")[0] == 0
    create(cli, "FROM base\nSYSTEM Two.\n")
    assert [parsed("run", name)["system"] for name in ("mario", "luigi", "other")] == ["Two.", "One.", None]
    code, _, err = cli("cp", "base", "luigi")
    assert code == 2 and "luigi exists already" in err


def test_removing_a_name_keeps_its_model(folder: Path, cli):
    create(cli, "FROM base\n")
    assert cli("rm", "mario", "--force") == (0, "", "")
    assert os.listdir(folder / "models") == ["base.gguf"]


def test_rm_removes_several_names_or_none(folder: Path, cli):
    create(cli, "FROM base\n")
    assert cli("cp", "mario", "luigi")[0] == 0
    code, _, err = cli("rm", "mario", "wario", "--force")
    assert code == 3 and "wario" in err and (folder / "models" / "mario.modelfile").exists()
    assert cli("rm", "mario", "luigi", "mario", "--force") == (0, "", "")
    assert os.listdir(folder / "models") == ["base.gguf"]


def test_removing_a_model_tells_the_names_without_one(folder: Path, cli):
    create(cli, "FROM base\n")
    assert (
        cli("rm", "base", "--force")[2]
        == "localllm: warning: the model of these names is removed: mario; remove them with `localllm rm NAME`\n"
    )
    assert cli("run", "mario", "-p", "Hi")[0] == 3 and "mario" not in [each.name for each in list_local_models()]


def test_rm_asks_with_the_names_that_would_lose_their_model(folder: Path, cli, monkeypatch):
    create(cli, "FROM base\n")
    questions: list[str] = []
    monkeypatch.setattr(rm, "is_terminal", lambda stream: True)
    monkeypatch.setattr(rm, "confirm", lambda question: questions.append(question))
    assert cli("rm", "base")[0] == 0 and (folder / "models" / "base.gguf").exists()
    assert questions[0].startswith("Remove base (") and questions[0].endswith("? mario would be left without a model.")


@pytest.mark.parametrize("moves", [False, True])
def test_import_brings_a_file_into_the_models_folder(folder: Path, cli, tiny: str, moves: bool):
    (folder / "new.gguf").write_bytes(Path(tiny).read_bytes())
    code, out, err = cli("import", "new.gguf", "brought", *["--move"][: int(moves)])
    assert (code, out, err) == (0, f"{folder}/models/brought.gguf\n", "")
    assert (folder / "new.gguf").exists() is not moves
    assert cli("run", "brought", "-p", "Hi", "-n", "2")[0] == 0
    code, _, err = cli("import", tiny, "brought")
    assert code == 2 and "brought is the name of a file in the models folder" in err


def test_import_refuses_what_is_no_model(folder: Path, cli):
    (folder / "x.gguf").write_text("no model")
    assert cli("import", "x.gguf")[0] == 3 and os.listdir(folder / "models") == ["base.gguf"]


def test_a_modelfile_put_into_the_folder_is_a_name(folder: Path, cli):
    (folder / "models" / "dropped.modelfile").write_text("FROM base\nPARAMETER top_k 4\n")
    assert parsed("run", "dropped")["top_k"] == 4
    (folder / "models" / "odd.modelfile").write_text("FORM base\n")
    code, _, err = cli("run", "odd", "-p", "Hi")
    assert code == 3 and "odd.modelfile, line 1: unknown instruction 'FORM'" in err
    assert cli("list")[1].splitlines()[-1].split(maxsplit=1) == ["odd", "name    of an invalid Modelfile"]


def test_names_that_stand_for_each_other_are_refused(folder: Path, cli):
    for name, base in (("one", "two"), ("two", "one")):
        (folder / "models" / f"{name}.modelfile").write_text(f"FROM {base}\n")
    code, _, err = cli("run", "one", "-p", "Hi")
    assert code == 3 and "FROM must lead to a model" in err and err.count("\n") == 1
