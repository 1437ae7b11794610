"""localllm serve: serve models over HTTP."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from localllm.cli import open_model as opening
from localllm.cli.command import CONFIGURED, CURRENT, get_values_for
from localllm.cli.ollama_variables import iter_variable_notes
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.options.one_shot import Projector
from localllm.cli.parameters import argument, build_group, option, option_group, parse_size
from localllm.cli.terminal.output import say
from localllm.cli.terminal.render import get_file_stem
from localllm.errors import LocalllmError, UsageError
from localllm.files.models_folder import is_path
from localllm.frozen import frozen
from localllm.services.hub.name_settings import find_stored_model, split_served_name

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.server.model_pool import NameOptions
    from localllm.server.run import ServerSettings

    Opener = Callable[[str], Model]

PORT = 11435
OLLAMA_PORT = 11434
LOCAL = ("127.0.0.1", "localhost", "::1")


@option_group("Address and access")
class ServerAddressFlags:
    """Options of `serve`: where it listens, and which requests it accepts."""

    port: int = option("--port", "Listen on this TCP port.  [default: 11435]", "N", default=PORT)
    socket: str | None = option(
        "--socket --unix-socket", "Listen on a Unix socket, which only you can open, instead of a port.", "PATH"
    )
    host: str | None = option(
        "--host",
        "Listen on this address, to let other computers connect; needs --api-key-file.  [default: 127.0.0.1]",
        "ADDRESS",
    )
    api_key_file: str | None = option(
        "--api-key-file",
        "Require an API key of this file, one per line (# starts a comment), with every request.",
        "FILE",
    )
    ssl_certfile: str | None = option("--ssl-certfile", "Serve HTTPS with this certificate chain, in PEM.", "FILE")
    ssl_keyfile: str | None = option(
        "--ssl-keyfile", "Use this private key.  [default: in the certificate's file]", "FILE"
    )
    allow_pull: bool = option(
        "--allow-pull", "Let requests (/api/pull) download models from the Hugging Face Hub; only without MODEL."
    )
    access_log: bool = option("--access-log", "Log each request to stderr, without its text.")
    allow_host: list[str] | None = option(
        "--allow-host", "Accept requests to http://NAME, another name of this computer.  [repeatable]", "NAME"
    )
    allow_origin: list[str] | None = option(
        "--allow-origin", "Allow requests from web pages of this origin, https://... (CORS).  [repeatable]", "ORIGIN"
    )

    strict_model_names: bool = option(
        "--strict-model-names", "With one model: refuse requests for any other model name instead of answering them."
    )


@option_group("Limits")
class ServerLimitFlags:
    """Options of `serve` that limit memory, time, and the size and count of requests."""

    parallel: int | None = option("-np --parallel", "Answer at most N requests per model at once.  [default: 16]", "N")
    idle: float | None = option(
        "--idle", "Unload a model after this time without a request.  [default: never]", "SECONDS"
    )
    max_body: int = option(
        "--max-body",
        "Limit the size of a request body, e.g. 32M.  [default: 32M]",
        "SIZE",
        parser=parse_size,
        default=32_000_000,
    )
    max_connections: int = option(
        "--max-connections", "Accept at most N connections at once.  [default: 128]", "N", default=128
    )
    timeout: float | None = option("--timeout", "Limit the time for one answer.  [default: no limit]", "SECONDS")
    on_overflow: Literal["error", "drop-turns"] | None = option(
        "--on-overflow",
        "When a conversation exceeds the context: refuse it, or drop its oldest turns.  [default: error]",
    )
    media_path: list[str] | None = option(
        "--media-path", "Let requests use images in this folder, by file:// URLs.  [repeatable]", "DIR"
    )
    cache_reuse: int | None = option(
        "--cache-reuse",
        "Reuse chunks of N or more tokens from earlier prompts even at other positions; answers may differ. "
        "0: never.  [default: 64 in /infill, else never]",
        "N",
    )
    spm_infill: bool = option(
        "--spm-infill", "In /infill, put the suffix before the prefix, for models that prefer that order."
    )
    grace: float = option(
        "--grace",
        "At shutdown, let running answers finish for this time.  [default: 30; 0: none]",
        "SECONDS",
        default=30.0,
    )


def serve(
    models: list[str] | None = argument(
        "[MODEL...]",
        "GGUF files or model names; NAME=MODEL serves one as NAME.  [default: all of `localllm list`]",
        offer_models,
        also=options.NAMED,
    ),
    *,
    place: ServerAddressFlags,
    share: ServerLimitFlags,
    engine: options.EngineFlags,
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
    from localllm.server.run import ServerSettings, run_server

    served = map_names(models or []) or list_local_models()
    paths = {each.name: each.path for each in served}
    keys = read_api_keys(place.api_key_file)
    if place.host is not None and not keys:
        raise UsageError("--host lets other computers connect: add --api-key-file FILE with the API keys to accept")
    if place.socket is not None and place.host is not None:
        raise UsageError("give either --socket or --host, not both")
    if place.ssl_keyfile is not None and place.ssl_certfile is None:
        raise UsageError("--ssl-keyfile needs --ssl-certfile FILE")
    if share.cache_reuse is not None and share.cache_reuse < 0:
        raise UsageError(f"--cache-reuse must be 0 or more tokens, not {share.cache_reuse}")
    if share.idle is not None and share.idle < 0:
        raise UsageError(f"--idle must be 0 or more seconds, not {share.idle:g}")
    if mmproj is not None and len(paths) > 1:
        raise UsageError("--mmproj needs a single model; several models use the mmproj-*.gguf in their folders")
    if place.allow_pull and models:
        raise UsageError("--allow-pull adds models while the server runs: leave out MODEL, to serve all local ones")
    if missing := [folder for folder in share.media_path or () if not os.path.isdir(folder)]:
        raise UsageError(f"--media-path must be an existing folder, not {missing[0]}")

    openers, stamps = dict[str, "Opener"](), {each.name: get_stamp(each.name) for each in served}
    names = {each.name: own for each in served if (own := make_name_options(each, share.cache_reuse, openers))}
    setup = ServerSettings(
        paths, make_opener(CURRENT.get().params, share.cache_reuse), place.host or "127.0.0.1", place.port,
        place.socket,
        engine.memory, share.parallel,
        share.grace, keys, tuple(place.allow_host or ()), [*map(normalize_origin, place.allow_origin or ())],
        share.max_body, share.max_connections, share.timeout, share.on_overflow == "drop-turns",
        tuple(share.media_path or ()), place.strict_model_names, share.idle, place.access_log,
        place.ssl_certfile, place.ssl_keyfile, share.cache_reuse, share.spm_infill, names,
        None if models else partial(find_added, share.cache_reuse, openers, stamps), place.allow_pull,
    )  # fmt: skip
    if place.host is None and place.socket is None:
        warn_ollama_host(place.port, is_chosen=place.port != PORT)
    context = CURRENT.get()
    sources = {
        each.name: getattr(context.get_parameter_source(each.name), "name", "") for each in context.command.params
    }
    configured = context.meta.get(CONFIGURED, {})
    applied = {name: each for name, each in configured.items() if sources.get(name) == "DEFAULT_MAP"}
    unset = [each for each in context.command.params if sources[each.name] == "DEFAULT"]
    for line in iter_variable_notes(applied, unset):
        say(f"localllm: {line}")
    if not models and has_found_models():
        say("localllm: models of `localllm list --found` are served, too, when a request names them")
    with ExitStack() as stack:
        run_server(setup, stack, lambda address: print_ready(setup, address), lambda line: say(f"localllm: {line}"))


def has_found_models() -> bool:
    """Return whether other programs have models on this computer."""
    from localllm.services.hub.catalogue import find_shortest_name
    from localllm.services.hub.found_models import find_models

    return bool(find_models(find_shortest_name))


def require_extra() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise LocalllmError(f"serve needs {' and '.join(missing)}: pip install 'localllm[serve]'")


def print_ready(setup: "ServerSettings", address: str) -> None:
    """Print on stderr that the server is ready."""
    say(f"localllm: serving {', '.join(setup.paths)} at {address}; Ctrl-C stops the server")


@frozen
class ServedModel:
    """A model to serve: its name in requests, the path of its file, and the user's argument."""

    name: str
    path: str
    text: str


