#!/usr/bin/env python3
"""How long a vision encoder takes for a picture, here and in llama.cpp: SigLIP-400M's shape, random weights.

    python scripts/measure_pictures.py --peer-python PEER/bin/python [--format F16] [--side 512] [--rounds 3]

One picture of so many pixels, both programs in turn with the same file and the same threads; the fastest round of each.
PEER is a virtual environment with llama-cpp-python.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from models import write  # noqa: E402
from models.projectors import projector, seeing, write_projector  # noqa: E402

from localllm.engine.options import EngineOptions  # noqa: E402
from localllm.engine.pictures import PictureReader  # noqa: E402
from localllm.files.gguf_file import GGUFFile  # noqa: E402

SIGLIP = {"layers": 27, "width": 1152, "hidden": 4304, "heads": 16, "patch": 16, "merge": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--format", default="F16")
    parser.add_argument("--side", type=int, default=512, help="pixels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the file is written, or is since an earlier run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(exist_ok=True)
        path = folder / f"mmproj-{options.format}.gguf"
        if not path.exists():
            write_all(folder, path, options)
        measure(folder, path, options)


def write_all(folder: Path, path: Path, options: argparse.Namespace) -> None:
    """A projector, a model that goes with it, and a picture."""
    side = options.side
    metadata = {"vision.projector.scale_factor": 4, "vision.preproc_image_size": side}
    write_projector(projector("idefics3", metadata=metadata, **SIGLIP, side=side), path, options.format)
    write(seeing("idefics3"), folder / "model.gguf")
    np.save(folder / "picture.npy", np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


def measure(folder: Path, path: Path, options: argparse.Namespace) -> None:
    picture = Image.fromarray(np.load(folder / "picture.npy"))
    reader = PictureReader(GGUFFile.open(path), EngineOptions(threads=options.threads))
    reader.read(picture)
    ours, theirs = [], []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        reader.read(picture)
        ours.append(time.perf_counter() - begin)
        theirs.append(peer_seconds(options, folder, path))
    reader.close()
    print(f"{options.format}: {min(ours):.2f} s, llama.cpp {min(theirs):.2f} s, ratio {min(theirs) / min(ours):.2f}")


def peer_seconds(options: argparse.Namespace, folder: Path, path: Path) -> float:
    """Of llama.cpp's second encoding in a process."""
    files = [str(file) for file in (folder / "model.gguf", path, folder / "picture.npy")]
    command = [options.peer_python, str(ROOT / "scripts" / "time_mtmd.py"), *files, str(options.threads)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return float(done.stdout)


if __name__ == "__main__":
    main()
