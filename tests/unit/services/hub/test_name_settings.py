"""Test settings of a model's name: on the command line, in the server and in Python."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapters import random_adapter, supported_names, write_adapter
from invoked import Reached, invoke
from served import scripted, serving
from tiny_model import write_tiny_model

import localllm
from localllm import api
from localllm.cli import map_run
from localllm.cli.interactive.conversation import NameSettings, make_opener
from localllm.cli.options import shared as options
from localllm.cli.parameters import build_group
from localllm.cli.registry import list_params
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.conversation import AnswerDefaults
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.server import run as server
from localllm.server.model_pool import NameOptions
from localllm.services.control_vectors import write_control_vector
from localllm.services.hub.catalogue import resolve_model
from localllm.services.hub.name_values import COMMAND_ONLY, RENAMED, convert_option, load_name_values
from tests.unit.cli.test_command import parsed


@pytest.fixture
def models(tmp_path: Path, monkeypatch, tiny: str) -> Path:
    """Put a model `base` and two aliases of it with their own settings into the folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path / "models"))
    (tmp_path / "localllm").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.gguf").symlink_to(tiny)
    (tmp_path / "localllm" / "config.toml").write_text(
        '[aliases]\nmario = "base"\nluigi = "base"\n'
        '[model.mario]\nsystem-prompt = "You are Mario."\ncontext = 64\nn-predict = 3\nstop = "!"\n'
        '[model.luigi]\nsystem = "In French."\ntemp = 0\nthink = "off"\n'
        "[model.base]\ntop-k = 7\n"
    )
    return tmp_path


@pytest.mark.parametrize("command", ["run", "chat", "map"])
def test_an_alias_has_its_own_settings_and_those_of_its_target(models: Path, command: str):
    rows = {name: parsed(command, name) for name in ("base", "mario", "luigi")}
    assert [row["context"] for row in rows.values()] == [None, 64, None]
    assert [row["temperature"] for row in rows.values()] == [None, None, 0.0]
    assert [row["top_k"] for row in rows.values()] == [7, 7, 7]
    assert [row.get("system") for row in rows.values() if "system" in row] in (
        [None, "You are Mario.", "In French."], [],
    )  # fmt: skip


def test_an_alias_of_an_alias_has_the_settings_of_both_and_its_file(models: Path):
    with (models / "localllm" / "config.toml").open("a") as config:
        config.write("[model.bowser]\ncontext = 32\n")
    config_path = models / "localllm" / "config.toml"
    config_path.write_text(config_path.read_text().replace("[aliases]\n", '[aliases]\nbowser = "mario"\n'))
    row = parsed("run", "bowser")
    assert (row["context"], row["max_tokens"], row["top_k"]) == (32, 3, 7)
    assert resolve_model("bowser") == resolve_model("base")


def test_aliases_in_a_circle_are_refused_with_their_line(models: Path, cli):
    config_path = models / "localllm" / "config.toml"
    config_path.write_text('[aliases]\na = "b"\nb = "c"\nc = "b"\nself = "self"\n')
    code, out, err = cli("run", "a", "-p", "Hi")
    assert (code, out) == (2, "") and "line 3: aliases must not form a circle: b = c = b" in err
    assert "circle" not in cli("run", "self", "-p", "Hi")[2]


def test_a_path_has_no_settings_of_its_aliases(models: Path):
    assert parsed("run", f"{models}/models/base.gguf")["top_k"] is None


def test_config_names_the_line_of_the_requested_name(models: Path, cli):
    lines = {name: cli("config", "run", name)[1] for name in ("base", "mario", "luigi")}
    assert "You are Mario." not in lines["base"] + lines["luigi"] and "In French." not in lines["base"]
    assert "config.toml, line 5" in next(line for line in lines["mario"].splitlines() if line.startswith("--system "))


def test_eval_gives_each_model_its_own_settings(models: Path, monkeypatch, cli):

    jobs = list[Any]()
    monkeypatch.setattr(map_run, "answer_questions", lambda model, job, *rest: jobs.append(job) or [])
    (models / "q.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n')
    cli("eval", "base", "mario", "luigi", models / "q.jsonl")
    assert [job.context for job in jobs] == [None, 64, None]
    assert [job.options.max_tokens for job in jobs] == [None, 3, None]
    assert [job.options.think for job in jobs] == ["auto", "auto", "off"]
    systems = [[message["content"] for message in job.prompts._head] for job in jobs]
    assert systems == [[], ["You are Mario."], ["In French."]]


def setup_of(*words: object) -> server.ServerSettings:
    heard = list[server.ServerSettings]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "run_server", lambda setup, *rest: heard.append(setup))
        invoke("serve", *words)
    return heard[0]


