"""Test OLLAMA_HOST: how clients parse it, and what `serve` says about it."""

import pytest

from localllm.cli.commands.serve import split_ollama_host, warn_ollama_host


@pytest.mark.parametrize(("address", "host", "port"), [
    ("127.0.0.1", "127.0.0.1", 11434), ("0.0.0.0:8080", "0.0.0.0", 8080), (":8080", "0.0.0.0", 8080),
    ("http://example.com", "example.com", 80), ("https://example.com/x", "example.com", 443), ("", "127.0.0.1", 11434),
    ("[::1]:11435", "::1", 11435), ("::1", "::1", 11434), ("host", "host", 11434), ("http://h:1/", "h", 1),
])  # fmt: skip
def test_ollama_host_is_parsed_as_ollama_does(address: str, host: str, port: int):
    assert split_ollama_host(address) == (host, port)


@pytest.mark.parametrize(("address", "line"), [
    ("127.0.0.1:8080", "OLLAMA_HOST=127.0.0.1:8080 is ignored; use --port 8080 to listen there"),
    ("0.0.0.0", "OLLAMA_HOST=0.0.0.0 is ignored; use --host 0.0.0.0 --port 11434 --api-key-file FILE to let other "
     "computers connect"),
    ("http://127.0.0.1:11435", ""), ("localhost:11435", ""), ("", ""),
])  # fmt: skip
def test_serve_reports_that_ollama_host_is_not_used(address: str, line: str, monkeypatch, capsys):
    """Stay silent if it is the address of this server."""
    monkeypatch.setenv("OLLAMA_HOST", address)
    warn_ollama_host(11435)
    assert capsys.readouterr().err == (f"localllm: {line}\n" if line else "")


def test_serve_with_its_own_port_reports_the_other_address(monkeypatch, capsys):
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:8080")
    warn_ollama_host(99, is_chosen=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("OLLAMA_HOST", "0.0.0.0")
    warn_ollama_host(99, is_chosen=True)
    assert "use --host 0.0.0.0 --port 99 " in capsys.readouterr().err
