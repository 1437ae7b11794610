"""Test what surrounds a question of `localllm run`: named files, follow-up questions, code blocks."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm import builtin_model
from localllm.services import sessions
from localllm.services.search.code_blocks import CodeBlockReader, extract_code, extract_code_blocks

TEXT = "Hi\n```python\na = `1`\n\n  b\n``\n```\nthen\n  ~~~~ x\n  c\n    d\n~~~\n  ~~~~\n```\nopen"
SAID = "Sure:\n```sh\nls -l | wc -l\n\n# lines\n```\nOr:\n~~~\nfind\n~~~\n"
ASK = ("-p", "Which commands are there?", "--temp", 0, "-n", 12)


@pytest.fixture
def state(tmp_path: Path, monkeypatch) -> Path:
    for kind in ("STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path))
    return tmp_path / "localllm"


def grammar(text: str) -> list[str]:
    """Return options that force the model to write exactly this."""
    return ["--temp", "0", "--grammar", f"root ::= {json.dumps(text)}"]


# ---- code blocks


def test_code_blocks_are_those_of_markdown():
    assert extract_code_blocks(TEXT) == ["a = `1`\n\n  b\n``", "c\n  d\n~~~", "open"]
    assert extract_code(TEXT) == extract_code_blocks(TEXT)[0] and extract_code(TEXT, last=True) == "open"
    assert extract_code_blocks("```a``` is inline\n") == [] and extract_code("none") is None
    assert extract_code_blocks("````\n```\nx\n```\n````") == ["```\nx\n```"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    "text", [TEXT, "```\nx", "```\nx\n``", "   ```\n   x\n     y\n   ```\nz", "no block", "```\n```"]
)
def test_streamed_chunks_give_the_block_of_the_whole_text(text: str, size: int):
    reader, code = CodeBlockReader(), ""
    for start in range(0, len(text), size):
        code += reader.push(text[start : start + size])
    code += reader.finish()
    assert (code.removesuffix("\n") if reader.is_open else None) == extract_code(text)


@pytest.mark.parametrize(
    ("option", "code"), [("-x", "ls -l | wc -l\n\n# lines\n"), ("--extract", None), ("--extract-last", "find\n")]
)
def test_extract_prints_only_the_code(cli, option: str, code: str | None):
    status, out, err = cli("run", "-p", "Hi", option, "--no-stdin", *grammar(SAID))
    assert (status, out) == (0, code or "ls -l | wc -l\n\n# lines\n") and "code block" not in err


def test_an_answer_ends_after_its_first_block(cli, state: Path):
    """Stop before the model's next step, without drafts the next token."""
    assert cli("run", "-p", "Hi", "-x", "--speculate", "off", *grammar(SAID))[0] == 0
    last = json.loads((state / "last-answer.jsonl").read_text().splitlines()[-1])
    assert last["content"].startswith("Sure:\n```sh\n") and "find" not in last["content"]


@pytest.mark.parametrize("more", [["-x"], ["--extract-last"], ["-x", "--n", "2"]])
def test_without_a_block_the_whole_answer_is_printed_with_a_note(cli, more: list[str]):
    code, out, err = cli("run", "-p", "Hi", *more, *grammar("ls -l"))
    assert (
        code == 0 and set(out.split("\n\n")) <= {"ls -l", "ls -l\n"} and "has no code block; printing all of it" in err
    )


def test_the_note_about_a_missing_code_block_is_printed_below_the_answer(cli, monkeypatch):
    """End the answer's line first, as both are seen on a terminal."""
    from localllm.cli.terminal import stream_renderer

    order = list[str]()
    page = SimpleNamespace(push=order.append, end=lambda: order.append("\n"))
    monkeypatch.setattr(stream_renderer, "make_page", lambda: page)
    monkeypatch.setattr(stream_renderer.terminal, "say", order.append)
    block = stream_renderer.FirstBlockPage(SimpleNamespace(finish_reason="stop"))
    block.push("ls -l")
    block.end()
    assert order == ["ls -l", "\n", stream_renderer.NO_BLOCK]


def test_extract_reports_a_block_that_is_cut_off(cli):
    code, out, err = cli("run", "-p", "Hi", "-x", "-n", 12, *grammar("```sh\n" + "ls -l\n" * 40 + "```\n"))
    assert code == 7 and out.startswith("ls -l\n") and "the code block is incomplete" in err
    assert "incomplete" not in cli("run", "-p", "Hi", "-x", *grammar(SAID))[2]


def test_extract_applies_to_each_of_several_answers(cli):
    assert (
        cli("run", "-p", "Hi", "--n", 2, "-x", *grammar(SAID))[1]
        == "ls -l | wc -l\n\n# lines\n\nls -l | wc -l\n\n# lines\n"
    )


def test_extract_is_refused_with_conflicting_options(cli):
    code, _, err = cli("run", "-p", "Hi", "-x", "--json")
    assert code == 2 and err.endswith("--extract cannot be combined with --json: leave out one of them\n")


# ---- follow-up questions


