"""Test the command line's frame: groups, aliases, defaults from config.toml and environment, help, completion."""

import ast
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import pytest
import typer
from project import ROOT
from terminal import Terminal

import localllm
from localllm.cli import compat as llama_names
from localllm.cli import open_model as opening
from localllm.cli.app import app, make_context, program
from localllm.cli.argv import parse_words, split_short_options
from localllm.cli.command import Command, unescape_text
from localllm.cli.commands.completion import complete_word
from localllm.cli.defaults import list_conflicts
from localllm.cli.help_text import format_help, get_help_width
from localllm.cli.options.shared import AdapterFlags, CacheFlags, EngineFlags, RopeFlags, parse_token_bias
from localllm.cli.parameters import NAMED, argument
from localllm.cli.prompt_input import read_prompt
from localllm.cli.registry import COMMANDS, build_command, list_params, require_command
from localllm.errors import UsageError
from localllm.files.settings import load_settings
from tests.integration.test_cli import posix
from tests.unit.generation.embedding.test_embedder import write_wordpiece_model

sys.path.insert(0, str(ROOT / "scripts"))
from write_help import COMING, LLAMA_CPP_OPTIONS, coming_from, documents, llama_cpp_options

OVERFLOW = ["error", "drop-turns", "shift", "head", "tail", "middle", "relevant", "chunks"]
WIDTHS = [40, 60, 80, 120]


def parsed(name: str, *words: object) -> dict[str, Any]:
    """Parse a command line into the command's parameters."""
    context = make_context(name)
    return context.command.make_context(name, [*map(str, words)], parent=context.parent).params


# Groups.


