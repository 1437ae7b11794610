"""localllm serve: serve models over HTTP."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from localllm.cli import open_model as opening
from localllm.cli.command import CURRENT, values_for
from localllm.cli.ollama_host import tell_ollama_host
from localllm.cli.options import shared as options
from localllm.cli.options.images import Projector
from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import Also, build_group, group
from localllm.cli.resolve_model import resolve_model_path
from localllm.cli.terminal.output import say
from localllm.cli.terminal.render import file_stem
from localllm.errors import LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.services.hub.name_settings import split_served, stored_model

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.server.model_pool import NameOptions
    from localllm.server.run import Setup

    Opener = Callable[[str], Model]

PORT = 11435
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def amount(text: str) -> int:
    """Parse a number of bytes, optionally with K, M or G. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.strip().upper())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 500M or 8G")
    return int(float(match[1]) * UNITS[match[2]])


@group
class Place:
    """Address and access."""

    port: Annotated[int, typer.Option("--port", metavar="N", help="TCP port.  [default: 11435]")] = PORT
    socket: Annotated[
        str | None,
        typer.Option(
            "--socket",
            "--unix-socket",
            metavar="PATH",
            help="Listen on a Unix socket, which only you can open, instead of a port.",
        ),
    ] = None
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on, to let other computers connect; needs --api-key-file.  [default: 127.0.0.1]",
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="File of API keys, one per line (# starts a comment); every request needs one of them.",
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        typer.Option("--ssl-certfile", metavar="FILE", help="Serve HTTPS with this certificate chain, in PEM."),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        typer.Option(
            "--ssl-keyfile",
            metavar="FILE",
            help="Private key of the certificate.  [default: in the certificate's file]",
        ),
    ] = None
    access_log: Annotated[bool, typer.Option("--access-log", help="Log each request to stderr, without its text.")] = (
        False
    )
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Accept requests to http://NAME, another name of this computer.  [repeatable]",
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="Allow requests from web pages of this origin, https://... (CORS).  [repeatable]",
        ),
    ] = None

    strict_model_names: Annotated[
        bool,
        typer.Option(
            "--strict-model-names",
            help="With one model: refuse requests for any other model name instead of answering them.",
        ),
    ] = False


