"""Runs models of odd shapes with an unreadable page behind every buffer, vector and weight.

    python guarded.py FORMAT TOKENS SHAPE...

Buffers have room for a run of TOKENS tokens and no more, rounded up as kernels' tiles need. A kernel that reads or
writes one byte too far ends the process. tests/unit/kernels/test_memory_bounds.py starts it.
"""

import ctypes
import mmap
import sys
from types import SimpleNamespace

import gguf
import numpy as np

from localllm.engine import runs
from localllm.files.gguf.metadata import Irregularities

if __name__ == "__main__":
    runs.BATCH = int(sys.argv[2])  # before others take it over

from localllm.engine.engine import Engine
from localllm.engine.lower import steps, tape
from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import Tensor
from localllm.quant.formats import BY_NAME

BATCHES = [1, 5, 9, 13, 129]
# width, heads, key-value heads, head dimension, feed-forward width, vocabulary
SHAPES = [
    (32, 1, 1, 32, 32, 17), (48, 3, 1, 16, 40, 33), (64, 4, 2, 16, 96, 50), (80, 5, 5, 16, 56, 61),
    (96, 3, 3, 32, 160, 70), (160, 5, 1, 32, 224, 97), (192, 4, 4, 48, 128, 100), (256, 4, 2, 64, 320, 129),
    (288, 3, 1, 96, 352, 131), (320, 2, 1, 80, 576, 255),
    (1088, 17, 1, 64, 1120, 203),
]  # fmt: skip
FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q2_K"]
keep: list = []
system = ctypes.CDLL(None, use_errno=True)


def guarded(size: int) -> int:
    """Return the address of `size` bytes, a multiple of 4, that end where an unreadable page begins; full of NaN."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
    keep.append(memory)
    array = np.frombuffer(memory, np.uint8)
    array[:whole] = 0xFF
    guard = array.ctypes.data + whole
    assert system.mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0
    return guard - size


def guarded_copy(array: np.ndarray) -> np.ndarray:
    data = np.ascontiguousarray(array)
    copy = np.ctypeslib.as_array((ctypes.c_uint8 * data.nbytes).from_address(guarded(data.nbytes)))
    copy[:] = data.view(np.uint8).reshape(-1)
    return copy.view(data.dtype).reshape(data.shape)


def place_buffers(steps: list[tape.KernelStep]) -> None:
    """Allocate every buffer by itself, without sharing memory between lifetimes."""
    for buffer in {buffer for step in steps for buffer in step.reads + step.writes if buffer.rows}:
        buffer.address = guarded(buffer.rows * buffer.stride)


def model(shape: tuple[int, ...], format: str, bias: bool, experts: int) -> SimpleNamespace:
    """Return a llama with random weights, in place of a file; with `experts`, a token goes to 2 of them."""
    width, heads, kv_heads, head_dim, hidden, vocab = shape
    random, tensors = np.random.default_rng(0), {}

    def add(name: str, *size: int) -> None:
        block = BY_NAME[format].block
        is_matrix = len(size) > 1 and name.endswith("weight")
        kind = format if is_matrix and size[-1] % block == 0 else "F32"
        # Some rows, again and again: to make and to round as many as 40 experts have took most of the time.
        rows = int(np.prod(size[:-1]))
        values = random.normal(0, size[-1] ** -0.5, (min(rows, 37), size[-1])).astype(np.float32) + (len(size) == 1)
        data = guarded_copy(encoded(values, kind)[np.arange(rows) % len(values)]).view(np.uint8)
        tensors[name] = Tensor(name, BY_NAME[kind], size, data.reshape(*size[:-1], -1))

    add("token_embd.weight", vocab, width)
    for layer in range(2):
        sizes = {"attn_q": (heads * head_dim, width), "attn_k": (kv_heads * head_dim, width)}
        sizes |= {"attn_v": (kv_heads * head_dim, width), "attn_output": (width, heads * head_dim)}
        kind, stack = ("_exps", (experts,)) if experts else ("", ())
        sizes |= {f"ffn_{part}{kind}": (*stack, hidden, width) for part in ("gate", "up")}
        sizes[f"ffn_down{kind}"] = *stack, width, hidden
        if experts:
            sizes["ffn_gate_inp"] = experts, width
        for name, size in sizes.items():
            add(f"blk.{layer}.{name}.weight", *size)
            if bias:
                add(f"blk.{layer}.{name}.bias", *size[:-1])
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.ffn_norm.weight", width)
    add("output_norm.weight", width)
    add("output.weight", vocab, width)
    names = {"context_length": 512, "embedding_length": width, "block_count": 2, "feed_forward_length": hidden}
    names |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": head_dim}
    names |= {"attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": 1e-5}
    names |= {"expert_count": experts, "expert_used_count": 2} if experts else {}
    metadata = {"general.architecture": "llama", **{f"llama.{name}": value for name, value in names.items()}}
    return SimpleNamespace(path="guarded", metadata=metadata, tensors=tensors, oddities=Irregularities(), nbytes=0)


def encoded(values: np.ndarray, format: str) -> np.ndarray:
    """Return values in a format; for k-quants, random blocks with small scales."""
    if not format.endswith("_K"):
        return values if format == "F32" else gguf.quantize(values, gguf.GGMLQuantizationType[format])
    size = (len(values), BY_NAME[format].row_bytes(values.shape[1]))
    return np.random.default_rng(len(values)).integers(0, 256, size, dtype=np.uint8) & 0x2F


def run(shape: tuple[int, ...], format: str) -> None:
    """Run precisely and not, one sequence and two, with all KV cache types for F32, and with 0 to 40 experts."""
    cases = {"f16": (0, 40), "f32": (3,), "q8_0": (0,)} if format == "F32" else {"f16": (0, 3, 40)}
    for kv_type, experts in ((kv_type, experts) for kv_type, counts in cases.items() for experts in counts):
        file = model(shape, format, kv_type == "f16" and experts != 3, experts)
        engine = Engine(file, EngineOptions(2, 512, kv_type))
        for precise in (True, False):
            ids = np.random.default_rng(0).integers(0, shape[-1], runs.BATCH).tolist()
            first, second = engine.sequence(), engine.sequence()
            assert np.isfinite(first.append(ids, "all", precise)).all()
            engine.step([(first, ids[: len(ids) // 2 + 1]), (second, ids[: len(ids) // 2])][: len(ids)], precise)
            first.close()
            second.close()
        engine.close()
        keep.clear()


if __name__ == "__main__":
    tape.allocate_buffers = place_buffers
    without_guard = steps.pad_columns
    steps.pad_columns = lambda vector: guarded_copy(without_guard(vector))
    for number in map(int, sys.argv[3:]):
        print(SHAPES[number], flush=True)
        run(SHAPES[number], sys.argv[1])
