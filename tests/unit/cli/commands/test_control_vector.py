"""The command control-vector: its file, its errors, and an interruption."""

from pathlib import Path
from typing import Any

import pytest
from invoked import invoke

from localllm.engine.adapter_file import read_control_vector
from localllm.files.gguf.file import GGUFFile
from localllm.services import control_vectors
from localllm.services.outputs import is_control_vector, is_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "happy").write_text("I am glad\nIt is fun\n")
    (tmp_path / "sad").write_text("I am sad\nIt is grim\n")
    (tmp_path / "one").write_text("one\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PAIR = ("--positive", "happy", "--negative", "sad")


@pytest.mark.parametrize("method", ["mean", "pca"])
def test_the_file_can_be_used_at_once(cli, tiny: str, folder: Path, method: str):
    code, out, err = cli("control-vector", tiny, "v.gguf", *PAIR, "--method", method)
    assert (code, out, err) == (0, "", "")
    with GGUFFile.open(tiny) as file:
        width = file.tensors["token_embd.weight"].shape[1]
        layers: Any = file.metadata["llama.block_count"]
    assert [*read_control_vector("v.gguf", width, layers)] == [*range(1, layers)]
    assert is_control_vector("v.gguf") and not is_model("v.gguf")
    answers = {cli("run", tiny, "-p", "Hi", "--temp", "0", "-n", "8", "--control-vector", f"v.gguf:{scale}")[:2]
               for scale in (-20, 0, 20)}  # fmt: skip
    assert len(answers) > 1 and {code for code, _ in answers} == {0}
    assert cli("control-vector", tiny, "v.gguf", *PAIR, "--method", method)[0] == 0  # replaces its own kind


@pytest.mark.parametrize(("words", "message"), [
    ("v.gguf --positive happy --negative one", "must be as many positive as negative prompts (found 2 and 1)"),
    ("v.gguf --positive happy --negative happy", "the hidden states after positive and negative prompts are equal"),
    ("v.gguf --positive happy --negative no", "cannot read no"),
    ("happy --positive happy --negative sad", "happy: the output is also an input; choose another name"),
    ("TINY --positive happy --negative sad", "the output is also an input; choose another name"),
    ("one --positive happy --negative sad", "one: the file exists and is not a control vector; use --force"),
    ("v.gguf --positive happy", "--negative FILE is missing"),
    ("v.gguf --positive happy --negative sad --method best", "--method: must be mean or pca, not 'best'"),
    ("v.gguf --positive happy --negative sad -t 0", "-t must"),
])  # fmt: skip
def test_errors_are_one_line_and_write_nothing(cli, tiny: str, folder: Path, words: str, message: str):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, err = cli("control-vector", tiny, *words.replace("TINY", tiny).split())
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_interrupted_command_writes_nothing(tiny: str, folder: Path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(control_vectors.StateReader, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        invoke("control-vector", tiny, "v.gguf", *PAIR)
    assert not (folder / "v.gguf").exists()