@dataclass(frozen=True)
class Inner:
    """A group of options."""

    title: ClassVar[str] = "What is inside"

    small: Annotated[int | None, typer.Option("-s", "--small", metavar="N", help="A number.")] = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A group with a group in it."""

    title: ClassVar[str] = "What is outside"

    texts: Annotated[list[str] | None, typer.Option("--text", metavar="TEXT", help="A text.")] = None
    inner: Inner


On = Annotated[bool, typer.Option("--on", help="On.")]


def test_groups_are_flattened_into_options_and_built_again():
    calls: list[Any] = []

    def do(
        name: Annotated[str, typer.Argument(metavar="NAME", help="Whose.")], *, outer: Outer, on: On = False
    ) -> None:
        """Do it."""
        calls.append((name, outer, on))

    command = build_command(do, Command)
    with command.make_context("do", ["me", "--text", "a", "-s5", "--text=b", "--on"]) as context:
        command.invoke(context)
    with command.make_context("do", ["you"]) as context:
        command.invoke(context)
    assert calls == [
        ("me", Outer(texts=["a", "b"], inner=Inner(5)), True),
        ("you", Outer(texts=None, inner=Inner(None)), False),
    ]
    text = command.format_plain_help(context, 80)
    assert text.index("What is outside:") < text.index("--text") < text.index("What is inside:") < text.index("--small")


def options_in(text: str) -> set[str]:
    """Return the options in a help text: those that begin a row, and those after "also"."""
    rows = re.findall(r"^  (-[^ ,]+(?:, -[^ ,]+)*)", text, re.M)
    return {name for row in [*rows, *re.findall(r"\[also: ([^\]]*)\]", text)] for name in row.split(", ")}


@pytest.mark.parametrize("name", COMMANDS)
def test_typer_knows_every_option_that_help_shows(name: str):
    group = typer.main.get_command(app)
    command = group.commands[name]
    context = typer.Context(command, info_name=name, help_option_names=["-h", "--help"])
    shown = options_in(command.format_plain_help(context, 10_000))
    assert len(shown) > 1
    options = [each for each in command.get_params(context) if each.param_type_name == "option"]
    assert {part for each in options for part in (*each.opts, *each.secondary_opts)} == shown
    panels = {each.rich_help_panel for each in options if each.rich_help_panel}
    assert all(f"\n{panel}:\n" in command.format_plain_help(context, 10_000) for panel in panels)
    assert [*group.list_commands(context)] == [*COMMANDS]


def test_options_have_environment_variables():
    by_name = {each.name: each for each in typer.main.get_command(app).commands["run"].params}
    assert by_name["top_k"].envvar == ["LOCALLLM_TOP_K"] and by_name["model"].envvar == ["LOCALLLM_MODEL"]
    assert by_name["yes"].envvar == [] and by_name[f"model{NAMED}"].opts == ["-m", "--model"]


def test_only_public_names_of_typer_are_used():
    """Allow newer versions, and import nothing of it that is slow."""
    for path in (ROOT / "localllm" / "cli").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
        assert {name for name in imported if name.startswith(("typer", "click"))} <= {"typer.core", "typer.models"}, (
            path.name
        )
        frames = {"ctx", "context", "typer", "made", "program"}
        taken = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and each.attr.startswith("_")]
        assert not [each.attr for each in taken if isinstance(each.value, ast.Name) and each.value.id in frames]
    code = "import sys; from localllm.cli.app import execute; execute(['run', '-p', 'x', '-n5', 'm', '--help'])"
    slow = "assert not {'pydantic', 'rich', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", f"{code}; {slow}"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


# Names.


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("-m x -p y", {"model": "x", "prompt": ["y"]}),
        ("--model=x -py", {"model": "x", "prompt": ["y"]}),
        ("x --ctx-size 5 --predict 6 -t -1", {"context": 5, "max_tokens": 6, "threads": None}),
        ("x -c 0 --n-predict -1 -s -1", {"context": None, "max_tokens": -1, "seed": None}),
        ("x -n6 -s 7 --reverse-prompt a -r b", {"max_tokens": 6, "seed": 7, "stop": ["a", "b"]}),
        ("x --system-prompt a -ctk q8_0 --cache-type-v f32", {"system": "a", "keys": "q8_0", "values": "f32"}),
        (r"x -p a\nb -sys \x41 -e -r \t", {"prompt": ["a\nb"], "system": "A", "stop": ["\t"]}),
        (r"x -p a\nb --no-escape", {"prompt": [r"a\nb"]}),
        ("x -p --raw -f -", {"prompt": ["--raw"], "file": ["-"], "raw": False}),
        ("-p y -- -x", {"model": "-x", "prompt": ["y"]}),
    ],
)
def test_option_aliases_set_the_same_parameter(words: str, values: dict[str, Any]):
    values_of_run = parsed("run", *words.split(" "))
    assert {name: values_of_run[name] for name in values} == values


def test_arguments_can_be_given_by_name():
    assert parsed("perplexity", "-f", "text", "-m", "model") | {"model": "model", "text": "text"} == parsed(
        "perplexity", "model", "text"
    )
    assert parsed("imatrix", "-f", "a", "-m", "m", "b", "-o", "o")["texts"] == ["a", "b"]


def test_an_option_value_may_be_omitted():
    assert [parsed("map", *words.split())["ray"] for words in ("m", "m --ray", "m --ray a", "m --ray --raw")] == [
        None,
        "",
        "a",
        "",
    ]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (r"a\nb\tc\r", "a\nb\tc\r"),
        (r"\"\'\\n", "\"'\\n"),
        (r"\xc3\xa4\x41", "äA"),
        (r"\q\x4", r"\q\x4"),
        ("ä\\", "ä\\"),
        (r"\xff", "\udcff"),
    ],
)
def test_escape_sequences_are_replaced(text: str, meaning: str):
    assert unescape_text(text) == meaning


def test_each_llama_cpp_option_is_either_known_or_refused():
    positions = {"--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"}
    device = {"-ngl", "--gpu-layers", "--n-gpu-layers", "-dev", "--device"}
    adapters = set(llama_names.UNSUPPORTED[llama_names._ADAPTER].split())
    shown = {"--system", "--template"}  # Ollama's `show` has them as flags
    elsewhere = positions | device | adapters | shown  # not all commands have them
    for name_of in ("run", "chat"):
        params = list_params(name_of)
        known = {name for param in params for name in param.names} - elsewhere
        assert not known & {*llama_names._LEFT_OUT, *llama_names._REFUSED, *llama_names.EQUIVALENTS}
        for name in {*llama_names._LEFT_OUT, *llama_names._REFUSED} - elsewhere:
            if foreign := llama_names.find_ignored(name, name_of):
                words = parse_words([name, "x"][: 1 + (foreign.values > 0)], params, name_of)
                assert (words.ignored, words.texts) == ([(name, foreign.reason)], {})
            else:
                with pytest.raises(
                    UsageError, match=re.escape(f"{name}: {llama_names.explain_unsupported(name, name_of)}")
                ):
                    parse_words(["x", name, "1"], params, name_of)
    assert llama_names._LEFT_OUT.keys() & llama_names._REFUSED.keys() == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run x -ngl many", "-ngl"),
        ("embed x --lora=a", "--lora: this command takes no adapters"),
        ("run x -cnv", "-cnv: use `localllm chat` for a conversation"),
        ("chat x -st", "-st: use `localllm run` for a single answer"),
        ("run x -p y --tmep 0", "unknown option --tmep; did you mean --temp"),
        ("run x -temp 0", "unknown option -temp; did you mean --temp"),
        ("run x -prompt y", "unknown option -prompt; did you mean --prompt"),
        ("run x --zzz", "unknown option --zzz; localllm run --help lists the options"),
        ("run x -p", "-p needs a value: put it after -p"),
        ("run x --temp cold", "--temp: must be a number, not 'cold'"),
        ("run x -s 1.5", "-s: must be an integer, not '1.5'"),
        (
            "run x --on-overflow burn",
            "--on-overflow: must be error, drop-turns, shift, head, tail, middle, relevant or chunks, not 'burn'",
        ),
        ("run x y z", "'z'"),
        ("rum x", "unknown command rum; did you mean run"),
        ("remove x", "unknown command remove; did you mean rm"),
        ("download x", "unknown command download; did you mean pull"),
        ("show x", "unknown command show; did you mean inspect"),
        ("llama-server x", "unknown command llama-server; did you mean serve"),
        ("rnu x", "unknown command rnu; did you mean run"),
        ("xyzzyx y", "unknown command xyzzyx; localllm --help lists the commands"),
        ("small.gguf", "localllm chat small.gguf"),
        ("-v", "-v needs a command before it, as in `localllm run MODEL -v ...`; for the version, use --version"),
        ("embed small hello", "cannot read hello: No such file or directory; to embed this word, use `echo hello |"),
        ("-m small.gguf", "-m needs a command before it, as in `localllm run MODEL -m ...`"),
        ("help rnu", "unknown command rnu"),
        ("config rnu", "unknown command rnu"),
        ("completion tcsh", "SHELL: must be bash, zsh, fish or powershell, not 'tcsh'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(refused, words: str, message: str):
    assert re.fullmatch(rf"localllm: error: .*{message}.*\n", refused(words.split()))


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("-n5", ["-n", "5"]), ("-en5", ["-e", "-n", "5"]), ("-ee", ["-e", "-e"]), ("-en", ["-e", "-n"]),
        ("-pabc", ["-p", "abc"]), ("-s-1", ["-s", "-1"]), ("-s1.5", ["-s", "1.5"]), ("-temp", None), ("-prompt", None),
        ("-t0x", None), ("--n", None), ("-z", None), ("-ez", None), ("-eprompt", ["-e", "-p", "rompt"]),
    ],
)  # fmt: skip
def test_combined_short_options_are_split(word: str, parts: list[str] | None):
    assert split_short_options(word, {name: param for param in list_params("run") for name in param.names}) == parts


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("a.gguf", "; to chat with that model: localllm chat a.gguf"), ("rnu", "; did you mean run?"),
        ("rmm", "; localllm --help lists the commands"), ("remove", "; did you mean rm?"), ("VERSION", ": use "
        "`localllm --version`"),
        ("ps", ": only `localllm serve` keeps models loaded, and lists them at /api/ps"),
        ("xyzzyx", "; localllm --help lists the commands"),
    ],
)  # fmt: skip
def test_an_unknown_command_gets_a_suggestion(name: str, suggestion: str):
    with pytest.raises(UsageError) as error:
        require_command(name)
    assert str(error.value) == f"unknown command {name}{suggestion}"


@pytest.mark.parametrize(
    ("text", "bias"),
    [
        ("3+1.5", 1.5), ("3-inf", -math.inf), ("3-1", -1.0), ("3+1e2", 100.0), ("3+inf", math.inf),
        *[(odd, None) for odd in ("3", "+1", "3+", "3+nan", "3+-1", "a+1", "3-x", "3++1", "3+ 1", "")],
    ],
)  # fmt: skip
def test_logit_bias_is_parsed_from_id_and_bias(text: str, bias: float | None):
    if bias is not None:
        assert parse_token_bias(text) == (3, bias)
    else:
        with pytest.raises(ValueError, match=f"^must be a token id and a bias, .* not {re.escape(repr(text))}$"):
            parse_token_bias(text)


@pytest.mark.parametrize(
    ("text", "raw"),
    [("1", True), ("True", True), ("yes", True), ("ON", True), ("0", False), ("false", False), ("no", False)],
)
def test_flags_of_the_environment_are_booleans(monkeypatch, text: str, raw: bool):
    monkeypatch.setenv("LOCALLLM_RAW", text)
    assert parsed("run", "m")["raw"] is raw
    monkeypatch.setenv("LOCALLLM_RAW", "maybe")
    with pytest.raises(UsageError, match=r"^LOCALLLM_RAW: must be true or false, not 'maybe'$"):
        parsed("run", "m")


def test_chat_template_takes_a_file_a_name_or_a_template(tmp_path: Path):
    path = tmp_path / "template"
    path.write_text("{{ messages }}\n")
    templates = [
        parsed("run", "m", "--chat-template", text)["chat_template"] for text in (path, "granite-4.0", "{{ 1/2 }}")
    ]
    assert templates == ["{{ messages }}", "granite-4.0", "{{ 1/2 }}"]
    with pytest.raises(UsageError, match=r"no\.jinja"):
        parsed("run", "m", "--chat-template-file", "no.jinja")


def test_prompt_from_a_file_keeps_its_final_line_break(tmp_path: Path):
    path = tmp_path / "prompt"
    path.write_bytes(b"a\r\n")
    assert read_prompt([], [str(path)], use_stdin=False).text == "a"
    assert read_prompt([], use_stdin=False, exact=str(path)).text == "a\r\n"


# Defaults from elsewhere.


@pytest.fixture
def configure(tmp_path: Path, monkeypatch):
    """Return a function that writes config.toml and returns its path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "localllm" / "config.toml"
    path.parent.mkdir()

    def write(text: str) -> Path:
        path.write_text(text, encoding="utf-8")
        return path

    return write


