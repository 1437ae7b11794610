"""The verbs of recurrent layers, whose state is a localllm.arch.layer_state.RecurrentLayerState.

See localllm.arch.verbs about verbs.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from localllm.arch.layer_state import RecurrentLayerState
from localllm.arch.weights import Weight
from localllm.frozen import frozen

Activation = Any


@frozen
class HeadState:
    """The state of a recurrent layer's heads: state `number`, h [heads, key_dim, value_dim].

    For each token h is first multiplied by e^(dt * rate), rates [heads]; head i has the keys of head
    i / repeat % key_heads.
    """

    state: RecurrentLayerState
    number: int
    rates: Weight
    key_heads: int
    repeat: int


class RecurrentVerbs(Protocol):
    """The verbs of recurrent layers."""

    def convolve(
        self,
        x: Activation,
        weight: Weight,
        state: RecurrentLayerState,
        number: int = 0,
        silu: bool = True,
        dilation: int = 1,
    ) -> Activation:
        """Convolve over time, column by column, with zeros before a sequence's first token.

        y[t] = the sum over taps of weight[:, tap] * x[t - (taps - 1 - tap) * dilation], plus the bias; with `silu`,
        y * sigmoid(y). State `number` [(taps - 1) * dilation, columns]: the rows of the last tokens.
        """

    def previous(self, x: Activation, state: RecurrentLayerState, number: int) -> Activation:
        """Return the previous token's row, zeros before the first.

        State `number` [1, columns]: the last row.
        """

    def mean(self, x: Activation, state: RecurrentLayerState, number: int) -> Activation:
        """Average each token's row with the `before` previous ones, zeros before the first.

        State `number` [before, columns]: the previous rows.
        """

    def gated_mean(
        self, x: Activation, places: Weight, state: RecurrentLayerState, number: int = 0, stretches: int = 1
    ) -> Activation:
        """Average over the last tokens, column by column, weighted by the softmax of gates.

        y[t] = the sum over taps of p[tap] * x[t - taps + 1 + tap], p the softmax over the taps of gates[t - taps + 1 +
        tap] + places[tap], without taps before a sequence's first token (pooled keys of an indexer: GLM 5.3, 2026;
        compressed keys: DeepSeek-V4, 2026). With two stretches, the earlier half of the taps reads the first columns
        of x and of gates, the later half the second ones, so that blocks overlap.

        x [tokens, 2 * stretches * columns]: the values, then their gates. places [taps / stretches, stretches *
        columns]. State `number` [taps - 1, 2 * stretches * columns]: the rows of the last tokens.
        """

    def selective_scan(
        self,
        x: Activation,
        dt: Activation,
        b: Activation,
        c: Activation,
        rates: Weight,
        skip: Weight,
        state: RecurrentLayerState,
    ) -> Activation:
        """Compute per column h = e^(dt * rates) * h + dt * x * b, y = h c + skip * x.

        Mamba: Gu and Dao 2023. x, dt [tokens, columns]; b, c [tokens, state size]; rates [columns, state size];
            state 1:
        h [state size, columns].
        """

    def state_space(
        self, x: Activation, dt: Activation, b: Activation, c: Activation, skip: Weight, heads: HeadState
    ) -> Activation:
        """Compute per head h = e^(dt * rate) * h + b (dt * x)^T, y = c h + skip * x.

        Mamba 2: Dao and Gu 2024. x [tokens, heads * value_dim]; dt [tokens, heads]; b, c [tokens, key_heads * key_dim];
        skip [heads].
        """

    def delta_rule(
        self, q: Activation, k: Activation, v: Activation, dt: Activation, strength: Activation, heads: HeadState
    ) -> Activation:
        """Apply the gated delta rule, which overwrites a key's value in the state.

        Yang et al. 2024, arXiv 2412.06464. For each head, h = e^(dt * rate) * h, then h = h + k (strength * (v - k
        h))^T, y = q h. q, k [tokens, key_heads * key_dim]; v [tokens, heads * value_dim]; dt, strength [tokens, heads].
        """

    def lightning_attention(
        self,
        q: Activation,
        k: Activation,
        v: Activation,
        slopes: Sequence[float],
        state: RecurrentLayerState,
        number: int,
    ) -> Activation:
        """Compute per head h = e^-slope * h + k v^T, y = q h.

        Qin et al. 2024, arXiv 2401.04658; MiniMax-01, 2025. q, k [tokens, heads * key_dim]; v [tokens, heads *
        value_dim]; state `number`: h [heads, key_dim, value_dim].
        """

    def gated_linear_attention(
        self, q: Activation, k: Activation, v: Activation, w: Activation, state: RecurrentLayerState, number: int
    ) -> Activation:
        """Compute per head h = diag(w) h + k v^T, y = q h.

        Yang et al. 2023, arXiv 2312.06635. q, k, w [tokens, heads * key_dim]; v [tokens, heads * value_dim]; state
            `number`:
        h [heads, key_dim, value_dim].
        """

    def wkv6(
        self,
        r: Activation,
        k: Activation,
        v: Activation,
        w: Activation,
        first: Weight,
        state: RecurrentLayerState,
        number: int,
    ) -> Activation:
        """Compute per head y = r (h + diag(first) k v^T), then h = diag(w) h + k v^T (RWKV-6).

        The current token has its own weights, `first` [heads, key_dim] (Peng et al. 2024, arXiv 2404.05892). Other
        arguments as in gated_linear_attention.
        """

    def wkv7(
        self,
        r: Activation,
        w: Activation,
        k: Activation,
        v: Activation,
        a: Activation,
        b: Activation,
        state: RecurrentLayerState,
        number: int,
    ) -> Activation:
        """Compute per head h = diag(w) h + b (a h) + k v^T, y = r h.

        RWKV-7: Peng et al. 2025, arXiv 2503.14456. With a = -key and b = key * rate, the second term removes the key's
        old value. r, w, k, a, b [tokens, heads * key_dim]; v [tokens, heads * value_dim]; state `number`: h [heads,
        key_dim, value_dim].
        """
