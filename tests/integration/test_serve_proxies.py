"""Test the proxies of docs/deploy.md: each token passes before the next one is generated."""

import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from project import ROOT
from served import Scripted, scripted, serving

from localllm.server.guard import AccessRules

DEPLOY = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
HOST = "models.example"
ANSWER = "one two three four five"


def block(kind: str) -> str:
    (config,) = re.findall(rf"```{kind}\n(.*?)```", DEPLOY, re.DOTALL)
    return config


def nginx(folder: Path, port: int, upstream: int) -> list[str]:
    """Write a configuration with the documented location; return the command that runs it."""
    location = block("nginx").replace("127.0.0.1:11435", f"127.0.0.1:{upstream}")
    places = "".join(
        f"{name} {folder / name};\n"
        for name in (
            "client_body_temp_path",
            "proxy_temp_path",
            "fastcgi_temp_path",
            "uwsgi_temp_path",
            "scgi_temp_path",
        )
    )
    server = f"server {{ listen 127.0.0.1:{port}; server_name {HOST};\n{location} }}"
    text = f"daemon off; pid {folder}/pid; events {{}} http {{ access_log off;\n{places}{server} }}"
    (folder / "nginx.conf").write_text(text, encoding="utf-8")
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, port: int, upstream: int) -> list[str]:
    """Write a configuration with the documented site, without TLS; return the command that runs it."""
    site = block("text").replace("127.0.0.1:11435", f"127.0.0.1:{upstream}").replace(HOST, f"http://{HOST}:{port}")
    (folder / "Caddyfile").write_text("{\n\tadmin off\n}\n" + site, encoding="utf-8")
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


class OneByOne:
    """A gate of a scripted model that lets one run pass at a time."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)

    def allow(self) -> None:
        self._allowed.release()

    def wait(self, timeout: float) -> bool:
        return self._allowed.acquire(timeout=timeout)


@pytest.mark.slow(2)
@pytest.mark.parametrize("proxy", [nginx, caddy])
def test_tokens_pass_a_proxy_one_by_one(proxy: Callable[[Path, int, int], list[str]], tmp_path: Path, tiny: str):
    if shutil.which(proxy.__name__) is None:
        pytest.skip(f"needs {proxy.__name__}")
    gate = OneByOne()

    def made():
        model = scripted(tiny, {"count": ANSWER})
        engine: Scripted = model.engine
        engine.gate = gate
        return model

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving({"m": made}, AccessRules(hosts=(HOST,))) as served:
        process = subprocess.Popen(proxy(tmp_path, port, served.port), stderr=subprocess.PIPE)
        try:
            gate.allow()
            gate.allow()  # one run ahead of what has arrived
            response = request_stream(port, process)
            texts = list[str]()
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "choices" in event, event
                    if text := "".join(choice["delta"].get("content") or "" for choice in event["choices"]):
                        texts.append(text)
                        gate.allow()
            assert response.status == 200 and "".join(texts).strip() == ANSWER and len(texts) > 4
        finally:
            for _ in range(100):
                gate.allow()
            process.terminate()
            process.wait(20)


def request_stream(port: int, process: subprocess.Popen[bytes]) -> http.client.HTTPResponse:
    """Request a stream as soon as the proxy listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for _ in range(200):
        if process.poll() is not None:
            break
        try:
            connection.connect()
            break
        except OSError:
            time.sleep(0.05)
    assert process.poll() is None, process.stderr and process.stderr.read()
    body = {"messages": [{"role": "user", "content": "count"}], "stream": True}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", "Host": HOST}
    )
    return connection.getresponse()