def test_serve_applies_the_settings_of_each_name(models: Path, tiny: str):
    setup = setup_of("base", "mario", "luigi", f"bob={tiny}")
    assert setup.names.keys() == {"base", "mario", "luigi"}
    assert setup.names["mario"].defaults.system == "You are Mario."
    assert setup.names["mario"].defaults.options.max_tokens == 3
    assert setup.names["luigi"].defaults.options.sampling.explicit == {"temperature": 0.0, "top_k": 7}
    assert setup.names["base"].defaults.system is None
    assert [setup.names[name].open_model is None for name in ("base", "mario", "luigi")] == [True, False, True]


def test_serve_of_all_models_includes_aliases_with_settings(models: Path):
    with (models / "localllm" / "config.toml").open("a") as file:
        file.write("[model.elsewhere]\ntemp = 1\n")
    setup = setup_of()
    assert setup.paths.keys() == {"base", "mario", "luigi"}
    assert setup.names["mario"].defaults.system == "You are Mario."


def test_a_running_server_follows_aliases_and_names_of_other_programs(models: Path, tiny: str, monkeypatch):
    """Name removed ones with an empty path, and changed ones with the new path."""
    setup = setup_of()
    assert setup.find is not None and [*setup.find(setup.paths)] == []
    config = models / "localllm" / "config.toml"
    config.write_text('[aliases]\nmario = "base"\nelsewhere = "other"\n[model.mario]\ntop-k = 3\n')
    (models / "models" / "other.gguf").symlink_to(tiny)
    other = str(models / "models" / "other.gguf")
    paths = {**setup.paths, "elsewhere": "/moved.gguf", "llama9": "/blob"}
    changes = {name: path for name, path, _ in setup.find(paths)}
    assert changes == {"luigi": "", "llama9": "", "elsewhere": other, "other": other}


class Talk:
    """The part of a conversation that changing its model concerns."""

    def __init__(self, options: GenerationOptions, system: str | None):
        self.options, self.model = options, SimpleNamespace(session=SimpleNamespace(system=system))

    def set(self, options: GenerationOptions) -> None:
        self.options = options

    def set_system(self, text: str | None) -> None:
        self.model.session.system = text


@pytest.mark.parametrize("typed", [[], ["--temp", "0.5"]])
def test_switching_the_model_of_a_chat_applies_the_new_names_settings(models: Path, monkeypatch, typed: list[str]):
    heard = list[Any]()

    def stand_in(conversation: Any, name: str, open_model: Any) -> None:
        opened = list[Any]()
        first = NameSettings.load(name)
        talk: Any = Talk(first.generation, first.system)

        def open_other(name, engine, template):
            opened.append((name, engine.context))

        switch = make_opener(talk, name, open_other)
        for other in ("mario", "luigi", "base"):
            switch(other)
            heard.append(
                (*opened[-1], talk.model.session.system, talk.options.max_tokens, talk.options.sampling.explicit)
            )
        talk.set_system("My own.")
        switch("mario")
        heard.append(talk.model.session.system)

    temperature = {"temperature": 0.5} if typed else {}
    invoke_chat(monkeypatch, stand_in, "base", *typed)
    assert heard == [
        ("mario", 64, "You are Mario.", 3, {"top_k": 7, **temperature}),
        ("luigi", None, "In French.", None, {"top_k": 7, "temperature": 0.5 if typed else 0.0}),
        ("base", None, None, None, {"top_k": 7, **temperature}),
        "My own.",
    ]


def test_switching_the_model_of_a_chat_ends_the_first_names_settings(models: Path, monkeypatch):
    heard = list[Any]()

    def stand_in(conversation: Any, name: str, open_model: Any) -> None:
        heard.extend(NameSettings.load(each) for each in ("mario", "base"))

    invoke_chat(monkeypatch, stand_in, "mario", "--temp", "0.5")
    assert [each.engine.context for each in heard] == [64, None]
    assert [each.generation.stop for each in heard] == [("!",), ()] and heard[1].system is None
    assert [each.generation.max_tokens for each in heard] == [3, None]
    assert [each.generation.sampling.explicit for each in heard] == [{"temperature": 0.5, "top_k": 7}] * 2


def invoke_chat(monkeypatch: pytest.MonkeyPatch, at_start: Any, *words: str) -> None:
    """Run `chat` until it would read questions."""
    from localllm.cli.commands import chat

    def begin(path: str, **how: Any) -> Any:
        at_start(None, path, None)
        raise Reached

    monkeypatch.setattr(chat, "open_for_chat", begin)
    monkeypatch.setattr(chat, "is_terminal", lambda file: True)
    monkeypatch.setattr(chat, "exit_on_signals", lambda: None)
    with pytest.raises(Reached):
        invoke("chat", *words)


