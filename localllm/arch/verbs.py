"""The verbs that an architecture is written in.

A verb gets everything by argument, changes no argument and returns a new activation. The recorder of localllm.engine
writes them down, once, when a model is opened; `Reference` of localllm.kernels computes them at once in NumPy. An
Activation is float32 [rows, columns] in the builder's own form; rows are the tokens of a run, or those of them that
were selected.

Verbs that treat rows one by one, and nothing but numbers of the same place together, are all here: what they mean, and
their formulas in NumPy. Each has a row in localllm.kernels.verbs, and kernels. Those of recurrent layers are in
localllm.arch.recurrent_verbs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from localllm.arch.elementwise_reference import (
    clamp,
    exponential,
    gelu_erf,
    if_finite,
    plus,
    relu,
    relu_squared,
    sigmoid,
    signed_root,
    softcap,
    swiglu_limited,
    xielu,
)
from localllm.arch.layer_state import Latent, Paged
from localllm.arch.recurrent_verbs import StateVerbs
from localllm.arch.rope import Rope
from localllm.arch.routing import Routing
from localllm.arch.weights import Weight
from localllm.frozen import frozen

Activation = Any
Numbers = Any  # one integer for each row
Choice = Any  # which experts the tokens of an activation go to
EVERY_TOKEN = 1 << 40


@frozen
class Scores:
    """How queries and keys make scores: query heads in equal groups share key-value heads.

    A score s becomes softcap * tanh(s / softcap) if softcap is not 0, and loses slope * |distance| if heads have slopes
    (ALiBi, Press et al. 2021). A sink is a score of each head for nothing (gpt-oss, 2025). Tokens see the `ahead`
    tokens behind them, too: EVERY_TOKEN where attention goes both ways.

    Biases are added by distance: of a head, number i where the key stands i - reach places behind the query, the first
    and the last one beyond (T5, Raffel et al. 2020). Queries of a decoder see what it has written itself, or, where
    they cross, what the encoder has read. Patches of a picture may see those of their window only.

    Where heads see two sets of keys apart, `logs` of what they see are needed to put both together.
    """

    heads: int
    scale: float
    softcap: float = 0.0
    slopes: Sequence[float] = ()
    sinks: Weight | None = None
    ahead: int = 0
    chosen: Activation | None = None  # which keys count, as `choose` says; None: all that a token sees
    biases: np.ndarray | None = None  # float32 [heads, 2 * reach + 1]
    crosses: bool = False
    windowed: bool = False
    logs: bool = False  # behind what the heads see stand logarithms of the sums of their e^score, sinks among them


@frozen
class Hashing:
    """A row of a table for some tokens: `first`, and the exclusive or of their ids, each times its factor, modulo
    `size`. Factors are for the token itself, the one before and so on. What stands before an `end`, and before a
    sequence's first token, counts as an `end`.
    """

    factors: tuple[int, ...]
    size: int
    first: int
    end: int


class RowwiseVerbs(Protocol):
    """Verbs that treat rows one by one: y has the shape of x."""

    def rowwise(self, verb: str, formula: Callable[..., Any], *inputs: Activation, **given: float) -> Activation:
        """What a builder does with such a verb; formula: of activations and numbers as NumPy has them."""
        ...

    def add(self, x: Activation, y: Activation) -> Activation:
        """x + y."""
        return self.rowwise("add", np.add, x, y)

    def multiply(self, x: Activation, y: Activation) -> Activation:
        """x * y."""
        return self.rowwise("multiply", np.multiply, x, y)

    def swiglu(self, gate: Activation, up: Activation) -> Activation:
        """silu(gate) * up (Shazeer 2020)."""
        return self.rowwise("swiglu", swiglu, gate, up)

    def swiglu_limited(self, gate: Activation, up: Activation, sharpness: float, limit: float) -> Activation:
        """gate * sigmoid(sharpness * gate) * (up + 1) of numbers that are not beyond the limit (gpt-oss, 2025)."""
        return self.rowwise("swiglu_limited", swiglu_limited, gate, up, sharpness=sharpness, limit=limit)

    def geglu(self, gate: Activation, up: Activation) -> Activation:
        """gelu(gate) * up (Shazeer 2020)."""
        return self.rowwise("geglu", geglu, gate, up)

    def reglu(self, gate: Activation, up: Activation) -> Activation:
        """max(gate, 0) * up (Shazeer 2020), NaN where the gate is infinite."""
        return self.rowwise("reglu", reglu, gate, up)

    def gelu(self, x: Activation) -> Activation:
        """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
        return self.rowwise("gelu", gelu, x)

    def gelu_erf(self, x: Activation) -> Activation:
        """x / 2 * (1 + erf(x / sqrt(2))), which `gelu` comes near to within 5e-4 (Hendrycks and Gimpel 2016)."""
        return self.rowwise("gelu_erf", gelu_erf, x)

    def relu_squared(self, x: Activation) -> Activation:
        """max(x, 0)^2 (So et al. 2021), NaN for infinity."""
        return self.rowwise("relu_squared", relu_squared, x)

    def relu(self, x: Activation) -> Activation:
        """max(x, 0), NaN for infinity."""
        return self.rowwise("relu", relu, x)

    def exponential(self, x: Activation) -> Activation:
        """e^x, NaN for infinity."""
        return self.rowwise("exponential", exponential, x)

    def plus(self, x: Activation, number: float) -> Activation:
        """x + number."""
        return self.rowwise("plus", plus, x, number=number)

    def xielu(self, x: Activation, alpha_p: float, alpha_n: float, beta: float, epsilon: float) -> Activation:
        """alpha_p x^2 + beta x where x is above 0, else alpha_n (e^min(x, epsilon) - 1 - x) + beta x (xIELU, Huang and
        Schlag 2024, arXiv 2411.13010). The alphas as they multiply: learned ones have gone through softplus, and the
        second one through adding beta. epsilon is a little below 0.
        """
        return self.rowwise("xielu", xielu, x, alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, epsilon=epsilon)

    def sigmoid(self, x: Activation) -> Activation:
        """1 / (1 + e^-x), NaN for infinity."""
        return self.rowwise("sigmoid", sigmoid, x)

    def clamp(self, x: Activation, limit: float) -> Activation:
        """x, but nothing beyond limit or -limit, and NaN for infinity."""
        return self.rowwise("clamp", clamp, x, limit=limit)

    def signed_root(self, x: Activation, least: float) -> Activation:
        """sqrt(|x|), but of no less than `least`, with the sign of x; 0 for 0 and NaN for infinity."""
        return self.rowwise("signed_root", signed_root, x, least=least)

    def softcap(self, x: Activation, cap: float) -> Activation:
        """cap * tanh(x / cap): about x where it is small, never beyond the cap; NaN for infinity."""
        return self.rowwise("softcap", softcap, x, cap=cap)


