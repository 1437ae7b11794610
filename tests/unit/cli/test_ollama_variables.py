"""Test Ollama's environment variables: what `serve` takes from them, and what it says."""

import pytest

from localllm.cli.ollama_variables import iter_variable_notes, read_ollama_defaults
from localllm.cli.registry import list_params
from tests.unit.cli.test_command import parsed


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("OLLAMA_KEEP_ALIVE", "10m", "idle", 600.0),
        ("OLLAMA_KEEP_ALIVE", "0", "idle", 0.0),
        ("OLLAMA_KEEP_ALIVE", "-1", "idle", None),
        ("OLLAMA_KEEP_ALIVE", "soon", "idle", None),
        ("OLLAMA_CONTEXT_LENGTH", "8192", "context", 8192),
        ("OLLAMA_CONTEXT_LENGTH", "0", "context", None),
        ("OLLAMA_NUM_PARALLEL", "4", "parallel", 4),
        ("OLLAMA_NUM_PARALLEL", "x", "parallel", None),
        ("OLLAMA_KV_CACHE_TYPE", "Q8_0", "kv_type", "q8_0"),
        ("OLLAMA_KV_CACHE_TYPE", '"q4_0"', "kv_type", "q4_0"),
        ("OLLAMA_KV_CACHE_TYPE", "q9", "kv_type", "f16"),
    ],
)
def test_serve_uses_variables_of_the_same_meaning(monkeypatch, variable: str, text: str, name: str, value: object):
    monkeypatch.setenv(variable, text)
    assert parsed("serve", "m")[name] == (value if value is not None else None)


def test_options_and_config_override_ollamas_variables(monkeypatch, tmp_path, cli):
    monkeypatch.setenv("OLLAMA_CONTEXT_LENGTH", "8192")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "OLLAMA_CONTEXT_LENGTH" in cli("config", "serve")[1]
    (tmp_path / "localllm").mkdir()
    (tmp_path / "localllm" / "config.toml").write_text("[defaults]\ncontext = 99\n")
    assert parsed("serve", "m")["context"] == 99 and parsed("serve", "m", "-c", "7")["context"] == 7
    assert parsed("run", "m")["context"] == 99


def test_serve_lists_used_variables_and_replacements_of_ignored_ones(monkeypatch):
    assert [*iter_variable_notes({})] == []
    monkeypatch.setenv("OLLAMA_KEEP_ALIVE", "10m")
    monkeypatch.setenv("OLLAMA_ORIGINS", "*")
    assert [*iter_variable_notes(read_ollama_defaults(list_params("serve")))] == [
        "OLLAMA_KEEP_ALIVE=10m is used, as options of `serve` would be",
        "ignored: OLLAMA_ORIGINS (use --allow-origin ORIGIN)",
    ]


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("OLLAMA_KEEP_ALIVE", "soon", "must be a time such as 5m; models stay loaded, as without it"),
        ("OLLAMA_CONTEXT_LENGTH", "8k", "must be a number of tokens; the model's own context is used"),
        ("OLLAMA_NUM_PARALLEL", "-2", "must be a number of requests; 16 at once are answered, as without it"),
        ("OLLAMA_KV_CACHE_TYPE", "q9", "must be a type such as q8_0; f16 is used"),
    ],
)
def test_serve_names_an_invalid_variable_and_what_is_used_instead(monkeypatch, variable: str, text: str, message: str):
    monkeypatch.setenv(variable, text)
    params = list_params("serve")
    assert read_ollama_defaults(params) == {}
    assert [*iter_variable_notes({}, params)] == [f"{variable}={text} is not understood: it {message}"]
    assert [*iter_variable_notes({}, [])] == [], "an option on the command line is used instead"


@pytest.mark.parametrize(("variable", "text"), [("OLLAMA_KEEP_ALIVE", "-1"), ("OLLAMA_NUM_PARALLEL", "0")])
def test_values_that_mean_the_default_are_no_mistakes(monkeypatch, variable: str, text: str):
    monkeypatch.setenv(variable, text)
    assert [*iter_variable_notes({}, list_params("serve"))] == []


def test_stop_asks_a_running_server_to_unload_a_model(cli, tiny: str):
    from served import serving

    with serving({"tiny": tiny}) as served:
        served.post("/api/generate", {"model": "tiny"})
        assert served.get("/api/ps").json["models"]
        assert cli("stop", "tiny", "--endpoint", served.url) == (0, "", "")
        assert served.get("/api/ps").json["models"] == []
    code, _, err = cli("stop", "tiny", "--endpoint", served.url)
    assert code == 1 and "cannot be reached" in err and err.count("\n") == 1
