"""A server in a thread of the tests, with real or scripted models."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra localllm[serve]")
pytest.importorskip("uvicorn", reason="needs the extra localllm[serve]")

from fake_engine import FakeSequence
from talker import Talker

from localllm import api
from localllm.files.gguf.file import GGUFFile
from localllm.server.app import create_application
from localllm.server.guard import AccessRules
from localllm.server.http import ClientLimits
from localllm.server.listener import ShutdownOptions, bind_tcp, create_listener
from localllm.server.metrics import Metrics
from localllm.server.model_pool import ModelPool
from localllm.server.service import ServerContext

Step = tuple[int, ...]


class Scripted(Talker):
    """A scripted engine that a test can block.

    Attributes:
        steps: for each run, the token count of each sequence.
        gate: an event that runs wait for.
    """

    bytes_per_token = 0

    def __init__(self, tokenizer: Any, context: int, script: Mapping[str, str]):
        super().__init__(tokenizer, context)
        self._script = script
        self.steps, self.gate = list[Step](), threading.Event()
        self.gate.set()

    def answer(self, question: str) -> list[int]:
        said = self._script.get(question, question.upper())
        return [*self._tokenizer.encode(said, special=True), self._tokenizer.eos_id]

    def run(
        self,
        requests: Sequence[tuple[FakeSequence, Sequence[int]]],
        logits: str,
        precise: bool,
        kernel_tokens: Sequence[int] = (),
    ) -> list[np.ndarray]:
        assert self.gate.wait(30)
        self.steps.append(tuple(len(ids) for _, ids in requests))
        return [sequence.append(list(ids), logits) for sequence, ids in requests]


def scripted(path: str, script: Mapping[str, str], context: int = 4096, template: str | None = None) -> api.Model:
    """Return a model with the vocabulary of a file that answers the last question by a script."""
    file = GGUFFile.open(path)
    tokenizer = api.load_tokenizer(file)
    engine: Any = Scripted(tokenizer, context, script)
    return api.Model(file, tokenizer, engine, template)


@dataclass
class Reply:
    """A response as a client sees it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Return the data of the events, except [DONE]."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass
class Served:
    """A running server, and requests to it."""

    port: int
    service: ServerContext
    loop: asyncio.AbstractEventLoop
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def model(self, name: str | None = None) -> Any:
        """Return the open model of that name."""
        return self.service.pool.resolve(name).model

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, value: Any, **headers: str) -> Reply:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return self.ask("POST", path, body, {"Content-Type": "application/json", **headers})

    def chat(self, text: str, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {**self.headers, **headers})
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()


def prompt_of_latest(served: Served, model: str) -> str:
    """Return the latest prompt and answer of a scripted model."""
    opened = served.model(model)
    return opened.tokenizer.decode(opened.engine.sequences[-1].tokens, special=True)


@contextmanager
def serving(
    models: Mapping[str, Callable[[], api.Model] | str],
    rules: AccessRules | None = None,
    limits: ClientLimits | None = None,
    **more: Any,
) -> Iterator[Served]:
    """Run a server; models: by name, a function that makes one, or a file's path; more: arguments of ModelPool."""
    makers = {f"/made/{name}": make for name, make in models.items() if not isinstance(make, str)}
    paths = {name: make if isinstance(make, str) else f"/made/{name}" for name, make in models.items()}
    opened = lambda path: makers[path]() if path in makers else api.open_model(path, 2)  # noqa: E731
    ready, started = threading.Event(), list[Any]()
    place = bind_tcp("127.0.0.1", 0)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # who does not read is noticed sooner

    async def work() -> None:
        metrics, bounds = Metrics(), limits or ClientLimits()
        service = ServerContext(ModelPool(paths, opened, metrics, **more), metrics, bounds)
        server = create_listener(
            create_application(service, rules or AccessRules()), bounds, ShutdownOptions(5, lambda: None, print)
        )
        place.listen(128)
        started.extend([service, server, asyncio.get_running_loop()])
        ready.set()
        try:
            await server.serve([place])
        finally:
            await service.pool.close()

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    assert ready.wait(30)
    service, server, loop = started
    try:
        yield Served(place.getsockname()[1], service, loop)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
