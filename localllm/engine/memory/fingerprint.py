"""What the numbers of a cache depend on, as a short key: the weights, what is done with them, and by which code.

Reading all weights would take as long as the prompt. Instead the key has the size of each of the model's files and when
its content and its place last changed, to the nanosecond, the second of which programs cannot easily set, and samples
of every tensor. To copy or move a file makes another model of it, which costs time and nothing else.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from localllm.arch.kv_cache_types import KVType
from localllm.arch.weights import Weight
from localllm.engine.operations.activation import Activation
from localllm.engine.operations.operation import Operation
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.build.objects import object_folder
from localllm.kernels.machine import has_tiles
from localllm.system.files import version_of

State = list[tuple[int, int, int]]
SAMPLES, SAMPLE = 8, 64  # of each tensor, evenly spread; bytes of one


def fingerprint(file: GGUFFile, state: State, operations: Sequence[Operation], kv_type: KVType) -> bytes:
    """32 bytes; state: of the model's files when they were opened."""
    key = hashlib.blake2b(digest_size=32)
    code = object_folder().name, has_tiles()
    key.update(repr((code, kv_type, state, described(operations))).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        key.update(source.read_bytes())
    for name, tensor in file.tensors.items():
        key.update(f"{name} {tensor.format.name} {tensor.shape} ".encode() + sample(tensor.data.reshape(-1)))
    return key.digest()


def state_of(file: GGUFFile) -> State:
    """Of each of a model's files its size, and when it changed. Raises OSError."""
    return [version_of(path) for path in file.parts]


def sample(data: np.ndarray) -> bytes:
    """Some of a tensor's bytes."""
    if len(data) <= SAMPLES * SAMPLE:
        return data.tobytes()
    starts = [(len(data) - SAMPLE) * i // (SAMPLES - 1) for i in range(SAMPLES)]
    return b"".join(data[start : start + SAMPLE].tobytes() for start in starts)


def described(operations: Sequence[Operation]) -> list[Any]:
    """What is done, in plain values: operations with the numbers of those that they read."""
    numbers: dict[Activation, int] = {}
    lines = []
    for number, operation in enumerate(operations):
        inputs = [numbers[x] for x in operation.inputs]
        names = sorted(each.name for each in fields(operation) if each.name not in ("inputs", "output"))
        given = [(name, plain(getattr(operation, name))) for name in names]
        lines.append((operation.verb, inputs, operation.output.rows.name, operation.output.columns, given))
        numbers[operation.output] = number
    return lines


def plain(value: Any) -> Any:
    """Something that an operation was given, such that equal values look equal, and others do not."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).hexdigest()
    if isinstance(value, Weight):
        tensor, parts = value.tensor, (plain(value.bias), plain(value.scale))
        return tensor.name, tensor.format.name, tensor.shape, value.first_row, parts
    if isinstance(value, Mapping):
        return sorted((name, plain(each)) for name, each in value.items())
    return repr(value)
