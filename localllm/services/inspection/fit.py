"""Estimate from a model's header whether it fits into memory, and its speed. Implements `localllm fit`.

For a model on the Hugging Face hub, only the header (a few megabytes) is fetched, and nothing is stored. The ranking of
all models fetches nothing: models.toml has the size and parameters of models that can be pulled, but not their KV
cache.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Required, TypedDict

from localllm.arch import load_architecture
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import KVType, count_cache_bytes
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.models_folder import get_projector_size
from localllm.services.hub import catalogue
from localllm.services.hub.found_models import find_models
from localllm.services.inspection.inspect import MatrixCosts, MemoryRow, is_embedding_model, list_memory
from localllm.system.memory import get_available_memory

if TYPE_CHECKING:
    from localllm.engine.adapters import Adapter

TYPES = ("f16", "q8_0", "q4_0")  # KV cache types that are shown by default
# Memory needed in addition to weights and KV cache. Models of 0.1 to 1.3 billion parameters took 0.05 to 0.19 GB
# during a prefill of 1024 tokens; wider ones have larger buffers.
WORKING_BYTES = 300_000_000  # bytes
# The share of the memory bandwidth that decode reaches: 0.64 to 0.87, by format and processor (docs/models.md).
SHARE = 0.7


class MemoryFit(TypedDict):
    """Memory in bytes and expected speed for a context length and a KV cache type."""

    kv_type: str
    context: int
    cache_bytes: int
    total_bytes: int
    needed_bytes: int
    fits: bool
    tokens_per_s: float | None


class DiskFit(TypedDict):
    """The memory, disk reads and speed of a model that is larger than memory.

    held_bytes: weights in memory, with the cached experts.  read_bytes: what a token reads from the disk.
    tokens_per_s: expected speed of decode.
    """

    held_bytes: int
    read_bytes: int
    disk_gbs: float
    tokens_per_s: float


class FileFit(TypedDict):
    """A model file, the memory that it needs, and its expected speed.

    adapter_bytes: memory of adapters.  longest: the longest context that fits, by KV cache type.
    table_bytes: of weight_bytes, those of embeddings of which only the rows of a text's tokens take memory.
    disk: how a local model that is larger than memory runs; None for others.
    """

    architecture: str
    parameters: int
    weight_bytes: int
    projector_bytes: int
    adapter_bytes: int
    table_bytes: int
    weight_bytes_per_token: int
    context: int
    working_bytes: int
    available_bytes: int
    bandwidth_gbs: float
    disk: "DiskFit | None"
    longest: dict[str, int]
    rows: list[MemoryFit]


class ModelFit(FileFit):
    """The estimate for one model; fetched_bytes: size of the header that was downloaded for it."""

    model: str
    path: str
    fetched_bytes: int


class FitRow(TypedDict, total=False):
    """A row of the ranking; sizes in bytes. For an unreadable file, `problem` replaces the figures."""

    name: Required[str]
    here: Required[bool]
    problem: str
    parameters: int
    weight_bytes: int
    context: int
    needed_bytes: int
    cache_bytes: int | None
    fits: bool
    tokens_per_s: float | None


class FitRanking(TypedDict):
    """The ranking of all models, for JSON."""

    order: str
    context: int
    kv_type: str
    available_bytes: int
    bandwidth_gbs: float
    models: list[FitRow]


CONTEXT = 4096  # default context length of the estimates, in tokens
ORDERS: dict[str, Callable[[FitRow], float]] = {
    "size": lambda row: -row["parameters"],
    "speed": lambda row: -(row["tokens_per_s"] or 0),
    "memory": lambda row: row["needed_bytes"],
}
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
OnRead = Callable[[str], None]  # called with a description of each step


def ignore_step(what: str) -> None:
    pass


def describe_fit(
    model: str, on_read: OnRead = ignore_step, context: int | None = None, kv_type: str | None = None,
    lora: Sequence[str] = (),
) -> ModelFit:  # fmt: skip
    """Describe how a model fits this computer, for JSON; sizes in bytes.

    The rows give, for each context length and KV cache type, the memory needed, whether it is available, and the
    expected tokens per second with a full context. context, kv_type: None for several.  lora: paths of adapters. Raises
    ModelError, UsageError, and LocalllmError if the hub cannot be reached.
    """
    kinds = TYPES if kv_type is None else (kv_type,)
    try:
        path = catalogue.resolve_model(model)
    except catalogue.MissingError as error:
        return describe_remote(error.reference, on_read, context, kinds, lora)
    with GGUFFile.open(path, needed=()) as file:
        facts = describe_file(file, on_read, context, get_projector_size(path), kinds, lora=lora)
        return {"model": model, "path": path, "fetched_bytes": 0, **facts}


def rank_models(
    order: str = "size", context: int = CONTEXT, kv_type: str = "f16", on_read: OnRead = ignore_step
) -> FitRanking:
    """Describe every model for JSON, those that fit first; order: a key of ORDERS. Sizes in bytes.

    Unreadable files come last.
    """
    on_read("measuring the memory's bandwidth")
    bandwidth, available = measure_bandwidth(), get_available_memory()
    rows = [describe_model_file(name, context, kv_type, bandwidth, on_read) for name in iter_local_names()]
    local = {row["name"] for row in rows}
    rows += [
        describe_registry_model(model, bandwidth, available)
        for model in catalogue.load_registry().values()
        if model.name not in local
    ]
    key = ORDERS[order]
    rows.sort(key=lambda row: ("problem" in row, not row.get("fits"), 0 if "problem" in row else key(row)))
    return {
        "order": order, "context": context, "kv_type": kv_type, "available_bytes": available,
        "bandwidth_gbs": bandwidth / 1e9, "models": rows,
    }  # fmt: skip


def describe_remote(
    reference: catalogue.HubReference, on_read: OnRead, context: int | None, kinds: Sequence[str] = TYPES,
    lora: Sequence[str] = (),
) -> ModelFit:  # fmt: skip
    """Describe a hub model by its header."""
    from localllm.services.hub.huggingface import HubRepository
    from localllm.services.hub.pull import list_model_files, list_projectors, open_remote_model

    on_read(f"reading the header of {reference.text}")
    repository = HubRepository(reference.repository)
    files = list_model_files(repository, reference)
    with open_remote_model(repository, files) as (model, fetched):
        projectors = sum(file.size for file in list_projectors(repository, files))
        facts = describe_file(model, on_read, context, projectors, kinds, lora=lora)
        return {"model": reference.text, "path": model.path, "fetched_bytes": fetched, **facts}


def describe_file(
    file: GGUFFile,
    on_read: OnRead,
    context: int | None,
    projector: int = 0,
    kinds: Sequence[str] = TYPES,
    bandwidth: float | None = None,
    lora: Sequence[str] = (),
) -> FileFit:
    """Describe a model file.

    projector: size of its vision projector in bytes.  kinds: KV cache types.  bandwidth: memory bandwidth in bytes per
    second; None: measure it.  lora: paths of adapters. Raises ModelError, UsageError.
    """
    _, h = load_architecture(file)
    if not file.tensors:
        raise ModelError(f"{file.path}: the file contains a vocabulary only; give a file with weights")
    costs = MatrixCosts.from_file(file)
    if context is not None and not 1 <= context <= h.context:
        raise UsageError(f"context must be from 1 to {h.context}, the model's training context, not {context}")
    adapters = sum(adapter.nbytes for adapter in open_fitting(file, lora))
    read = replace(costs, weight_bytes=costs.weight_bytes + adapters)
    nbytes = file.nbytes - costs.table_bytes + projector + adapters
    available = get_available_memory(mapped=nbytes)
    if bandwidth is None:
        on_read("measuring the memory's bandwidth")
        bandwidth = measure_bandwidth()
    kinds = kinds[:1] if is_embedding_model(h) else kinds  # embedding models keep no KV cache
    rows = [
        estimate_fit(row, kind, read, available, None if is_embedding_model(h) else bandwidth)
        for kind in kinds
        for row in list_memory(h, nbytes, KVType.parse(kind), h.context if is_embedding_model(h) else context)
    ]
    return {
        "architecture": h.arch, "parameters": file.parameters, "weight_bytes": file.nbytes,
        "projector_bytes": projector, "adapter_bytes": adapters, "table_bytes": costs.table_bytes,
        "weight_bytes_per_token": costs.weight_bytes, "context": h.context,
        "working_bytes": WORKING_BYTES, "available_bytes": available,
        "bandwidth_gbs": bandwidth / 1e9,
        "disk": estimate_streaming(file, read, available, bandwidth, on_read) if nbytes > available else None,
        "longest": {kind: find_longest_context(h, nbytes, KVType.parse(kind), available) for kind in kinds},
        "rows": rows,
    }  # fmt: skip


def estimate_streaming(
    file: GGUFFile, costs: MatrixCosts, available: int, bandwidth: float, on_read: OnRead
) -> DiskFit | None:
    """Estimate how a model larger than memory runs, with experts that are chosen equally often; None without a file."""
    if not os.path.exists(file.path):
        return None
    on_read("measuring the disk's speed")
    disk, dense = measure_disk(file), costs.weight_bytes - costs.expert_bytes
    room = max(available - WORKING_BYTES, 0)
    cached = min(max(room - dense, 0), costs.all_expert_bytes)
    missing = max(dense - room, 0)
    if costs.all_expert_bytes:
        missing += costs.expert_bytes * (costs.all_expert_bytes - cached) // costs.all_expert_bytes
    speeds = [SHARE * bandwidth / costs.weight_bytes, disk / missing if missing else sys.maxsize]
    return {
        "held_bytes": min(dense, room) + cached, "read_bytes": missing, "disk_gbs": disk / 1e9,
        "tokens_per_s": min(speeds),
    }  # fmt: skip


def measure_disk(file: GGUFFile) -> float:
    """Measure the bytes per second of reading a model's file from the disk."""
    from localllm.engine.cpu.weight_stream import measure_file  # seldom needed

    path = next(iter(file.parts), file.path)
    return measure_file(path, os.path.getsize(path))


