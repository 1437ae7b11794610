"""A short key (hash) of everything that cached states depend on: weights, operations and code.

Hashing all weights would take as long as prefilling the prompt. Instead the key covers samples of every tensor, and
each model file's size, modification time and change time in nanoseconds; programs cannot easily set the change time. A
copied or moved file counts as another model, which costs only time.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from localllm.arch.layer_state import KVType
from localllm.arch.weights import Weight
from localllm.engine.operations.activation import Activation
from localllm.engine.operations.operation import Operation
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.build.objects import object_folder
from localllm.kernels.machine import has_tiles

State = list[tuple[int, int, int]]
SAMPLES, SAMPLE = 8, 64  # samples of each tensor, evenly spaced; bytes of one


def fingerprint(file: GGUFFile, state: State, operations: Sequence[Operation], kv_type: KVType) -> bytes:
    """Compute the key, 32 bytes; state: the files' versions when the model was opened."""
    key = hashlib.blake2b(digest_size=32)
    code = object_folder().name, has_tiles()
    key.update(repr((code, kv_type, state, describe_operations(operations))).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        key.update(source.read_bytes())
    for name, tensor in file.tensors.items():
        key.update(f"{name} {tensor.format.name} {tensor.shape} ".encode() + sample(tensor.data.reshape(-1)))
    return key.digest()


def sample(data: np.ndarray) -> bytes:
    """Return SAMPLES samples of a tensor's bytes, or all of them if they are few."""
    if len(data) <= SAMPLES * SAMPLE:
        return data.tobytes()
    starts = [(len(data) - SAMPLE) * i // (SAMPLES - 1) for i in range(SAMPLES)]
    return b"".join(data[start : start + SAMPLE].tobytes() for start in starts)


def describe_operations(operations: Sequence[Operation]) -> list[object]:
    """Describe operations by plain values that compare by content; inputs are numbers of earlier operations."""
    numbers: dict[Activation, int] = {}
    lines: list[object] = []
    for number, operation in enumerate(operations):
        inputs = [numbers[x] for x in operation.inputs]
        names = sorted(each.name for each in fields(operation) if each.name not in ("inputs", "output"))
        field_values = [(name, plain(getattr(operation, name))) for name in names]
        lines.append((operation.verb, inputs, operation.output.rows.name, operation.output.columns, field_values))
        numbers[operation.output] = number
    return lines


def plain(value: object) -> object:
    """Convert an operation's attribute to a value; reprs of values are equal if and only if attributes are."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).hexdigest()
    if isinstance(value, Weight):
        tensor, parts = value.tensor, (plain(value.bias), plain(value.scale))
        return tensor.name, tensor.format.name, tensor.shape, value.first_row, parts
    if isinstance(value, Mapping):
        return [(name, plain(value[name])) for name in sorted(value)]
    return repr(value)
