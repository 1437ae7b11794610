"""One run of the server, from the first socket to the last model that is put away."""

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NoReturn

from localllm.frozen import frozen
from localllm.server.app import application
from localllm.server.guard import Rules
from localllm.server.http import Limits
from localllm.server.listener import Ending, Listener, listener, tcp_socket, twin, unix_socket
from localllm.server.metrics import Metrics
from localllm.server.model_pool import ModelPool
from localllm.server.service import Service
from localllm.system.memory import available_memory

if TYPE_CHECKING:
    from localllm.api import Model


TO_LEAVE = 1.5  # seconds after which a server that cuts its answers is gone


@frozen
class Setup:
    """What a server is told.

    Attributes:
        paths: of models, by name.  open_model: opens one.  host, port, socket: where to listen; a path wins.
        memory: the most bytes of open models, None for what is free now.  parallel: answers of a model at once.
        grace: seconds for answers to end.  keys, hosts, origins: as of Rules.
        body, connections, answer_seconds, drops_turns, folders: as of Limits.
        strict_names: whether a single model answers to its own name only.
    """

    paths: Mapping[str, str]
    open_model: "Callable[[str], Model]"
    host: str
    port: int
    socket: str | None
    memory: int | None
    parallel: int | None
    grace: float
    keys: Sequence[str]
    hosts: Sequence[str]
    origins: Sequence[str]
    body: int
    connections: int
    answer_seconds: float | None
    drops_turns: bool
    folders: Sequence[str]
    strict_names: bool = False


def run(setup: Setup, stack: ExitStack, on_ready: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Until a signal ends it; on_ready is told the address. Raises LocalllmError, and KeyboardInterrupt for Ctrl-C."""
    host = f"[{setup.host}]" if ":" in setup.host else setup.host
    if setup.socket is not None:
        found, address = stack.enter_context(unix_socket(setup.socket)), setup.socket
    else:
        found = stack.enter_context(tcp_socket(setup.host, setup.port))
        address = f"http://{host}:{found.getsockname()[1]}"
    places = [found]
    if setup.socket is None and setup.host == "127.0.0.1" and (other := twin(found)):
        places.append(stack.enter_context(other))
    limits = Limits(
        setup.body, answer_seconds=setup.answer_seconds, connections=setup.connections, drops_turns=setup.drops_turns,
        folders=setup.folders,
    )  # fmt: skip
    own = [] if setup.host == "127.0.0.1" else own_names()
    rules = Rules([host, *own, *setup.hosts], setup.origins, setup.keys)

    server: Listener | None = None
    deadline = threading.Timer(TO_LEAVE, lambda: leave(server, stack))
    deadline.daemon = True

    async def serving() -> Listener:
        nonlocal server
        metrics = Metrics()

        def stop_answers() -> None:
            shelf.stop_answers()
            deadline.start()

        memory = available_memory() if setup.memory is None else setup.memory
        shelf = ModelPool(setup.paths, setup.open_model, metrics, memory, setup.parallel, setup.strict_names)
        ending = Ending(setup.grace, stop_answers, warn)
        server = listener(application(Service(shelf, metrics, limits), rules), limits, ending)
        if len(setup.paths) == 1:
            async with shelf.use(None):  # so that what is wrong with it is known at once
                pass
        try:
            for place in places:
                place.listen(setup.connections)
            collect_often()
            on_ready(address)
            await server.serve(places)
        finally:
            await shelf.close()
        return server

    try:
        ended = asyncio.run(serving())
    finally:
        deadline.cancel()
    if ended.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt


def own_names() -> list[str]:
    """What other computers call this one."""
    name = socket.gethostname()
    return [name, f"{name.partition('.')[0]}.local"]


def leave(server: Listener | None, stack: ExitStack) -> NoReturn:
    """End the process though a thread of it is not done: it reads a long text, or opens a model."""
    with suppress(Exception):
        stack.close()
    os._exit(130 if server and server.stopped_by == signal.SIGINT else 0)


def collect_often() -> None:
    """As Python does by itself, but not in what is there now, which stays.

    Requests that end leave cycles, which a command hardly looks for, as it ends soon: with every answer memory grew.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # of few: what is there once more by a quarter is a reason to look at everything
    gc.set_threshold(700, 10, 10)
