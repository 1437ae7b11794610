"""Images against llama.cpp's mtmd, as recorded: a prompt's tokens with two images, their rows, the logits behind.

scripts/record/record_pictures.py records them. llama.cpp's GELU comes from a table of float16: that is most of the
difference.
"""

from pathlib import Path

import numpy as np
import pytest
from engines import bound
from models import write
from models.golden import FOLDER
from models.projectors import (
    PROJECTORS,
    TEXT_AROUND,
    PictureGolden,
    digest_of,
    projector,
    seeing,
    shown,
    write_projector,
)
from PIL import Image

import localllm
from localllm.arch.vision import internvl, llava
from localllm.arch.vision.hyperparameters import cut_into_patches
from localllm.arch.vision.vit import make_table, to_array
from localllm.engine.options import EngineOptions
from localllm.engine.vision_encoder import VisionEncoder
from localllm.files.gguf.file import GGUFFile
from tests.goldens.test_logits import nmse


@pytest.fixture
def as_llama_cpp(monkeypatch):
    """See as llama.cpp does.

    LLaVA and InternVL have the token for the whole image behind the patches, which have their neighbours' positions;
    LLaVA lacks the file's last layer where the file does not say which one counts, and has GELU by tanh; LLaVA 1.6 has
    the tiles' rows as they are, in front of those of the whole image.
    """

    def prepend_class_token(h, picture):
        pixels = cut_into_patches(h, picture)
        return np.concatenate((pixels, np.zeros_like(pixels[:1])))

    def add_class_position(b, v):
        bias = v.get_bias("patch_embd")
        b.ignore(v.position_embd, v.require_exact("class_embd"))
        numbers = to_array(v.position_embd).copy()
        numbers[-1] += to_array(v.require_exact("class_embd")) - (0 if bias is None else to_array(bias))
        return make_table("positions", numbers)

    def project(b, w, h, x):
        mm = w.get_submodel("mm.")
        b.ignore(*filter(None, map(w.get_exact, llava.NEWLINES)))
        return b.linear(b.gelu(b.linear(x, mm.require("0"))), mm.require("2"))

    def arrange_rows(rows, size, how, side, newline):
        return np.concatenate((*rows[1:], rows[0]))

    monkeypatch.setattr(llava, "arrange_rows", arrange_rows)
    monkeypatch.setattr(llava, "project", project)
    layer = llava.read_feature_layer
    for family in (llava, internvl):
        monkeypatch.setattr(family, "prepend_class_token", prepend_class_token)
        monkeypatch.setattr(family, "add_class_position", add_class_position)
    gathered = internvl.merge_patches
    monkeypatch.setattr(internvl, "gather", lambda h, x, grid: gathered(h, np.roll(x, 1, axis=0), grid))
    monkeypatch.setattr(
        llava,
        "read_feature_layer",
        lambda fields, layers: layer(fields, layers) - (fields.read_raw("vision.feature_layer") is None),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTORS)
def test_images_are_seen_as_by_llama_cpp(tmp_path, name, as_llama_cpp):
    golden = PictureGolden.load(name)
    assert golden.digest == digest_of(name), f"{name} is not what its golden is of: record it anew"
    ids, logits, rows = prompted(tmp_path, name)
    assert np.array_equal(np.maximum(ids, -1), golden.tokens)
    assert len(rows) == int((golden.tokens < 0).sum()) and nmse(golden.some(rows), golden.rows) < 1e-6
    assert nmse(logits, golden.logits) < 1e-6


def prompted(folder: Path, name: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return the ids of the prompt, logits behind it, and the images' rows."""
    write(seeing(name), folder / "model.gguf")
    write_projector(projector(name), folder / "mmproj.gguf")
    with localllm.open(folder / "model.gguf", threads=2, cache=False, kv_type="f32") as model:
        images = [model.vision.encode(image).ids for image in shown(name)]
        ids = [
            token
            for text, image in zip(TEXT_AROUND, [*images, []], strict=True)
            for token in (*model.tokenizer.encode(text, special=True), *image)
        ]
        rows = np.concatenate([seen.rows for known in model.vision.encoder._cache.values() for seen in known.seen])
        return ids, model.sequence().append(ids)[0], rows


@pytest.mark.parametrize("name", PROJECTORS)
def test_logits_behind_images_agree_with_transformers(tmp_path, name):
    assert nmse(prompted(tmp_path, name)[1], PictureGolden.load(name).said) < bound(1e-8, 1e-6)


@pytest.mark.parametrize("name", PROJECTORS)
def test_rows_of_images_agree_with_transformers(tmp_path, name):
    path = write_projector(projector(name), tmp_path / "mmproj.gguf")
    reader = VisionEncoder(GGUFFile.open(path), EngineOptions(threads=2))
    images = [reader.family.prepare(reader.hyperparameters, Image.fromarray(image)) for image in shown(name)]
    rows = np.concatenate([reader.read(picture) for image in images for picture in image.pictures])
    reader.close()
    golden = PictureGolden.load(name)
    assert nmse(golden.some(rows), golden.trained) < bound(1e-10, 1e-6)


def test_goldens_of_pictures_are_small():
    assert all((FOLDER / f"picture_{name}.npz").stat().st_size < 1 << 16 for name in PROJECTORS)
