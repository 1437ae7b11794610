"""Attention on a GPU: kernels, and the division of contexts into parts."""

from localllm.engine.cuda.target import CudaTarget
from localllm.engine.lower.steps import Steps
from localllm.engine.lower.tape import Buffer
from localllm.engine.operations.activation import ALL
from localllm.engine.operations.attention import Attend, AttentionSteps, reach_of
from localllm.engine.operations.key_selection import SelectKeys
from localllm.errors import UnsupportedError
from localllm.frozen import frozen
from localllm.kernels.cuda import CHOOSING

BLOCKS = 264  # blocks that fill a GPU of 132 multiprocessors, two each
DECODE = 8  # up to this many tokens, each one's context is divided as if it were alone, and gives the same bits
FEW_TOKENS = 16  # most tokens of a run without tensor cores
MOST_DIM = 256  # largest head on tensor cores; larger ones need too many registers
LANES, NUMBERS = 32, 8  # most lanes that share a head, and numbers of it that each lane reads at once
MOST_HEADS, MOST_NUMBERS = 8, 128  # most query heads of a bundle, and most numbers of queries and results in registers


@frozen
class FewTokenAttention:
    """The division of attend_few's work (localllm.kernels.cuda.attention) for heads of these dimensions."""

    key_dim: int
    value_dim: int
    group: int  # query heads that share a key-value head

    @property
    def bundle(self) -> int:
        """Return how many query heads a block computes together: equal parts of the group that fit the registers."""
        numbers = NUMBERS * sum(-(-dim // (NUMBERS * LANES)) for dim in (self.key_dim, self.value_dim))
        most_heads = min(max(MOST_NUMBERS // numbers, 1), MOST_HEADS)
        return -(-self.group // -(-self.group // most_heads))

    @property
    def bundles(self) -> int:
        return -(-self.group // self.bundle)

    @property
    def partial_bytes(self) -> int:
        """Bytes of a head's partial result."""
        return 4 * (4 + -(-self.value_dim // 8) * 8)

    def parts(self, tokens: int, kv_heads: int) -> int:
        """Return into how many parts a context is divided at most."""
        return -(-BLOCKS // (kv_heads * self.bundles * (tokens if tokens > DECODE else 1)))


def attend(steps: Steps, operation: Attend, target: CudaTarget) -> None:
    """Append the steps of attention: in float32 for few tokens, on tensor cores for many."""
    attention = operation.prepare(steps)
    if operation.cross_attention or reach_of(operation.biases):
        raise UnsupportedError("encoder models run on the CPU only: use --device cpu")
    for name in ("cross_attention", "reach", "biases"):
        del attention.arguments[name]
    attention.arguments["sequences"] = steps.header.sequences
    needs_few = any(attention.arguments[name] for name in ("chosen", "logs")) or attention.state.period > 1
    append = attend_few if needs_few or are_few(attention, target) else attend_many
    append(steps, attention, target)
    operation.finish(steps, attention)


def are_few(attention: AttentionSteps, target: CudaTarget) -> bool:
    """Return whether attention is computed in float32: for few tokens, a float32 cache, or very long heads."""
    state, is_exact = attention.state, any(side.kind == "f32" for side in attention.sides)
    return target.tokens <= FEW_TOKENS or is_exact or max(state.key_dim, state.value_dim) > MOST_DIM


def attend_few(steps: Steps, attention: AttentionSteps, target: CudaTarget) -> None:
    """Append the steps that compute attention token by token, each context divided into parts."""
    state, sides, heads, arguments, reads, y = attention
    header = steps.header
    few = FewTokenAttention(state.key_dim, state.value_dim, heads // state.kv_heads)
    parts = few.parts(target.tokens, state.kv_heads)
    partial = Buffer(target.tokens * heads * parts, few.partial_bytes)
    arguments = arguments | {"count": steps.counts[ALL], "positions": header.positions, "owners": header.owners}
    arguments |= {"parts": parts, "partial": partial, "partial_bytes": few.partial_bytes}
    merged = {name: arguments.pop(name) for name in ("sinks", "logs", "y", "y_stride")}
    shared = ("count", "positions", "owners", "sequences", "heads", "window", "chunked", "lookahead", "parts",
              "partial", "partial_bytes", "chosen", "chosen_stride", "choice_stride", "kv_heads")  # fmt: skip
    merged |= {name: arguments[name] for name in shared} | {"value_dim": state.value_dim}
    kinds = "-".join(side.kind.upper() for side in sides)
    kernel = f"attend_few-{kinds}-{few.bundle}-{few.key_dim}-{few.value_dim}"
    kernel += "-chosen" if arguments["chosen"] else ""
    steps.append(kernel, arguments | {"bundles": few.bundles}, target.tokens, reads, [partial])
    steps.append("merge_few", merged, target.tokens, [partial], [y])


def select_keys(steps: Steps, operation: SelectKeys, target: CudaTarget) -> None:
    """Append the step that selects keys."""
    arguments, reads, y, kernel = operation.prepare(steps)
    scores = Buffer(min(target.tokens, CHOOSING), 4 * 32 * operation.output.columns)
    arguments |= {"count": steps.counts[ALL], "scratch": scores, "scratch_bytes": scores.stride}
    steps.append(kernel, arguments, target.tokens, reads, [y, scores])


def attend_many(steps: Steps, attention: AttentionSteps, target: CudaTarget) -> None:
    """Append the step that computes attention for all tokens of a sequence together, on tensor cores."""
    state, sides, _, arguments, reads, y = attention
    kinds = "-".join(side.kind.upper() for side in sides)
    kernel = f"attend_many-{kinds}-{state.key_dim}-{state.value_dim}-{target.depth}"
    excluded = ("chosen", "chosen_stride", "choice_stride", "logs", "period")
    arguments = {name: value for name, value in arguments.items() if name not in excluded}
    arguments |= {"sequence_count": steps.header.sequence_count}
    steps.append(kernel, arguments, target.tokens, reads, [y])