@group
class Share:
    """Limits."""

    memory: Annotated[
        int | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            parser=amount,
            help="Maximum memory for all loaded models, e.g. 8G.  [default: what is free at startup]",
        ),
    ] = None
    parallel: Annotated[
        int | None,
        typer.Option("-np", "--parallel", metavar="N", help="Maximum concurrent requests per model.  [default: 16]"),
    ] = None
    idle: Annotated[
        float | None,
        typer.Option(
            "--idle", metavar="SECONDS", help="Unload a model after this time without a request.  [default: never]"
        ),
    ] = None
    max_body: Annotated[
        int,
        typer.Option(
            "--max-body",
            metavar="SIZE",
            parser=amount,
            help="Maximum size of a request body, e.g. 32M.  [default: 32M]",
        ),
    ] = 32_000_000
    max_connections: Annotated[
        int, typer.Option("--max-connections", metavar="N", help="Maximum concurrent connections.  [default: 128]")
    ] = 128
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="Maximum time for one answer.  [default: no limit]"),
    ] = None
    on_overflow: Annotated[
        Literal["error", "drop-turns"] | None,
        typer.Option(
            "--on-overflow",
            help="When a conversation exceeds the context: refuse it, or drop its oldest turns.  [default: error]",
        ),
    ] = None
    media_path: Annotated[
        list[str] | None,
        typer.Option(
            "--media-path",
            metavar="DIR",
            help="Folder of images that requests may refer to by file:// URLs.  [repeatable]",
        ),
    ] = None
    cache_reuse: Annotated[
        int | None,
        typer.Option(
            "--cache-reuse",
            metavar="N",
            help="Reuse chunks of N or more tokens from earlier prompts even at other positions; answers may differ. "
            "0: never.  [default: 64 in /infill, else never]",
        ),
    ] = None
    spm_infill: Annotated[
        bool,
        typer.Option(
            "--spm-infill", help="In /infill, put the suffix before the prefix, for models that prefer that order."
        ),
    ] = False
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            help="At shutdown, time for running answers to finish.  [default: 30; 0: none]",
        ),
    ] = 30.0


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL...]",
            autocompletion=offer_models,
            help="GGUF files or model names; NAME=MODEL serves one as NAME.  [default: all of `localllm list`]",
        ),
        Also(*options.NAMED),
    ] = None,
    *,
    place: Place,
    share: Share,
    engine: options.EngineGroup,
    chat_template: options.ChatTemplate = None,
    no_cache: options.NoCache = False,
    mmproj: Projector = None,
) -> None:
    """Serve models over HTTP to programs on this computer.

    The API is OpenAI's (/v1/chat/completions, /v1/completions, /v1/models, ...); requests are answered concurrently.
    With several models, each is loaded at its first request, and unloaded when others need its memory. By default only
    programs on this computer can connect: see docs/serve.md. Ctrl-C or SIGTERM stops the server.

    Examples:
      localllm serve model.gguf
      localllm serve small=qwen3-0.6b large=qwen3-8b --memory 12G
      localllm serve model.gguf --socket ~/.localllm.sock
    """
    require_extra()
    from localllm.server.guard import normalize_origin
    from localllm.server.run import Setup, run

    served = map_names(models or []) or on_disk()
    paths = {each.name: each.path for each in served}
    keys = keys_of(place.api_key_file)
    if place.host is not None and not keys:
        raise UsageError(
            "--host lets other computers connect: give --api-key-file FILE with the keys that they may use"
        )
    if place.socket is not None and place.host is not None:
        raise UsageError("give either --socket or --host, not both")
    if place.ssl_keyfile is not None and place.ssl_certfile is None:
        raise UsageError("--ssl-keyfile needs --ssl-certfile FILE")
    if share.cache_reuse is not None and share.cache_reuse < 0:
        raise UsageError(f"--cache-reuse should be 0 or more tokens, not {share.cache_reuse}")
    if share.idle is not None and share.idle < 0:
        raise UsageError(f"--idle should be 0 or more seconds, not {share.idle:g}")
    if mmproj is not None and len(paths) > 1:
        raise UsageError("--mmproj works with one model; several use the mmproj-*.gguf in their folders")
    if missing := [folder for folder in share.media_path or () if not os.path.isdir(folder)]:
        raise UsageError(f"--media-path: {missing[0]} is not a folder")

    openers = dict[str, "Opener"]()
    names = {each.name: own for each in served if (own := own_options(each, share.cache_reuse, openers))}
    setup = Setup(
        paths, opener(CURRENT.get().params, share.cache_reuse), place.host or "127.0.0.1", place.port, place.socket,
        share.memory, share.parallel,
        share.grace, keys, tuple(place.allow_host or ()), [*map(normalize_origin, place.allow_origin or ())],
        share.max_body, share.max_connections, share.timeout, share.on_overflow == "drop-turns",
        tuple(share.media_path or ()), place.strict_model_names, share.idle, place.access_log,
        place.ssl_certfile, place.ssl_keyfile, share.cache_reuse, share.spm_infill, names,
        None if models else partial(find_added, share.cache_reuse, openers),
    )  # fmt: skip
    if place.host is None and place.socket is None:
        tell_ollama_host(place.port, is_chosen=place.port != PORT)
    with ExitStack() as stack:
        run(setup, stack, lambda address: tell(setup, address), lambda line: say(f"localllm: {line}"))


def require_extra() -> None:
    """Raise LocalllmError, which says what to install, if a package is missing."""
    from importlib.util import find_spec

    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise LocalllmError(f"serve needs {' and '.join(missing)}: pip install 'localllm[serve]'")


def tell(setup: "Setup", address: str) -> None:
    """Print on stderr that the server is ready."""
    say(f"localllm: {', '.join(setup.paths)} at {address}; Ctrl-C stops the server")