CONFIG = """\
cache_gb = 0.5
[aliases]
small = "~/small.gguf"
[defaults]
temp = 0.5
top-k = 5
stop = ["a", "b"]
[command.run]
temp = 0.6
max_tokens = 7
raw = true
[model.small]
temp = 0.7
[model."other.gguf"]
seed = 3
"""


def test_options_override_environment_config_file_and_defaults(configure, monkeypatch):
    configure(CONFIG)
    assert [parsed(name, "x")["temperature"] for name in ("chat", "run")] == [0.5, 0.6]
    home = os.path.expanduser("~/small.gguf")
    assert [parsed("run", "-m", model)["temperature"] for model in ("small", home)] == [0.7, 0.6]
    values = parsed("run", "other.gguf")
    wanted = {"top_k": 5, "stop": ["a", "b"], "max_tokens": 7, "raw": True, "seed": 3, "top_p": None}
    assert {name: values[name] for name in wanted} == wanted
    monkeypatch.setenv("LOCALLLM_TEMP", "0.8")
    monkeypatch.setenv("LOCALLLM_STOP", "c d")
    monkeypatch.setenv("LOCALLLM_RAW", "off")
    values = parsed("run", "small")
    assert (values["temperature"], values["stop"], values["raw"]) == (0.8, ["c d"], False)
    assert parsed("run", "small", "--temp", "0.9", "-r", "e")["temperature"] == 0.9
    assert parsed("run", "small", "--temp", "0.9", "-r", "e")["stop"] == ["e"]


