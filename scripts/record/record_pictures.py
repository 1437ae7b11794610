#!/usr/bin/env python3
"""Record llama.cpp's image rows and logits for the projectors of tests/support/models/projectors.py, in tests/goldens.

    python scripts/record/record_pictures.py --peer-python PEER/bin/python --torch-python TORCH/bin/python [NAME...]

PEER is a virtual environment with llama-cpp-python (recorded: 0.3.36), TORCH one with torch and transformers (2.13.0
and 5.23.0), which computes the rows of the same pictures in float64.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts" / "tools")]
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
from peer import ask_peer  # noqa: E402
from PIL import Image  # noqa: E402

from localllm.engine.options import EngineOptions  # noqa: E402
from localllm.engine.vision_encoder import VisionEncoder  # noqa: E402
from localllm.files.gguf.file import GGUFFile  # noqa: E402

MARKER = "<__media__>"
TEXT_FIELDS = {
    "vocab": "vocab_size", "width": "embedding_length", "hidden": "feed_forward_length", "layers": "block_count",
    "heads": "attention.head_count", "kv_heads": "attention.head_count_kv", "base": "rope.freq_base",
    "epsilon": "attention.layer_norm_rms_epsilon", "head_dim": "attention.key_length",
    "window": "attention.sliding_window", "taps": "shortconv.l_cache", "interval": "full_attention_interval",
    "conv": "ssm.conv_kernel", "keys": "ssm.group_count", "values": "ssm.time_step_rank", "inner": "ssm.inner_size",
    "state": "ssm.state_size", "turned": "rope.dimension_count",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    names = options.names or list(PROJECTORS)
    with tempfile.TemporaryDirectory() as made:
        folders = {name: Path(made) / name for name in names}
        ask_peer(options.peer_python, *(in_mtmd(name, folder) for name, folder in folders.items()))
        run_transformers(options.torch_python, [in_transformers(name, folder) for name, folder in folders.items()])
        for name, folder in folders.items():
            with np.load(folder / "out.npz") as found, np.load(folder / "trained.npz") as trained:
                some = PictureGolden.some
                rows, seen = some(found["rows"]), some(trained["rows"])
                golden = PictureGolden(found["tokens"], rows, found["logits"], seen, trained["logits"], digest_of(name))
            golden.save(name)
            print(f"{name}: {len(golden.tokens)} tokens, {len(golden.rows)} rows, {float(golden.logits.std()):.3f}")


def in_mtmd(name: str, folder: Path) -> dict:
    """Return the job for llama.cpp: a prompt with two images."""
    folder.mkdir()
    write(seeing(name), folder / "model.gguf")
    write_projector(projector(name), folder / "mmproj.gguf")
    images = shown(name)
    for number, image in enumerate(images):
        np.save(folder / f"{number}.npy", image)
    job = {"job": "pictures", "model": str(folder / "model.gguf"), "mmproj": str(folder / "mmproj.gguf")}
    return job | {
        "text": MARKER.join(TEXT_AROUND),
        "images": [str(folder / f"{number}.npy") for number in range(len(images))],
        "out": str(folder / "out.npz"),
    }


def in_transformers(name: str, folder: Path) -> dict:
    """Return the job of run_transformers_vision.py: the same pictures, as the family prepared them."""
    reader = VisionEncoder(GGUFFile.open(folder / "mmproj.gguf"), EngineOptions(threads=1))
    h = reader.hyperparameters
    pictures = [
        picture for image in shown(name) for picture in reader.family.prepare(h, Image.fromarray(image)).pictures
    ]
    pixels = [
        ((np.asarray(picture, np.float64) / 255 - h.mean) / h.deviation).transpose(2, 0, 1) for picture in pictures
    ]
    np.savez(folder / "pixels.npz", *pixels)
    np.savez(folder / "tensors.npz", **projector(name).tensors)
    vision = {"hidden_size": h.width, "intermediate_size": h.hidden, "num_hidden_layers": h.layers,
              "num_attention_heads": h.heads, "image_size": h.side, "patch_size": h.patch,
              "layer_norm_eps": h.epsilon}  # fmt: skip
    config = {"vision": vision, "merge": h.merge, "out": h.out, "layer": getattr(h, "seen", h.layers)}
    config |= {"pattern": getattr(h, "pattern", 0), "deep": list(getattr(h, "deep", ()))}
    if (cuts := getattr(h, "cuts", None)) and cuts.sizes:
        config |= {"cuts": [[rows, columns] for columns, rows in cuts.sizes]}
        config |= {"sizes": [image.shape[:2] for image in shown(name)]}
    reader.close()
    files = {key: str(folder / f"{key}.npz") for key in ("tensors", "pixels")}
    job = {"kind": h.kind, "config": config, "out": str(folder / "trained.npz"), **files}
    return job | text_of(
        name, folder, [[length // h.merge for length in h.compute_grid(picture)] for picture in pictures]
    )


def text_of(name: str, folder: Path, grids: list[list[int]]) -> dict:
    """Return the language model's job, whose logits are compared, too; grids: of the pictures, in rows."""
    made = seeing(name)
    np.savez(folder / "text.npz", **made.tensors)
    fields = {key.removeprefix(f"{made.arch}."): value for key, value in made.metadata.items()}
    text = {"arch": made.arch, "base": 10000.0}
    text |= {key: fields[field] for key, field in TEXT_FIELDS.items() if field in fields}
    text.setdefault("head_dim", text["width"] // text["heads"])
    if "rope.dimension_sections" in fields:
        text["sections"] = fields["rope.dimension_sections"][:3]
    more = {"text_tensors": str(folder / "text.npz"), "tokens": str(folder / "out.npz"), "grids": grids}
    return {"text": text, **more}


def run_transformers(python: str, jobs: list[dict]) -> None:
    """Run all jobs in one process."""
    command, lines = [python, Path(__file__).with_name("run_transformers_vision.py")], "\n".join(map(json.dumps, jobs))
    done = subprocess.run(command, input=lines, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"transformers: {done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
