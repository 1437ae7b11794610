#!/usr/bin/env python3
"""Record how transformers puts the rows of LLaVA 1.6's images together, of sampled sizes, in tests/goldens.

    TORCH/bin/python scripts/record/record_lines.py

TORCH is a virtual environment with torch and transformers (recorded: 2.13.0 and 5.23.0). Of each image the numbers of
the rows are recorded in the order of the prompt, by their sum of SHA-256: -1 is the end of a line.
"""

import hashlib
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, image_size_to_num_patches

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "lines_of_llava16.npz"
SIDE, PER_SIDE = 336, 24
CUTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # rows and columns, those of LLaVA 1.6 7B


def main() -> None:
    draw = random.Random(0)
    sizes = [(int(10 ** draw.uniform(0.5, 3.5)), int(10 ** draw.uniform(0.5, 3.5))) for _ in range(600)]
    sizes = [size for size in sizes if max(size) <= 200 * min(size)]
    sizes += [(side, side + more) for side in (335, 336, 671, 672, 1008) for more in (-1, 0, 1)]
    found = [digest(np.array(order(size), np.int32)) for size in sizes]
    np.savez_compressed(GOLDEN, sizes=np.array(sizes, np.int32), digests=np.array(found))
    print(f"{len(sizes)} sizes, {GOLDEN.stat().st_size} bytes")


def digest(numbers: np.ndarray) -> str:
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


def order(size: tuple[int, int]) -> list[int]:
    """Return the numbers of the rows; size: columns and rows."""
    columns, rows = size
    count = image_size_to_num_patches((rows, columns), CUTS, SIDE)
    features = torch.arange(count * PER_SIDE**2, dtype=torch.float64).reshape(count, PER_SIDE**2, 1)
    of = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(image_size=SIDE, patch_size=SIDE // PER_SIDE), image_grid_pinpoints=CUTS
        )
    )
    newline = torch.tensor([-1.0], dtype=torch.float64)
    packed, _ = LlavaNextModel.pack_image_features(of, (features,), torch.tensor([[rows, columns]]), "default", newline)
    return packed[0].reshape(-1).long().tolist()


if __name__ == "__main__":
    main()
