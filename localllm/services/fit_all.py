"""Ranks local models and those that can be pulled by speed, size or memory. Implements `localllm fit --all`.

Nothing is fetched: models.toml has the size and weights of models that can be pulled, but not their KV cache, which
`localllm fit NAME` reads from the header.
"""

import re
from collections.abc import Callable, Iterator
from typing import Required, TypedDict

from localllm.arch import architecture
from localllm.errors import LocalllmError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.projectors import projector_bytes
from localllm.services.catalogue import Known, models_on_disk, registry_models, resolve, shortest_name
from localllm.services.fit import SHARE, WORKING, describe_file, measure_bandwidth
from localllm.services.found_models import find_models
from localllm.system.memory import available_memory


class FitRow(TypedDict, total=False):
    """A model and how it fits; sizes in bytes. A file that cannot be read has a problem and no figures."""

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
    """All models and how they fit, for JSON."""

    order: str
    context: int
    kv_type: str
    available_bytes: int
    bandwidth_gbs: float
    models: list[FitRow]


CONTEXT = 4096  # tokens for which memory and speed are estimated, unless another number is asked for
ORDERS: dict[str, Callable[[FitRow], float]] = {
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
) -> FitRanking:
    """Describe every model for JSON, those that fit first; order: a key of ORDERS. Sizes in bytes.

    Files that cannot be read come last.
    """
    on_read("measuring the memory's bandwidth")
    bandwidth, available = measure_bandwidth(), available_memory()
    rows = [describe_model_file(name, context, kv_type, bandwidth, on_read) for name in names_here()]
    local = {row["name"] for row in rows}
    rows += [
        describe_registry_model(model, bandwidth, available)
        for model in registry_models().values()
        if model.name not in local
    ]
    key = ORDERS[order]
    rows.sort(key=lambda row: ("problem" in row, not row.get("fits"), 0 if "problem" in row else key(row)))
    return {
        "order": order, "context": context, "kv_type": kv_type, "available_bytes": available,
        "bandwidth_gbs": bandwidth / 1e9, "models": rows,
    }  # fmt: skip


def names_here() -> Iterator[str]:
    """Yield the names of local models, the built-in one and those of other programs included."""
    built_in = [model.name for model in registry_models().values() if not model.repository]
    on_disk = [model.name for model in models_on_disk() if model.is_whole]
    yield from dict.fromkeys([*built_in, *on_disk, *(model.name for model in find_models(shortest_name))])


def describe_model_file(
    name: str, context: int, kv_type: str, bandwidth: float, on_read: Callable[[str], None]
) -> FitRow:
    """Describe a model by its file, for a context of `context` tokens, or the trained one if that is shorter."""
    on_read(f"reading the header of {name}")
    try:
        path = resolve(name)
        with GGUFFile.open(path, needed=()) as file:
            length = min(context, architecture(file)[1].context)
            facts = describe_file(file, on_read, length, projector_bytes(path), (kv_type,), bandwidth)
    except (LocalllmError, OSError) as error:
        return {"name": name, "here": True, "problem": str(error)}
    row = facts["rows"][-1]
    return {
        "name": name, "here": True, "parameters": facts["parameters"], "weight_bytes": facts["weight_bytes"],
        "context": row["context"], "needed_bytes": row["needed_bytes"], "cache_bytes": row["cache_bytes"],
        "fits": row["fits"], "tokens_per_s": row["tokens_per_s"],
    }  # fmt: skip


def describe_registry_model(model: Known, bandwidth: float, available: int) -> FitRow:
    """Describe a model that can be pulled, with the memory and speed of an empty KV cache."""
    total, active = parameters_of(model.parameters)
    weights = model.megabytes * 1_000_000
    needed_bytes = weights + WORKING
    speed = None if model.is_embedder else SHARE * bandwidth / (weights * active / total)
    return {
        "name": model.name, "here": False, "parameters": int(total), "weight_bytes": weights, "context": model.context,
        "needed_bytes": needed_bytes, "cache_bytes": None, "fits": needed_bytes <= available, "tokens_per_s": speed,
    }  # fmt: skip


def parameters_of(text: str) -> tuple[float, float]:
    """Return the number of weights in a text such as "30.5B (A 3.3B)", and of those that a token uses."""
    numbers = [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+)([KMBT])", text)]
    return numbers[0], numbers[-1]