class Builder(RowwiseVerbs, StateVerbs, Protocol):
    """What all builders can do."""

    ids: Numbers  # of the run's tokens
    positions: Numbers  # theirs in their sequences
    kinds: Numbers  # theirs in a pair of texts: 0 in the first one, 1 in the second
    wanted: Numbers  # which tokens' logits are asked for
    reveals: bool  # whether somebody goes on with what the model makes of all tokens

    def begin(self, embedded: Callable[[], Activation], parts: int = 1) -> Activation:
        """What goes into the first layer: what `embedded` makes of the run's tokens, or the rows of an image that stand
        for them. parts: of such a row, equally wide, of which this is the first; the others are for `deepen`."""
        ...

    def deepen(self, x: Activation, part: int) -> Activation:
        """x, and of an image's rows a part behind the first one added to it (DeepStack, Meng et al. 2024, arXiv
        2406.04334)."""
        ...

    def embed(self, weight: Weight, ids: Numbers) -> Activation:
        """The embedding rows of the tokens: [tokens, width]."""
        ...

    def replace_ids(self, ids: Numbers, table: np.ndarray) -> Numbers:
        """Numbers for the tokens' ids, int64 [vocab]: other ids, or those of rows of a smaller table."""
        ...

    def as_column(self, ids: Numbers) -> Activation:
        """Each token's id and 1, exact below 2^24: [tokens, 1]. 0 is none, as before a sequence's first token."""
        ...

    def embed_hashed(self, weight: Weight, tokens: Activation, hashing: Hashing) -> Activation:
        """A row of a table for each token and those before it: [tokens, width] (embeddings of sequences by their
        hashes: Svenstrup et al. 2017, arXiv 1709.03933).

        tokens: as `as_column` has them, those of a row side by side, itself first.
        """
        ...

    def embed_positions(self, weight: Weight, positions: Numbers) -> Activation:
        """The rows of a table of positions: [tokens, width]."""
        ...

    def embed_kinds(self, weight: Weight, kinds: Numbers) -> Activation:
        """The rows of a table of kinds of tokens: [tokens, width]."""
        ...

    def reveal(self, x: Activation) -> Activation:
        """The same, for a layer that guesses (localllm.arch.mtp) to go on with. Only if the builder reveals."""
        ...

    def enter(self, x: Activation, layer: int) -> Activation:
        """The same: what goes into a layer, or comes out of the last one if there are no more than that. Heads in files
        of their own go on with some of these."""
        ...

    def select(self, x: Activation, which: Numbers) -> Activation:
        """Some of the rows, by their numbers."""
        ...

    def columns(self, x: Activation, first: int, end: int, period: int | None = None) -> Activation:
        """The columns from `first` up to `end`, of each `period` columns."""
        ...

    def join(self, x: Activation, y: Activation, heads: int, shared: bool = False) -> Activation:
        """Head by head, columns of x and then columns of y; all heads get the same of y if it is shared."""
        ...

    def head_linear(self, x: Activation, weight: Weight) -> Activation:
        """Each head's columns by its own matrix; the weight is a stack [heads, rows, columns]."""
        ...

    def rms_norm(self, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None) -> Activation:
        """x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019).

        Each `group` columns are normalized on their own, the whole row if it is None; the weight has as many numbers
        as a group or as a row, and None stands for ones.
        """
        ...

    def layer_norm(self, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None) -> Activation:
        """(x - mean) / sqrt(variance + epsilon) * weight + bias (Ba et al. 2016); groups and weight as in rms_norm."""
        ...

    def linear(self, x: Activation, weight: Weight) -> Activation:
        """x W^T * scale + bias: [tokens, rows of W]."""
        ...

    def rope(self, x: Activation, rope: Rope, positions: Numbers, factors: Weight | None = None) -> Activation:
        """Rotate each head's pairs by position * frequency (Su et al. 2021)."""
        ...

    def by_context(self, short: Weight, long: Weight, original: int) -> Weight:
        """`long` if sequences may become longer than `original` tokens, else `short`."""
        ...

    def ignore(self, *weights: Weight | None) -> None:
        """These stand in the file, but nothing needs them."""
        ...

    def attend(
        self, q: Activation, k: Activation | None, v: Activation | None, state: Paged | Latent, scores: Scores
    ) -> Activation:
        """softmax(q k^T * scale) v over the keys that a token sees: its sequence's up to its own, within the window.

        The run's keys and values go to the cache first, unless they are None: then an earlier layer has filled it. The
        values of a Latent state are the first numbers of its keys. y [tokens, heads * value_dim], or with `logs` one
        column more for each head.
        """
        ...

    def keep(self, k: Activation, v: Activation, state: Paged) -> None:
        """The run's keys and values go to the cache, for attention elsewhere."""
        ...

    def pool(self, x: Activation, kind: str) -> Activation:
        """One row for each text, of a row for each of its tokens: their "mean", the first ("cls") or the "last"."""
        ...

    def choose(
        self, q: Activation, k: Activation, weights: Activation | None, index: Latent, count: int, block: int = 1
    ) -> Activation:
        """Which keys a token sees, for `attend`: of its sequence's up to its own the `count` with the largest sums over
        heads of weight * max(q k, 0), of equal ones the first (lightning indexer: DeepSeek-V3.2, 2025). If one of the
        sums is not a number, it sees none.

        So many blocks of `block` positions, if it is not 1: a block is seen as a whole, and its key is that of its last
        token; tokens behind the last whole block see each other anyway.

        q [tokens, heads * key_dim], k [tokens, key_dim], weights [tokens, heads], None for ones. A bit of each position
        of a sequence, 32 in a number.
        """
        ...

    def choose_blocks(
        self, q: Activation, k: Activation, index: Latent, count: int, block: int, local: int
    ) -> Activation:
        """Which keys each group of query heads sees, for `attend`: `count` blocks of `block` positions, whose largest
        q k is largest, among them always the last `local` (MiniMax M3, 2026). Otherwise as `choose`.

        q [tokens, groups * key_dim], k [tokens, key_dim]. The bits of the groups are side by side.
        """
        ...

    def route(
        self, logits: Activation, routing: Routing, bias: Weight | None = None, table: Weight | None = None
    ) -> Choice:
        """Which experts each token goes to (localllm.arch.routing.Routing), and their weights.

        The bias counts in the choice only. A table [vocab, used] of whole numbers says where tokens go by their ids
        (hash layers: Roller et al. 2021, arXiv 2106.04426). A token with a logit that is not a number goes anywhere,
        with NaN.
        """
        ...

    def gather(self, x: Activation, choice: Choice) -> Activation:
        """A row for each expert that a token goes to; here in the order of the tokens."""
        ...

    def expert_linear(self, x: Activation, weight: Weight, choice: Choice) -> Activation:
        """Each row by the matrix of its expert, as in `linear`; the weight is a stack [experts, rows, columns]."""
        ...

    def scatter(self, x: Activation, choice: Choice) -> Activation:
        """What its experts make of a token, weighted and added up."""
        ...

    def sigmoid_gate(self, x: Activation, gate: Activation) -> Activation:
        """x * sigmoid(gate), which has one column."""
        ...

    def scale(self, x: Activation, factor: float | Weight) -> Activation:
        """x * factor, a number or a tensor of one."""
        ...

    def scale_columns(self, x: Activation, weight: Weight) -> Activation:
        """Each column of x times its number of a vector."""
        ...

    def lerp(self, x: Activation, z: Activation, weight: Weight) -> Activation:
        """x + (z - x) * weight, a vector of a number for each column: so far from x to z."""
        ...

    def multiply_heads(self, x: Activation, gates: Activation) -> Activation:
        """Each head's columns of x times its gate; gates [tokens, heads]."""
        ...

    def softmax(self, x: Activation) -> Activation:
        """e^x of each column, divided by the sum of all of the row's; NaN where one of them is not finite."""
        ...

    def sinkhorn(self, x: Activation, size: int, iterations: int, epsilon: float) -> Activation:
        """Of each row's numbers, a matrix of `size` rows, one whose rows and columns add up to about 1, transposed: the
        softmax of each row, and epsilon; then columns are divided by their sums and epsilon, and, iterations - 1 times,
        rows and columns (Sinkhorn and Knopp 1967; in residual streams: Xie et al. 2025, arXiv 2512.24880). NaN where
        one of the row's numbers is not finite.
        """
        ...

    def head_dots(self, x: Activation, z: Activation, heads: int) -> Activation:
        """The sum of x * z over the columns of each head: [tokens, heads]."""
        ...

    def mix(self, x: Activation, weights: Activation, streams: int) -> Activation:
        """Streams side by side, y_i = the sum over j of weights_ij * x_j.

        x [tokens, streams * width]; weights [tokens, m * streams], those of y_0 first: y [tokens, m * width].
        """
        ...

    def add_vector(self, x: Activation, vector: Weight | np.ndarray) -> Activation:
        """x + vector, which is the same for all tokens: a tensor, or float32 [columns]."""
        ...

    def temper(self, x: Activation, positions: Numbers, slope: float, length: int, offset: int = 0) -> Activation:
        """x * (1 + slope * log(floor((position + offset) / length) + 1)): sharper attention far behind (Llama 4)."""
        ...

    def softplus(self, x: Activation, bias: Weight | None = None) -> Activation:
        """log(1 + e^(x + bias)), NaN for infinity."""
        ...


# ---- formulas of the verbs that treat rows one by one, float32 as their inputs ----


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def geglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gelu(gate) * up


def reglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return if_finite(np.maximum(gate, 0), gate) * up


def gelu(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return (x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))).astype(np.float32)
