"""Ollama's API for changes of models: /api/pull, /api/create, /api/copy, /api/delete and /api/push.

Names only are accepted, never paths, and only the models folder is written. A download needs --allow-pull. Source:
https://github.com/ollama/ollama/blob/main/docs/api.md
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.models_folder import remove_empty_folders
from localllm.server.fields import RequestBody, require_present
from localllm.server.http import (
    JsonLines,
    RejectedRequestError,
    encode_json,
    format_ollama_error,
    make_json_response,
    read_json,
    respond_when_done,
)
from localllm.server.messages import parse_messages
from localllm.server.model_pool import UnknownModelError
from localllm.server.ollama_chat import parse_model_name
from localllm.server.openai_chat import make_extension_headers
from localllm.server.service import ServerContext
from localllm.services.hub.catalogue import HubReference, find_model, find_removable, parse_reference, resolve_alias
from localllm.services.hub.create_model import copy_name, create_model, require_no_path
from localllm.services.hub.modelfile import LISTS, Modelfile, parse_modelfile, require_parameters
from localllm.services.hub.pull import PullProgress, pull_model

WHERE = "create"  # begins the messages about a Modelfile
REFUSED = "the server was started for certain models only: start `localllm serve` without MODEL to change models"
NO_PULL = "this server does not download models: start it with --allow-pull, or use `localllm pull`"
PROGRESS_SECONDS = 0.2  # between two lines about a download


async def read_change(service: ServerContext, request: Request) -> RequestBody:
    """Read the body of a request for a change. Raises RejectedRequestError if the server's models are fixed."""
    body = RequestBody(await read_json(request, service.limits, any_type=True))
    if service.pool.find is None:
        raise RejectedRequestError(403, REFUSED)
    return body


def require_name(text: str | None, field: str) -> str:
    """Return the name of a model. Raises UsageError for a missing name, and for a path outside the models folder."""
    return require_no_path(require_present(text, field), field)


def respond_statuses(body: RequestBody, *statuses: str) -> Response:
    """Respond with all statuses, each on a line, or with the last one if `stream` is false."""
    headers = make_extension_headers(body)
    if body.get_optional_bool("stream") is False:
        return make_json_response({"status": statuses[-1]}, headers=headers)
    lines = b"".join(encode_json({"status": status}) + b"\n" for status in statuses)
    return Response(lines, headers=headers, media_type=JsonLines.media_type)


async def create(service: ServerContext, request: Request) -> Response:
    """Create a name for a model with settings of its own."""
    body = await read_change(service, request)
    name = require_name(parse_model_name(body), "model")
    for field, way in (
        ("files", "use `localllm import FILE` on the server's computer"),
        ("adapters", "use `localllm create` with ADAPTER on the server's computer"),
        ("quantize", "use `localllm quantize`"),
    ):
        body.reject(field, way)
    content = parse_content(body)
    require_name(content.base, "from")
    if content.adapters or content.projector:
        raise UsageError("modelfile: ADAPTER and projectors are files: use `localllm create` on the server's computer")
    warnings = await asyncio.to_thread(create_model, name, content, None, WHERE)
    await service.pool.forget(name)
    service.pool.refresh()
    statuses = [f"warning: {line}" for line in warnings]
    return respond_statuses(body, "reading model metadata", *statuses, "writing manifest", "success")


def parse_content(body: RequestBody) -> Modelfile:
    """Return the Modelfile that a request describes by its fields, or has as `modelfile`. Raises UsageError."""
    if (text := body.get_string("modelfile")) is not None:
        return parse_modelfile(text, WHERE)
    parameters = dict(body.get_mapping("parameters") or {})
    require_parameters(parameters, "parameters")
    for key, value in parameters.items():
        if key in LISTS and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            parameters[key] = [str(value)]
        elif key not in LISTS and (isinstance(value, bool) or not isinstance(value, int | float | str)):
            raise UsageError(f"parameters: {key} must be a number or a string")
    messages = parse_messages([*(body.get_list("messages") or ())]) if body.get_list("messages") else []
    if any(not isinstance(message["content"], str) for message in messages):
        raise UsageError("messages: the content must be a string")
    return Modelfile(
        require_present(body.get_string("from"), "from"), "", parameters, body.get_string("system") or None,
        tuple({"role": message["role"], "content": message["content"]} for message in messages), (),
        body.get_strings("license"), body.get_string("template") or None,
    )  # fmt: skip


async def copy(service: ServerContext, request: Request) -> Response:
    """Give a model a second name."""
    body = await read_change(service, request)
    source, target = (require_name(body.get_string(field), field) for field in ("source", "destination"))
    service.pool.get(source.removesuffix(":latest"))
    await asyncio.to_thread(copy_name, source, target)
    service.pool.refresh()
    return Response(headers=make_extension_headers(body))


