"""Packs activations as right operands of AMX products, once for all matrices that they are multiplied with.

A panel is 16 tokens. The activations for a slab's columns are contiguous:

    [columns / TILE_SLAB][panel][plane, high and low][32 columns][16 pairs of columns][16 tokens][2]

Missing tokens are copies of the last one, missing columns are zero. With experts, the rows of an expert may begin at
any row: the i-th expert that has rows begins at panel i + first row // 16, which leaves each expert enough panels.
"""

from localllm.kernels.cpu import PANEL_BYTES, PANEL_TOKENS, PRECISE_TOKENS, TILE_SLAB
from localllm.kernels.cpu.amx.rows import two
from localllm.kernels.cpu.amx.slab import PLANE_BYTES
from localllm.kernels.cpu.amx.tiles import TILE, store_high, store_planes
from localllm.kernels.cpu.signature import argument, device, kernel
from localllm.kernels.simd import load_i64, transpose_f32
from localllm.kernels.table import EXPERT, PACK

EXPERT_BYTES = 8 * len(EXPERT)


@device
def pack_panel(a, first, count, panel, exact, scratch):
    """Pack 16 rows from number `first` on as panel number `panel`. The first `count` of them exist."""
    columns, stride = argument(a, PACK.columns), argument(a, PACK.stride)
    for k in range(0, columns, 32):
        for i in range(PANEL_TOKENS):
            x, y = two(argument(a, PACK.x) + (first + min(i, count - 1)) * stride, k, columns)
            if exact:
                store_planes(scratch + i * 64, TILE, x, y)
            else:
                store_high(scratch + i * 64, 0, x, y)
        place = argument(a, PACK.panels) + k // TILE_SLAB * argument(a, PACK.slab_bytes) + panel * PANEL_BYTES
        place += k % TILE_SLAB // 32 * TILE
        transpose_f32(scratch, 64, place)
        if exact:
            transpose_f32(scratch + TILE, 64, place + PLANE_BYTES)


@device
def pack_rows(a, first, count, panel, part, parts, exact, scratch):
    """Pack a part's share of `count` rows, from number `first` on; panel: number of their first panel."""
    panels = (count + PANEL_TOKENS - 1) // PANEL_TOKENS
    for i in range(panels * part // parts, panels * (part + 1) // parts):
        at = i * PANEL_TOKENS
        pack_panel(a, first + at, min(count - at, PANEL_TOKENS), panel + i, exact, scratch)


@kernel
def pack(a, part, parts, thread):
    """Pack all tokens, or the rows of all experts, as panels; the parts share the panels, or the experts."""
    tokens, active = load_i64(argument(a, PACK.count)), argument(a, PACK.active)
    scratch = argument(a, PACK.scratch) + thread * argument(a, PACK.scratch_bytes)
    kernel_tokens = load_i64(argument(a, PACK.kernel_tokens))
    exact = kernel_tokens <= load_i64(argument(a, PACK.most_exact))
    if active == 0:
        if kernel_tokens >= argument(a, PACK.least):
            pack_rows(a, 0, tokens, 0, part, parts, exact, scratch)
        return
    if kernel_tokens <= PRECISE_TOKENS:  # experts read rows then, see matmul/experts.py
        return
    experts = load_i64(argument(a, PACK.active_count))
    for i in range(experts * part // parts, experts * (part + 1) // parts):
        expert = active + i * EXPERT_BYTES
        first, count = argument(expert, EXPERT.first), argument(expert, EXPERT.count)
        if count >= argument(a, PACK.least):
            pack_rows(a, first, count, i + first // PANEL_TOKENS, 0, 1, exact, scratch)
