"""Formats by need: what they take and cost, which matrices go together, and what is spent."""

import gguf
import pytest

from localllm.services.needs import Need, candidates, filled, group_of, layer_of, predicted, total


def size_of(name: str) -> tuple[int, int]:
    """Weights and bytes of a block, as the gguf package has them."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("columns", [32, 64, 256, 512, 544, 31, 48])
def test_formats_for_rows_of_a_length(columns: int):
    """All that are offered fit; rows of 256 have those of super-blocks, too."""
    offered = candidates(columns)
    of_blocks = ["Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    of_super_blocks = ["Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K"]
    assert offered == (of_super_blocks if columns % 256 == 0 else []) + (of_blocks if columns % 32 == 0 else [])
    for name in offered:
        block, nbytes = size_of(name)
        assert columns % block == 0 and Need("x", 7 * columns, {}).bytes(name) == 7 * columns // block * nbytes


def test_what_a_format_costs():
    """Its own error, and the rounding of what it meets, by the numbers that share a scale there."""
    need = Need("x", 256, {"Q4_K": 0.25, "Q4_0": 0.5}, {256: 0.125, 32: 0.0625}, harm=8.0)
    assert (need.cost("Q4_K"), need.cost("Q4_0")) == (8 * 0.375, 8 * 0.5625)
    assert Need("x", 256, {"Q4_K": 0.25}, harm=8.0).cost("Q4_K") == 2
    assert Need("x", 256, {"Q4_K": 0.25}).cost("Q4_K") == 0, "one that does no harm"


def test_which_matrices_are_measured_together():
    """Those of two layers, keys with queries, up with gate; what is in no layer, or has no role, is alone."""
    kinds = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    groups: dict[str, list[str]] = {}
    for layer in (0, 1, 2, 3, 12):
        for kind in kinds:
            name = f"blk.{layer}.{kind}.weight"
            groups.setdefault(group_of(name), []).append(name)
    alike = [["attn_q", "attn_k"], ["attn_v"], ["attn_output"], ["ffn_gate", "ffn_up"], ["ffn_down"]]
    assert sorted(map(sorted, groups.values())) == sorted(
        sorted(f"blk.{layer}.{kind}.weight" for layer in layers for kind in together)
        for layers in ((0, 1), (2, 3), (12,))
        for together in alike
    )
    for name in ("output.weight", "token_embd.weight", "blk.3.odd.weight", "v.blk.0.attn_q.weight"):
        assert group_of(name) == name
    names = ["blk.0.x", "blk.17.attn_q.weight", "x.blk.3.y", "output.weight", "blk.x.y"]
    assert [layer_of(name) for name in names] == [0, 17, None, None, None]


def test_what_is_left_is_spent_where_it_helps_most():
    """By what a byte brings, until nothing that helps fits any more."""
    sizes = {name: Need("x", 256, {}).bytes(name) for name in ("Q2_K", "Q4_K", "Q6_K")}
    errors = {"Q2_K": 1.0, "Q4_K": 0.1, "Q6_K": 0.01}
    needs = [Need("a", 256, errors, harm=1.0), Need("b", 256, errors, harm=2.0), Need("c", 256, errors, harm=0.0)]
    least = dict.fromkeys("abc", "Q2_K")
    start, step = total(needs, least), sizes["Q4_K"] - sizes["Q2_K"]
    assert start == 3 * sizes["Q2_K"]
    for room, found in (
        (0, "222"), (step - 1, "222"), (step, "242"), (2 * step - 1, "242"), (2 * step, "442"), (10**6, "662"),
    ):  # fmt: skip
        formats = filled(needs, dict(least), start + room)
        assert formats == {name: f"Q{bits}_K" for name, bits in zip("abc", found, strict=True)}, room
    assert predicted(needs, {"a": "Q4_K", "b": "Q6_K", "c": "Q2_K"}) == pytest.approx(0.1 + 0.02)
