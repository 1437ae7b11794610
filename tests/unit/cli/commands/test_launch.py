"""Test localllm launch: the settings of each agent, --dry-run, and the start of the agent."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm.cli.commands import launch as command
from localllm.services.agents import AGENTS, AgentServer

HERE = AgentServer("http://127.0.0.1:1", "localllm", "m", 4096)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf"))
    with serving({"one": lambda: scripted(path, {}), "two": lambda: scripted(path, {})}) as server:
        assert server.chat("Hi", model="two").status == 200  # opened: its context is known
        yield server


def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> list[Any]:
    """Put a program on PATH, and record what would replace this process."""
    calls: list[Any] = []
    file = tmp_path / program
    file.write_text("#!/bin/sh\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(command, "replace_process", lambda words, environment: calls.append((words, environment)))
    return calls


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_gets_url_key_and_model(name: str):
    settings = AGENTS[name].configure(HERE)
    settings_text = json.dumps([settings.variables, settings.arguments])
    assert HERE.url in settings_text and HERE.key in settings_text and "m" in settings_text.replace("localllm", "")
    assert AGENTS[name].configure(AgentServer(HERE.url, "k", "m")).variables  # a context that is not known


def test_settings_of_claude_opencode_and_codex_name_the_model():
    claude = AGENTS["claude"].configure(HERE).variables
    assert claude["ANTHROPIC_BASE_URL"] == HERE.url and claude["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "m"
    config = json.loads(AGENTS["opencode"].configure(HERE).variables["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "localllm/m" and config["provider"]["localllm"]["models"]["m"]["limit"]["context"] == 4096
    arguments = AGENTS["codex"].configure(HERE).arguments
    assert 'model_providers.localllm.base_url="http://127.0.0.1:1/v1"' in arguments
    assert "model_context_window=4096" in arguments


def test_launch_shows_the_settings_and_starts_the_agent(cli, served: Served, tmp_path, monkeypatch):
    calls = started(monkeypatch, tmp_path, "aider")
    code, out, stderr = cli("launch", "aider", "--url", served.url, "--", "--yes", "x y")
    assert (code, out) == (0, "") and f"OPENAI_API_BASE={served.url}/v1" in stderr and "'x y'" in stderr
    [(words, environment)] = calls
    assert words[0] == str(tmp_path / "aider") and words[-2:] == ["--yes", "x y"] and "openai/one" in words
    assert environment["OPENAI_API_KEY"] == "localllm" and "HOME" in environment


def test_launch_names_the_model_and_its_context(cli, served: Served):
    code, _, stderr = cli("launch", "codex", "--url", served.url, "--model", "two", "--dry-run")
    assert code == 0 and "-m two" in stderr and "model_context_window=4096" in stderr
    code, _, stderr = cli("launch", "codex", "--url", served.url, "--model", "three", "--dry-run")
    assert code == 2 and "does not serve model three; available: one, two" in stderr


def test_launch_does_not_show_the_api_key(cli, served: Served, tmp_path):
    key = tmp_path / "key"
    key.write_text("very-secret\n")
    code, _, stderr = cli("launch", "qwen", "--url", served.url, "--api-key-file", key, "--dry-run")
    assert code == 0 and "very-secret" not in stderr and "LOCALLLM_API_KEY" in stderr


def test_launch_explains_why_an_agent_cannot_start(cli, served: Served, tmp_path, monkeypatch):
    code, _, stderr = cli("launch", "vim", "--dry-run")
    assert code == 2 and "unknown agent vim" in stderr
    code, _, stderr = cli("launch", "qwen", "--url", "http://127.0.0.1:9", "--dry-run")
    assert code == 1 and "cannot be reached" in stderr and "localllm serve" in stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, stderr = cli("launch", "qwen", "--url", served.url)
    assert code == 1 and "npm install -g @qwen-code/qwen-code" in stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_the_agent_replaces_this_process(served: Served, tmp_path):
    import subprocess

    file = tmp_path / "qwen"
    file.write_text('#!/bin/sh\necho "$OPENAI_MODEL $1 $2 $3"; exit 7\n')
    file.chmod(0o700)
    words = [sys.executable, "-m", "localllm", "launch", "qwen", "--url", served.url, "--", "hello"]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (7, "one --auth-type openai hello\n")
