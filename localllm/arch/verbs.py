"""The verbs in which an architecture is written.

A verb is a pure function: it changes no argument and returns a new activation. The recorder of localllm.engine records
the verbs once, when a model is opened; `ReferenceBuilder` of localllm.engine computes them at once in NumPy. An
Activation is float32 [rows, columns] in the builder's own form; rows are the tokens of a run, or a selection of them.

Elementwise verbs are in localllm.arch.rowwise_verbs, those of recurrent layers in localllm.arch.recurrent_verbs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from localllm.arch.layer_state import LatentState, PagedState
from localllm.arch.recurrent_verbs import RecurrentVerbs
from localllm.arch.rope import RopeParameters
from localllm.arch.rowwise_verbs import RowwiseVerbs
from localllm.arch.weights import Weight
from localllm.frozen import frozen


@frozen
class Routing:
    """The rule by which a router selects experts: those with the highest scores in the best groups.

    Scores are the softmax of the router's logits, or the sigmoid or the root of softplus of each. The weight of a used
    expert is its score, divided by the sum over all used ones if `normalized`, times `scale`.
    """

    experts: int
    used: int  # by each token
    sigmoid: bool = False
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1  # of equal size; a group's score is the sum of its two highest (DeepSeek-V3, 2024)
    groups_used: int = 1
    weighs_inputs: bool = False  # weights multiply the experts' inputs instead of their outputs
    rooted: bool = False  # scores are roots of softplus (DeepSeek-V4, 2026)
    together: int = 1  # number of consecutive experts that share matrices; group i has expert i's score (GroveMoE)

    @property
    def matrices(self) -> int:
        """The number of matrices in each expert stack."""
        return self.experts // self.together


Activation = Any
Numbers = Any  # one integer per row
Choice = Any  # the experts of each token, and their weights
FULL_ATTENTION = 1 << 40


@frozen
class AttentionScores:
    """The options of attention scores.

    Equal groups of query heads share a key-value head. A score s becomes softcap * tanh(s / softcap) if softcap is not
    0, and slope * |distance| is subtracted if heads have slopes (ALiBi, Press et al. 2021). A sink is an additional
    score per head without a value (gpt-oss, 2025). Tokens also attend to the next `lookahead` tokens: FULL_ATTENTION
    for bidirectional attention. Biases are added by distance: bias i of a head where the key is i - reach positions
    after the query; the first and the last one also apply beyond (T5, Raffel et al. 2020). With `cross_attention`, a
    decoder's queries attend to the encoder's keys. With `windowed`, patches of an image attend only to their window.
    `logs` makes it possible to combine the results of two sets of keys.
    """

    heads: int
    scale: float
    softcap: float = 0.0
    slopes: Sequence[float] = ()
    sinks: Weight | None = None
    lookahead: int = 0
    chosen: Activation | None = None  # the keys of select_keys; None: all visible ones
    biases: np.ndarray | None = None  # float32 [heads, 2 * reach + 1]
    cross_attention: bool = False
    windowed: bool = False
    logs: bool = False  # append per head the logarithm of its sum of e^score, sinks included


@frozen
class NgramHash:
    """A hash of a token and its predecessors to a row of a table.

    The row is first + (xor over i of id_i * factor_i) % size, where id_0 is the token's, id_1 that of the previous one
    and so on. Ids before an `end` token, and before a sequence's first token, count as `end`.
    """

    factors: tuple[int, ...]
    size: int
    first: int
    end: int


class Builder(RowwiseVerbs, RecurrentVerbs, Protocol):
    """The verbs of all builders."""

    ids: Numbers  # the ids of the run's tokens
    positions: Numbers  # the tokens' positions in their sequences
    kinds: Numbers  # the tokens' types in a pair of texts: 0 in the first one, 1 in the second
    wanted: Numbers  # the tokens whose logits are requested
    reveals: bool  # whether the last hidden states of all tokens are exported

    def embed_inputs(self, embedded: Callable[[], Activation], parts: int = 1) -> Activation:
        """Return the first layer's input: embedded(), or the rows of an image instead of tokens.

        parts: number of equally wide slices of an image's row, of which this returns the first; add_deepstack adds the
        others.
        """

    def add_deepstack(self, x: Activation, part: int) -> Activation:
        """Add a further slice of an image's rows to x (DeepStack, Meng et al. 2024, arXiv 2406.04334)."""

    def embed(self, weight: Weight, ids: Numbers) -> Activation:
        """Look up the embedding rows of the tokens, [tokens, width]."""

    def replace_ids(self, ids: Numbers, table: np.ndarray) -> Numbers:
        """Map the tokens' ids through a table, int64 [vocab], to other ids or to rows of a smaller table."""

    def as_column(self, ids: Numbers) -> Activation:
        """Return each token's id + 1, exact below 2^24, [tokens, 1]. 0 means no token."""

    def embed_hashed(self, weight: Weight, tokens: Activation, hashing: NgramHash) -> Activation:
        """Look up a row for each token and its predecessors by their hash, [tokens, width].

        Hash embeddings: Svenstrup et al. 2017, arXiv 1709.03933. tokens: columns from `as_column`: the token itself,
        then its predecessors.
        """

    def embed_positions(self, weight: Weight, positions: Numbers) -> Activation:
        """Look up the rows of a position table, [tokens, width]."""

    def embed_kinds(self, weight: Weight, kinds: Numbers) -> Activation:
        """Look up the rows of a token-type table, [tokens, width]."""

    def export_hidden(self, x: Activation) -> Activation:
        """Return x unchanged; a builder made to export hidden states also exports x, for an MTP layer."""

    def tap_layer_input(self, x: Activation, layer: int) -> Activation:
        """Return x unchanged, and export this layer's input for a draft head (EAGLE-3).

        The last layer's output counts as the input of one more layer.
        """

    def select(self, x: Activation, rows: Numbers) -> Activation:
        """Select rows by their indices."""

    def slice_columns(self, x: Activation, first: int, end: int, period: int | None = None) -> Activation:
        """Take columns `first` to `end` - 1 of every `period` columns."""

    def concat_heads(self, x: Activation, y: Activation, heads: int, shared: bool = False) -> Activation:
        """Concatenate x and y head by head; with `shared`, y is one head, appended to each of x."""

    def head_linear(self, x: Activation, weight: Weight) -> Activation:
        """Multiply each head's columns by its own matrix; the weight is a stack [heads, rows, columns]."""

    def rms_norm(self, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None) -> Activation:
        """Compute x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019).

        Each `group` of columns is normalized separately; None: the whole row. The weight has the size of a group or of
        a row; None: weights of 1.
        """

    def layer_norm(self, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None) -> Activation:
        """Compute (x - mean) / sqrt(variance + epsilon) * weight + bias (Ba et al. 2016).

        Groups as in rms_norm.
        """

    def linear(self, x: Activation, weight: Weight) -> Activation:
        """Compute x W^T * scale + bias, [tokens, rows of W]."""

    def add_low_rank(self, y: Activation, x: Activation, weight: Weight, adapter: int, factor: float) -> Activation:
        """Compute y + factor * scale * x W, where the weight is [columns of x, columns of y].

        The scale is that of the adapter with this index, for each token. localllm.engine.adapters uses it.
        """

    def add_scaled(
        self, y: Activation, x: Activation, adapter: int, factor: float, choice: Choice | None = None
    ) -> Activation:
        """Compute y + factor * scale * x, with the scale of add_low_rank.

        choice: the experts whose rows x has; None if x has a row for each token.
        """

    def rope(
        self, x: Activation, rope: RopeParameters, positions: Numbers, factors: Weight | None = None
    ) -> Activation:
        """Rotate each head's pairs by position * frequency (Su et al. 2021)."""

    def select_by_context(self, short: Weight, long: Weight, original: int) -> Weight:
        """Return `long` if sequences may become longer than `original` tokens, else `short`."""

    def ignore(self, *weights: Weight | None) -> None:
        """Mark weights as used that no verb reads."""

    def attend(
        self,
        q: Activation,
        k: Activation | None,
        v: Activation | None,
        state: PagedState | LatentState,
        scores: AttentionScores,
    ) -> Activation:
        """Compute softmax(q k^T * scale) v over the keys up to a token's own, within the window.

        The run's keys and values are written to the cache first; None means that an earlier layer has written them. The
        values of a Latent state are the first columns of its keys. y [tokens, heads * value_dim], with `logs` one
        additional column per head.
        """

    def write_kv(self, k: Activation, v: Activation, state: PagedState) -> None:
        """Write the run's keys and values to the cache without attending to them."""

    def pool(self, x: Activation, kind: str) -> Activation:
        """Pool the tokens' rows to one per text: their "mean", the first ("cls") or the "last"."""

    def select_keys(
        self, q: Activation, k: Activation, weights: Activation | None, index: LatentState, count: int, block: int = 1
    ) -> Activation:
        """Select the keys that a token attends to: the `count` visible ones with the largest indexer scores.

        A score is the sum over heads of weight * max(q k, 0); of equal scores the first is selected (lightning indexer:
        DeepSeek-V3.2, 2025). If a score is NaN, no keys are selected for the token. With a `block` other than 1,
        `count` blocks of that many positions are selected: a block's key is that of its last token, and the keys after
        the last whole block are always selected. q [tokens, heads * key_dim], k [tokens, key_dim], weights [tokens,
        heads], None for ones. Returns a bit mask over the positions of a sequence, 32 per element.
        """

    def select_key_blocks(
        self, q: Activation, k: Activation, index: LatentState, count: int, block: int, local: int
    ) -> Activation:
        """Select `count` blocks of keys for each group of query heads, by the largest q k of a block.

        The last `local` blocks are always selected (MiniMax M3, 2026). Other arguments as in select_keys.
        q [tokens, groups * key_dim], k [tokens, key_dim]. The groups' bit masks are concatenated.
        """

    def route(
        self, logits: Activation, routing: Routing, bias: Weight | None = None, table: Weight | None = None
    ) -> Choice:
        """Route each token to experts (localllm.arch.verbs.Routing), with weights.

        The bias affects the selection only. A table [vocab, used] of integers routes tokens by their ids (hash layers:
        Roller et al. 2021, arXiv 2106.04426). A token with a NaN logit goes to any experts, with NaN weights.
        """

    def gather(self, x: Activation, choice: Choice) -> Activation:
        """Repeat each token's row for each of its experts, in the order of the tokens."""

    def expert_linear(self, x: Activation, weight: Weight, choice: Choice) -> Activation:
        """Multiply each row by its expert's matrix, like `linear`; weight: a stack [experts, rows, columns]."""

    def scatter(self, x: Activation, choice: Choice) -> Activation:
        """Sum the weighted outputs of each token's experts."""

    def sigmoid_gate(self, x: Activation, gate: Activation) -> Activation:
        """Compute x * sigmoid(gate), gate [tokens, 1]."""

    def scale(self, x: Activation, factor: float | Weight) -> Activation:
        """Compute x * factor.

        factor: a number, or a tensor with one element.
        """

    def scale_columns(self, x: Activation, weight: Weight) -> Activation:
        """Multiply each column of x by its element of a vector."""

    def lerp(self, x: Activation, z: Activation, weight: Weight) -> Activation:
        """Compute x + (z - x) * weight; weight: a vector with one element per column."""

    def multiply_heads(self, x: Activation, gates: Activation) -> Activation:
        """Multiply each head's columns of x by its gate; gates [tokens, heads]."""

    def softmax(self, x: Activation) -> Activation:
        """Compute the softmax of each row; NaN where a value is not finite."""

    def sinkhorn(self, x: Activation, size: int, iterations: int, epsilon: float) -> Activation:
        """Normalize each row's matrix of `size` rows so that its rows and columns sum to about 1, transposed.

        Each row becomes its softmax plus epsilon; then columns are divided by their sums plus epsilon, and, iterations
        - 1 times, rows and columns (Sinkhorn and Knopp 1967; in residual streams: Xie et al. 2025, arXiv 2512.24880).
        NaN where a value is not finite.
        """

    def head_dots(self, x: Activation, z: Activation, heads: int) -> Activation:
        """Sum x * z over the columns of each head, [tokens, heads]."""

    def mix_streams(self, x: Activation, weights: Activation, streams: int) -> Activation:
        """Compute m sums of residual streams, y_i = the sum over j of weights_ij * x_j.

        x [tokens, streams * width]; weights [tokens, m * streams], those of y_0 first. y [tokens, m * width].
        """

    def add_vector(self, x: Activation, vector: Weight | np.ndarray) -> Activation:
        """Compute x + vector: a tensor, or float32 [columns]."""

    def scale_by_position(
        self, x: Activation, positions: Numbers, slope: float, length: int, offset: int = 0
    ) -> Activation:
        """Compute x * (1 + slope * log(floor((position + offset) / length) + 1)).

        This is Llama 4's attention temperature.
        """

    def softplus(self, x: Activation, bias: Weight | None = None) -> Activation:
        """Compute log(1 + e^(x + bias)), NaN for infinity."""
