"""OLLAMA_HOST: what Ollama reads from it, and what `serve` says."""

import pytest

from localllm.cli.commands.serve import split_ollama_host, tell_ollama_host


@pytest.mark.parametrize(("address", "host", "port"), [
    ("127.0.0.1", "127.0.0.1", 11434), ("0.0.0.0:8080", "0.0.0.0", 8080), (":8080", "0.0.0.0", 8080),
    ("http://example.com", "example.com", 80), ("https://example.com/x", "example.com", 443), ("", "127.0.0.1", 11434),
    ("[::1]:11435", "::1", 11435), ("::1", "::1", 11434), ("host", "host", 11434), ("http://h:1/", "h", 1),
])  # fmt: skip
def test_an_address_is_read_as_ollama_reads_it(address: str, host: str, port: int):
    assert split_ollama_host(address) == (host, port)


@pytest.mark.parametrize(("address", "line"), [
    ("127.0.0.1:8080", "OLLAMA_HOST=127.0.0.1:8080 is not used; give --port 8080 to listen there"),
    ("0.0.0.0", "OLLAMA_HOST=0.0.0.0 is not used; give --host 0.0.0.0 --port 11434 --api-key-file FILE to let other "
     "computers connect"),
    ("http://127.0.0.1:11435", ""), ("localhost:11435", ""), ("", ""),
])  # fmt: skip
def test_serve_says_that_the_variable_is_not_used(address: str, line: str, monkeypatch, capsys):
    """Unless it names the address where clients find this server."""
    monkeypatch.setenv("OLLAMA_HOST", address)
    tell_ollama_host(11435)
    assert capsys.readouterr().err == (f"localllm: {line}\n" if line else "")


def test_a_port_that_was_chosen_counts(monkeypatch, capsys):
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:8080")
    tell_ollama_host(99, is_chosen=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("OLLAMA_HOST", "0.0.0.0")
    tell_ollama_host(99, is_chosen=True)
    assert "give --host 0.0.0.0 --port 99 " in capsys.readouterr().err
