"""Scales that are folded away: where they can be, that the model stays the same, and that they gain."""

from pathlib import Path

import numpy as np
import pytest

from localllm.arch import architecture
from localllm.arch.weights import Weights
from localllm.engine.record.folds import Fold, folds
from localllm.engine.record.recorder import recorded
from localllm.files.gguf_file import GGUFFile
from localllm.kernels.widen import Widener
from localllm.quant.eight_bits import rounded
from localllm.quant.recipes import RECIPES
from localllm.services.calibrate import Calibration
from localllm.services.folded import FoldedSource
from localllm.services.folding import FoldReader, scales_for, usual
from localllm.services.originals import Originals
from localllm.services.quantize import open_source
from localllm.services.quantize_plan import QuantizeRequest, make_plan

TEXT = "hello world, " * 60
# Of a tied embedding, experts, a latent of attention, recurrent layers, norms of heads and behind blocks, biases, fused
# matrices, a norm for two branches: what is folded in the first layer, and behind the last one.
FOLDED = {
    "gemma3": ["attn_norm", "attn_v", "ffn_norm", "ffn_up"],
    "llama_moe": ["attn_norm", "attn_v", "ffn_norm", "ffn_up_exps", "output_norm"],
    "deepseek2_v3": ["attn_norm", "attn_q_a_norm", "ffn_norm", "ffn_up", "output_norm"],
    "mamba2": ["attn_norm", "output_norm"],
    "qwen35": ["attn_norm", "post_attention_norm", "ffn_up", "output_norm"],
    "gpt_oss": ["attn_norm", "attn_v", "post_attention_norm", "output_norm"],
    "phi3": ["attn_norm", "attn_qkv", "ffn_norm", "ffn_up", "output_norm"],
    "falcon": ["attn_norm", "attn_qkv", "output_norm"],
}


def found_in(path: Path) -> list[Fold]:
    file = GGUFFile.open(path)
    module, h = architecture(file)
    return folds(recorded(file, module.forward, Weights(file.tensors), h, 32).operations, file.tensors)


@pytest.mark.parametrize("kind", FOLDED)
def test_where_scales_can_be_folded_away(shared: Path, kind: str):
    made = [fold.divided[0][0] for fold in found_in(shared / f"goldens/arch/{kind}.gguf")]
    own = [name for name in made if not name.startswith("blk.") or name.startswith("blk.0.")]
    assert [name.removeprefix("blk.0.").removesuffix(".weight") for name in own] == FOLDED[kind]


def test_rows_of_fused_matrices_and_heads_in_groups(shared: Path):
    by_made = {fold.divided[0][0]: fold for fold in found_in(shared / "goldens/arch/falcon.gguf")}
    values = by_made["blk.0.attn_qkv.weight"]
    assert (values.width, values.divided[0][1], values.heads, values.times) == (32, 160, 1, 4)
    np.testing.assert_array_equal(Fold(4, (), (), 2, 3).read(np.arange(4)), [0, 1] * 3 + [2, 3] * 3)
    np.testing.assert_array_equal(Fold(4, (), (), 2, 3).mean(np.array([0, 1] * 3 + [2, 3] * 3)), np.arange(4))


@pytest.mark.parametrize("kind", FOLDED)
def test_a_scaled_model_computes_the_same(shared: Path, tmp_path: Path, kind: str):
    """Powers of two, with which floats are as exact as before: only where they are out of range something is lost."""
    (tmp_path / "text.txt").write_text(TEXT)
    source = open_source(str(shared / f"goldens/arch/{kind}.gguf"))
    request = QuantizeRequest(RECIPES["Q4_0"], allow_requantize=True, texts=[str(tmp_path / "text.txt")])
    plan = make_plan(source, request)
    calibration = Calibration(plan, request.texts)
    widener = Widener({job.tensor.format for job in plan.jobs})
    generator = np.random.default_rng(5)
    scales = [(fold, np.exp2(generator.integers(-3, 4, fold.width)).astype(np.float32)) for fold in calibration.folds()]
    scaled = calibration.planned(make_plan(FoldedSource(source, scales, widener), request))
    chunks = [chunk[:12] for chunk in calibration.chunks[:2]]
    before, after = (each.logits(Originals(each.jobs, widener), chunks, 1) for each in (calibration, scaled))
    changed = [fold.multiplied[0] for fold, _ in scales]
    assert changed and all(
        not np.array_equal(
            *(Originals(each.jobs, widener).sampled(each.jobs[name].tensor, 0, 4) for each in (calibration, scaled))
        )
        for name in changed
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * np.abs(one).max())


def reader(format: str, sizes: np.ndarray) -> FoldReader:
    """A matrix whose inputs have columns of such sizes."""
    generator, columns = np.random.default_rng(1), len(sizes)
    x = generator.normal(size=(300, columns)).astype(np.float32) * sizes
    return FoldReader(
        format, generator.normal(0, 0.1, (32, columns)).astype(np.float32), (x[::2] ** 2).mean(0), x[1::2]
    )


@pytest.mark.parametrize("format", ["Q4_K", "Q8_0"])
def test_columns_that_stand_out_are_scaled(format: str):
    sizes = np.ones(512, np.float32)
    sizes[[7, 300]] = 100
    fold, one = Fold(512, (), ()), reader(format, sizes)
    scales = scales_for(fold, [one])
    assert scales is not None and scales[7] > 2 * np.median(scales)
    assert one.error(scales) < 0.8 * one.error(np.ones(512, np.float32))


def test_without_a_gain_nothing_is_scaled():
    """All columns meet the same, and all weigh the same."""
    generator = np.random.default_rng(1)
    x = generator.choice(np.array([-1, 1], np.float32), (200, 512))
    alike = generator.permuted(np.tile(generator.normal(size=(32, 1)).astype(np.float32), 512), axis=0)
    assert scales_for(Fold(512, (), ()), [FoldReader("Q4_K", alike, (x[::2] ** 2).mean(axis=0), x[1::2])]) is None


def test_columns_that_meet_nothing_or_weigh_nothing_stay():
    met, weighed = np.array([0, 1, 4, 1e-30, 1e30]), np.array([1, 0, 1, 1, 1])
    found = usual(met, weighed, 0.5, 0.5)
    assert found[0] == found[1] == 1 and found.min() >= 1 / 64 and found.max() <= 64 and found[2] > 1


def test_eight_bits_have_the_largest_number_of_a_block_and_zeros():
    x = np.array([[1, -3, 0.5, 0, 0, 0, 0, 0]], np.float32)
    found = rounded(x, 4)
    assert found[0, 1] == -3 and not found[0, 3:].any()
    assert 0 < np.abs(found - x).max() <= 3 / 127 / 2
