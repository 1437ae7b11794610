#!/usr/bin/env python3
"""Record what llama.cpp computes with control vectors, for tests/unit/engine/test_control_vectors.py.

    python scripts/record/record_control_vectors.py --peer-python PEER/bin/python

PEER has llama-cpp-python. tests/goldens/control_vectors.npz gets the logits of each case of tests/support/adapters.py.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts" / "tools")]

from adapters import CONTROL_CASES, CONTROL_IDS, random_directions  # noqa: E402
from models import write_model  # noqa: E402
from peer import ask_for_arrays  # noqa: E402

from localllm.files.gguf.file import GGUFFile  # noqa: E402


def record(python: str) -> dict[str, np.ndarray]:
    """Return the logits of each case, float32 [tokens, vocab], by its name."""
    found = dict[str, np.ndarray]()
    with TemporaryDirectory() as name:
        for family, first, last in CONTROL_CASES:
            path = write_model(family, Path(name) / f"{family}.gguf")
            with GGUFFile.open(path) as file:
                vectors = random_directions(file).tolist()
            job = {"model": str(path), "tokens": CONTROL_IDS, "then": 0, "vectors": vectors, "layers": [first, last]}
            arrays = ask_for_arrays(python, Path(name), job="logits", **job)
            if arrays is None:
                sys.exit(f"llama.cpp does not compute {family}")
            found[f"{family} {first} {last}"] = arrays["prefill"]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="an interpreter that has llama-cpp-python")
    np.savez_compressed(ROOT / "tests" / "goldens" / "control_vectors.npz", **record(parser.parse_args().peer_python))