def open_fitting(file: GGUFFile, lora: Sequence[str]) -> "list[Adapter]":
    """Open adapters for a model. Raises ModelError for one that does not fit, UsageError."""
    if not lora:
        return []
    from localllm.convert.adapters import open_adapters  # seldom needed

    adapters = [adapter for adapter, _ in open_adapters([(path, 1.0) for path in lora], file.metadata, file.tensors)]
    for adapter in adapters:
        adapter.require_fit(file.tensors, str(file.metadata.get("general.architecture", "")))
    return adapters


def estimate_fit(
    row: MemoryRow, kv_type: str, costs: MatrixCosts, available: int, bandwidth: float | None
) -> MemoryFit:
    """Add whether the model fits, and its speed, to a row of `memory`.

    Each token reads all weights and the KV cache. bandwidth: in bytes per second; None for a model that generates no
    text.
    """
    needed_bytes = row["total_bytes"] + WORKING_BYTES
    speed = bandwidth and SHARE * bandwidth / (costs.weight_bytes + row["cache_bytes"])
    return {
        **row, "kv_type": kv_type, "needed_bytes": needed_bytes, "fits": needed_bytes <= available,
        "tokens_per_s": speed,
    }  # fmt: skip


def find_longest_context(h: Hyperparameters, weight_bytes: int, kv_type: KVType, available: int) -> int:
    """Return the longest context that fits, at most the trained one; 0 if none fits."""
    room = available - weight_bytes - WORKING_BYTES
    lowest, highest = 0, h.context
    while lowest < highest:
        tokens = (lowest + highest + 1) // 2
        fits = count_cache_bytes(h.list_states(), tokens, kv_type) <= room
        lowest, highest = (tokens, highest) if fits else (lowest, tokens - 1)
    return lowest


