"""The verbs of recurrent layers in plain NumPy, token by token: a part of localllm.kernels.reference."""

from collections.abc import Callable, Sequence

import numpy as np


class RecurrentReference:
    """What a Reference does for recurrent layers. Activations are float32 [tokens, columns]."""

    _spans: Sequence
    _ends: np.ndarray

    def multiply(self, x, y):
        """x * y."""
        return x * y

    def sigmoid(self, x):
        """1 / (1 + e^-x), NaN for infinity."""
        with np.errstate(over="ignore"):
            return if_finite(1 / (1 + np.exp(-x)), x)

    def softplus(self, x, bias=None):
        """log(1 + e^(x + bias)), NaN for infinity."""
        x = x + (bias.vector() if bias else 0)
        with np.errstate(invalid="ignore"):
            return if_finite(np.logaddexp(0, x).astype(np.float32), x)

    def convolve(self, x, weight, state, number=0, silu=True):
        """y[t] = sum over taps of weight[:, tap] * x[t - taps + 1 + tap] + bias, column by column, over the tokens of a
        sequence; zeros stand before its first. With `silu` it is multiplied by its sigmoid.

        State `number` [taps - 1, columns]: the last tokens.
        """
        taps = weight.flat().vector().reshape(x.shape[1], -1)

        def of_sequence(window, x):
            seen = np.concatenate((window, x))
            y = sum(taps[:, tap] * seen[tap : tap + len(x)] for tap in range(taps.shape[1]))
            return seen[len(x) :], y + (weight.bias.vector() if weight.bias else 0)

        y = self._by_sequence(state, number, of_sequence, x)
        return y * self.sigmoid(y) if silu else y

    def selective_scan(self, x, dt, b, c, rates, skip, state):
        """For each column h = e^(dt * rates) * h + dt * x * b, y = h c + skip * x (Gu and Dao 2023).

        x, dt [tokens, columns]; b, c [tokens, state size]; rates [columns, state size]; state 1: h [state size,
        columns].
        """
        rates, skip = rates.flat().vector().reshape(x.shape[1], -1).T, skip.flat().vector()

        def token(h, x, dt, b, c):
            h = np.exp(dt * rates) * h + b[:, None] * (dt * x)
            return h, c @ h + skip * x

        return self._by_token(state, 1, token, x, dt, b, c)

    def state_space(self, x, dt, b, c, rates, skip, state, number, groups):
        """For each head h = e^(dt * rate) * h + b (dt * x)^T, y = c h + skip * x (Mamba 2: Dao and Gu 2024).

        x [tokens, heads * value_dim]; dt [tokens, heads]; b, c [tokens, groups * key_dim]: heads in equal groups share
        them; state `number`: h [heads, key_dim, value_dim].
        """
        heads, _, value_dim = state.shapes[number]
        rates, skip = rates.flat().vector(), skip.flat().vector()[:, None]

        def token(h, x, dt, b, c):
            x = x.reshape(heads, value_dim)
            b, c = (np.repeat(z.reshape(groups, -1), heads // groups, axis=0) for z in (b, c))
            h = np.exp(dt * rates)[:, None, None] * h + b[:, :, None] * (dt[:, None] * x)[:, None]
            return h, (np.einsum("hk,hkv->hv", c, h) + skip * x).reshape(-1)

        return self._by_token(state, number, token, x, dt, b, c)

    def delta_rule(self, q, k, v, dt, strength, rates, state, number, key_heads, repeat=1):
        """For each head h = e^(dt * rate) * h, then h = h + k (strength * (v - k h))^T, y = q h: what the key has read
        so far is replaced (the gated delta rule: Yang et al. 2024, arXiv 2412.06464).

        q, k [tokens, key_heads * key_dim]; v [tokens, heads * value_dim]; dt, strength [tokens, heads]; head i has the
        keys of head i / repeat % key_heads; state `number`: h [heads, key_dim, value_dim].
        """
        heads, _, value_dim = state.shapes[number]
        keys_of, rates = np.arange(heads) // repeat % key_heads, rates.flat().vector()

        def token(h, q, k, v, dt, strength):
            q, k = (z.reshape(key_heads, -1)[keys_of] for z in (q, k))
            h = np.exp(dt * rates)[:, None, None] * h
            change = strength[:, None] * (v.reshape(heads, value_dim) - np.einsum("hk,hkv->hv", k, h))
            h = h + k[:, :, None] * change[:, None]
            return h, np.einsum("hk,hkv->hv", q, h).reshape(-1)

        return self._by_token(state, number, token, q, k, v, dt, strength)

    def _by_token(self, state, number: int, token: Callable, *inputs):
        """The outputs of token(h, *rows) -> (h, output), one after the other."""

        def of_sequence(h, *inputs):
            outputs = []
            for rows in zip(*inputs, strict=True):
                h, y = token(h, *rows)
                outputs.append(y)
            return h, np.stack(outputs)

        return self._by_sequence(state, number, of_sequence, *inputs)

    def _by_sequence(self, state, number: int, of_sequence: Callable, *inputs):
        """The outputs of of_sequence(state, *inputs) -> (state, outputs) for the rows of each sequence."""
        results = []
        for span, end in zip(self._spans, self._ends, strict=True):
            rows = slice(end - len(span.ids), end)
            old = span.store.state(state.layer, number, state.shapes[number])
            new, outputs = of_sequence(old, *(x[rows] for x in inputs))
            span.store.put_state(state.layer, number, new.astype(np.float32))
            results.append(outputs)
        return np.concatenate(results).astype(np.float32)


def if_finite(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """y, but NaN where x is not finite: a function whose values are bounded would hide what a broken weight made."""
    return np.where(np.isfinite(x), y, np.float32(np.nan))
