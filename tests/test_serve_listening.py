"""localllm serve as a listener: connections that are quick, an end that is told, clients that speak something else."""

import socket
from http.client import HTTPConnection
from typing import Any

import pytest
from served import Served, scripted, serving
from tiny_model import write_tiny_model

from localllm.server.listening import Patient


@pytest.fixture
def path(tmp_path) -> str:
    return str(write_tiny_model(tmp_path / "tiny.gguf"))


@pytest.fixture
def told(path: str):
    with serving({"scripted": lambda: scripted(path, {})}) as served:
        yield served


def test_pieces_leave_at_once(told: Served, monkeypatch: pytest.MonkeyPatch):
    """Without TCP_NODELAY, a second request on a connection waits for the client's delayed acknowledgement."""
    accepted = list[Any]()
    made = Patient.connection_made
    monkeypatch.setattr(Patient, "connection_made", lambda self, place: accepted.append(place) or made(self, place))
    connection = HTTPConnection("127.0.0.1", told.port, timeout=30)
    for _ in range(3):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    [transport] = accepted
    assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()
