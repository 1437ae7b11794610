"""Test one run of the server, with stand-ins for listener and worker: what each option changes."""

import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from invoked import told_by

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")

from localllm.server import run as server
from localllm.server.run import ServerSettings

USUAL = {
    "host": "127.0.0.1", "port": 11435, "socket": None, "memory": None, "parallel": None, "grace": 30.0, "keys": [],
    "hosts": [], "origins": [], "body": 32_000_000, "connections": 128, "answer_seconds": None, "drops_turns": False,
    "folders": [], "open_model": None, "strict_names": False, "access_log": False, "ssl_certfile": None,
    "ssl_keyfile": None, "idle_seconds": None, "cache_reuse": None, "suffix_first": False,
    "names": {}, "find": None, "allows_pull": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("", {}),
        ("--port 99 --memory 1.5G -np 3 --grace 0 --max-body 5k --max-connections 7 --timeout 2.5",
         {"port": 99, "memory": 1_500_000_000, "parallel": 3, "grace": 0.0, "body": 5000, "connections": 7,
          "answer_seconds": 2.5}),
        ("--on-overflow drop-turns --media-path FOLDER --allow-host a --allow-host b --allow-origin https://c",
         {"drops_turns": True, "folders": ["FOLDER"], "hosts": ["a", "b"], "origins": ["https://c"]}),
        ("--cache-reuse 32 --spm-infill", {"cache_reuse": 32, "suffix_first": True}),
        ("--strict-model-names --idle 60", {"strict_names": True, "idle_seconds": 60}),
        ("--on-overflow error --socket s", {"socket": "s"}),
        ("--unix-socket s --access-log", {"socket": "s", "access_log": True}),
        ("--ssl-certfile a --ssl-keyfile b", {"ssl_certfile": "a", "ssl_keyfile": "b"}),
        ("--host 0.0.0.0 --api-key-file KEYS", {"host": "0.0.0.0", "keys": ["12345678", "abcdefgh"]}),
    ],
)  # fmt: skip
def test_serve_options_reach_the_settings(tiny: str, tmp_path, line: str, changed: dict):
    (tmp_path / "keys").write_text("12345678\nabcdefgh\n")
    (tmp_path / "keys").chmod(0o600)
    words = line.replace("FOLDER", str(tmp_path)).replace("KEYS", str(tmp_path / "keys")).split()
    setup = told_by((server, "run_server"), "serve", f"m={tiny}", *words)["setup"]
    here = {"folders": [str(tmp_path)]} if "folders" in changed else {}
    assert setup == USUAL | {"paths": {"m": tiny}} | changed | here


