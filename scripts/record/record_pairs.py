#!/usr/bin/env python3
"""Record token ids and vectors of transformers' CLIP for texts and pictures, in tests/goldens/pair_clip.npz.

The model is the tiny random one of tests/support/models/pairs.py; vectors are float64.

    python scripts/record/record_pairs.py --torch-python TORCH/bin/python

TORCH is a virtual environment with torch, transformers (recorded: 2.13.0 and 5.23.0) and Pillow.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from models import pairs  # noqa: E402
from models.golden import FOLDER  # noqa: E402

ASKING = """
import json, sys
import numpy as np, torch
from PIL import Image
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer
folder, texts = sys.argv[1], json.loads(sys.argv[2])
tokenizer = CLIPTokenizer.from_pretrained(folder)
model = CLIPModel.from_pretrained(folder).double().eval()
def vector(found):
    return np.asarray(getattr(found, "pooler_output", found).detach())[0]
made = {}
with torch.no_grad():
    for number, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"][:24]
        made[f"ids{number}"] = np.array(ids)
        made[f"text{number}"] = vector(model.get_text_features(input_ids=torch.tensor([ids])))
    with np.load(folder + "/pictures.npz") as file:
        for name, pixels in file.items():
            shown = CLIPImageProcessorPil.from_pretrained(folder)(Image.fromarray(pixels), return_tensors="pt")
            made[name] = vector(model.get_image_features(pixel_values=shown["pixel_values"].double()))
np.savez(folder + "/out.npz", **made)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        import json

        folder = pairs.write_pair(Path(made) / "clip")
        np.savez(folder / "pictures.npz", **{f"picture{n}": one for n, one in enumerate(pairs.pictures())})
        subprocess.run([options.torch_python, "-c", ASKING, str(folder), json.dumps(pairs.TEXTS)], check=True)
        with np.load(folder / "out.npz") as found:
            np.savez(FOLDER / "pair_clip.npz", digest=pairs.digest(), **found)


if __name__ == "__main__":
    main()