def measure_bandwidth() -> float:
    """Measure the memory bandwidth in bytes per second with the default thread count."""
    from localllm.engine.cpu.limits import measure_read_bandwidth
    from localllm.system.cpu import count_usable_cores

    return measure_read_bandwidth(count_usable_cores())


def iter_local_names() -> Iterator[str]:
    """Yield the names of local models, including the built-in one and those of other programs."""
    built_in = [model.name for model in catalogue.load_registry().values() if not model.repository]
    on_disk = [model.name for model in catalogue.list_models_on_disk() if model.is_whole and not model.kind]
    yield from dict.fromkeys(
        [*built_in, *on_disk, *(model.name for model in find_models(catalogue.find_shortest_name))]
    )


def describe_model_file(name: str, context: int, kv_type: str, bandwidth: float, on_read: OnRead) -> FitRow:
    """Describe a model by its file, for `context` tokens or the trained context, whichever is shorter."""
    on_read(f"reading the header of {name}")
    try:
        path = catalogue.resolve_model(name)
        with GGUFFile.open(path, needed=()) as file:
            length = min(context, load_architecture(file)[1].context)
            facts = describe_file(file, on_read, length, get_projector_size(path), (kv_type,), bandwidth)
    except (LocalllmError, OSError) as error:
        return {"name": name, "here": True, "problem": str(error)}
    row = facts["rows"][-1]
    return {
        "name": name, "here": True, "parameters": facts["parameters"], "weight_bytes": facts["weight_bytes"],
        "context": row["context"], "needed_bytes": row["needed_bytes"], "cache_bytes": row["cache_bytes"],
        "fits": row["fits"], "tokens_per_s": row["tokens_per_s"],
    }  # fmt: skip


def describe_registry_model(model: catalogue.KnownModel, bandwidth: float, available: int) -> FitRow:
    """Describe a model that can be pulled; memory and speed are those with an empty KV cache."""
    total, active = parse_parameters(model.parameters)
    weights = model.megabytes * 1_000_000
    needed_bytes = weights + WORKING_BYTES
    speed = None if model.is_embedder else SHARE * bandwidth / (weights * active / total)
    return {
        "name": model.name, "here": False, "parameters": int(total), "weight_bytes": weights, "context": model.context,
        "needed_bytes": needed_bytes, "cache_bytes": None, "fits": needed_bytes <= available, "tokens_per_s": speed,
    }  # fmt: skip


def parse_parameters(text: str) -> tuple[float, float]:
    """Parse total and active parameters from a string such as "30.5B (A 3.3B)"."""
    numbers = [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)([KMBT])", text)]
    return numbers[0], numbers[-1]