class Listens:
    """A stand-in for socket, pool and server that records its calls."""

    def __init__(self, stopped_by: int | None):
        self.did, self.stopped_by = list[Any](), stopped_by

    def __enter__(self) -> "Listens":
        return self

    def __exit__(self, *error: object) -> None:
        self.did.append("gone")

    def listen(self, connections: int) -> None:
        self.did.append(("listen", connections))

    def getsockname(self) -> tuple[str, int]:
        return "somewhere", 99

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[None]:
        self.did.append(("open", name))
        yield

    async def serve(self, sockets: list[Any]) -> None:
        assert sockets == [self]
        self.did.append("serve")

    async def close(self) -> None:
        self.did.append("close")

    def stop_responses(self) -> None:
        self.did.append("stop")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a server with changed settings."""

    def run(stopped_by: int | None = signal.SIGTERM, **changed: Any) -> tuple[Listens, Any]:
        stand_in_server, calls = Listens(stopped_by), SimpleNamespace(addresses=[])

        def stand_in(name: str, result: Any) -> None:
            owner = server if hasattr(server, name) else server.listener
            monkeypatch.setattr(owner, name, lambda *arguments: setattr(calls, name, arguments) or result)

        stand_in("bind_tcp", stand_in_server)
        stand_in("bind_unix", stand_in_server)
        stand_in("bind_ipv6_loopback", None)
        stand_in("get_host_names", ["box"])
        stand_in("ModelPool", stand_in_server)
        stand_in("create_listener", stand_in_server)
        stand_in("create_application", "the application")
        monkeypatch.setattr(server, "restore_gc", lambda: stand_in_server.did.append("collect"))
        monkeypatch.setattr(server, "get_available_memory", lambda: 77)
        usual = USUAL | {"paths": {"m": "/m.gguf"}, "open_model": len, "port": 5}
        with ExitStack() as stack:
            server.run_server(ServerSettings(**usual | changed), stack, calls.addresses.append, print)
        return stand_in_server, calls

    return run


def test_serve_opens_its_only_model_listens_and_closes(ran):
    """Open the model first, so that its errors are shown at once."""
    stand_in_server, calls = ran()
    assert stand_in_server.did == [("open", None), ("listen", 128), "collect", "serve", "close", "gone"]
    assert calls.addresses == ["http://127.0.0.1:99"] and calls.bind_tcp == ("127.0.0.1", 5)
    paths, open_model, metrics, memory, parallel, is_strict, idle, names = calls.ModelPool
    assert (paths, open_model, memory, parallel, is_strict, idle) == ({"m": "/m.gguf"}, len, 77, None, False, None)
    assert names == {}
    service, rules, log = calls.create_application
    assert log is None
    assert (service.pool, service.metrics, rules.hosts) == (stand_in_server, metrics, ["127.0.0.1"])
    app, limits, ending, tls = calls.create_listener
    assert tls is None and (app, ending.grace, limits) == ("the application", 30.0, service.limits)
    several, _ = ran(paths={"a": "/a", "b": "/b"})
    assert several.did == [("listen", 128), "collect", "serve", "close", "gone"]


def test_settings_reach_pool_rules_and_listener(ran):
    stand_in_server, calls = ran(
        host="::1", memory=5, parallel=3, grace=2.5, keys=["k"], hosts=["h"], origins=["o"], body=7, connections=9,
        answer_seconds=1.5, drops_turns=True, folders=["f"], strict_names=True, access_log=True,
        idle_seconds=60.0,
    )  # fmt: skip
    assert (
        calls.addresses == ["http://[::1]:99"] and calls.bind_tcp == ("::1", 5) and ("listen", 9) in stand_in_server.did
    )
    assert calls.ModelPool[3:7] == (5, 3, True, 60.0) and calls.create_listener[2].grace == 2.5
    service, rules, log = calls.create_application
    assert log is print
    assert (rules.hosts, rules.origins, rules.keys) == (["[::1]", "box", "h"], ["o"], ["k"])
    limits = service.limits
    assert (limits.body, limits.connections, limits.answer_seconds, limits.drops_turns, limits.folders) == (
        7, 9, 1.5, True, ["f"],
    )  # fmt: skip
    assert (limits.depth, limits.seconds) == (100, 30.0)


def test_ctrl_c_exits_with_130_and_a_signal_with_its_code(ran):
    with pytest.raises(KeyboardInterrupt):
        ran(stopped_by=signal.SIGINT)
    ran(stopped_by=None)


def test_serve_listens_on_a_unix_socket(ran):
    stand_in_server, calls = ran(socket="/s")
    assert calls.addresses == ["/s"] == [*calls.bind_unix] and not hasattr(calls, "bind_tcp")
    assert stand_in_server.did[-2:] == ["close", "gone"]


def test_a_server_that_hangs_after_its_responses_are_stopped_is_ended(ran, monkeypatch):
    timer = Mock()
    monkeypatch.setattr(server.threading, "Timer", timer)
    stand_in_server, calls = ran()
    seconds, _ = timer.call_args.args
    assert seconds == server.EXIT_SECONDS and timer().daemon and not timer().start.called and timer().cancel.called
    calls.create_listener[2].stop_responses()
    assert stand_in_server.did[-1] == "stop" and timer().start.called


@pytest.mark.parametrize(("stopped_by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (None, 0)])
def test_ending_a_hanging_server_removes_its_files_first(monkeypatch, stopped_by: int | None, code: int):
    codes, stack = list[Any](), ExitStack()
    monkeypatch.setattr(server.os, "_exit", codes.append)
    stack.callback(codes.append, "removed")
    server.exit_now(SimpleNamespace(stopped_by=stopped_by) if stopped_by else None, stack)
    assert codes == ["removed", code]
