#!/usr/bin/env python3
"""Record what exact arithmetic makes of the real models of `scripts/test --real`: tests/goldens/real.json.

    python scripts/record/record_real.py --peer-python PEER/bin/python [NAME...]

PEER is a virtual environment with llama-cpp-python. Exact is what llama.cpp computes for the file's weights in F32,
which `localllm quantize` writes; beside it stands what llama.cpp computes for the file itself. Of each model: prompts,
the most likely tokens behind them one after the other, by how much each was more likely than the next one (in logits),
and the perplexity of tests/support/prose.txt as llama-perplexity has it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "tools")]

from peer import ask_for_arrays, ask_for_json  # noqa: E402
from real_models import read_table  # noqa: E402

from localllm.api import open_tokenizer  # noqa: E402
from localllm.services.evaluation.scores import add_bos, split_chunks  # noqa: E402

MODELS = ["qwen-0.5b", "gemma-270m"]
TOKENS, CONTEXT, CHUNKS = 48, 512, 4
OUT, TEXT = ROOT / "tests" / "goldens" / "real.json", ROOT / "tests" / "support" / "prose.txt"
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small computer that",
    "def fibonacci(n):\n    ",
    "The three primary colors are",
    "Water boils at 100 degrees Celsius because",
    "import numpy as np\n\ndef mean_of_rows(matrix):\n",
    "A list of European countries and their capitals:\n\n1.",
    "Q: What is 12 times 12?\nA:",
    "The old man walked slowly down to the harbour, and",
    "SELECT name, price FROM products WHERE",
    "In 1969, the first human being",
    "Ein kleiner Hund lief durch den Wald und",
]


def greedy(python: str, model: Path, prompts: list[list[int]], folder: Path) -> list[dict[str, list[Any]]]:
    """Return the most likely tokens behind each prompt, and their margins."""
    found = []
    for prompt in prompts:
        job = {"job": "logits", "model": str(model), "tokens": prompt, "then": TOKENS, "threads": 2}
        made = ask_for_arrays(python, folder, **job) or sys.exit(f"{model} was not computed")
        rows = np.concatenate([made["prefill"][-1:], made["decode"][:-1]])
        best = np.partition(rows, -2)[:, -2:]
        margins = (best[:, 1] - best[:, 0]).round(4).tolist()
        found.append({"tokens": made["then"].tolist(), "margins": margins})
    return found


def perplexity(python: str, model: Path, chunks: np.ndarray, read: list[list[int]], folder: Path) -> float:
    """Compute the perplexity of the second halves of all chunks."""
    job = {"job": "score", "model": str(model), "texts": read, "targets": chunks.tolist()}
    return float(np.exp(np.mean(ask_for_json(python, folder, **job))))


def record(name: str, python: str, folder: Path) -> dict[str, Any]:
    """Record a model."""
    path = read_table()[name].path
    exact, tokenizer = folder / "exact.gguf", open_tokenizer(path)
    words = [sys.executable, "-m", "localllm", "quantize", path, exact, "F32", "--force", "--allow-requantize"]
    subprocess.run(words, check=True, capture_output=True)
    prompts = [tokenizer.encode(prompt, special=True, bos=True) for prompt in PROMPTS]
    chunks = split_chunks(tokenizer.encode(TEXT.read_text("utf-8"), bos=True), CONTEXT, CHUNKS)
    read = [add_bos(chunk, tokenizer) for chunk in chunks]
    made = greedy(python, exact, prompts, folder)
    theirs = greedy(python, path, prompts, folder)
    same = [one["tokens"] == other["tokens"] for one, other in zip(made, theirs, strict=True)]
    figures = {"exact": perplexity(python, exact, chunks, read, folder)}
    figures["llama.cpp"] = perplexity(python, path, chunks, read, folder)
    texts = [{"prompt": prompt, **one} for prompt, one in zip(PROMPTS, made, strict=True)]
    exact.unlink()
    return {
        "texts": texts,
        "texts_of_llama_cpp": sum(same),
        "perplexity": figures,
        "chunks": CHUNKS,
        "context": CONTEXT,
    }


def main() -> None:
    """Parse, record, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; none: all")
    parser.add_argument("--peer-python", required=True, help="an interpreter that has llama-cpp-python")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorded = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {}
        for name in options.names or MODELS:
            recorded[name] = record(name, options.peer_python, Path(folder))
            OUT.write_text(json.dumps(recorded, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