def test_the_default_model_brings_its_own_defaults(configure, monkeypatch):
    configure('[defaults]\nmodel = "small"\n[model.small]\ntop-k = 3\n')
    assert (parsed("run")["model"], parsed("run")["top_k"]) == ("small", 3)
    assert (parsed("run", "big")["model"], parsed("run", "big")["top_k"]) == ("big", None)
    monkeypatch.setenv("LOCALLLM_MODEL", "big")
    assert (parsed("run")["model"], parsed("run")["top_k"]) == ("big", None)


def test_an_option_drops_conflicting_defaults(configure):
    configure('[defaults]\nsystem = "x"\nchat-template = "phi3"\ntemp = 0.1\nseed = 4\nkv-type = "k=f16,v=f32"\n')
    assert parsed("run", "m")["system"] == "x"
    assert [parsed("run", "m", "--raw")[name] for name in ("system", "chat_template")] == [None, None]
    assert parsed("run", "m", "-sysf", "f")["system"] is None
    assert [parsed("run", "m", "--beams", 2)[name] for name in ("temperature", "seed")] == [None, None]
    assert parsed("run", "m", "-ctk", "f32")["kv_type"] == "f16"


# What was typed, and the defaults that it silences: lines of config.toml, each with the parameter that it sets.
SYSTEMS = {'system = "x"': "system", 'system-prompt-file = "f"': "system_file"}
SHAPES = {'json-schema = "{}"': "json_schema", 'grammar = "root ::= x"': "grammar", 'regex = "a"': "regex"}
THOUGHTS = {'think = "on"': "think", "think-budget = 5": "think_budget", 'template-var = "a=1"': "template_var"}
DRAWING = {
    "temp = 0.1": "temperature", "top-k = 3": "top_k", "min-p = 0.1": "min_p", "seed = 3": "seed",
    "mirostat = 2": "mirostat", 'samplers = "top_k"': "samplers", 'sampling-seq = "k"': "letters",
    "ignore-eos = true": "ignore_eos", "dry-multiplier = 0.5": "dry_multiplier",
}  # fmt: skip
KINDS_OF_CACHE = {'cache-type-k = "f32"': "keys", 'cache-type-v = "f32"': "values"}
SILENCED = [
    ("run", "-sys y", {'system-prompt-file = "f"': "system_file"}),
    ("run", "-sysf g", {'system = "x"': "system"}),
    ("run", "--raw", {**SYSTEMS, 'chat-template = "phi3"': "chat_template", **THOUGHTS}),
    *[
        ("run", f"{typed} x", {line: name for line, name in SHAPES.items() if not line.startswith(typed[2:])})
        for typed in ("--json-schema", "--grammar", "--regex")
    ],
    ("run", "--samplers top_p", {'sampling-seq = "k"': "letters"}),
    ("run", "--sampling-seq p", {'samplers = "top_k"': "samplers"}),
    ("run", "--beams 2", DRAWING),
    ("run", "--kv-type q8_0", KINDS_OF_CACHE),
    *[("run", f"{typed} q8_0", {'kv-type = "k=f16,v=f32"': "kv_type"}) for typed in ("-ctk", "-ctv")],
    ("bench", "--json", {"md = true": "as_markdown"}),
    ("bench", "--md", {"json = true": "as_json"}),
]


@pytest.mark.parametrize(
    ("command", "typed", "line", "name"),
    [(command, typed, line, name) for command, typed, lines in SILENCED for line, name in lines.items()],
)
def test_a_given_option_drops_each_conflicting_default(configure, command, typed, line, name):
    """Keep the default without it."""
    usual = parsed(command, "m")[name]
    configure(f"[command.{command}]\n{line}\n")
    held = parsed(command, "m")[name]
    assert held != usual
    assert parsed(command, "m", "-t", "1")[name] == held
    assert parsed(command, "m", *typed.split())[name] == usual


def test_every_conflicting_pair_of_options_is_tested():
    flags = {"-sys": "system", "-sysf": "system_file", "--sampling-seq": "letters", "-ctk": "keys", "-ctv": "values"}
    flags |= {"--json": "as_json", "--md": "as_markdown"}
    tested = {"beams": set(list_conflicts("beams"))}
    for _, typed, lines in SILENCED:
        flag = typed.split()[0]
        name = flags.get(flag, flag[2:].replace("-", "_"))
        tested.setdefault(name, set()).update(lines.values())
    names = {param.name for command in COMMANDS for param in list_params(command)}
    assert {name: {*list_conflicts(name)} for name in names if list_conflicts(name)} == tested
    assert {*DRAWING.values()} <= tested["beams"]


def test_two_conflicting_options_that_were_typed_are_kept(configure):
    configure('[command.run]\nregex = "a"\n')
    values = parsed("run", "m", "--regex", "b", "--grammar", "c")
    assert (values["regex"], values["grammar"]) == ("b", "c")


