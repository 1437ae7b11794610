"""Measure what quantizing an embedding model costs: llama-quantize's files and ours, as a Markdown table.

    python scripts/measure quantized-embedder LLAMA_QUANTIZE MODEL-F32.gguf Q4_K_M Q5_0... --calibrate

A cell is the mean of 1 - cosine between the vectors of the quantized file and of MODEL, computed by localllm, for
`--texts` passages of 5 to 60 words. With `--imatrix FILE`, both tools get it. Files are deleted once measured.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from common import PROSE, draw_passages, localllm_command, make_parser, print_header, print_row, run_process


def vectors(model: Path, texts: Path) -> np.ndarray:
    """Embed each line of a file, float64 [texts, width], of length 1."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "vectors.npy"
        run_process(localllm_command("embed", model, texts, "-o", out))
        rows = np.load(out).astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Comparison:
    """The original's vectors, and the files that are compared with it."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self._options, self._folder, self._texts = options, folder, folder / "texts.txt"
        lines = draw_passages(Path(options.text).read_text(encoding="utf-8"), options.texts, 0)
        self._texts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self._exact = vectors(options.model, self._texts)

    def _loss(self, name: str, command: list[str], libraries: Path | None = None) -> dict[str, float]:
        """Make a file, and return its mean 1 - cosine and its size in bytes."""
        run_process(command, libraries=libraries)
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
        ours = localllm_command("quantize", options.model, out / "ours.gguf", type, *matrix)
        found["ours"] = self._loss("ours.gguf", ours)
        if options.calibrate:
            calibrated = localllm_command("quantize", options.model, out / "calibrated.gguf", type, "--calibrate")
            found["calibrated"] = self._loss("calibrated.gguf", calibrated)
        return found


def row(type: str, found: dict[str, dict[str, float]]) -> list[str]:
    """Return the cells of a type's line."""
    theirs = found["theirs"]["loss"]
    cells = [f"{found['theirs']['bytes'] / 1e6:.1f}", f"{found['ours']['bytes'] / 1e6:.1f}", f"{theirs:.5f}"]
    losses = [found[name]["loss"] for name in ("ours", "calibrated") if name in found]
    return [type, *cells, *(f"{loss:.5f} ({loss / theirs:.2f})" for loss in losses)]


def main() -> None:
    """Parse, measure, print a line for each type as soon as it is known."""
    parser = make_parser(__doc__, threads=False)
    parser.add_argument("program", type=Path, help="llama-quantize")
    parser.add_argument("model", type=Path, help="an embedding model's GGUF file in F32")
    parser.add_argument("types", nargs="+")
    parser.add_argument("--calibrate", action="store_true", help="measure `quantize --calibrate`, too")
    parser.add_argument("--imatrix", type=Path, help="an importance matrix for both tools")
    parser.add_argument("--texts", type=int, default=88)
    parser.add_argument("--text", default=str(PROSE), help="where they come from")
    parser.add_argument("--json", type=Path, help="append the figures to this file, a line of JSON for each type")
    options = parser.parse_args()
    header = ["type", "MB, llama-quantize", "MB, ours", "llama-quantize", "ours (ratio)"]
    header += ["calibrated (ratio)"] if options.calibrate else []
    print_header(header)
    with tempfile.TemporaryDirectory(dir=options.model.parent) as name:
        comparison = Comparison(options, Path(name))
        for type in options.types:
            found = comparison.measure(type)
            print_row(row(type, found))
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"type": type, **found}) + "\n")
