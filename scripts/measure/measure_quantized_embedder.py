#!/usr/bin/env python3
"""Measure what quantizing an embedding model costs: llama-quantize's files and ours, as a Markdown table.

    python scripts/measure/measure_quantized_embedder.py LLAMA_QUANTIZE MODEL-F32.gguf Q4_K_M Q5_0... --calibrate

A cell is the mean of 1 - cosine between the vectors of the quantized file and of MODEL, computed by localllm, for
`--texts` passages of 5 to 60 words. With `--imatrix FILE`, both tools get it. Files are deleted once measured.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
WORDS = (5, 60)


def passages(text: str, count: int) -> list[str]:
    """Draw passages of WORDS words, the same in each run."""
    words, chance, lines = text.split(), random.Random(0), []
    for _ in range(count):
        length = chance.randint(*WORDS)
        start = chance.randrange(len(words) - length)
        lines.append(" ".join(words[start : start + length]))
    return lines


def localllm(*words: object) -> list[str]:
    """Return the command that runs localllm."""
    return [sys.executable, "-m", "localllm", *map(str, words)]


def run(command: list[str], libraries: Path | None = None) -> None:
    """Run a command. Raises SystemExit with what it said if it failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if libraries:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")


def vectors(model: Path, texts: Path) -> np.ndarray:
    """Embed each line of a file, float64 [texts, width], of length 1."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "vectors.npy"
        run(localllm("embed", model, texts, "-o", out))
        rows = np.load(out).astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Comparison:
    """The original's vectors, and the files that are compared with it."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self._options, self._folder, self._texts = options, folder, folder / "texts.txt"
        lines = passages(Path(options.text).read_text(encoding="utf-8"), options.texts)
        self._texts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self._exact = vectors(options.model, self._texts)

    def _loss(self, name: str, command: list[str], libraries: Path | None = None) -> dict[str, float]:
        """Make a file, and return its mean 1 - cosine and its size in bytes."""
        run(command, libraries)
        file = self._folder / name
        near = (vectors(file, self._texts) * self._exact).sum(axis=1)
        size = file.stat().st_size
        file.unlink()
        return {"loss": float((1 - near).mean()), "bytes": size}

    def measure(self, type: str) -> dict[str, dict[str, float]]:
        """Return the losses and sizes of one type: llama-quantize's, ours, and ours calibrated."""
        options, out = self._options, self._folder
        matrix = ["--imatrix", str(options.imatrix)] if options.imatrix else []
        peer = [str(options.program), *matrix, str(options.model), str(out / "peer.gguf"), type, "2"]
        found = {"theirs": self._loss("peer.gguf", peer, options.program.resolve().parent)}
        ours = localllm("quantize", options.model, out / "ours.gguf", type, *matrix)
        found["ours"] = self._loss("ours.gguf", ours)
        if options.calibrate:
            calibrated = localllm("quantize", options.model, out / "calibrated.gguf", type, "--calibrate")
            found["calibrated"] = self._loss("calibrated.gguf", calibrated)
        return found


def row(type: str, found: dict[str, dict[str, float]]) -> str:
    """Return a type's line of the table."""
    theirs = found["theirs"]["loss"]
    cells = [f"{found['theirs']['bytes'] / 1e6:.1f}", f"{found['ours']['bytes'] / 1e6:.1f}", f"{theirs:.5f}"]
    for name in ("ours", "calibrated"):
        if name in found:
            cells.append(f"{found[name]['loss']:.5f} ({found[name]['loss'] / theirs:.2f})")
    return "| " + " | ".join([type, *cells]) + " |"


def main() -> None:
    """Parse, measure, print a line for each type as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="llama-quantize")
    parser.add_argument("model", type=Path, help="an embedding model's GGUF file in F32")
    parser.add_argument("types", nargs="+")
    parser.add_argument("--calibrate", action="store_true", help="measure `quantize --calibrate`, too")
    parser.add_argument("--imatrix", type=Path, help="an importance matrix for both tools")
    parser.add_argument("--texts", type=int, default=88)
    parser.add_argument("--text", default=str(ROOT / "tests" / "support" / "prose.txt"), help="where they come from")
    parser.add_argument("--json", type=Path, help="append the figures to this file, a line of JSON for each type")
    options = parser.parse_args()
    header = ["type", "MB, llama-quantize", "MB, ours", "llama-quantize", "ours (ratio)"]
    header += ["calibrated (ratio)"] if options.calibrate else []
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)
    with tempfile.TemporaryDirectory(dir=options.model.parent) as name:
        comparison = Comparison(options, Path(name))
        for type in options.types:
            found = comparison.measure(type)
            print(row(type, found), flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"type": type, **found}) + "\n")


if __name__ == "__main__":
    main()
