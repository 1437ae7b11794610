#!/usr/bin/env python3
"""Record what llama.cpp's layers and heads that guess say, in tests/goldens/guesses.npz.

    python scripts/record/record_guesses.py --peer-python PEER/bin/python

PEER is a virtual environment with llama-cpp-python 0.3.36: functions of its library are called that other versions may
name otherwise.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts" / "tools")]
from models import write  # noqa: E402
from models.golden import kept  # noqa: E402
from models.guessing import GUESSES, HEADS, MADE, OWN, text, with_guess, with_head  # noqa: E402
from peer import ask_for_arrays  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    options, found = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [*OWN, *MADE, *HEADS]:
            made, of_head = with_head(name) if name in HEADS else (with_guess(name), None)
            path = str(write(made, Path(folder, f"{name}.gguf")))
            own = str(write(of_head, Path(folder, f"{name}-head.gguf"))) if of_head else None
            job = {"job": "guesses", "model": path, "head": own, "tokens": text()}
            arrays = ask_for_arrays(options.peer_python, Path(folder), **job) or sys.exit(f"{name} was not computed")
            found |= {name: kept(arrays["rows"]), f"{name} digest": (of_head or made).digest()}
            print(f"{name}: logits of {found[name].std():.2f}")
    np.savez(GUESSES, **found)


if __name__ == "__main__":
    main()
