"""Test a server that runs for long: request ids, the access log, TLS, sockets of a service manager."""

import http.client
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from project import ROOT
from served import serving

import localllm
from localllm.errors import UsageError
from localllm.server.app import AccessLog
from localllm.server.listener import TlsFiles, format_address, require_keys, take_inherited_sockets

GUIDE = str(localllm.builtin_model())


# ---- ids and lines


def test_every_response_has_an_id_that_the_client_may_choose():
    with serving({"guide": GUIDE}) as served:
        own = [served.get("/health").headers["x-request-id"] for _ in range(2)]
        assert len(set(own)) == 2 and all(re.fullmatch("[0-9a-f]{16}", each) for each in own)
        assert served.get("/health", **{"X-Request-Id": "job-7/a"}).headers["x-request-id"] == "job-7/a"
        assert served.get("/health", **{"X-Request-Id": "a b\x7f"}).headers["x-request-id"] != "a b\x7f"
        assert "x-request-id" in served.get("/nowhere").headers


def ask(path: bytes, respond) -> list[str]:
    """Return the log lines of one request."""
    import asyncio

    lines = list[str]()
    scope = {"type": "http", "method": "POST", "path": "/x", "raw_path": path, "headers": [], "client": ("::1", 5)}

    async def send(message):
        pass

    async def receive():
        return {"type": "http.disconnect"}

    asyncio.run(AccessLog(respond, lines.append)(scope, receive, send))
    return lines


def test_a_log_line_has_no_query_and_no_line_break():
    async def respond(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"12345"})

    (line,) = ask(b"/v1/chat%0Acompletions?key=secret", respond)
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ::1 POST /v1/chat%0Acompletions 200 5 bytes \d+\.\d{3} s [0-9a-f]{16}"
    assert re.fullmatch(pattern, line), line
    assert len(ask(b"/" + b"a" * 5000, respond)[0]) < 400


def test_a_client_that_leaves_before_the_response_is_logged_as_499():
    async def respond(scope, receive, send):
        pass

    assert " 499 0 bytes " in ask(b"/x", respond)[0]


# ---- a server as a process of its own

LISTENS = """
import os, socket, sys
listening = socket.socket(getattr(socket, sys.argv[1]), socket.SOCK_STREAM, {"AF_INET": 6}.get(sys.argv[1], 0))
listening.bind(sys.argv[2] if sys.argv[1] == "AF_UNIX" else (sys.argv[2], 0))
listening.listen()
os.dup2(listening.fileno(), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.executable, [sys.executable, "-m", "localllm", "serve", *sys.argv[3:]])
"""