def test_conflicting_options_name_existing_options():
    known = {param.name for command in COMMANDS for param in list_params(command)}
    assert {other for name in known for other in list_conflicts(name)} <= known


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("cache_gb = 1\n[", 2, ".*"),
        ("threads = 4\n", 1, "unknown key 'threads'; available: cache_gb, .*"),
        ("\ncache_gb = -1\n", 2, "cache_gb must be a number, 0 or greater"),
        ("cache_gb = true\n", 1, "cache_gb must be a number.*"),
        ("aliases = 3", 1, "aliases must be a table.*"),
        ("[aliases]\na = 'b'\nc = 3\n", 3, "an alias must be .*"),
        ("[model]\nsmall = 3\n", 2, r"model must contain tables, such as \[model.small\]"),
        ("[defaults]\n# nothing\ntempp = 1\n", 3, "no command has an option --tempp"),
        ("[command.run]\ntemp = 1\nmd = true\n", 3, "run has no option --md; localllm run --help lists the options"),
        ("[command.rnu]\n", 1, "unknown command rnu; localllm --help lists them"),
        ("[defaults]\ntemp = 'cold'\n", 2, "temp: must be a number, not 'cold'"),
        ("[defaults]\ntemp = true\n", 2, "temp: must be a string or a number, not true"),
        ("[defaults]\nraw = 1\n", 2, "raw: must be true or false, not 1"),
        ("[defaults]\nthreads = [1, 2]\n", 2, r"threads: must be a string or a number, not \[1, 2\]"),
        ("[model.'a.b']\ntop_k = 1.5\n", 2, "top_k: must be an integer, not '1.5'"),
        ("[model]\n'a.b'.top-k = 'x'\n", 2, "top-k: must be an integer, not 'x'"),
    ],
)
def test_errors_in_the_config_file_name_the_line(cli, refused, configure, text: str, line: int, message: str):
    path = configure(text)
    assert re.fullmatch(rf"localllm: error: {re.escape(str(path))}, line {line}: {message}\n", refused(["config"]))
    assert cli("run", "--help")[0] == 0


def test_an_unreadable_config_file_is_an_error(cli, configure):
    configure("").write_bytes(b"# \n# \xff\n")
    assert re.search(r"config.toml, line 2: the file must be UTF-8\n$", cli("config")[2])
    configure("").unlink()
    assert load_settings().aliases == {}
    configure("").unlink()
    (load_settings().path).mkdir()
    assert cli("config")[0] == 2


def test_a_refused_default_names_its_source(cli, configure, monkeypatch):
    configure("[defaults]\ntop-p = 2\n")
    assert re.match(r"localllm: error: --top-p \(config.toml, line 2\) must be", cli("run", "x", "-p", "y")[2])
    assert re.match("localllm: error: --top-p must be", cli("run", "x", "-p", "y", "--top-p", "3")[2])
    monkeypatch.setenv("LOCALLLM_TOP_P", "4")
    assert re.match(r"localllm: error: --top-p \(LOCALLLM_TOP_P\) must be", cli("run", "x", "-p", "y")[2])


def test_an_error_in_the_environment_names_the_variable(cli, monkeypatch):
    monkeypatch.setenv("LOCALLLM_TEMP", "cold")
    assert cli("run", "x", "-p", "y") == (2, "", "localllm: error: LOCALLLM_TEMP: must be a number, not 'cold'\n")


def test_no_option_takes_a_reserved_environment_variable():
    others = {f"LOCALLLM_{name}" for name in ("CACHE", "DEBUG", "MODELS", "PREFIX_GB")}
    assert not others & {name for command in COMMANDS for param in list_params(command) for name in param.variables}


def test_context_of_search_ignores_the_context_of_models(cli, configure, monkeypatch, tmp_path: Path):
    """Keep grep's --context apart from the context size of other commands."""
    (text := tmp_path / "text.md").write_text("# A\n\nBoats leave at nine.\n\n# B\n\nTea is free.\n")
    asked = ("search", str(text), "when do boats leave?", "--top", "1")
    code, plain, _ = cli(*asked)
    assert code == 0 and "nine" in plain and "Tea" not in plain
    assert "Tea" in cli(*asked, "--context", "5")[1]
    configure("[defaults]\ncontext = 8192\n")
    monkeypatch.setenv("LOCALLLM_CONTEXT", "4096")
    assert cli(*asked)[:2] == (0, plain)
    (line,) = (line for line in cli("config")[1].splitlines() if line.startswith("--context  ") and "4096" in line)
    assert "run, chat" in line and "search" not in line