def test_serve_applies_the_settings_of_the_name_it_gives_a_model(models: Path, tiny: str):
    assert setup_of(f"mario={tiny}").names["mario"].defaults.system == "You are Mario."
    both = setup_of("peach=luigi").names["peach"].defaults
    assert (both.system, both.options.think) == ("In French.", "off")


def test_requests_get_the_defaults_of_their_models_name(tmp_path: Path):
    path = str(write_tiny_model(tmp_path / "tiny.gguf"))
    defaults = AnswerDefaults("You are Mario.", [], GenerationOptions(2, sampling=SamplingOptions(temperature=0)))
    make = lambda: scripted(path, {"hi": "one two three four five"})  # noqa: E731
    question = {"role": "user", "content": "hi"}
    with serving({"base": make, "mario": make}, names={"mario": NameOptions(defaults)}) as served:

        def prompt(model: str, *messages: dict[str, str]) -> str:
            text: str = served.post("/apply-template", {"model": model, "messages": messages}).json["prompt"]
            return text

        def reason(**fields: Any) -> str:
            text: str = served.chat("hi", **fields).json["choices"][0]["finish_reason"]
            return text

        assert "Mario" in prompt("mario", question) and "Mario" not in prompt("base", question)
        assert "Mario" not in prompt("mario", {"role": "system", "content": "Own."}, question)
        assert [reason(model="base"), reason(model="mario"), reason(model="mario", max_tokens=99)] == [
            "stop", "length", "stop",
        ]  # fmt: skip
        counted = [
            served.post("/v1/messages/count_tokens", {"model": name, "messages": [question]}).json["input_tokens"]
            for name in ("base", "mario")
        ]
        assert counted[0] < counted[1]


def test_names_of_one_file_share_a_model_unless_opened_otherwise(tiny: str):
    opened = list[str]()

    def other(path: str) -> api.Model:
        opened.append(path)
        return scripted(tiny, {}, context=64)

    names = {"small": NameOptions(open_model=other), "tiny": NameOptions(open_model=other)}
    models = dict.fromkeys(("base", "same", "small", "tiny"), tiny)
    with serving(models, names=names) as served:
        entries = served.service.pool.entries
        assert [entries[name].shared.name for name in models] == ["base", "base", "small", "small"]
        for name in ("small", "tiny"):
            assert served.chat("hi", model=name).status == 200
        assert opened == [tiny] and served.model("tiny").context == 64


def test_python_applies_the_settings_of_a_name(models: Path):
    with localllm.open("mario") as mario, localllm.open("base") as base:
        assert (mario.context, base.context > 64) == (64, True)
        assert mario.session.defaults.system == "You are Mario." and base.session.defaults.system is None
        assert "Mario" in mario.detokenize(mario.chat([{"role": "user", "content": "Hi"}]).prompt)
        assert len(list(mario.generate("Once", ignore_eos=True))) <= 3
        assert mario.session.with_defaults(GenerationOptions()).sampling.top_k == 7
        (answer,) = mario.map(["Once"], ignore_eos=True, max_tokens=5)
        assert answer.completion_tokens == 5
    with localllm.open("mario", context=32) as model:
        assert model.context == 32


@pytest.fixture
def styled(models: Path, tiny: str) -> Path:
    """Give the name `mario` an adapter and a control vector, and `luigi` the adapter at scale 0."""
    with GGUFFile.open(tiny) as file:
        names = [name for name in supported_names(file) if "attn_q" in name]
        write_adapter(random_adapter(file, names), models / "poet.gguf", 1.0)
        layers, width = file.metadata["llama.block_count"], file.tensors["token_embd.weight"].shape[1]
    write_control_vector(models / "happy.gguf", "llama", np.ones((layers - 1, width), np.float32))
    (models / "localllm" / "config.toml").write_text(
        f'[aliases]\nmario = "base"\nluigi = "base"\n'
        f'[model.mario]\nlora = "{models}/poet.gguf:0.5"\ncontrol-vector = ["{models}/happy.gguf"]\n'
        f'control-vector-layer-range = "1 1"\n'
        f'[model.luigi]\nlora-scaled = "{models}/poet.gguf"\nlora-init-without-apply = true\n'
    )
    return models


def adapters_of(folder: Path, name: str) -> dict[str, object]:
    """Return the fields of EngineOptions that the name should have."""
    if name == "luigi":
        return {"lora": ((f"{folder}/poet.gguf", 0.0),), "control_vectors": (), "control_layers": None}
    vectors = ((f"{folder}/happy.gguf", 1.0),)
    return {"lora": ((f"{folder}/poet.gguf", 0.5),), "control_vectors": vectors, "control_layers": (1, 1)}