def map_names(models: list[str]) -> list[ServedModel]:
    """Return the models to serve. Raises UsageError for duplicate names, and the errors of resolve_model_path."""
    served = dict[str, ServedModel]()
    for text in models:
        name, model = split_served_name(text)
        path = resolve_model_path(model)
        name = name or (get_file_stem(path) if model == path else model)
        if name in served:
            raise UsageError(f"two models are named {name}: give one another name with NAME={model}")
        served[name] = ServedModel(name, path, text)
    return [*served.values()]


def list_local_models() -> list[ServedModel]:
    import localllm
    from localllm.files.models_folder import list_created_names
    from localllm.files.settings import load_settings
    from localllm.services.hub.catalogue import list_models_on_disk, resolve_model

    on_disk = [each for each in list_models_on_disk() if each.is_whole and not each.kind]
    models = [ServedModel(each.name, str(each.path), each.name) for each in on_disk]
    created, settings = list_created_names(), load_settings()
    for name in created:
        with suppress(LocalllmError):  # one whose model is missing
            models.append(ServedModel(name, resolve_model(name), name))
    paths = {each.name: each.path for each in models}
    targets = {alias: settings.follow_alias(alias)[-1] for alias in settings.aliases}
    for alias, target in targets.items():
        if target in paths and (alias in settings.model or target in created):  # one with settings
            models.append(ServedModel(alias, paths[target], alias))
    builtin = "localllm-guide"
    return models or [ServedModel(builtin, str(localllm.builtin_model()), builtin)]