async def delete(service: ServerContext, request: Request) -> Response:
    """Remove a created name, or a model's files from the models folder."""
    body = await read_change(service, request)
    name = require_name(parse_model_name(body), "model")
    entry = service.pool.get(name)
    if resolve_alias(name) != name:
        raise RejectedRequestError(403, f"{name} is an alias in config.toml of the server's user: remove it there")
    if entry.active_requests or entry.shared.active_requests:
        raise RejectedRequestError(409, f"{name} is in use: try again when its requests have ended")
    removable = await asyncio.to_thread(find_removable, name)
    same_file = [each.name for each in service.pool.entries.values() if is_same_file(each.path, removable.path)]
    for each in {entry.name, *same_file}:
        await service.pool.forget(each)
    try:
        for path in removable.files:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise LocalllmError(f"{name} cannot be removed: {error.strerror}") from None
    remove_empty_folders(removable.path.parent)
    service.pool.refresh()
    return Response(headers=make_extension_headers(body))


def is_same_file(path: str, other: os.PathLike[str]) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


async def refuse_push(service: ServerContext, request: Request) -> Response:
    raise RejectedRequestError(501, "this server does not publish models")


async def refuse_blob(service: ServerContext, request: Request) -> Response:
    raise RejectedRequestError(
        501, "this server takes no files: use `localllm import FILE` on its computer, then create from that name"
    )


async def pull(service: ServerContext, request: Request) -> Response:
    """Serve a model that is on this computer, or download it if the server may; report success in lines."""
    body = RequestBody(await read_json(request, service.limits, any_type=True))
    body.get_bool("insecure")
    name = require_name(parse_model_name(body), "model")
    try:
        service.pool.get(name)
    except UnknownModelError:
        if service.pool.find is None:
            raise RejectedRequestError(403, REFUSED) from None
        try:
            await asyncio.to_thread(find_model, name)
        except ModelError as error:
            return await download(service, request, body, name, error)
        service.pool.add_found(name)
    return respond_statuses(body, "pulling manifest", "success")


async def download(
    service: ServerContext, request: Request, body: RequestBody, name: str, error: LocalllmError
) -> Response:
    """Download a model; error: why it is not on this computer."""
    reference = parse_reference(resolve_alias(name))
    if reference is None:
        raise RejectedRequestError(404, str(error))
    if not service.limits.allows_pull:
        raise RejectedRequestError(501, NO_PULL)
    lines = stream_download(service, name, reference)
    headers = make_extension_headers(body)
    if body.get_optional_bool("stream") is False:
        return await respond_when_done(request, read_last(lines), headers, lines.aclose)
    return JsonLines(encode_lines(lines), service.limits, headers, lines.aclose)


class StoppedPullError(LocalllmError):
    """The client that asked for a download has left."""


class ReportedProgress(PullProgress):
    """Keep the latest status of a download; raise StoppedPullError in it when is_stopped."""

    def __init__(self) -> None:
        self.status, self.is_stopped = dict[str, object](status="pulling manifest"), False

    def report_lookup(self, subject: str) -> None:
        self._set({"status": "pulling manifest"})

    def report_check(self, file: str, done: int, total: int) -> None:
        self._set({"status": "verifying sha256 digest", "total": total, "completed": done})

    def report_download(self, file: str, done: int, total: int) -> None:
        self._set({"status": f"pulling {file}", "digest": file, "total": total, "completed": done})

    def _set(self, status: dict[str, object]) -> None:
        self.status = status
        if self.is_stopped:
            raise StoppedPullError("the client has left; the partial download is kept")


async def stream_download(
    service: ServerContext, name: str, reference: HubReference
) -> AsyncGenerator[Mapping[str, object]]:
    """Yield the statuses of a download. Raises the errors of pull_model."""
    progress = ReportedProgress()
    work = asyncio.ensure_future(asyncio.to_thread(pull_model, reference, progress))
    last: Mapping[str, object] = {}
    try:
        while not work.done():
            if progress.status != last:
                yield (last := progress.status)
            await asyncio.wait([work], timeout=PROGRESS_SECONDS)
        work.result()
        yield {"status": "writing manifest"}
        try:
            service.pool.get(name)
        except UnknownModelError:
            service.pool.add_found(name)
        yield {"status": "success"}
    finally:
        progress.is_stopped = True
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def read_last(statuses: AsyncGenerator[Mapping[str, object]]) -> Mapping[str, object]:
    last: Mapping[str, object] = {}
    async for status in statuses:
        last = status
    return last


async def encode_lines(statuses: AsyncGenerator[Mapping[str, object]]) -> AsyncGenerator[bytes]:
    try:
        async for status in statuses:
            yield encode_json(status) + b"\n"
    except LocalllmError as error:
        yield encode_json(format_ollama_error(error)) + b"\n"
