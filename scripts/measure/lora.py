"""Measure a low-rank adapter (LoRA) on all matrices of a model's layers.

    python scripts/measure lora MODEL

The speed with a random adapter, as a ratio to without: prefill of 512 tokens and decode, with a scale of 1 and of 0;
and the time that another scale takes. Medians; both models are open, and take turns.
"""

import statistics
import tempfile
from pathlib import Path

import numpy as np
from adapters import random_adapter, write_adapter
from common import make_parser, print_header, print_row, time_of

from localllm import api
from localllm.files.gguf.file import GGUFFile

PROMPT, ANSWER = 512, 24


def measure_once(model: api.Model, ids: list[int], scale: float | None) -> tuple[float, float]:
    """Return the seconds of a prefill of PROMPT tokens and of decoding ANSWER tokens."""
    sequence = model.sequence()
    if scale is not None:
        sequence.set_adapter_scales([scale])
    prefill = time_of(lambda: sequence.append(ids[:PROMPT], "none"))
    sequence.truncate(128)
    decode = time_of(lambda: [sequence.append([id]) for id in ids[PROMPT:]])
    sequence.close()
    return prefill, decode


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser(__doc__, "model", rounds=7)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--type", choices=("F32", "F16"), default="F16", help="the type of the adapter's matrices")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_random(options.model, Path(folder), options.rank, options.type)
        measure(options.model, path, options.threads, options.rounds)


def write_random(model: str, folder: Path, rank: int, type: str) -> str:
    """Write an adapter for all matrices of a model's layers; return its path."""
    with GGUFFile.open(model) as file:
        names = [name for name in file.tensors if name.startswith("blk.") and len(file.tensors[name].shape) == 2]
        adapter = random_adapter(file, names, rank, format=type)
        about = {"general.architecture": file.metadata["general.architecture"]}
        return str(write_adapter(adapter, folder / "random.gguf", 1.0, **about))


def measure(path: str, adapter: str, threads: int, rounds: int) -> None:
    """Measure the three cases in turn, and print a table."""
    arguments = {"threads": threads, "context": PROMPT + ANSWER}
    with api.open_model(path, **arguments) as base, api.open_model(path, lora=adapter, **arguments) as model:
        ids = np.random.default_rng(0).integers(0, base.tokenizer.vocab_size, PROMPT + ANSWER).tolist()
        cases = {"without": (base, None), "scale 1": (model, 1.0), "scale 0": (model, 0.0)}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(rounds + 1):
            for name, (of, scale) in cases.items():
                times[name].append(measure_once(of, ids, scale))
        sequence = model.sequence()
        switch = statistics.median(time_of(lambda s=s: sequence.set_adapter_scales([s])) for s in np.linspace(0, 1, 21))
    print_header(["", "prefill, tokens/s", "ratio", "decode, tokens/s", "ratio"])
    base_times = [statistics.median(each) for each in zip(*times["without"][1:], strict=True)]
    for name, each in times.items():
        prefill, decode = (statistics.median(some) for some in zip(*each[1:], strict=True))
        speeds = f"{PROMPT / prefill:.0f}", f"{base_times[0] / prefill:.2f}", f"{ANSWER / decode:.1f}"
        print_row([name, *speeds, f"{base_times[1] / decode:.2f}"])
    print(f"another scale: {1e6 * switch:.0f} us")
