"""A local server with the Hugging Face hub's protocol that can fail in many ways.

It has two origins, as the hub has: `url` lists repositories, and redirects to another port for the bytes.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def commit_of(repository: str) -> str:
    """Return the commit of main, or of the revision after an @ in the repository's name."""
    return COMMIT if "@" not in repository else hashlib.sha1(repository.encode()).hexdigest()


class Hub:
    """What is served, and how.

    Attributes:
        repositories: the bytes of each file, by the repository's name and the file's.
        gated: repositories that ask for `token`.  requests: (method, path, range, authorization) of each.
        sent: bytes of files that were sent.
        cuts: connections for bytes break after so many bytes of the body, one number for each.
        statuses: what such connections answer instead, one number for each; 0 for as usual.
        api_statuses: the same of listings.  api_answer: instead of every listing.
        pause: seconds before each piece of 64 kB.  has_ranges: whether ranges are heeded.
        checksums, sizes: what is told of a file instead of the truth.  bodies: what is sent instead.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.token = "hf_right"
        self.requests: list[tuple[str, str, str | None, str | None]] = []
        self.sent = 0
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.api_statuses: list[int] = []
        self.api_answer = b""
        self.pause = 0.0
        self.has_ranges = True
        self.checksums: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.bodies: dict[str, bytes] = {}
        self.url = self.bytes_url = ""

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        servers = [Server(("127.0.0.1", 0), type("Handler", (kind,), {"hub": self})) for kind in KINDS]
        self.url, self.bytes_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
        for server in servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield self
        finally:
            for server in servers:
                server.shutdown()
                server.server_close()


class Server(ThreadingHTTPServer):
    """A server that ignores killed clients."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        headers = self.headers
        self.hub.requests.append((self.command, self.path, headers["Range"], headers["Authorization"]))
        self.answer(unquote(urlsplit(self.path).path))

    def answer(self, path: str) -> None:
        raise NotImplementedError

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class HubHandler(Handler):
    """The handler of the hub itself."""

    def answer(self, path: str) -> None:
        if match := API.fullmatch(path):
            self.answer_api(match[1] if match[2] is None else f"{match[1]}@{match[2]}")
        elif match := RESOLVE.fullmatch(path):
            commits = {commit_of(name): name for name in self.hub.repositories if name.partition("@")[0] == match[1]}
            self.answer_resolve(commits.get(match[2], match[1]), match[3])
        else:
            self.reply(404)

    def answer_api(self, repository: str) -> None:
        hub = self.hub
        if hub.api_statuses and (status := hub.api_statuses.pop(0)):
            self.reply(status)
        elif hub.api_answer:
            self.reply(200, hub.api_answer)
        elif "@" in repository and repository not in hub.repositories:
            self.reply(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        elif repository not in hub.repositories:
            known = self.headers["Authorization"] == f"Bearer {hub.token}"
            self.reply(404 if known else 401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        else:
            files = hub.repositories[repository]
            siblings = [{"rfilename": name} | self.described(name, data) for name, data in files.items()]
            body = {"id": repository.partition("@")[0], "sha": commit_of(repository), "siblings": siblings}
            self.reply(200, json.dumps(body).encode(), Content_Type="application/json")

    def described(self, name: str, data: bytes) -> dict:
        if not name.endswith((".gguf", ".safetensors")):
            return {"size": len(data), "blobId": "0" * 40}
        size = self.hub.sizes.get(name, len(data))
        checksum = self.hub.checksums.get(name, hashlib.sha256(data).hexdigest())
        return {"size": size, "blobId": "0" * 40, "lfs": {"sha256": checksum, "size": size, "pointerSize": 135}}

    def answer_resolve(self, repository: str, name: str) -> None:
        hub = self.hub
        if repository in hub.gated and self.headers["Authorization"] != f"Bearer {hub.token}":
            status = 403 if self.headers["Authorization"] else 401
            self.reply(status, X_Error_Code="GatedRepo", X_Error_Message="Access to model is restricted")
        elif name not in hub.repositories.get(repository, {}):
            self.reply(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        else:
            data = hub.repositories[repository][name]
            self.reply(
                302,
                Location=f"{hub.bytes_url}/{quote(f'{repository}/{name}')}?signature=x",
                X_Repo_Commit=commit_of(repository),
                X_Linked_Size=str(hub.sizes.get(name, len(data))),
                X_Linked_Etag=f'"{hashlib.sha256(data).hexdigest()}"',
            )


class BytesHandler(Handler):
    """The handler of the origin to which the hub redirects."""

    def answer(self, path: str) -> None:
        hub = self.hub
        if hub.statuses and (status := hub.statuses.pop(0)):
            return self.reply(status)
        repository = max((one for one in hub.repositories if path.startswith(f"/{one}/")), key=len)
        name = path.removeprefix(f"/{repository}/")
        data = hub.bodies.get(name, hub.repositories[repository][name])
        start, end = 0, len(data)
        if hub.has_ranges and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")):
            start, end = int(match[1]), min(end, int(match[2] or end) + 1)
            if start >= len(data):
                return self.reply(416, Content_Range=f"bytes */{len(data)}")
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        self.send_body(data[start:end])

    def send_body(self, body: bytes) -> None:
        hub = self.hub
        cut = hub.cuts.pop(0) if hub.cuts else len(body)
        for start in range(0, min(cut, len(body)), 1 << 16):
            piece = body[start : min(start + (1 << 16), cut)]
            time.sleep(hub.pause)
            hub.sent += len(piece)  # before whoever reads it can ask
            self.wfile.write(piece)
        if cut < len(body):
            self.wfile.flush()
            self.close_connection = True


KINDS = HubHandler, BytesHandler
