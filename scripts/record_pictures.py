#!/usr/bin/env python3
"""Record what llama.cpp sees by the tiny random projectors of tests/models/projectors.py, in tests/goldens.

    python scripts/record_pictures.py --peer-python PEER/bin/python [NAME...]

PEER is a virtual environment with llama-cpp-python (recorded: 0.3.36).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from models import write  # noqa: E402
from models.projectors import (  # noqa: E402
    PROJECTORS,
    TEXT_AROUND,
    PictureGolden,
    digest_of,
    projector,
    seeing,
    shown,
    write_projector,
)

MARKER = "<__media__>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    for name in options.names or PROJECTORS:
        with tempfile.TemporaryDirectory() as folder:
            record(name, Path(folder), options.peer_python)


def record(name: str, folder: Path, peer: str) -> None:
    """Make a golden of what llama.cpp says."""
    write(seeing(name), folder / "model.gguf")
    write_projector(projector(name), folder / "mmproj.gguf")
    images = shown(name)
    for number, image in enumerate(images):
        np.save(folder / f"{number}.npy", image)
    job = {"model": str(folder / "model.gguf"), "mmproj": str(folder / "mmproj.gguf"), "text": MARKER.join(TEXT_AROUND)}
    job |= {"images": [str(folder / f"{number}.npy") for number in range(len(images))], "out": str(folder / "out.npz")}
    command = [peer, str(ROOT / "scripts" / "run_mtmd.py")]
    done = subprocess.run(command, input=json.dumps(job), text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    with np.load(folder / "out.npz") as found:
        golden = PictureGolden(found["tokens"], found["rows"], found["logits"], digest_of(name))
    golden.save(name)
    print(f"{name}: {len(golden.tokens)} tokens, {len(golden.rows)} rows, {float(golden.logits.std()):.3f}")


if __name__ == "__main__":
    main()
