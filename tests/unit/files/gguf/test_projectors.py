"""Projectors as files: inspected, fitted and quantized."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from models import write
from models.projectors import PROJECTORS, projector, seeing, shown, write_projector

from localllm.engine.vision_encoder import VisionEncoder
from localllm.files.gguf.file import GGUFFile
from tests.goldens.test_logits import nmse

WIDE = {"width": 256, "hidden": 512, "heads": 4, "out": 256}
SMALL = {"F16": 1e-6, "BF16": 2e-4, "Q8_0": 1e-3, "Q6_K": 3e-3, "Q5_1": 1e-2, "Q4_K_M": 5e-2, "Q4_0": 1e-1}
# What llama-quantize (llama.cpp, November 2026) makes of these projectors, all matrices F32 before: formats of the
# layers' matrices in Q4_K_M; with other types all are of one. Behind the layers are the projectors' own.
MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_out": "Q4_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K"}
VALUES = "Q4_K", "Q6_K"
OWN = {"gemma3": [], "idefics3": ["mm.model.fc"], "llava": ["mm.0", "mm.2"]}


@pytest.fixture
def run_command(cli):
    """Return a function that runs a command and returns its exit code, stdout and stderr."""
    return lambda *arguments: cli(*map(str, arguments))


def rows_of(path: Path, name: str) -> np.ndarray:
    """Return the rows that a projector makes of two images."""
    from PIL import Image

    with GGUFFile.open(path) as file:
        reader = VisionEncoder(file)
        family, h = reader.family, reader.hyperparameters
        pictures = [picture for image in shown(name) for picture in family.prepare(h, Image.fromarray(image)).pictures]
        rows = np.concatenate([reader.read(picture) for picture in pictures])
        reader.close()
        return rows


def formats_of(path: Path) -> dict[str, str]:
    """Return the formats of matrices and tensors of more dimensions, by name."""
    return {
        tensor.name.removesuffix(".weight"): tensor.tensor_type.name
        for tensor in gguf.GGUFReader(path).tensors
        if len(tensor.shape) > 1
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("type", SMALL)
def test_a_quantized_projector_has_llama_quantizes_formats(run_command, tmp_path, name, type):
    """Except Gemma's matrix that lies on its side; and expect nearly the same rows."""
    source = write_projector(projector(name, **WIDE), tmp_path / "mmproj.gguf")
    target = tmp_path / "small.gguf"
    code, _, err = run_command("quantize", source, target, type)
    assert code == 0, err
    found, expected = formats_of(target), {"v.patch_embd": "F32", "v.position_embd": "F32"}
    mixed = type == "Q4_K_M"
    for layer in range(2):
        expected |= {f"v.blk.{layer}.{part}": MIXED[part] if mixed else type for part in MIXED}
        expected[f"v.blk.{layer}.attn_v"] = VALUES[layer] if mixed else type
    expected |= dict.fromkeys(OWN[name], "Q4_K" if mixed else type)
    expected |= {"mm.input_projection": "F32"} if name == "gemma3" else {}
    assert found == expected
    error = nmse(rows_of(target, name), rows_of(source, name))
    assert SMALL[type] / 1000 < error < SMALL[type]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTORS)
def test_every_projector_quantizes_to_blocks(run_command, tmp_path, name):
    """Expect a file that can be read, and that sees the same."""
    source, target = write_projector(projector(name), tmp_path / "mmproj.gguf"), tmp_path / "small.gguf"
    assert run_command("quantize", source, target, "Q8_0")[0] == 0
    assert "Q8_0" in formats_of(target).values() and 1e-6 < nmse(rows_of(target, name), rows_of(source, name)) < 1e-3


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_a_quantized_projector_beside_a_model_answers(run_command, tmp_path, type):
    write(seeing("llava", width=256, heads=8, context=512), tmp_path / "tiny.gguf")
    source = write_projector(projector("llava", **WIDE), tmp_path / "whole.gguf")
    assert run_command("quantize", source, tmp_path / "mmproj-tiny.gguf", type)[0] == 0
    source.unlink()
    from PIL import Image

    Image.fromarray(shown("llava")[0]).save(tmp_path / "one.png")
    arguments = ["-p", "?", "--image", tmp_path / "one.png", "-n", 8, "--no-cache", "-t", 2]
    code, out, err = run_command("run", tmp_path / "tiny.gguf", *arguments)
    assert code == 0 and out and not err


