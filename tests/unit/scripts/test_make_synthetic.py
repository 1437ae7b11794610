"""Test synthetic models: valid files, plausible weights in every format, and working tokenizers."""

import sys

import gguf
import numpy as np
import pytest
from kernel_calls import dequantized
from project import ROOT

from localllm.files.gguf.file import GGUFFile

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
from make_synthetic import MIXES, SHAPES, format_of, planned, vocabulary, write_model
from synthetic_blocks import PLAIN

TINY = SHAPES["tiny"]


@pytest.mark.sampled
@pytest.mark.parametrize("wanted", [*PLAIN, *MIXES])
def test_weights_are_plausible_in_every_format(tmp_path, wanted):
    write_model(tmp_path / "model.gguf", TINY, wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) == 2]
        assert len(matrices) == 1 + 7 * TINY.layers
        for tensor in matrices:
            assert wanted in MIXES or tensor.format.name == wanted
            weights = dequantized(tensor.format.name, tensor.data)
            assert weights.shape == tensor.shape and np.isfinite(weights).all()
            expected = tensor.shape[1] ** -0.5
            assert 0.7 * expected < weights.std() < 1.4 * expected
            assert abs(weights.mean()) < 0.03 * expected
            assert len(np.unique(tensor.data, axis=0)) == len(tensor.data)  # no two rows are the same


def test_experts_are_stacked_matrices(tmp_path):
    shape = TINY._replace(experts=8, experts_used=2)
    write_model(tmp_path / "model.gguf", shape, "Q4_0")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        stacks = {tensor.name: tensor.shape for tensor in file.tensors.values() if len(tensor.shape) == 3}
        assert len(stacks) == 3 * shape.layers and stacks["blk.0.ffn_down_exps.weight"] == (8, 256, 512)
        assert file.tensors["blk.0.ffn_gate_inp.weight"].format.name == "F32"
        assert file.metadata["llama.expert_count"] == 8 and file.metadata["llama.expert_used_count"] == 2


def test_equal_seeds_give_equal_files(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, TINY, "Q4_0", seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_the_gguf_package_reads_synthetic_models(tmp_path):
    write_model(tmp_path / "model.gguf", TINY, "Q4_K_M")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    file = GGUFFile.open(tmp_path / "model.gguf")
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].data.tobytes() == tensor.data.tobytes()
    assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.block_count"] == TINY.layers


def test_q4_k_m_is_the_mix_of_llama_quantize():
    shape = SHAPES["1.2b"]
    better = [layer for layer in range(16) if format_of(f"blk.{layer}.attn_v.weight", 2048, "Q4_K_M", shape).id == 14]
    assert better == [0, 1, 4, 7, 10, 13, 14, 15]
    assert [format_of(f"blk.{layer}.ffn_down.weight", 8192, "Q4_K_M", shape).name for layer in (1, 2)] == [
        "Q6_K",
        "Q4_K",
    ]
    assert format_of("token_embd.weight", 2048, "Q4_K_M", shape).name == "Q6_K"
    assert format_of("token_embd.weight", 4096, "Q4_K_M", SHAPES["8b"]).name == "Q4_K"
    assert format_of("output.weight", 4096, "Q4_K_M", SHAPES["8b"]).name == "Q6_K"
    assert format_of("blk.0.attn_q.weight", 576, "Q4_K_M", SHAPES["135m"]).name == "Q5_0"  # no multiple of 256


def test_shapes_have_the_sizes_of_real_models():
    for name, parameters in (("135m", 134_515_008), ("1.2b", 1_235_814_400), ("8b", 8_030_261_248)):
        plans = planned(SHAPES[name], "F32")
        assert sum(max(plan.rows, 1) * plan.columns for plan in plans) == parameters


def test_every_merge_joins_two_pieces_into_a_third():
    pieces, merges = vocabulary(2000, np.random.default_rng(0))
    assert len(pieces) == len(set(pieces)) == 2000
    known = set(pieces[:256])
    for piece, merge in zip(pieces[256:-4], merges, strict=True):
        left, right = merge.split(" ")
        assert left in known and right in known and left + right == piece
        known.add(piece)