def test_continue_asks_in_the_conversation_of_the_last_answer(cli, state: Path):
    first = cli("run", *ASK, "-sys", "Be brief.")[1]
    code, _, _ = cli("run", "--continue", "-p", "And else?", "-n", 3, "--temp", 0)
    header, *kept = map(json.loads, (state / "last-answer.jsonl").read_text().splitlines())
    assert code == 0 and Path(header["model"]["path"]).name == "guide.gguf"
    assert [(line["role"], line["content"]) for line in kept[:-1]] == [
        ("system", "Be brief."), ("user", ASK[1]), ("assistant", first[:-1]), ("user", "And else?"),
    ]  # fmt: skip
    assert (state / "last-answer.jsonl").stat().st_mode & 0o077 == 0


def test_an_answer_that_cannot_be_saved_warns_about_continue(cli, state: Path, monkeypatch):
    def fail(old: str, new: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("localllm.services.last_answer.replace_file", fail)
    message = (
        "localllm: warning: this answer could not be saved (No space left on device): --continue will continue an "
        "earlier one\n"
    )
    assert message not in cli("run", *ASK)[2]
    (state / "last-answer.jsonl").write_text("an earlier one")
    code, _, err = cli("run", *ASK)
    assert code == 0 and err.endswith(message)
    assert [path.name for path in state.iterdir()] == ["last-answer.jsonl"]


def test_a_continued_answer_equals_that_of_the_whole_conversation(cli, state: Path, tmp_path: Path):
    first = cli("run", *ASK)[1].removesuffix("\n")
    messages = [
        {"role": "user", "content": ASK[1]}, {"role": "assistant", "content": first},
        {"role": "user", "content": "What is a GGUF file?"},
    ]  # fmt: skip
    short = "--temp", 0, "-n", 12
    followed = cli("run", "--continue", "-p", "What is a GGUF file?", *short)[1]
    asked = json.dumps({"messages": messages}).encode()
    assert json.loads(cli("map", builtin_model(), *short, stdin=asked)[1])["output"] == followed.removesuffix("\n")


def test_continue_uses_the_model_of_the_last_answer(cli, state: Path, tiny: str):
    assert cli("run", tiny, "-p", "Hi", "-n", 2)[0] == 0
    code, _, err = cli("run", "--continue", "-p", "More", "-n", 2)
    assert code == 0 and "no model given" not in err
    assert json.loads((state / "last-answer.jsonl").read_text().splitlines()[0])["model"]["path"] == tiny


def test_continue_without_an_earlier_answer_is_refused(cli, state: Path):
    code, _, err = cli("run", "--continue", "-p", "Hi")
    assert code == 2 and "there is no answer to continue: generate one with `localllm run` first" in err
    assert cli("run", *ASK, "--no-cache")[0] == 0 and not (state / "last-answer.jsonl").exists()
    code, _, err = cli("run", "--continue", "-p", "Hi", "--raw")
    assert code == 2 and "--continue cannot be combined with --raw" in err
    code, _, err = cli("run", "--continue", "--session", "a", "-p", "Hi")
    assert code == 2 and "give either --session or --continue, not both" in err


def test_a_session_of_run_needs_no_terminal(cli, state: Path):
    for question in ("Which commands are there?", "What else?"):
        code, out, _ = cli("run", "--session", "trip", "-p", question, "--temp", 0, "-n", 4)
        assert code == 0
    lines = sessions.read_session("trip").messages
    assert [line["content"] for line in lines if line["role"] == "user"] == ["Which commands are there?", "What else?"]
    assert lines[-1]["content"] == out.removesuffix("\n") and sessions.list_names() == ["trip"]
    assert cli("sessions", "show", "trip")[1].count("user: ") == 2


# ---- what stands where


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for name in names:
        Path(name).write_text(f"text of {Path(name).name}\n")
    return names


def last_question(state: Path) -> str:
    return json.loads((state / "last-answer.jsonl").read_text().splitlines()[1])["content"]


def test_the_question_follows_files_unless_prompt_first_is_set(cli, state: Path, files: list[str]):
    assert cli("run", "-p", "Which?", "-f", files[0], "-n", 1, stdin=b"piped\n")[0] == 0
    assert last_question(state) == "text of a.txt\n\npiped\n\nWhich?"
    assert cli("run", "-p", "Which?", "-f", files[0], "--prompt-first", "-n", 1, stdin=b"piped\n")[0] == 0
    assert last_question(state) == "Which?\n\ntext of a.txt\n\npiped"


def test_several_files_are_headed_by_their_names(cli, state: Path, files: list[str]):
    many = ["-f", files[0], "-f", files[1]]
    assert cli("run", *many, "-p", "Which?", "-n", 1)[0] == 0
    assert last_question(state) == f"==> {files[0]} <==\ntext of a.txt\n\n==> {files[1]} <==\ntext of b.txt\n\nWhich?"
    assert cli("run", *many, "--no-names", "-n", 1)[0] == 0
    assert last_question(state) == "text of a.txt\n\ntext of b.txt"


def test_a_second_question_on_a_file_prefills_only_the_question(cli, state: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("LOCALLLM_PREFIX_GB", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    long = tmp_path / "long.txt"
    long.write_text("The ferry leaves at nine, and the train at ten. " * 40)
    results = [
        json.loads(cli("run", "-f", long, "-p", question, "-n", 1, "--json")[1])
        for question in ("When does the ferry leave?", "And what about the train?")
    ]
    assert results[0]["cached_tokens"] == 0
    assert results[1]["cached_tokens"] > 0.7 * results[1]["prompt_tokens"] > 200
