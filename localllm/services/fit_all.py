"""Rank the models that are here, and those that can be pulled, by speed, size and memory on this computer.

Implements `localllm fit --all`. Nothing is fetched: of a model that is not here, models.toml says its size and weights,
not its cache, which `localllm fit NAME` reads from its header.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from localllm.arch import architecture
from localllm.errors import LocalllmError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.projectors import projector_bytes
from localllm.services.catalogue import Known, models_on_disk, registry_models, resolve, shortest_name
from localllm.services.fit import SHARE, WORKING, describe_file, measure_bandwidth
from localllm.services.found_models import find_models
from localllm.system.memory import available_memory

CONTEXT = 4096  # tokens for which memory and speed are estimated, unless another number is asked for
ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "size": lambda row: -row["parameters"],
    "speed": lambda row: -(row["tokens_per_s"] or 0),
    "memory": lambda row: row["needed_bytes"],
}
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def fit_all(
    order: str = "size",
    context: int = CONTEXT,
    kv_type: str = "f16",
    on_read: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Describe every model for JSON, those that fit first, in the order that a key of ORDERS names; sizes in bytes.

    A file that cannot be read has a problem instead of figures, and comes last.
    """
    on_read("measuring the memory's bandwidth")
    bandwidth, available = measure_bandwidth(), available_memory()
    rows = [describe_model_file(name, context, kv_type, bandwidth, on_read) for name in names_here()]
    here = {row["name"] for row in rows}
    rows += [
        describe_registry_model(model, bandwidth, available)
        for model in registry_models().values()
        if model.name not in here
    ]
    key = ORDERS[order]
    rows.sort(key=lambda row: ("problem" in row, not row.get("fits"), 0 if "problem" in row else key(row)))
    facts = {"order": order, "context": context, "kv_type": kv_type, "available_bytes": available}
    return facts | {"bandwidth_gbs": bandwidth / 1e9, "models": rows}


def names_here() -> Iterator[str]:
    """Yield the names of the models that are here, also the built-in one and those of other programs."""
    built_in = [model.name for model in registry_models().values() if not model.repository]
    on_disk = [model.name for model in models_on_disk() if model.is_whole]
    yield from dict.fromkeys([*built_in, *on_disk, *(model.name for model in find_models(shortest_name))])


def describe_model_file(
    name: str, context: int, kv_type: str, bandwidth: float, on_read: Callable[[str], None]
) -> dict[str, Any]:
    """Describe a model by its file, for a context of that many tokens, or the model's own if that is shorter."""
    on_read(f"reading the header of {name}")
    try:
        path = resolve(name)
        with GGUFFile.open(path, needed=()) as file:
            length = min(context, architecture(file)[1].context)
            facts = describe_file(file, on_read, length, projector_bytes(path), (kv_type,), bandwidth)
    except (LocalllmError, OSError) as error:
        return {"name": name, "here": True, "problem": str(error)}
    row = facts["rows"][-1]
    picked = {key: row[key] for key in ("context", "needed_bytes", "cache_bytes", "fits", "tokens_per_s")}
    picked |= {key: facts[key] for key in ("parameters", "weight_bytes")}
    return {"name": name, "here": True, **picked}


def describe_registry_model(model: Known, bandwidth: float, available: int) -> dict[str, Any]:
    """Describe a model that can be pulled: memory and speed are those of an empty cache."""
    total, active = parameters_of(model.parameters)
    weights = model.megabytes * 1_000_000
    needed = weights + WORKING
    speed = None if model.is_embedder else SHARE * bandwidth / (weights * active / total)
    return {
        "name": model.name, "here": False, "parameters": int(total), "weight_bytes": weights, "context": model.context,
        "needed_bytes": needed, "cache_bytes": None, "fits": needed <= available, "tokens_per_s": speed,
    }  # fmt: skip


def parameters_of(text: str) -> tuple[float, float]:
    """Return the weights that "30.5B (A 3.3B)" tells of, and those that a token uses."""
    numbers = [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)([KMBT])", text)]
    return numbers[0], numbers[-1]