@pytest.mark.parametrize("folder", ["", "relative"])
def test_a_relative_config_folder_is_ignored(monkeypatch, tmp_path: Path, folder: str):
    monkeypatch.setenv("XDG_CONFIG_HOME", folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("APPDATA", str(tmp_path / ".config"))  # Windows'
    assert load_settings().path == tmp_path / ".config" / "localllm" / "config.toml"


def test_config_lists_values_with_their_sources(cli, configure, monkeypatch):
    configure(CONFIG)
    monkeypatch.delenv("LOCALLLM_PREFIX_GB")
    monkeypatch.setenv("LOCALLLM_TOP_K", "6")
    code, out, err = cli("config")
    assert (code, err) == (0, "")
    lines = [re.split(" {2,}", line) for line in out.splitlines()]
    assert ["prompts kept", "500.0 MB", "config.toml, line 1"] in lines
    assert ["alias small", os.path.expanduser("~/small.gguf"), "config.toml, line 3"] in lines
    assert ["--max-tokens", "7", "config.toml, line 10: run"] in lines
    assert ["--top-k", "6", "LOCALLLM_TOP_K: run, chat, map, ask, eval"] in lines
    _, out, _ = cli("config", "run", "small")
    lines = [re.split(" {2,}", line) for line in out.splitlines()]
    for line in (
        ["MODEL", "small", "typed"],
        ["--temp", "0.7", "config.toml, line 13"],
        ["--raw", "on", "config.toml, line 11"],
        ["--json", "off", "default"],
        ["--top-p", "0.95", "default"],
    ):
        assert line in lines
    assert {line[0] for line in lines} >= {
        f"--{param.keys[0]}" for param in list_params("run") if param.keys and not param.is_argument
    }
    monkeypatch.setenv("LOCALLLM_PREFIX_GB", "1")
    assert re.search(r"prompts kept +1.0 GB +LOCALLLM_PREFIX_GB\n", cli("config")[1])


# Help.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_fits_the_terminal_and_shows_everything(name: str | None, width: int):
    context = make_context(name)
    text = context.command.format_plain_help(context, width)
    assert max(map(len, text.splitlines())) <= width or width < 80
    assert [line for line in text.splitlines() if len(line) > width and " " in line.strip()] == []
    words, letters = text.split(), "".join(text.split())
    for param in list_params(name) if name else program.params:
        assert "".join(param.help.split()) in letters
        for option_name in param.names:
            assert {option_name, f"{option_name},", f"{option_name}]"} & {*words}


BESIDE = """\
Usage: localllm do [OPTIONS] NAME

Do it.

A long paragraph of more words than one line of the terminal
has room for.

two  columns
of it

Arguments:
  NAME                          Whose it is, as long as it
                                may be.  [also: -m, --name]

Options:
  -n, --max N                   How many at most.  [default:
                                1]  [also: --maximum]
  --an-option-of-a-longer-name  28.

What is inside:
  --kind one|other              Which.
  -e, --an-option-of-a-long-name
                                On.  [also: --no-escape]

Commands:
  sub  What it does.

Examples:
  localllm do "a b" --max 5 'c d e f g h'
  x | localllm do
"""
BELOW = """\
Usage: localllm do [OPTIONS]
       NAME

Do it.

A long paragraph of more words
than one line of the terminal
has room for.

two  columns
of it

Arguments:
  NAME
      Whose it is, as long as
      it may be.  [also: -m,
      --name]

Options:
  -n, --max N
      How many at most.
      [default: 1]  [also:
      --maximum]
  --an-option-of-a-longer-name
      28.

What is inside:
  --kind one|other
      Which.
  -e,
    --an-option-of-a-long-name
      On.  [also: --no-escape]

Commands:
  sub
      What it does.

Examples:
  localllm do "a b" --max 5 \\
      'c d e f g h'
  x | localllm do
"""


@dataclass(frozen=True, kw_only=True)
class Within:
    """A group of options."""

    title: ClassVar[str] = "What is inside"

    k: Annotated[Literal["one", "other"], typer.Option("--kind", help="Which.")] = "one"
    f: Annotated[bool, typer.Option("-e/--no-escape", "--an-option-of-a-long-name", help="On.")] = False


def explained(
    a: Annotated[str, argument("NAME", "Whose it is, as long as it may be.", also=("-m", "--name"))],
    *,
    n: Annotated[
        int, typer.Option("-n", "--max", "--maximum", metavar="N", help="How many at most.  [default: 1]")
    ] = 1,
    within: Within,
    g: Annotated[bool, typer.Option("--an-option-of-a-longer-name", help="28.")] = False,
) -> None: ...


PARAMETERS = build_command(explained, Command).params
DOCSTRING = """Do it.

A long
    paragraph of more words than one line of the terminal has room for.

\b
two  columns
of it

Examples:
  localllm do "a b" --max 5 'c d e f g h'
  x | localllm do"""


@pytest.mark.parametrize(("width", "text"), [(60, BESIDE), (30, BELOW)])
def test_help_is_laid_out_beside_or_below_the_names(width: int, text: str):
    """Put texts below if there is no room, or after a name longer than 28 letters."""
    usage, behind = "localllm do [OPTIONS] NAME", [("sub", "What it does.")]
    assert f"{format_help(usage, DOCSTRING, PARAMETERS, behind, width)}\n" == text
    assert "\n  NAME\n" in format_help(usage, DOCSTRING, PARAMETERS, behind, 59)


@pytest.mark.parametrize(("columns_variable", "wide"), [("10", 20), ("20", 20), ("21", 21), ("99", 99), ("101", 100)])
def test_help_is_20_to_100_columns_wide(monkeypatch, columns_variable: str, wide: int):
    monkeypatch.setenv("COLUMNS", columns_variable)
    assert get_help_width() == wide


def test_docs_show_the_current_help():
    for path, page in documents().items():
        assert path.read_text(encoding="utf-8") == page, f"{path.name}: scripts/write_help.py writes it anew"
    assert COMING.read_text(encoding="utf-8") == coming_from(), "scripts/write_help.py writes it anew"
    assert LLAMA_CPP_OPTIONS.read_text(encoding="utf-8") == llama_cpp_options(), "scripts/write_help.py writes it anew"


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_are_valid_commands(name: str):
    context = make_context(name)
    examples = context.command.help.partition("\n\nExamples:\n")[2].splitlines()
    assert examples
    for example in examples:
        lexer = shlex.shlex(example, posix=True, punctuation_chars="|;<>")
        lexer.whitespace_split = True
        parts = [[]]
        for word in lexer:
            parts[-1].append(word) if word not in ("|", ";") else parts.append([])
        ours = [part[part.index("localllm") + 1 :] for part in parts if "localllm" in part[:2]]
        assert ours, example
        for typed in ours:
            typed = typed[: next((place for place, word in enumerate(typed) if word[0] in "<>"), None)]
            assert parse_words(typed[1:], list_params(typed[0]), typed[0]) if typed else example == "  localllm"


def test_help_command_equals_the_help_option(cli):
    assert cli("help") == cli("--help") == cli("-h")
    for name in ("run", "help"):
        assert cli("help", name) == cli(name, "--help")


def test_version_options_print_the_version(cli):
    assert cli("-V") == cli("--version") == (0, f"{localllm.__version__}\n", "")


@posix
def test_help_is_coloured_on_a_terminal_only(cli):
    shown = Terminal("help", "cache")
    assert shown.end() == 0
    assert "\x1b[1mUsage:" in shown.seen and "\x1b[36m--help" in shown.seen
    assert re.sub("\x1b\\[[0-9;]*m", "", shown.seen).replace("\r\n", "\n").startswith("Usage: localllm cache")
    assert "\x1b" not in cli("help", "cache")[1]


# Completion.


@pytest.mark.parametrize(
    ("before", "begun", "kind", "words"),
    [
        ([], "ru", "nothing", ["run"]),
        ([], "--v", "nothing", ["--version"]),
        (["help"], "war", "nothing", ["warmup"]),
        (["run"], "--top-p", "nothing", ["--top-p"]),
        (["run"], "-ct", "nothing", ["-ctk", "-ctv"]),
        (["run", "x", "--on-overflow"], "", "nothing", OVERFLOW),
        (["run", "x", "-f"], "a", "files", []),
        (["run", "x", "-n"], "", "nothing", []),
        (["run", "-n", "3", "--raw"], "sm", "models", ["small"]),
        (["run", "-m"], "sm", "models", ["small"]),
        (["perplexity"], "", "models", ["small"]),
        (["perplexity", "x"], "", "files", []),
        (["perplexity", "--json", "x"], "", "files", []),
        (["perplexity", "--json"], "", "models", ["small"]),
        (["completion"], "z", "nothing", ["zsh"]),
        (["cache"], "", "nothing", ["clear"]),
        (["serve"], "sm", "models", ["small"]),
        (["serve", "x"], "sm", "models", ["small"]),
        (["run"], "qwen3-4", "models", []),
        (["fit"], "qwen3-4b", "models", ["qwen3-4b", "qwen3-4b-2507"]),
        (["pull"], "qwen3-4b", "models", ["qwen3-4b", "qwen3-4b-2507"]),
        (["pull", "x", "y"], "sm", "models", ["small", "smollm2-1.7b", "smollm2-135m", "smollm2-360m", "smollm3-3b"]),
        (["run"], "--on-overflow=s", "nothing", ["--on-overflow=shift"]),
        (["run", "--on-overflow", "="], "s", "nothing", ["shift"]),
        (["run", "--on-overflow"], "=", "nothing", OVERFLOW),
        (["run", "--raw=x"], "--raw=y", "nothing", []),
        (["run", "--speculate"], "dr", "models", ["draft:"]),
        (["run", "--chat-template"], "phi", "files", ["phi3", "phi4"]),
        (["run", "--allow"], "x", "files", []),
        (["run", "--raw"], "sm", "models", ["small"]),
        (["run", "x", "y"], "sm", "files", []),
        (["quantize"], "", "files", []),
        (["quantize", "x"], "Q4_K", "files", ["Q4_K_M", "Q4_K_S"]),
        (["config"], "pa", "nothing", ["path"]),
        (["config"], "pu", "nothing", ["pull"]),
        (["config", "run"], "sm", "models", ["small"]),
        (["sessions"], "sh", "nothing", ["show"]),
    ],
)
def test_completion_offers_the_right_words_and_files(
    configure, before: list[str], begun: str, kind: str, words: list[str]
):
    configure('[aliases]\nsmall = "x.gguf"\n')
    found_kind, offers = complete_word(before, begun)
    assert (found_kind, [word for word, _ in offers]) == (kind, words)


def test_completion_of_invalid_words_offers_nothing(cli, monkeypatch):
    monkeypatch.setenv("_LOCALLLM_COMPLETE", "bash")
    assert cli("rnu", "") == (0, "", "")
    assert cli("run", "--on-overflow", "e") == (0, "nothing\nerror\t\n", "")


SHELLS = {
    "bash": "source <(localllm completion bash)\n"
    'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _localllm; printf "%s\\n" "${COMPREPLY[@]}"; }\n'
    "compopt() { :; }\n",
    "fish": "localllm completion fish | source\nfunction ask; complete -C (string join -- ' ' $argv); end\n",
}


@pytest.mark.sampled
@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_commands_options_and_files(tmp_path: Path, shell: str):
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    program = tmp_path / "bin" / "localllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m localllm "$@"\n')
    program.chmod(0o755)
    for name in ("a.gguf", "b.txt", "c d.gguf"):
        (tmp_path / name).touch()
    asked = ("war", "run ''", "run x -f b", "run --no-c", "run x --on-overflow = dr")
    script = SHELLS[shell] + "".join(f"ask localllm {words}\n" for words in asked)
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run([shell, "-c", script], cwd=tmp_path, env=os.environ | environment, capture_output=True)
    offers = [line.partition("\t")[0].replace("\\", "") for line in done.stdout.decode().splitlines()]
    assert {"warmup", "a.gguf", "c d.gguf", "b.txt", "--no-cache", "drop-turns"} == set(offers) - {"bin", "bin/"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("begun", "words"),
    [
        ("", [r"my\ chat", "plain"]),
        ("my", [r"my\ chat"]),
        (r"my\ c", [r"my\ chat"]),
        ('"my c', ["my chat"]),
        ("'my", ["my chat"]),
        ("none", []),
    ],
)
def test_bash_quotes_names_with_blanks(tmp_path: Path, begun: str, words: list[str]):
    """Complete one word, also after a quote or a backslash."""
    program = tmp_path / "bin" / "localllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m localllm "$@"\n')
    program.chmod(0o755)
    folder = tmp_path / "localllm" / "sessions"
    folder.mkdir(parents=True, mode=0o700)
    for name in ("my chat", "plain"):
        (folder / f"{name}.jsonl").touch(0o600)
    asked = f"ask localllm sessions show {shlex.quote(begun)}\n"
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_DATA_HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-c", SHELLS["bash"] + asked], cwd=tmp_path, env=os.environ | environment, capture_output=True
    )
    assert sorted(done.stdout.decode().split("\n")) == sorted([*words, ""] if words else ["", ""])


