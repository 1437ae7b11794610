"""Ollama's API for models: /api/tags, /api/show, /api/ps, /api/version, /api/embed and /api/embeddings.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

import asyncio
import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from time import perf_counter

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from localllm.arch import load_architecture
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import GGUFFile
from localllm.files.models_folder import get_projector_size
from localllm.frozen import frozen
from localllm.server.embeddings import embed_texts, parse_strings
from localllm.server.fields import RequestBody
from localllm.server.http import make_json_response, read_json
from localllm.server.model_pool import ModelEntry
from localllm.server.ollama_chat import format_timestamp, parse_model_name, to_nanoseconds
from localllm.server.openai_chat import make_extension_headers
from localllm.server.request_options import parse_keep_alive
from localllm.server.service import ServerContext
from localllm.services.hub.created_names import find_created
from localllm.services.hub.modelfile import Modelfile
from localllm.text.vocabulary import INFILL_TEXTS, read_infill_tokens

VERSION = "0.12.6"  # version of Ollama with this API: clients demand a minimum
BRIEF = 5  # maximum length of an array shown without `verbose`, as in Ollama
FOREVER = timedelta(days=36500)  # reported for a model that is never unloaded


@frozen
class ModelFacts:
    """Facts about a model, from its file's header.

    Attributes:
        architecture: as in its metadata.  parameters: their count.  format: such as Q4_K_M.
        context: in tokens, None if unknown.  size: of the file, in bytes.
        digest: of its path, size and time, not of its content, which would take minutes to read.
        template: the chat template, "" if there is none.  capabilities: by Ollama's names.
        metadata: all keys; arrays of more than BRIEF elements are empty.
    """

    architecture: str
    parameters: int
    format: str
    context: int | None
    size: int
    digest: str
    template: str
    capabilities: tuple[str, ...]
    metadata: dict[str, object]


def get_facts(entry: ModelEntry) -> ModelFacts:
    """Read a model's header, once for each state of the file. Raises ModelError."""
    try:
        state = os.stat(entry.path)
    except OSError as error:
        raise ModelError(f"cannot read {entry.name}: {error.strerror}") from None
    return read_facts(entry.path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=256)
def read_facts(path: str, mtime_ns: int, size: int) -> ModelFacts:
    """Read the header of a file; its time and size are part of the cache key."""
    digest = hashlib.sha256(f"{os.path.realpath(path)}\0{mtime_ns}\0{size}".encode()).hexdigest()
    with GGUFFile.open(path, needed=()) as file:
        metadata = file.metadata
        template = metadata.get("tokenizer.chat_template")
        name = str(metadata.get("general.architecture", "unknown"))
        context = metadata.get(f"{name}.context_length")
        return ModelFacts(
            name, file.parameters, file.type_name, context if isinstance(context, int) else None, size, digest,
            template if isinstance(template, str) else "",
            detect_capabilities(file, template if isinstance(template, str) else ""),
            {key: to_list(value) if is_brief(value) else [] for key, value in metadata.items()},
        )  # fmt: skip


def is_brief(value: object) -> bool:
    """Return whether a metadata value is shown without `verbose`; the vocabulary's arrays are too long."""
    return isinstance(value, str | int | float | bool) or (isinstance(value, list | np.ndarray) and len(value) <= BRIEF)


def read_verbose_fields(path: str) -> dict[str, object]:
    """Return the additional fields of `verbose`: complete metadata, and the tensors as in GGUF."""
    with GGUFFile.open(path, needed=()) as file:
        metadata = {key: to_list(value) for key, value in file.metadata.items()}
        tensors = [
            {"name": name, "type": tensor.format.name, "shape": [*reversed(tensor.shape)]}
            for name, tensor in file.tensors.items()
        ]
    return {"model_info": metadata | {"general.parameter_count": file.parameters}, "tensors": tensors}