def find_added(
    cache_reuse: int | None,
    openers: "dict[str, Opener]",
    stamps: dict[str, int],
    paths: Mapping[str, str],
    wanted: str = "",
) -> "Iterator[tuple[str, str, NameOptions]]":
    """Yield local models that are not served yet, and names that changed: name, path and options of the name.

    Names that mean no model any more have the path "": removed ones, aliases, and names of other programs.

    stamps: the times of the names' Modelfiles, which are updated.  paths: those served, by name.  wanted: yield the
    model of this name instead, wherever it is on this computer.
    """
    from localllm.server.model_pool import NameOptions

    models = [ServedModel(wanted, locate_by_name(wanted), wanted)] if wanted else list_local_models()
    for name in paths.keys() - {each.name for each in models} if not wanted else ():
        try:
            models.append(ServedModel(name, locate_by_name(name), name))
        except LocalllmError:
            stamps.pop(name, None)
            yield name, "", NameOptions()
    for each in models:
        stamp = get_stamp(each.name)
        if paths.get(each.name) != each.path or stamps.get(each.name, 0) != stamp:
            stamps[each.name] = stamp
            try:
                yield each.name, each.path, make_name_options(each, cache_reuse, openers) or NameOptions()
            except LocalllmError as error:
                say(f"localllm: warning: {each.name} is not served: {error}")


def get_stamp(name: str) -> int:
    """Return the time of a created name's Modelfile in nanoseconds, 0 for other names."""
    from localllm.files.models_folder import get_created_path

    try:
        return get_created_path(name).stat().st_mtime_ns
    except OSError:
        return 0


def locate_by_name(name: str) -> str:
    """Return the path of a model by its name, never by a path. Raises LocalllmError."""
    from localllm.services.hub.catalogue import resolve_model

    if is_path(name) or name.startswith(("/", ".", "~")):
        raise UsageError(f"model must be a name that `localllm list` shows, not the path {name[:80]!r}")
    return resolve_model(name)


