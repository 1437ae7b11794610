"""The verbs of recurrent layers: what they keep of a sequence is a Recurrent state (localllm.arch.layer_state).

See localllm.arch.verbs for what a verb is.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from localllm.arch.layer_state import Recurrent
from localllm.arch.weights import Weight
from localllm.frozen import frozen

Activation = Any


@frozen
class HeadState:
    """What the heads of a recurrent layer keep: state `number`, h [heads, key_dim, value_dim].

    Before each token h is multiplied by e^(dt * rate), rates [heads]; head i has the keys of head
    i / repeat % key_heads.
    """

    state: Recurrent
    number: int
    rates: Weight
    key_heads: int
    repeat: int


class StateVerbs(Protocol):
    """What a builder does for recurrent layers."""

    def convolve(
        self, x: Activation, weight: Weight, state: Recurrent, number: int = 0, silu: bool = True, dilation: int = 1
    ) -> Activation:
        """y[t] = sum over taps of weight[:, tap] * x[t - (taps - 1 - tap) * dilation] + bias, column by column, over
        the tokens of a sequence; zeros stand before its first. With `silu` it is multiplied by its sigmoid.

        State `number` [(taps - 1) * dilation, columns]: the last tokens.
        """
        ...

    def previous(self, x: Activation, state: Recurrent, number: int) -> Activation:
        """Of each token the row of the one before, zeros before the first. State `number` [1, columns]: the last."""
        ...

    def mean(self, x: Activation, state: Recurrent, number: int) -> Activation:
        """Of each token the mean of it and as many before as state `number` has rows [before, columns], zeros before
        the first."""
        ...

    def gated_mean(
        self, x: Activation, places: Weight, state: Recurrent, number: int = 0, stretches: int = 1
    ) -> Activation:
        """y[t] = the sum over taps of p[tap] * x[t - taps + 1 + tap], column by column, p the softmax over the taps of
        gates[t - taps + 1 + tap] + places[tap], over the tokens of a sequence that there are (a pool of an indexer's
        keys: GLM 5.3, 2026; compressed keys: DeepSeek-V4, 2026).

        Taps in two stretches, of as many each, have columns of their own, the earlier ones first: blocks overlap.

        x [tokens, 2 * stretches * columns]: what is averaged, and its gates. places [taps / stretches, stretches *
        columns]. State `number` [taps - 1, 2 * stretches * columns]: the last tokens.
        """
        ...

    def selective_scan(
        self,
        x: Activation,
        dt: Activation,
        b: Activation,
        c: Activation,
        rates: Weight,
        skip: Weight,
        state: Recurrent,
    ) -> Activation:
        """For each column h = e^(dt * rates) * h + dt * x * b, y = h c + skip * x (Gu and Dao 2023).

        x, dt [tokens, columns]; b, c [tokens, state size]; rates [columns, state size]; state 1: h [state size,
        columns].
        """
        ...

    def state_space(
        self, x: Activation, dt: Activation, b: Activation, c: Activation, skip: Weight, heads: HeadState
    ) -> Activation:
        """For each head h = e^(dt * rate) * h + b (dt * x)^T, y = c h + skip * x (Mamba 2: Dao and Gu 2024).

        x [tokens, heads * value_dim]; dt [tokens, heads]; b, c [tokens, key_heads * key_dim]; skip [heads].
        """
        ...

    def delta_rule(
        self, q: Activation, k: Activation, v: Activation, dt: Activation, strength: Activation, heads: HeadState
    ) -> Activation:
        """For each head h = e^(dt * rate) * h, then h = h + k (strength * (v - k h))^T, y = q h: what the key has read
        so far is replaced (the gated delta rule: Yang et al. 2024, arXiv 2412.06464).

        q, k [tokens, key_heads * key_dim]; v [tokens, heads * value_dim]; dt, strength [tokens, heads].
        """
        ...

    def lightning_attention(
        self, q: Activation, k: Activation, v: Activation, slopes: Sequence[float], state: Recurrent, number: int
    ) -> Activation:
        """For each head h = e^-slope * h + k v^T, y = q h (Qin et al. 2024, arXiv 2401.04658; MiniMax-01, 2025).

        q, k [tokens, heads * key_dim]; v [tokens, heads * value_dim]; state `number`: h [heads, key_dim, value_dim].
        """
        ...

    def gated_linear_attention(
        self, q: Activation, k: Activation, v: Activation, w: Activation, state: Recurrent, number: int
    ) -> Activation:
        """For each head h = diag(w) h + k v^T, y = q h (Yang et al. 2023, arXiv 2312.06635).

        q, k, w [tokens, heads * key_dim]; v [tokens, heads * value_dim]; state `number`: h [heads, key_dim, value_dim].
        """
        ...

    def wkv6(
        self, r: Activation, k: Activation, v: Activation, w: Activation, first: Weight, state: Recurrent, number: int
    ) -> Activation:
        """For each head y = r (h + diag(first) k v^T), then h = diag(w) h + k v^T (RWKV-6: Peng et al. 2024, arXiv
        2404.05892): a token is read with weights of its own, `first` [heads, key_dim], before it is kept.

        Otherwise as gated_linear_attention.
        """
        ...

    def wkv7(
        self,
        r: Activation,
        w: Activation,
        k: Activation,
        v: Activation,
        a: Activation,
        b: Activation,
        state: Recurrent,
        number: int,
    ) -> Activation:
        """For each head h = diag(w) h + b (a h) + k v^T, y = r h (RWKV-7: Peng et al. 2025, arXiv 2503.14456): what a
        reads is taken away by b, as a is -b.

        r, w, k, a, b [tokens, heads * key_dim]; v [tokens, heads * value_dim]; state `number`: h [heads, key_dim,
        value_dim].
        """
        ...