def test_powershell_completion_passes_a_dot_after_the_word(cli, monkeypatch):
    """Avoid empty arguments; run what its script runs, as there is no PowerShell."""
    monkeypatch.setenv("_LOCALLLM_COMPLETE", "powershell")
    assert cli("war.")[1].splitlines()[1].startswith("warmup\t")
    assert cli("run", "x", "--on-overflow", ".")[1].split() == ["nothing", *OVERFLOW]
    monkeypatch.delenv("_LOCALLLM_COMPLETE")
    _, script, _ = cli("completion", "powershell")
    assert 'localllm @before "$begun."' in script and script.count("{") == script.count("}")
    assert script.count("(") == script.count(")") and "%" not in script


@pytest.mark.sampled
def test_a_prompt_may_fill_the_context_unless_it_shifts(tiny: str):
    group = SimpleNamespace(context=64, rope=RopeFlags())
    assert opening.compute_max_bytes(tiny, group, "shift") == sys.maxsize
    most = {opening.compute_max_bytes(tiny, group, choice) for choice in (None, "error", "drop-turns")}
    assert len(most) == 1 and most < {*range(64, 64_000)}


@pytest.mark.sampled
@pytest.mark.parametrize("no_cache", [True, False])
def test_open_model_applies_context_and_cache_options(tiny: str, monkeypatch, no_cache: bool):
    group = EngineFlags(
        threads=1,
        context=64,
        device="cpu",
        gpu_layers="auto",
        cache=CacheFlags(kv_type="q8_0"),
        rope=RopeFlags(),
        adapters=AdapterFlags(),
    )
    with opening.open_model(tiny, group, no_cache=no_cache) as model:
        assert model.context == 64
        assert (model.prefixes is None) == no_cache