@pytest.mark.parametrize("name", ["mario", "luigi"])
def test_commands_apply_the_adapters_configured_for_a_model_name(styled: Path, name: str):
    for command in ("run", "chat", "map"):
        group = build_group(options.EngineFlags, parsed(command, name))
        assert group.adapters.to_fields() == adapters_of(styled, name), command


@pytest.mark.parametrize("name", ["mario", "luigi"])
def test_serve_opens_a_model_with_the_adapters_of_its_name(styled: Path, monkeypatch, name: str):
    opened, expected = list[Any](), adapters_of(styled, name)

    def open_model(path: str, engine: Any, *rest: object) -> None:
        opened.append(engine)
        raise Reached

    monkeypatch.setattr(api, "open_with_options", open_model)
    opens = setup_of(name).names[name].open_model
    assert opens is not None
    with pytest.raises(Reached):
        opens(f"{styled}/models/base.gguf")
    assert [{key: getattr(each, key) for key in expected} for each in opened] == [expected]


def test_python_opens_a_model_with_the_adapters_of_its_name(styled: Path):
    with localllm.open("mario") as mario, localllm.open("luigi") as luigi, localllm.open("base") as base:
        assert [[each.name for each in model.engine.adapters] for model in (mario, luigi, base)] == [
            ["poet"], ["poet"], [],
        ]  # fmt: skip
        assert [model.engine.adapter_scales for model in (mario, luigi, base)] == [(0.5,), (), ()]
        ids = mario.tokenize("Once upon a time")
        rows = [model.logits(ids) for model in (mario, luigi, base)]
        assert np.array_equal(rows[1], rows[2]) and not np.array_equal(rows[0], rows[1])
    with localllm.open("mario", lora="") as model:  # an argument wins
        assert not model.engine.adapters


def test_config_prints_adapters_as_they_are_typed(styled: Path, cli):
    line = next(line for line in cli("config", "run", "mario")[1].splitlines() if line.startswith("--lora "))
    assert f" {styled}/poet.gguf:0.5 " in line


def test_quantize_does_not_merge_the_adapter_of_a_name(styled: Path, monkeypatch):
    (styled / "localllm" / "config.toml").write_text('[defaults]\nlora = "a.gguf"\n')
    monkeypatch.setenv("LOCALLLM_LORA", "b.gguf")
    assert parsed("quantize", "base", "Q8_0")["lora"] is None


OF_THE_TERMINAL = {"escape", "json-whitespace", "additional-properties"}


@pytest.mark.parametrize("param", [each for each in list_params("map") if each.keys], ids=lambda each: each.keys[0])
def test_python_and_serve_know_every_option_that_changes_answers(param: Any):
    """Convert or report every spelling of sampling, generation and reasoning options."""
    panel = param.rich_help_panel or ""
    if not panel.startswith(("Sampling", "More sampling", "Generation", "Thinking", "Constrained")):
        return
    samples: dict[str, Any] = {
        "think": "on", "template_var": ["a=1"], "samplers": "top_k", "letters": "k", "ignore_eos": True,
        "stop": ["x"], "ban": ["x"], "dry_sequence_breakers": ["x"], "dry_base": 2,
    }  # fmt: skip
    for key in set(param.keys) - OF_THE_TERMINAL:
        name = RENAMED.get(plain := key.replace("-", "_"), plain)
        assert name in COMMAND_ONLY or convert_option(
            name, samples.get(param.name, 0.5 if param.kind is float else 1)
        ), key


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("temp = 'cold'", "line 4: temp: temperature must be a number"),
        ("think = 'so'", "line 4: think: think must be"),
        ("lora = 'a.gguf:nan'", "line 4: lora: 'a.gguf:nan' is not a list of files"),
        ("control-vector-layer-range = '1'", "line 4: control-vector-layer-range: '1' is not the first and"),
    ],
)
def test_an_invalid_setting_of_a_name_is_reported_with_its_line(models: Path, line: str, message: str):
    (models / "localllm" / "config.toml").write_text(f'[aliases]\nmario = "base"\n[model.mario]\n{line}\n')
    with pytest.raises(UsageError, match=message):
        load_name_values("mario")


def test_a_setting_that_only_commands_apply_is_reported(models: Path):
    (models / "localllm" / "config.toml").write_text('[model.base]\nregex = "a+"\n')
    assert load_name_values("base").warnings == (
        "config.toml, line 2: regex is ignored: only commands that have this option use it",
    )
