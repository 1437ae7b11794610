"""Test named prompts: localllm run --template, and localllm templates."""

import json
from pathlib import Path

import pytest

from localllm import builtin_model
from localllm.cli.registry import list_params
from localllm.errors import UsageError
from localllm.services.prompt_templates import list_names, load_template, parse_fields, parse_template

GUIDE = str(builtin_model())
OWN = """---
description: mine
temp: 0
max-tokens: 3
system: Be brief.
field: tone=dry
stop: ["###", "END"]
---
Say it in a {tone} tone, {"as": "JSON"}.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    for kind in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path))
    (tmp_path / "localllm" / "templates").mkdir(parents=True)
    (tmp_path / "localllm" / "templates" / "mine.md").write_text(OWN)
    return tmp_path / "localllm"


def asked(folder: Path) -> list[tuple[str, str]]:
    lines = map(json.loads, (folder / "last-answer.jsonl").read_text().splitlines()[1:-1])
    return [(line["role"], line["content"]) for line in lines]


TWELVE = "commit docstring explain-error extract regex rename review sql summarize tests title translate"
BUILTIN = TWELVE.split()


def test_twelve_templates_are_built_in():
    assert list_names() == BUILTIN


@pytest.mark.parametrize("name", BUILTIN)
def test_every_built_in_template_runs(cli, folder: Path, name: str):
    template, known = load_template(name), {option for param in list_params("run") for option in param.names}
    assert template.description and {word.split("=")[0] for word in template.list_arguments()} <= known
    code, out, err = cli("run", GUIDE, "--template", name, "-n", 40, stdin=b"the bill of May\n")
    assert code == 0 or (code == 7 and name in ("extract", "rename")), err
    text = asked(folder)[-1][1] if code == 0 else ""
    assert code or (text.startswith("the bill of May\n\n") and "{" not in text and out.strip())


def test_a_template_sets_options_and_prompt(cli, folder: Path):
    code, out, _ = cli("run", GUIDE, "--template", "mine", "--json", stdin=b"It rains.\n")
    assert code == 0 and json.loads(out)["completion_tokens"] == 3
    conversation = [("system", "Be brief."), ("user", 'It rains.\n\nSay it in a dry tone, {"as": "JSON"}.')]
    assert asked(folder) == conversation
    assert cli("run", GUIDE, "It rains.", "--template", "mine")[0] == 0  # what is said is what is asked about
    assert asked(folder) == conversation


def test_typed_options_override_those_of_a_template(cli, folder: Path):
    more = ("-n", 5, "-sys", "Go on.", "--field", "tone=merry", "-p", "In German.", "--json")
    out = cli("run", GUIDE, "--template", "mine", *more, stdin=b"It rains.\n")[1]
    assert json.loads(out)["completion_tokens"] == 5
    expected = 'It rains.\n\nSay it in a merry tone, {"as": "JSON"}.\n\nIn German.'
    assert asked(folder) == [("system", "Go on."), ("user", expected)]


def test_a_template_may_name_the_model_and_place_the_input(cli, folder: Path, tiny: str):
    path = folder / "templates" / "two.md"
    path.write_text(f"---\nmodel: {tiny}\nmax-tokens: 2\n---\nBefore {{input}} after.\n")
    assert cli("run", "--template", "two", stdin=b"x\n")[0] == 0
    assert json.loads((folder / "last-answer.jsonl").read_text().splitlines()[0])["model"]["path"] == tiny
    assert asked(folder) == [("user", "Before x after.")]
    assert cli("run", GUIDE, "--template", "two", stdin=b"x\n")[0] == 0
    assert json.loads((folder / "last-answer.jsonl").read_text().splitlines()[0])["model"]["path"] == GUIDE
    assert cli("run", GUIDE, "--template", path, "-n", 1, stdin=b"x\n")[0] == 0


def test_files_named_by_a_template_are_beside_it(folder: Path):
    (folder / "templates" / "s.json").write_text("{}")
    template = parse_template(
        "a", folder / "templates" / "a.md", "---\njson-schema: s.json\nextract: true\nraw: false\n---\n"
    )
    assert template.list_arguments() == [f"--json-schema={folder / 'templates' / 's.json'}", "--extract"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("run", GUIDE, "Hi", "--template", "nix"),
            "unknown template 'nix'; `localllm templates` lists the available ones",
        ),
        (("run", GUIDE, "Hi", "--template", "open"), "add --field what=TEXT"),
        (("run", GUIDE, "Hi", "--template", "mine", "--field", "tone"), "--field must be NAME=TEXT, not 'tone'"),
        (("run", GUIDE, "Hi", "--template", "bad"), "line 2: an option must be NAME: VALUE"),
        (("run", GUIDE, "Hi", "--template", "endless"), "the options at the top must be followed by a line ---"),
        (("run", GUIDE, "Hi", "--template", "odd"), "unknown option --colour"),
        (("templates", "show"), "NAME is missing: localllm templates show NAME"),
        (("templates", "edit", "a/b"), "is not a valid template name"),
    ],
)
def test_mistakes_in_templates_are_refused_in_one_line(refused, folder: Path, words: tuple[str, ...], problem: str):
    for name, text in {
        "open": "Say {what}.", "bad": "---\ntemp 0\n---\n", "endless": "---\ntemp: 0\n",
        "odd": "---\ncolour: red\n---\n",
    }.items():  # fmt: skip
        (folder / "templates" / f"{name}.md").write_text(text)
    refused(words, problem)


def test_templates_are_listed_and_shown(cli, folder: Path):
    lines = cli("templates")[1].splitlines()
    assert [line.split()[0] for line in lines] == sorted([*BUILTIN, "mine"]) and "mine           mine" in lines
    assert cli("templates", "show", "mine")[1] == OWN
    assert cli("templates", "path")[1] == f"{folder / 'templates'}\n"


def test_edit_copies_a_built_in_template(cli, folder: Path, monkeypatch):
    monkeypatch.setenv("VISUAL", "")
    monkeypatch.setenv("EDITOR", "sed -i s/ten/three/")
    assert cli("templates", "edit", "title")[0] == 0
    assert "at most three words" in cli("templates", "show", "title")[1] and load_template("title").is_own
    monkeypatch.setenv("EDITOR", "true")
    assert cli("templates", "edit", "haiku")[0] == 0 and load_template("haiku").description == "haiku"
    monkeypatch.setenv("EDITOR", "false")
    assert cli("templates", "edit", "haiku")[0] == 1
    monkeypatch.delenv("EDITOR")
    code, _, err = cli("templates", "edit", "haiku")
    assert code == 2 and "EDITOR is not set: set it to your editor's command, or write" in err


def test_fields_are_parsed_and_the_last_value_counts():
    assert parse_fields(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    with pytest.raises(UsageError):
        parse_fields(["=1"])
