"""Attention on the CPU: layers of the same shape share a plan of work units, whose partial results are merged."""

import numpy as np

from localllm.arch.layer_state import Latent, Paged
from localllm.engine.cpu.target import CpuTarget
from localllm.engine.lower.steps import Steps
from localllm.engine.lower.tape import Buffer
from localllm.engine.operations.activation import ALL
from localllm.engine.operations.attention import Attend
from localllm.engine.operations.key_selection import SelectKeys
from localllm.frozen import frozen
from localllm.kernels.cpu import ATTEND_KEYS, ATTEND_ROWS, ATTEND_TILES, FEW_TOKENS, MOST_SPLITS, SPLIT_TOKENS
from localllm.kernels.table import SPLIT, UNIT


@frozen
class AttentionPlan:
    """The work of attention in a run, see localllm.kernels.cpu.attention.plan."""

    units: np.ndarray
    unit_count: np.ndarray
    splits: np.ndarray
    made: Buffer  # represents the plan in the reads and writes of steps


def attend(steps: Steps, operation: Attend, target: CpuTarget) -> None:
    """Append the steps that compute attention unit by unit, and that merge partial results over a context."""
    attention = operation.prepare(steps)
    state, sides, heads, arguments, reads, y = attention
    plan = plan_of(steps, operation, state)
    key_dim, value_dim = -(-state.key_dim // 16) * 16, -(-state.value_dim // 16) * 16
    partial = Buffer(SPLIT_TOKENS * heads * MOST_SPLITS, (value_dim + 32) * 4)
    arguments |= {"units": plan.units, "unit_count": plan.unit_count, "splits": plan.splits, "partial": partial}
    arguments |= {"count": steps.counts[ALL], "positions": steps.header.positions}
    arguments |= {"key_dim": state.key_dim, "value_dim": state.value_dim}
    kernel, tile_bytes = ("attend_tiles", ATTEND_TILES) if target.in_tiles else ("attend", 0)
    arguments |= target.scratch(attention_scratch(key_dim, value_dim) + tile_bytes)
    kinds = "-".join(dict.fromkeys(side.kind.upper() for side in sides))
    reads, count = [*reads, plan.made], plan.unit_count
    steps.append(f"{kernel}-{kinds}", arguments, 8 * target.threads, reads, [y, partial], count)
    steps.append("merge", arguments, 2 * target.threads, [partial, plan.made], [y])
    operation.finish(steps, attention)


def select_keys(steps: Steps, operation: SelectKeys, target: CpuTarget) -> None:
    """Append the step that selects keys, token by token."""
    arguments, reads, y, kernel = operation.prepare(steps)
    context = 32 * operation.output.columns  # bits: the context for each head that selects
    arguments |= target.scratch(select_scratch(operation.heads, operation.state.key_dim, context))
    steps.row_step(kernel, operation.inputs[0].rows, arguments, reads, [y])


def select_scratch(heads: int, key_dim: int, context: int) -> int:
    """Return the scratch bytes of a thread that selects keys, see localllm.kernels.cpu.attention.select_keys."""
    return 4 * (heads + 1) * -(-key_dim // 16) * 16 + 8 * 256 + 4 * context


def plan_of(steps: Steps, operation: Attend, state: Paged | Latent) -> AttentionPlan:
    """Append the step that plans attention, once for all layers of the same shape."""
    heads, windowed = operation.heads, operation.windowed
    alike = {"heads": heads, "kv_heads": state.kv_heads, "window": state.window or 0, "chunked": state.chunked}
    alike |= {"lookahead": operation.lookahead, "cross_attention": operation.cross_attention}
    sequences = steps.header.windows if windowed else steps.header.sequences
    count = steps.header.window_count if windowed else steps.header.sequence_count

    def make() -> AttentionPlan:
        tokens = steps.target.tokens
        units = np.empty((most_units(tokens, heads, state.kv_heads), len(UNIT)), np.int64)
        plan = AttentionPlan(units, np.zeros(1, np.int64), np.empty((tokens, len(SPLIT)), np.int64), Buffer(0, 0))
        arguments: dict[str, object] = {"units": units, "unit_count": plan.unit_count, "splits": plan.splits}
        arguments |= {"sequences": sequences, "sequence_count": count}
        steps.append("plan", alike | arguments, 1, [], [plan.made])
        return plan

    return steps.memoize(("plan", windowed, *alike.values()), make)


def attention_scratch(key_dim: int, value_dim: int) -> int:
    """Return the scratch bytes of a thread that computes attention; the dimensions are padded."""
    tiles = 2 * ATTEND_KEYS * max(key_dim, value_dim)
    return 4 * (ATTEND_ROWS * (key_dim + value_dim + ATTEND_KEYS + 32) + tiles)


def most_units(tokens: int, heads: int, kv_heads: int) -> int:
    """Return the most work units of a run: tiles of rows, and one per part of the context if there are few tokens.

    tokens: the most of a run.
    """
    group = heads // kv_heads
    unsplit, split = tokens * group // ATTEND_ROWS + tokens, FEW_TOKENS * group // ATTEND_ROWS + 1
    return kv_heads * (unsplit + split * SPLIT_TOKENS * MOST_SPLITS)
