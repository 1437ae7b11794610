"""Measure time and memory of a vision encoder, here and in llama.cpp (SigLIP-400M's shape, random weights).

    python scripts/measure pictures --peer-python PEER [--format F16] [--side 512] [--rounds 3]

One picture of so many pixels, both programs in turn with the same file and the same threads; the fastest round of each.
Memory is the most that a process held (ru_maxrss): of `localllm run --image` with a tiny language model and one token
of an answer, and of llama.cpp, which opens the same model and reads no token.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import localllm_command, make_parser
from models import write
from models.projectors import projector, seeing, write_projector
from peer import PROGRAM, ask_for_json
from PIL import Image

from localllm.engine.options import EngineOptions
from localllm.engine.vision_encoder import VisionEncoder
from localllm.files.gguf.file import GGUFFile

SIGLIP = {"layers": 27, "width": 1152, "hidden": 4304, "heads": 16, "patch": 16, "merge": 4}


def main() -> None:
    parser = make_parser(__doc__, "peer", rounds=3)
    parser.add_argument("--format", default="F16")
    parser.add_argument("--side", type=int, default=512, help="pixels")
    parser.add_argument("--folder", type=Path, help="where the file is written, or is since an earlier run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(exist_ok=True)
        path = folder / f"mmproj-{options.format}.gguf"
        if not path.exists():
            write_all(folder, path, options)
        measure_memory(folder, path, options)
        measure(folder, path, options)


def write_all(folder: Path, path: Path, options: argparse.Namespace) -> None:
    """Write a projector, a model that fits it, and a picture."""
    side = options.side
    metadata = {"vision.projector.scale_factor": 4, "vision.preproc_image_size": side}
    write_projector(projector("idefics3", metadata=metadata, **SIGLIP, side=side), path, options.format)
    write(seeing("idefics3"), folder / "model.gguf")
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    np.save(folder / "picture.npy", pixels)
    Image.fromarray(pixels).save(folder / "picture.png")


def measure(folder: Path, path: Path, options: argparse.Namespace) -> None:
    picture = Image.fromarray(np.load(folder / "picture.npy"))
    reader = VisionEncoder(GGUFFile.open(path), EngineOptions(threads=options.threads))
    reader.read(picture)
    ours, theirs = [], []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        reader.read(picture)
        ours.append(time.perf_counter() - begin)
        theirs.append(ask_for_json(options.peer_python, folder, **peer_job(options, folder, path)))
    reader.close()
    print(f"{options.format}: {min(ours):.2f} s, llama.cpp {min(theirs):.2f} s, ratio {min(theirs) / min(ours):.2f}")


def peer_job(options: argparse.Namespace, folder: Path, path: Path) -> dict:
    """Return the job for llama.cpp: the seconds of its second encoding."""
    job = {"job": "pictures", "model": str(folder / "model.gguf"), "mmproj": str(path), "text": "<__media__>"}
    return job | {"images": [str(folder / "picture.npy")], "threads": options.threads, "seconds": True}


def measure_memory(folder: Path, path: Path, options: argparse.Namespace) -> None:
    run = ["run", folder / "model.gguf", "-p", "?", "--image", folder / "picture.png", "--mmproj", path, "-n", 1]
    ours = peak(localllm_command(*run, "--no-cache", "-t", options.threads))
    job = peer_job(options, folder, path) | {"out": str(folder / "seconds.json")}
    theirs = peak([options.peer_python, str(PROGRAM)], json.dumps(job))
    print(
        f"{options.format}: {ours / 1e6:.0f} MB, llama.cpp {theirs / 1e6:.0f} MB, file {path.stat().st_size / 1e6:.0f}"
    )


def peak(command: list[str], given: str = "") -> int:
    """Bytes that a process held at most; asked by a small one, as a child is counted with what its parent held."""
    asking = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024); sys.exit(done.returncode)"
    )
    words = [sys.executable, "-c", asking, *command]
    done = subprocess.run(words, input=given, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return int(done.stdout)