@frozen
class ServedModel:
    """A model to serve: its name in requests, the path of its file, and what the user typed for it."""

    name: str
    path: str
    text: str


def map_names(models: list[str]) -> list[ServedModel]:
    """Return the models to serve. Raises UsageError for two of one name, and as `resolve_model_path`."""
    served = dict[str, ServedModel]()
    for text in models:
        name, model = split_served(text)
        path = resolve_model_path(model)
        name = name or (file_stem(path) if model == path else model)
        if name in served:
            raise UsageError(f"two models have the name {name}: rename one with NAME={model}")
        served[name] = ServedModel(name, path, text)
    return [*served.values()]


def on_disk() -> list[ServedModel]:
    """Return all local models, also by their aliases that have settings of their own; or else the built-in one."""
    import localllm
    from localllm.files.settings import load_settings
    from localllm.services.hub.catalogue import models_on_disk

    models = [ServedModel(each.name, str(each.path), each.name) for each in models_on_disk() if each.is_whole]
    paths, settings = {each.name: each.path for each in models}, load_settings()
    named = {alias: paths[target] for alias, target in settings.aliases.items() if target in paths}
    models += [ServedModel(alias, path, alias) for alias, path in named.items() if alias in settings.model]
    builtin = "localllm-guide"
    return models or [ServedModel(builtin, str(localllm.builtin_model()), builtin)]


def find_added(
    cache_reuse: int | None, openers: "dict[str, Opener]", names: Collection[str]
) -> "Iterator[tuple[str, str, NameOptions]]":
    """Yield the local models of other names than these: name, path and what belongs to the name."""
    from localllm.server.model_pool import NameOptions

    for each in on_disk():
        if each.name not in names:
            try:
                yield each.name, each.path, own_options(each, cache_reuse, openers) or NameOptions()
            except LocalllmError as error:
                say(f"localllm: warning: {each.name} is not served: {error}")


def own_options(served: ServedModel, cache_reuse: int | None, openers: "dict[str, Opener]") -> "NameOptions | None":
    """Return what belongs to a model's name, None if nothing does; warn of what is not used.

    Raises UsageError, ModelError.

    openers: those of other names, by their options, which names of one file share.
    """
    from localllm.generation.answer_defaults import AnswerDefaults
    from localllm.server.model_pool import NameOptions
    from localllm.services.hub.name_values import values_of

    named, usual, stored = values_for(served.text), CURRENT.get().params, stored_model(served.text)
    own, values = {name: value for name, value in named.items() if value != usual[name]}, values_of(served.text)
    opening.warn(values.warnings)
    if not (own or stored):
        return NameOptions(values.defaults) if values.defaults != AnswerDefaults() else None
    key = repr((own, stored and stored.name))
    return NameOptions(values.defaults, openers.setdefault(key, opener(named, cache_reuse, served.text)))


def opener(values: "Mapping[str, Any]", cache_reuse: int | None, name: str | None = None) -> "Opener":
    """Return a function that opens a model's file with the values of the command's parameters."""

    def opened(path: str) -> "Model":
        engine = build_group(options.EngineGroup, values)
        model = opening.open_model(
            path, engine, values["chat_template"], values["no_cache"], values["mmproj"], name=name
        )
        if cache_reuse and not model.engine.can_shift:
            say(f"localllm: warning: {path}: --cache-reuse has no effect, because its keys cannot be moved")
        return model

    return opened


def keys_of(file: str | None) -> tuple[str, ...]:
    """Read the API keys in a file. Raises UsageError if there are none."""
    if file is None:
        return ()
    from localllm.files.text_file import read_keys

    keys = tuple(read_keys(file))
    if short := [key for key in keys if len(key) < 8 or not key.isascii()]:
        raise UsageError(f"{file}: a key should have at least 8 ASCII characters, not {len(short[0])}")
    if Path(file).stat().st_mode & 0o077:
        say(f"localllm: warning: other users of this computer can read {file}; run chmod 600 {file}")
    return keys
