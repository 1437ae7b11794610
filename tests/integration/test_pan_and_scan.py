"""Test Gemma 3's pan-and-scan from the command line to the answer: crops of a long image, and the words around them.

test_vision_encoder.py tests the positions of crops, test_image_cache.py their cache.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import write
from models.projectors import projector, seeing, write_projector

import localllm
from localllm.errors import UsageError
from tests.unit.engine.test_vision_encoder import picture

PICTURE = "\n\n<start_of_image>{}<end_of_image>\n\n"
WORDS = (  # Gemma3Processor.replace_image_token of transformers 5.23, for two crops
    f"Here is the original image {PICTURE} and here are some crops to help you see better {PICTURE} {PICTURE}"
)


def folder_of(name: str, tmp_path: Path) -> Path:
    """Write a vision model, its projector and an image with two crops; return the model's path."""
    picture((600, 300), 1).save(tmp_path / "long.png")
    write_projector(projector(name), tmp_path / "mmproj.gguf")
    return write(seeing(name, seed=5, context=2048), tmp_path / "tiny.gguf")


def test_crops_follow_the_image_with_the_words_of_transformers(tmp_path):
    """Compare with a prompt of the whole image and its crops as separate images."""
    path, shown = folder_of("gemma3", tmp_path), picture((600, 300), 1)
    with localllm.open(path, threads=2, cache=False, pan_and_scan=True) as model:
        ids = model.vision.encode(shown).ids
        logits = model.sequence().append(ids)[0]
        assert model.vision.encoder.encoded == 1
    with localllm.open(path, threads=2, cache=False) as model:
        parts = [shown, shown.crop((0, 0, 300, 300)), shown.crop((300, 0, 600, 300))]
        looks = [[token for token in model.vision.encode(part).ids if token < 0] for part in parts]
        texts = [model.tokenizer.encode(text, special=True) for text in WORDS.split("{}")]
        expected = [token for text, look in zip(texts, [*looks, []], strict=True) for token in (*text, *look)]
        assert np.array_equal(np.maximum(ids, -1), np.maximum(expected, -1)) and ids.count(-1) == 0
        assert np.array_equal(logits, model.sequence().append(expected)[0])


def test_pan_and_scan_prefills_more_of_long_images_only(tmp_path, cli):
    """Compare `chat` with `run`."""
    path, more = folder_of("gemma3", tmp_path), ["--temp", "0", "-n", "12", "-t", "2", "--no-cache"]
    picture((300, 300), 1).save(tmp_path / "square.png")

    def said(command: str, image: str, *options: str, stdin: bytes = b"") -> str:
        code, out, err = cli(command, str(path), "--image", str(tmp_path / image), *more, *options, stdin=stdin)
        assert code == 0 and "error" not in err
        return out

    asked = "-p", "What?"
    cut = said("run", "long.png", *asked, "--pan-and-scan")
    assert cut != said("run", "long.png", *asked)
    assert said("run", "square.png", *asked, "--pan-and-scan") == said("run", "square.png", *asked)
    assert said("chat", "long.png", "--pan-and-scan", stdin=b"What?") == cut


def test_models_without_crops_report_it(tmp_path, cli):
    """Try another family's projector, no projector, and an endpoint."""
    path = folder_of("idefics3", tmp_path)
    with pytest.raises(UsageError, match="pan-and-scan is for Gemma 3's projectors, this one's type is idefics3"):
        localllm.open(path, threads=2, cache=False, pan_and_scan=True)
    messages = ["pan-and-scan is for Gemma 3", "no projector (mmproj-", "--pan-and-scan is not available with"]
    places: list[list[Any]] = [[path], [path], ["--endpoint", "http://127.0.0.1:9"]]
    for message, place in zip(messages, places, strict=True):
        code, out, err = cli("run", *map(str, place), "-p", "What?", "--pan-and-scan")
        assert code != 0 and not out and message in err and err.count("\n") == 1
        (tmp_path / "mmproj.gguf").unlink(missing_ok=True)
