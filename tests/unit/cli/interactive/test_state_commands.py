"""Test what users of Ollama type in a chat: its names of options, parts to show, context, export, dropped images."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli.interactive.conversation import TerminalConversation
from localllm.cli.interactive.dropped_files import find_images
from localllm.cli.interactive.slash_commands import complete_line
from localllm.errors import UsageError
from localllm.services.hub.modelfile import parse_modelfile
from tests.unit.cli.interactive.test_conversation import (  # noqa: F401 - fixtures
    Answer,
    Model,
    Say,
    say,
    surroundings,
    talk,
    texts,
)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set parameter num_predict 40", "max_tokens", 40),
        ("/set num_predict 40", "max_tokens", 40),
        ("/set parameter num_predict -1", "max_tokens", None),
        ('/set parameter stop "User:" "a b"', "stop", ("User:", "a b")),
        ("/set stop a;b", "stop", ("a", "b")),
        ("/set think high", "think", "high"),
        ("/set think", "think", "on"),
        ("/set nothink", "think", "off"),
    ],
)
def test_set_takes_the_names_of_ollama(talk: TerminalConversation, say: Say, line: str, name: str, value: object):  # noqa: F811
    say(line)
    assert getattr(talk.options, name) == value


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "repeat_penalty",
    "repeat_last_n", "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta"])  # fmt: skip
def test_set_takes_ollamas_parameters_of_sampling(talk: TerminalConversation, say: Say, name: str):  # noqa: F811
    assert "= 1" in say(f"/set parameter {name} 1")


def test_set_system_and_verbose_do_what_their_commands_do(talk: TerminalConversation, say: Say):  # noqa: F811
    say('/set system "Be brief."')
    assert talk.model.session.system == "Be brief." and say("/show system") == "Be brief.\n"
    say("/set verbose")
    assert talk.stats
    say("/set quiet")
    assert not talk.stats


def test_context_opens_the_model_again(talk: TerminalConversation, say: Say):  # noqa: F811
    opened = list[Any]()

    def open_again(name: str, context: int) -> Any:
        opened.append((name, context))
        return Model(context=context)

    say("q", Answer("a"))
    assert say("/context") == "context   8 of 80 tokens, in 2 messages\n"
    for line in ("/context 40", "/set parameter num_ctx 50"):
        talk.model.file = SimpleNamespace()
        say(line, open=open_again)
    assert opened == [("", 40), ("", 50)] and texts(talk) == ["q", "a"]
    assert [message["content"] for message in talk.model.session.messages] == ["q", "a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/context some", "must be an integer of 1 or more .found 'some'"),
        ("/context 0", "must be an integer"),
        ("/context 8", "has 8 tokens already"),
        ("/show size", r"usage: /show, or /show info.license.modelfile"),
        ("/export", "usage: /export FILE.md"),
    ],
)
def test_what_cannot_be_done_is_told(talk: TerminalConversation, say: Say, line: str, message: str):  # noqa: F811
    say("q", Answer("a"))
    talk.model.file = SimpleNamespace()
    with pytest.raises(UsageError, match=message):
        say(line, open=lambda name, context: pytest.fail(name))


def test_the_context_of_a_servers_model_is_the_servers(talk: TerminalConversation, say: Say):  # noqa: F811
    with pytest.raises(UsageError, match="the server decides the context"):
        say("/context 40")


def test_show_modelfile_has_what_was_changed(talk: TerminalConversation, say: Say):  # noqa: F811
    for line in ("/set system Be brief.", "/set num_predict 9", "/set temperature 0.5", "/set stop a;b"):
        say(line)
    content = parse_modelfile(say("/show modelfile"), "shown")
    assert (content.base, content.system) == ("/m.gguf", "Be brief.")
    assert content.parameters == {"num_predict": 9, "temperature": 0.5, "stop": ["a", "b"]}


def test_show_license_and_template_read_the_file(talk: TerminalConversation, say: Say):  # noqa: F811
    assert "names no license" in say("/show license")
    talk.model.file = SimpleNamespace(metadata={"general.license": "mit", "general.license.link": "https://a.example"})
    assert say("/show license") == "mit\nhttps://a.example\n"
    talk.model.session.template = SimpleNamespace(source="{{ messages }}")
    assert say("/show template") == "{{ messages }}\n"
    assert [text for text, _ in complete_line(talk, "/show l")] == ["license"]


def test_export_writes_the_conversation_as_markdown(talk: TerminalConversation, say: Say, tmp_path: Path):  # noqa: F811
    path = tmp_path / "trip.md"
    with pytest.raises(UsageError, match="nothing to export"):
        say(f"/export {path}")
    say("What is **this**?", Answer("One.\n"))
    assert "2 messages" in say(f"/export {path}")
    assert path.read_text() == "# Conversation\n\n## User\n\nWhat is **this**?\n\n## Assistant\n\nOne.\n"
    with pytest.raises(UsageError, match="exists already"):
        say(f"/export {path}")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    (tmp_path / "my photo.PNG").write_bytes(b"")
    return tmp_path / "my photo.PNG"


def test_dropped_images_are_found_however_the_terminal_quotes_them(photo: Path):
    escaped = str(photo).replace(" ", "\\ ")
    for written in (f"'{photo}'", f'"{photo}"', escaped, f"file://{photo.as_posix().replace(' ', '%20')}"):
        assert find_images(f"What is {written} here?") == ("What is here?", [str(photo)])
        assert find_images(written) == ("", [str(photo)])
    two = find_images(f"{escaped} and '{photo}'")
    assert two == ("and", [str(photo)] * 2)


@pytest.mark.parametrize("text", ["What is 'none.png'?", "/no/such.png", "photo.PNG", "don't say \"it's\"", "/tmp x"])
def test_other_texts_have_no_images(photo: Path, text: str, monkeypatch):
    monkeypatch.chdir(photo.parent)
    assert find_images(text) == (text, [])


def test_a_dropped_image_is_attached_where_the_model_sees_images(
    talk: TerminalConversation,  # noqa: F811
    say: Say,  # noqa: F811
    photo: Path,
):
    encoded = list[str]()
    talk.model.file, talk.model.vision = SimpleNamespace(), SimpleNamespace(nbytes=9, encode=encoded.append)
    assert talk.attach_dropped(f"What is '{photo}'?") == f"What is '{photo}'?"
    assert talk.attach_dropped(f"'{photo}' What is this?") == "What is this?"
    assert encoded == talk.images == [str(photo)]
    talk.model.vision = SimpleNamespace(nbytes=0)
    assert talk.attach_dropped(f"'{photo}' What?") == f"'{photo}' What?"
    with pytest.raises(UsageError, match=r"unknown command /none\.png"):
        say("/none.png what?")
    say(f"{str(photo).replace(' ', chr(92) + ' ')} what?", Answer("A photo."))
    assert talk.lines[-1]["content"] == "A photo."
