"""OLLAMA_HOST, where users of Ollama say at which address it listens.

`serve` does not use it: Ollama itself may run there, and an address of the network needs keys. Programs that use a
server read the same variable, so it may name this one. Source: https://docs.ollama.com/faq
"""

import os
import re

from localllm.cli.terminal.output import say

OLLAMA_PORT = 11434
LOCAL = ("127.0.0.1", "localhost", "::1")


def tell_ollama_host(port_here: int, is_chosen: bool = False) -> None:
    """Say that OLLAMA_HOST is not used, and what to give instead, unless it names this server's address.

    is_chosen: whether the user has chosen this server's port.
    """
    address = os.environ.get("OLLAMA_HOST", "").strip().strip("\"'")
    host, port = split_ollama_host(address)
    port = port_here if is_chosen else port
    if not address or (host in LOCAL and port == port_here):
        return
    if host in LOCAL:
        say(f"localllm: OLLAMA_HOST={address} is not used; give --port {port} to listen there")
    else:
        say(
            f"localllm: OLLAMA_HOST={address} is not used; give --host {host} --port {port} --api-key-file FILE to let "
            "other computers connect"
        )


def split_ollama_host(address: str) -> tuple[str, int]:
    """Return the host and port that Ollama reads from its variable, [SCHEME://][HOST][:PORT]."""
    scheme, separator, rest = address.rpartition("://")
    usual = {"http": 80, "https": 443}.get(scheme, OLLAMA_PORT) if separator else OLLAMA_PORT
    match = re.fullmatch(r"(\[[^\]]*\]|[^:/]*)(?::(\d{1,5}))?", rest.partition("/")[0])
    host, port = (match[1], match[2]) if match else (rest, None)
    return host.strip("[]") or ("0.0.0.0" if port else "127.0.0.1"), int(port) if port else usual