@contextmanager
def running(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process and yield it with its first line."""
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stderr.readline()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such descriptors")
def test_a_socket_of_a_service_manager_is_used(tmp_path: Path):
    place = tmp_path / "socket"
    with running("-c", LISTENS, "AF_UNIX", str(place), GUIDE) as (process, line):
        assert line == f"localllm: serving guide at {place}; Ctrl-C stops the server\n"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(str(place))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert place.exists()  # the service manager's


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such descriptors")
def test_the_access_log_works_on_a_port_of_a_service_manager():
    with running("-c", LISTENS, "AF_INET", "127.0.0.1", GUIDE, "--access-log") as (process, line):
        url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        with urllib.request.urlopen(f"{url}/health?secret", timeout=30) as reply:
            assert reply.status == 200
        assert re.search(r"^localllm: \S+Z 127\.0\.0\.1 GET /health 200 \d+ bytes ", process.stderr.readline())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such descriptors")
def test_a_port_for_other_computers_needs_keys():
    with socket.socket() as anywhere, socket.socket() as here, socket.socket(socket.AF_UNIX) as unix:
        anywhere.bind(("0.0.0.0", 0))
        here.bind(("127.0.0.1", 0))
        require_keys([here, unix], [])
        require_keys([anywhere], ["12345678"])
        with pytest.raises(
            UsageError, match=r"^http://0\.0\.0\.0:\d+ lets other computers connect: add --api-key-file FILE$"
        ):
            require_keys([here, anywhere], [])
        assert format_address(here, "https") == f"https://127.0.0.1:{here.getsockname()[1]}"


def test_inherited_sockets_of_another_process_are_ignored(monkeypatch: pytest.MonkeyPatch):
    assert take_inherited_sockets() == []
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert take_inherited_sockets() == [] and "LISTEN_FDS" not in os.environ


def test_an_inherited_descriptor_that_is_no_socket_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setattr("localllm.server.listener.FIRST_DESCRIPTOR", 99_999)
    with pytest.raises(UsageError, match="descriptor 99999 is not a socket"):
        take_inherited_sockets()


# ---- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    paths = str(folder / "cert.pem"), str(folder / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names]
    subprocess.run([*command, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True, timeout=60)
    return paths


@pytest.mark.slow
def test_https_is_served_with_a_certificate(certificate: tuple[str, str]):
    cert, key = certificate
    options = ["--port", "0", "--ssl-certfile", cert, "--ssl-keyfile", key]
    with running("-m", "localllm", "serve", GUIDE, *options) as (_, line):
        match = re.search(r"at https://127\.0\.0\.1:(\d+);", line)
        assert match, line
        context = ssl.create_default_context(cafile=cert)
        client = http.client.HTTPSConnection("localhost", int(match[1]), timeout=30, context=context)
        own = {"Origin": f"https://localhost:{match[1]}"}  # the server's own page
        client.request("GET", "/health", headers=own)
        assert client.getresponse().status == 200
        client.close()
        client.request("GET", "/health", headers={"Origin": f"http://localhost:{match[1]}"})
        assert client.getresponse().status == 403
        client.close()


def test_unusable_certificates_are_refused(certificate: tuple[str, str], tmp_path: Path, cli, refused):
    cert, key = certificate
    assert TlsFiles.load(None, None) is None and TlsFiles.load(cert, key) == TlsFiles(cert, key)
    locked = tmp_path / "locked.pem"
    command = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", key, "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    for one, other in ((cert, None), (str(tmp_path / "none"), key), (cert, cert), (cert, str(locked))):
        with pytest.raises(UsageError, match=r"^ssl_certfile or ssl_keyfile cannot be loaded: ."):
            TlsFiles.load(one, other)
    assert cli("serve", GUIDE, "--ssl-keyfile", key)[2] == "localllm: error: --ssl-keyfile needs --ssl-certfile FILE\n"
    refused(["serve", GUIDE, "--ssl-certfile", tmp_path / "none"], "--ssl-certfile")


# ---- what the documentation says


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_documented_systemd_units_are_valid(tmp_path: Path):
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    units = re.findall(r"```ini\n(.*?)```", text, re.DOTALL)
    assert len(units) == 2
    for name, unit in zip(("socket", "service"), units, strict=True):
        unit = unit.replace("%h/.local/bin/localllm", "/bin/true")
        (tmp_path / f"localllm.{name}").write_text(unit, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--user", str(tmp_path / "localllm.socket")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "localllm" not in done.stderr, done.stderr


def reason_without_containers() -> str | None:
    """Return why no container can be built, "" or None if one can."""
    if shutil.which("docker") is None:
        return "needs docker"
    done = subprocess.run(["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True, text=True)
    return f"needs a builder: {done.stderr.strip()[:120]}" if done.returncode else None


@pytest.mark.slow(120)
def test_the_documented_container_file_builds_and_answers(tmp_path: Path):
    """Install this tree's wheel instead of the published one."""
    if reason := reason_without_containers():
        pytest.skip(reason)
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"```dockerfile\n(.*?)```", text, re.DOTALL)
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(wheel, check=True, timeout=300)
    (built,) = tmp_path.glob("*.whl")
    file = file.replace("COPY . /src", f"COPY {built.name} /tmp/")
    (tmp_path / "Dockerfile").write_text(file.replace("'/src[serve]'", f"'/tmp/{built.name}[serve]'"), encoding="utf-8")
    (tmp_path / "keys").write_text("12345678\n", encoding="utf-8")
    build = subprocess.run(["docker", "build", "-q", str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert build.returncode == 0, build.stderr
    mounts = [f"{GUIDE}:/models/model.gguf:ro", f"{tmp_path / 'keys'}:/run/secrets/localllm:ro"]
    volumes = [word for mount in mounts for word in ("-v", mount)]
    command = ["docker", "run", "--rm", "-p", "127.0.0.1:11499:11435", *volumes, build.stdout.strip()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as container:
        try:
            assert "model at http://0.0.0.0:11435" in container.stderr.readline()
            asked = urllib.request.Request(
                "http://127.0.0.1:11499/v1/models", headers={"Authorization": "Bearer 12345678"}
            )
            with urllib.request.urlopen(asked, timeout=30) as reply:
                assert reply.status == 200
        finally:
            container.terminate()


def test_documented_options_of_serve_exist():
    from localllm.cli.commands.serve import ServerAddressFlags, ServerLimitFlags

    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    names = {*ServerAddressFlags.__dataclass_fields__, *ServerLimitFlags.__dataclass_fields__}
    documented = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]*)", text)}
    others = {"no_cache_dir", "create_home", "user", "now"}  # of pip, useradd and systemctl
    assert documented - others <= names, documented - others - names