def make_name_options(
    served: ServedModel, cache_reuse: int | None, openers: "dict[str, Opener]"
) -> "NameOptions | None":
    """Return the options of a model's name, or None without any; warn of settings that are not used.

    Raises UsageError, ModelError.
    openers: functions that open a model, by their options; names of one file share them.
    """
    from localllm.generation.conversation import AnswerDefaults
    from localllm.server.model_pool import NameOptions
    from localllm.services.hub.name_values import load_name_values

    named, usual, stored = get_values_for(served.text), CURRENT.get().params, find_stored_model(served.text)
    own, values = {name: value for name, value in named.items() if value != usual[name]}, load_name_values(served.text)
    opening.warn(values.warnings)
    if not (own or stored):
        return NameOptions(values.defaults) if values.defaults != AnswerDefaults() else None
    key = repr((own, stored and stored.name))
    return NameOptions(values.defaults, openers.setdefault(key, make_opener(named, cache_reuse, served.text)))


def make_opener(values: "Mapping[str, Any]", cache_reuse: int | None, name: str | None = None) -> "Opener":
    def open_with_options(path: str) -> "Model":
        engine = build_group(options.EngineFlags, values)
        model = opening.open_model(
            path, engine, values["chat_template"], values["no_cache"], values["mmproj"], name=name
        )
        if cache_reuse and not model.engine.can_shift:
            say(f"localllm: warning: {path}: --cache-reuse is ignored: the model does not support context shift")
        return model

    return open_with_options


def read_api_keys(file: str | None) -> tuple[str, ...]:
    """Read the API keys in a file; () without a file. Raises UsageError for a file without keys, or a short key."""
    if file is None:
        return ()
    from localllm.files.text_file import read_keys

    keys = tuple(read_keys(file))
    if short := [key for key in keys if len(key) < 8 or not key.isascii()]:
        found = f"{len(short[0])} characters" if short[0].isascii() else "others"
        raise UsageError(f"{file}: each key must have at least 8 characters, all ASCII (found {found}): replace it")
    if Path(file).stat().st_mode & 0o077:
        say(f"localllm: warning: other users of this computer can read {file}; run chmod 600 {file}")
    return keys


# ---- OLLAMA_HOST, with which users of Ollama set its address


def warn_ollama_host(port_here: int, is_chosen: bool = False) -> None:
    """Warn that OLLAMA_HOST is not used, and name the alternative, unless it has this server's address.

    Ollama itself may run at that address, and a network address needs keys. Clients read the same variable, so it may
    name this server (https://docs.ollama.com/faq). is_chosen: whether the user has chosen the port.
    """
    address = os.environ.get("OLLAMA_HOST", "").strip().strip("\"'")
    host, port = split_ollama_host(address)
    port = port_here if is_chosen else port
    if not address or (host in LOCAL and port == port_here):
        return
    if host in LOCAL:
        say(f"localllm: OLLAMA_HOST={address} is ignored; use --port {port} to listen there")
    else:
        say(
            f"localllm: OLLAMA_HOST={address} is ignored; use --host {host} --port {port} --api-key-file FILE to let "
            "other computers connect"
        )


def split_ollama_host(address: str) -> tuple[str, int]:
    """Return host and port of OLLAMA_HOST, [SCHEME://][HOST][:PORT], with Ollama's defaults."""
    scheme, separator, rest = address.rpartition("://")
    usual = {"http": 80, "https": 443}.get(scheme, OLLAMA_PORT) if separator else OLLAMA_PORT
    match = re.fullmatch(r"(\[[^\]]*\]|[^:/]*)(?::(\d{1,5}))?", rest.partition("/")[0])
    host, port = (match[1], match[2]) if match else (rest, None)
    return host.strip("[]") or ("0.0.0.0" if port else "127.0.0.1"), int(port) if port else usual