def test_a_damaged_projector_is_not_quantized(run_command, tmp_path):
    """Leave out a tensor, or put weights that are no numbers."""
    whole, path = projector("llava", **WIDE), tmp_path / "mmproj.gguf"
    spoilt = [
        {name: value for name, value in whole.tensors.items() if name != "v.patch_embd.weight"},
        {name: value * (np.nan if name == "mm.0.weight" else 1) for name, value in whole.tensors.items()},
    ]
    for tensors, message in zip(spoilt, ("v.patch_embd", "mm.0.weight"), strict=True):
        write_projector(replace(whole, tensors=tensors), path)
        code, _, err = run_command("quantize", path, tmp_path / "none.gguf", "Q8_0")
        assert code == 3 and message in err and len(err.splitlines()) == 1 and not (tmp_path / "none.gguf").exists()


@pytest.mark.parametrize("name", PROJECTORS)
def test_inspect_shows_a_projectors_facts(run_command, tmp_path, name):
    """Show its contents, that it can be used, and by which models."""
    source = projector(name)
    path = write_projector(source, tmp_path / "mmproj.gguf")
    facts = json.loads(run_command("inspect", path, "--json")[1])
    side, patch, width = (
        source.metadata[f"clip.vision.{key}"] for key in ("image_size", "patch_size", "projection_dim")
    )
    kind = source.metadata["clip.projector_type"]
    assert facts["sees"] == {"type": kind, "side": side, "patch": patch, "width": width}
    layers = source.metadata["clip.vision.block_count"]
    assert (facts["architecture"], facts["supported"], facts["valid"], facts["layers"]) == ("clip", True, True, layers)
    assert facts["parameters"] == sum(value.size for value in source.tensors.values())
    assert facts["formats"]["F32"]["tensors"] == len(source.tensors) and facts["memory"] == []
    code, out, _ = run_command("inspect", path, "--check")
    assert code == 0 and f"pictures of {side} x {side} in patches of {patch}, for models {width} wide" in out
    assert "chat template" not in out


def test_a_damaged_projector_is_an_error_and_an_unknown_type_none(run_command, tmp_path):
    path = write_projector(projector("llava", metadata={"vision.attention.head_count": 5}), tmp_path / "mmproj.gguf")
    code, _, err = run_command("inspect", path)
    assert code == 3 and "96 is not divisible by vision.attention.head_count 5" in err
    path = write_projector(projector("llava", metadata={"projector_type": "other"}), tmp_path / "mmproj.gguf")
    code, out, _ = run_command("inspect", path)
    assert code == 0 and "not usable: projectors of the type other are not supported" in out


@pytest.mark.parametrize(
    ("tensor", "shape"), [("v.class_embd", (95,)), ("v.class_embd", (96, 96)), ("v.position_embd.weight", (17 * 96,))]
)
def test_rows_for_the_whole_image_must_have_their_shape(run_command, tmp_path, tensor, shape):
    """Found by scripts/fuzz/fuzz.py: LLaVA's first row of positions is added to before anything else is checked."""
    whole = projector("llava")
    tensors = {**whole.tensors, tensor: np.zeros(shape, np.float32)}
    code, _, err = run_command("inspect", write_projector(replace(whole, tensors=tensors), tmp_path / "mmproj.gguf"))
    assert code == 3 and tensor in err and "Traceback" not in err


def test_an_architecture_that_is_no_text_is_refused(run_command, tmp_path):
    whole = projector("llava")
    metadata = {**whole.metadata, "general.architecture": np.arange(3, dtype=np.int32)}
    code, _, err = run_command("inspect", write_projector(replace(whole, metadata=metadata), tmp_path / "mmproj.gguf"))
    assert code == 3 and len(err.splitlines()) == 1 and "Traceback" not in err


@pytest.mark.slow
def test_inspect_and_fit_count_a_projector_beside_a_model(run_command, tmp_path):
    path = write(seeing("llava"), tmp_path / "tiny.gguf")
    before = json.loads(run_command("fit", path, "--json")[1])
    assert json.loads(run_command("inspect", path, "--json")[1])["projector"] is None and before["projector_bytes"] == 0
    beside = write_projector(projector("llava"), tmp_path / "mmproj-tiny.gguf")
    size = beside.stat().st_size
    facts = json.loads(run_command("inspect", path, "--json")[1])
    assert facts["projector"] == {"path": str(beside), "bytes": size} and facts["sees"] is None
    assert f"images, by {beside}" in run_command("inspect", path)[1]
    after = json.loads(run_command("fit", path, "--json")[1])
    assert after["projector_bytes"] == size and "projector" in run_command("fit", path)[1]
    needed = Counter(row["needed_bytes"] for row in before["rows"])
    assert Counter(row["needed_bytes"] - size for row in after["rows"]) == needed
    shutil.copy(beside, tmp_path / "mmproj-other.gguf")
    assert json.loads(run_command("inspect", path, "--json")[1])["projector"]["path"] == str(beside)
