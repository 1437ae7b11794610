"""Measure our quantizers and llama.cpp's on the same matrices, and print a Markdown table.

    python scripts/measure quantizers --peer-python PEER SmolLM2-F32.gguf

The file's ffn_down
matrices serve as real weights (their rows are whole blocks of every format), beside a normal and a heavy-tailed random
one (Student's t with 3 degrees of freedom).

An error is the sum of w * (x - decoded) ** 2, decoded by the gguf package, w being 1, or with importance a random
factor per column, log-normal with a deviation of 1.5. A cell is our error by theirs, without and with importance.
Speeds are nanoseconds per weight of one thread's time, the best of three.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
from common import make_parser, print_header, print_row

from localllm.files.gguf.file import GGUFFile
from localllm.quant.encode import ENCODERS, encode
from localllm.quant.formats import BY_NAME

TIMES = 3

THEIRS = """
import ctypes, sys, time
from pathlib import Path
import llama_cpp, numpy as np
name, id, row_bytes, folder = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
library = Path(llama_cpp.__file__).parent / "lib"
ggml = ctypes.CDLL(str(next(library.glob("*ggml-base*"))))
ggml.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
pointer, long = ctypes.c_void_p, ctypes.c_int64
ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
for file in sorted(folder.glob("*.weights.npy")):
    weights = np.load(file)
    importance = np.load(str(file).replace("weights", "importance"))
    for kind in ("plain", "importance"):
        given = importance if kind == "importance" else None
        if given is None and ggml.ggml_quantize_requires_imatrix(id):
            given = np.ones_like(importance)
        address = None if given is None else given.ctypes.data
        blocks = np.zeros((weights.shape[0], int(weights.shape[1] * row_bytes)), np.uint8)
        least = float("inf")
        for _ in range(TIMES):
            start = time.thread_time()
            ggml.ggml_quantize_chunk(id, weights.ctypes.data, blocks.ctypes.data, 0, *weights.shape, address)
            least = min(least, time.thread_time() - start)
        np.savez(str(file).replace("weights.npy", f"{kind}.npz"), blocks=blocks, seconds=least)
""".replace("TIMES", str(TIMES))


def real_weights(path: str) -> np.ndarray:
    """Return some rows of every ffn_down, float32 [rows, columns]."""
    tensors = [tensor for name, tensor in GGUFFile.open(path).tensors.items() if name.endswith("ffn_down.weight")]
    if not tensors or any(tensor.format.name != "F32" for tensor in tensors):
        sys.exit(f"{path} has no ffn_down in F32")
    return np.concatenate([tensor.data.view(np.float32).reshape(tensor.shape)[::16] for tensor in tensors])


def matrices(path: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "model": real_weights(path),
        "normal": random.standard_normal((256, 4096)).astype(np.float32),
        "heavy-tailed": random.standard_t(3, (256, 4096)).astype(np.float32),
    }


def error(name: str, blocks: np.ndarray, weights: np.ndarray, importance: np.ndarray | None) -> float:
    squares = (gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float64) - weights) ** 2
    return float(np.sum(squares if importance is None else squares * importance))


def ours(name: str, weights: np.ndarray, importance: np.ndarray | None) -> tuple[np.ndarray, float]:
    """Return the blocks, and the seconds of the fastest run."""
    encode(name, weights[:1], importance)
    least = float("inf")
    for _ in range(TIMES):
        start = time.thread_time()
        blocks = encode(name, weights, importance)
        least = min(least, time.thread_time() - start)
    return blocks, least


def ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.3f}" if theirs else ("both 0" if ours == 0 else "theirs 0")


def compare(name: str, folder: Path, peer_python: str) -> list[str]:
    """Return the cells of a format's line."""
    format = BY_NAME[name]
    arguments = [name, str(format.id), str(format.bytes / format.block), str(folder)]
    subprocess.run([peer_python, "-c", THEIRS, *arguments], check=True)
    cells, speeds = [], []
    for file in sorted(folder.glob("*.weights.npy")):
        weights, ratios = np.load(file), []
        for kind in ("plain", "importance"):
            importance = np.load(str(file).replace("weights", "importance")) if kind == "importance" else None
            theirs = np.load(str(file).replace("weights.npy", f"{kind}.npz"))
            blocks, seconds = ours(name, weights, importance)
            ratios.append(
                ratio(error(name, blocks, weights, importance), error(name, theirs["blocks"], weights, importance))
            )
            if file.name.startswith("1"):
                speeds.append(f"{seconds / weights.size * 1e9:.1f} : {theirs['seconds'] / weights.size * 1e9:.1f}")
        cells.append(", ".join(ratios))
    return [name, *cells, *speeds]


def main() -> None:
    options = make_parser(__doc__, "peer", "model", threads=False).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, random = Path(temporary), np.random.default_rng(2)
        names = []
        for number, (label, weights) in enumerate(matrices(options.model).items()):
            importance = np.exp(random.standard_normal(weights.shape[1]) * 1.5).astype(np.float32)
            np.save(folder / f"{number}.weights.npy", weights)
            np.save(folder / f"{number}.importance.npy", importance)
            names.append(label)
        print_header(["type", *names, "ns, ours : theirs", "with importance"])
        for name in ENCODERS:
            if name != "F32":
                print_row(compare(name, folder, options.peer_python))