def to_list(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def detect_capabilities(file: GGUFFile, template: str) -> tuple[str, ...]:
    """Return a model's capabilities, derived from its template, vocabulary and projector."""
    try:
        _, h = load_architecture(file)
    except (ModelError, UnsupportedError):
        return ()
    if h.bidirectional and not h.is_diffusion:
        return ("embedding",)
    supported = {
        "completion": True, "tools": "tools" in template, "thinking": "think" in template,
        "insert": has_infill_tokens(file.metadata), "vision": get_projector_size(file.path) > 0,
    }  # fmt: skip
    return tuple(name for name, has in supported.items() if has)


def has_infill_tokens(metadata: Mapping[str, object]) -> bool:
    """Return whether a vocabulary has fill-in-the-middle tokens."""
    infill_texts = {text for texts in INFILL_TEXTS.values() for text in texts}
    tokens = metadata.get("tokenizer.ggml.tokens")
    pieces = tokens if isinstance(tokens, list) else []
    ids = {piece: token for token, piece in enumerate(pieces) if piece in infill_texts}
    return read_infill_tokens(metadata, ids.get, len(pieces)) is not None


def format_details(facts: ModelFacts) -> dict[str, object]:
    """Format the details that all of Ollama's responses about a model contain."""
    return {
        "parent_model": "", "format": "gguf", "family": facts.architecture, "families": [facts.architecture],
        "parameter_size": format_count(facts.parameters), "quantization_level": facts.format,
    }  # fmt: skip


def format_count(number: int) -> str:
    """Format a count as Ollama does: 494.03M, 1.5B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}" if unit == "B" else f"{number / size:.2f}{unit}"
    return str(number)


def format_entry(entry: ModelEntry, facts: ModelFacts) -> dict[str, object]:
    """Format a model as an item of a list."""
    return {
        "name": entry.name, "model": entry.name, "size": facts.size, "digest": facts.digest,
        "details": format_details(facts),
    }  # fmt: skip


async def list_tags(service: ServerContext, request: Request) -> Response:
    """List all models, except those whose file cannot be read."""
    service.pool.refresh()

    def read_entries() -> list[dict[str, object]]:
        models = []
        for entry in service.pool.entries.values():
            try:
                models.append({**format_entry(entry, get_facts(entry)), "modified_at": format_modified_at(entry)})
            except ModelError:
                continue
        return models

    return make_json_response({"models": await asyncio.to_thread(read_entries)})


def format_modified_at(entry: ModelEntry) -> str:
    return format_timestamp(datetime.fromtimestamp(entry.created, UTC))


async def show_model(service: ServerContext, request: Request) -> Response:
    """Describe one model: its template, metadata and capabilities."""
    body = RequestBody(await read_json(request, service.limits, any_type=True))
    entry = service.pool.resolve(parse_model_name(body))
    facts = await asyncio.to_thread(get_facts, entry)
    everything = await asyncio.to_thread(read_verbose_fields, entry.path) if body.get_bool("verbose") else {}
    created = await asyncio.to_thread(find_created, entry.name)
    content = created.content.hide_folders() if created else Modelfile(os.path.basename(entry.path))
    description = {
        "modelfile": content.format(),
        "parameters": "\n".join(content.list_parameters()),
        "template": facts.template,
        **({"system": content.system} if content.system else {}),
        **({"license": "\n".join(content.licenses)} if content.licenses else {}),
        "details": format_details(facts),
        "model_info": facts.metadata | {"general.parameter_count": facts.parameters},
        "capabilities": [*facts.capabilities],
        "modified_at": format_modified_at(entry),
        **everything,
    }
    return make_json_response(description, headers=make_extension_headers(body))


async def list_running(service: ServerContext, request: Request) -> Response:
    """List the open models and when each will be unloaded."""
    models = []
    for entry in service.pool.entries.values():
        if (model := entry.model) is None:
            continue
        timer, nbytes = entry.shared.idle_timer, entry.shared.held_bytes
        seconds_left = timer.when() - asyncio.get_running_loop().time() if timer and not timer.cancelled() else None
        expires = datetime.now(UTC) + (FOREVER if seconds_left is None else timedelta(seconds=max(0.0, seconds_left)))
        try:
            facts = await asyncio.to_thread(get_facts, entry)
        except ModelError:  # the file is gone, or no longer one
            continue
        in_use = {"size": nbytes, "size_vram": 0 if model.device == "CPU" else nbytes}
        times = {"expires_at": format_timestamp(expires), "context_length": model.context}
        models.append({**format_entry(entry, facts), **in_use, **times})
    return make_json_response({"models": models})


async def report_version(service: ServerContext, request: Request) -> Response:
    """Return the version of Ollama whose API this is."""
    return make_json_response({"version": VERSION})


async def embed(service: ServerContext, request: Request) -> Response:
    """Return an embedding of each string of `input`; truncate longer ones unless `truncate` is false."""
    body, started = RequestBody(await read_json(request, service.limits, any_type=True)), perf_counter()
    texts, dims = parse_strings(body.get("input"), "input"), body.get_int("dimensions", 1)
    overflow, name = "refuse" if body.get("truncate") is False else "cut", parse_model_name(body)
    use = service.pool.use(name, parse_keep_alive(body))
    vectors, count = await embed_texts(use, request, texts, overflow=overflow, dims=dims)
    body.get_mapping("options")
    seconds = to_nanoseconds(perf_counter() - started)
    answer = {"embeddings": vectors.tolist(), "total_duration": seconds, "load_duration": 0}
    answer |= {"model": service.pool.resolve(name).name, "prompt_eval_count": count}
    return make_json_response(answer, headers=make_extension_headers(body))


async def embed_prompt(service: ServerContext, request: Request) -> Response:
    """Return the embedding of `prompt` (Ollama's legacy endpoint)."""
    body = RequestBody(await read_json(request, service.limits, any_type=True))
    texts, name = [body.require_string("prompt")], parse_model_name(body)
    vectors, _ = await embed_texts(service.pool.use(name, parse_keep_alive(body)), request, texts, overflow="cut")
    body.get_mapping("options")
    return make_json_response({"embedding": vectors[0].tolist()}, headers=make_extension_headers(body))
