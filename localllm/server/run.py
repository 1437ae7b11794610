"""Run the server, from opening its sockets to closing its models."""

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import field
from typing import TYPE_CHECKING, NoReturn

from localllm.frozen import frozen
from localllm.server import listener
from localllm.server.app import create_application
from localllm.server.guard import AccessRules
from localllm.server.http import ClientLimits
from localllm.server.metrics import Metrics
from localllm.server.model_pool import Find, ModelPool, NameOptions
from localllm.server.service import ServerContext
from localllm.system.memory import get_available_memory

if TYPE_CHECKING:
    from localllm.api import Model


EXIT_SECONDS = 1.5  # seconds from cutting the responses short until the process is killed


@frozen
class ServerSettings:
    """The server's settings.

    Attributes:
        paths: model files by name.  open_model: opens one.  host, port: to listen on.  socket: path of a Unix socket to
        listen on instead.
        memory: limit in bytes for all open models; None: the memory free now.  parallel: concurrent requests per model.
        grace: seconds for responses to end at shutdown.  keys, hosts, origins: see AccessRules.
        body, connections, answer_seconds, drops_turns, folders, cache_reuse,
            suffix_first: see ClientLimits.
        strict_names: whether a single model is only available by its own name.
        idle_seconds: seconds without a request after which a model is unloaded; None: never.
        access_log: whether to print a line for each request.  ssl_certfile, ssl_keyfile: PEM files for TLS, or None.
        names: options by model name, see ModelPool.  find: finds models that were added since the start, or None.
        allows_pull: see ClientLimits.
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
    idle_seconds: float | None = None
    access_log: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    cache_reuse: int | None = None
    suffix_first: bool = False
    names: Mapping[str, NameOptions] = field(default_factory=dict)
    find: Find | None = None
    allows_pull: bool = False


def run_server(
    setup: ServerSettings, stack: ExitStack, on_ready: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Serve until a signal arrives.

    on_ready: called with the address. Raises LocalllmError, and KeyboardInterrupt for Ctrl-C.
    """
    host = f"[{setup.host}]" if ":" in setup.host else setup.host
    tls = listener.TlsFiles.load(setup.ssl_certfile, setup.ssl_keyfile)
    sockets, address = open_sockets(setup, stack, "https" if tls else "http")
    limits = ClientLimits(
        setup.body, answer_seconds=setup.answer_seconds, connections=setup.connections, drops_turns=setup.drops_turns,
        folders=setup.folders, cache_reuse=setup.cache_reuse, suffix_first=setup.suffix_first,
        allows_pull=setup.allows_pull,
    )  # fmt: skip
    local_names = [] if setup.host == "127.0.0.1" else get_host_names()
    rules = AccessRules([host, *local_names, *setup.hosts], setup.origins, setup.keys)

    server: listener.Listener | None = None
    deadline = threading.Timer(EXIT_SECONDS, lambda: exit_now(server, stack))
    deadline.daemon = True

    async def serve_models() -> listener.Listener:
        nonlocal server
        metrics = Metrics()

        def stop_responses() -> None:
            pool.stop_responses()
            deadline.start()

        memory = get_available_memory() if setup.memory is None else setup.memory
        pool = ModelPool(
            setup.paths, setup.open_model, metrics, memory, setup.parallel, setup.strict_names, setup.idle_seconds,
            setup.names,
        )  # fmt: skip
        pool.find = setup.find
        ending = listener.ShutdownOptions(setup.grace, stop_responses, warn)
        app = create_application(ServerContext(pool, metrics, limits), rules, warn if setup.access_log else None)
        server = listener.create_listener(app, limits, ending, tls)
        if len(setup.paths) == 1:
            async with pool.use(None):  # report errors of a single model at the start
                pass
        try:
            for listening in sockets:
                listening.listen(setup.connections)
            restore_gc()
            on_ready(address)
            await server.serve(sockets)
        finally:
            await pool.close()
        return server

    try:
        ended = asyncio.run(serve_models())
    finally:
        deadline.cancel()
    if ended.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt


def open_sockets(setup: ServerSettings, stack: ExitStack, scheme: str) -> tuple[list[socket.socket], str]:
    """Open the server's sockets, or take those of a service manager; return them and the first one's address.

    Raises LocalllmError.
    """
    if inherited := listener.take_inherited_sockets():
        for listening in inherited:
            stack.enter_context(listening)
        listener.require_keys(inherited, setup.keys)
        return inherited, listener.format_address(inherited[0], scheme)
    if setup.socket is not None:
        return [stack.enter_context(listener.bind_unix(setup.socket))], setup.socket
    main_socket = stack.enter_context(listener.bind_tcp(setup.host, setup.port))
    sockets = [main_socket]
    if setup.host == "127.0.0.1" and (ipv6_socket := listener.bind_ipv6_loopback(main_socket)):
        sockets.append(stack.enter_context(ipv6_socket))
    host = f"[{setup.host}]" if ":" in setup.host else setup.host
    return sockets, f"{scheme}://{host}:{main_socket.getsockname()[1]}"


def get_host_names() -> list[str]:
    """Return the host names by which other computers may reach this one."""
    name = socket.gethostname()
    return [name, f"{name.partition('.')[0]}.local"]


def exit_now(server: listener.Listener | None, stack: ExitStack) -> NoReturn:
    with suppress(Exception):
        stack.close()
    os._exit(130 if server and server.stopped_by == signal.SIGINT else 0)


def restore_gc() -> None:
    """Restore Python's default garbage collection for objects created from now on.

    Finished requests leave reference cycles. The command line's settings hardly collect any, because commands end soon:
    with these, memory grew with every response.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # few objects now: a full collection follows when they grow by a quarter
    gc.set_threshold(700, 10, 10)