def test_only_listed_commands_exist():
    group = make_context("run").parent.command
    assert {group.get_command(None, name) is None for name in (*COMMANDS,)} == {False}
    assert [group.get_command(None, name) for name in ("none", "", "__init__")] == [None] * 3


@pytest.fixture(scope="module")
def embedding_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write models for the commands that compute vectors and scores."""
    folder, names = tmp_path_factory.mktemp("readers"), {"embed": "bert", "rerank": "bert_rank"}
    return {command: write_wordpiece_model(name, folder / f"{name}.gguf") for command, name in names.items()}


OPENS_A_MODEL: dict[str, list[str]] = {
    "run": ["-p", "Hi"], "map": ["-p", "{line}"], "embed": [], "rerank": ["-q", "x"], "chat": [], "serve": [],
    "bench": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("option", "problem"),
    [("--device=nowhere", "unknown device 'nowhere'"), ("--threads=9999", "threads must be from 1 to .* .found 9999")],
)
@pytest.mark.parametrize("name", OPENS_A_MODEL)
def test_engine_options_reach_the_engine_of_every_command(
    tiny, embedding_models, monkeypatch, name: str, option: str, problem: str
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a line\n")))
    words, above = [str(embedding_models.get(name, tiny)), *OPENS_A_MODEL[name], option], make_context(name)
    context = above.command.make_context(name, words, parent=above.parent)
    with context, pytest.raises(UsageError, match=problem):
        context.command.invoke(context)
