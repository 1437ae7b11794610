"""The verbs of recurrent layers in plain NumPy, token by token: a part of localllm.kernels.reference."""

from collections.abc import Callable, Sequence

import numpy as np

from localllm.arch.verbs import RowwiseVerbs, if_finite


class RecurrentReference(RowwiseVerbs):
    """What a Reference does for recurrent layers. Activations are float32 [tokens, columns]."""

    _spans: Sequence
    _ends: np.ndarray

    def matrix(self, weight) -> np.ndarray:
        raise NotImplementedError

    def rowwise(self, verb, formula, *inputs, **given):
        return formula(*inputs, **given)

    def softplus(self, x, bias=None):
        x = x + (bias.vector() if bias else 0)
        with np.errstate(invalid="ignore"):
            return if_finite(np.logaddexp(0, x).astype(np.float32), x)

    def convolve(self, x, weight, state, number=0, silu=True, dilation=1):
        taps = weight.flat().vector().reshape(x.shape[1], -1)

        def of_sequence(window, x):
            seen = np.concatenate((window, x))
            y = sum(taps[:, tap] * seen[tap * dilation :][: len(x)] for tap in range(taps.shape[1]))
            return seen[len(x) :], y + (weight.bias.vector() if weight.bias else 0)

        y = self._by_sequence(state, number, of_sequence, x)
        return y * self.sigmoid(y) if silu else y

    def mean(self, x, state, number):
        def of_sequence(window, x):
            seen, taps = np.concatenate((window, x)), len(window) + 1
            return seen[len(x) :], sum(seen[tap : tap + len(x)] for tap in range(taps)) / np.float32(taps)

        return self._by_sequence(state, number, of_sequence, x)

    def gated_mean(self, x, places, state, number=0, stretches=1):
        columns = x.shape[1] // (2 * stretches)
        of_places = self.matrix(places).reshape(-1, stretches, columns).swapaxes(0, 1)  # [stretches, taps, columns]
        taps, begins = of_places.shape[0] * of_places.shape[1], self._begins()

        def of_sequence(window, x):
            seen = np.concatenate((window, x)).reshape(-1, 2, stretches, columns)
            rows = np.stack([seen[tap : tap + len(x), :, tap * stretches // taps] for tap in range(taps)])
            gates = rows[:, :, 1] + of_places.reshape(taps, 1, columns)
            is_there = np.arange(taps)[:, None] + next(begins) + np.arange(len(x)) >= taps - 1
            with np.errstate(invalid="ignore"):
                flaws = gates - gates
                gates = np.where(is_there[:, :, None], gates, -np.inf)
                powers = np.exp(gates - gates.max(axis=0)) + np.where(is_there[:, :, None], flaws, 0)
                means = (powers * rows[:, :, 0]).sum(axis=0) / powers.sum(axis=0)
            return seen[len(x) :].reshape(taps - 1, 2 * stretches * columns), means

        return self._by_sequence(state, number, of_sequence, x).astype(np.float32)

    def _begins(self):
        """How many tokens each sequence has before the run."""
        return iter([span.position for span in self._spans])

    def previous(self, x, state, number):
        def of_sequence(last, x):
            return x[-1:], np.concatenate((last, x[:-1]))

        return self._by_sequence(state, number, of_sequence, x)

    def selective_scan(self, x, dt, b, c, rates, skip, state):
        rates, skip = rates.flat().vector().reshape(x.shape[1], -1).T, skip.flat().vector()

        def token(h, x, dt, b, c):
            h = np.exp(dt * rates) * h + b[:, None] * (dt * x)
            return h, c @ h + skip * x

        return self._by_token(state, 1, token, x, dt, b, c)

    def state_space(self, x, dt, b, c, skip, heads):
        skip = skip.flat().vector()[:, None]

        def token(h, c, b, x, dt):
            return h + b[:, :, None] * (dt[:, None] * x)[:, None], skip * x

        return self._by_head(heads, token, c, b, x, dt)

    def delta_rule(self, q, k, v, dt, strength, heads):
        def token(h, q, k, v, dt, strength):
            change = strength[:, None] * (v - np.einsum("hk,hkv->hv", k, h))
            return h + k[:, :, None] * change[:, None], 0

        return self._by_head(heads, token, q, k, v, dt, strength)

    def _by_head(self, scan, token: Callable, *inputs):
        """q h + more, with token(h, q, k, v, dt, ...) -> (h, more); heads [heads, ...], and h has faded by dt."""
        heads, _, value_dim = scan.state.shapes[scan.number]
        keys_of, rates = np.arange(heads) // scan.repeat % scan.key_heads, scan.rates.flat().vector()

        def of_heads(h, q, k, v, dt, *strength):
            q, k = (x.reshape(scan.key_heads, -1)[keys_of] for x in (q, k))
            faded = np.exp(dt * rates)[:, None, None] * h
            h, more = token(faded, q, k, v.reshape(heads, value_dim), dt, *strength)
            return h, (np.einsum("hk,hkv->hv", q, h) + more).reshape(-1)

        return self._by_token(scan.state, scan.number, of_heads, *inputs)

    def lightning_attention(self, q, k, v, slopes, state, number):
        decays = np.exp(-np.float32(slopes))[:, None, None]

        def token(h, q, k, v):
            h = decays * h + k[:, :, None] * v[:, None]
            return h, np.einsum("hk,hkv->hv", q, h)

        return self._by_row(state, number, token, q, k, v)

    def gated_linear_attention(self, q, k, v, w, state, number):
        def token(h, q, k, v, w):
            h = w[:, :, None] * h + k[:, :, None] * v[:, None]
            return h, np.einsum("hk,hkv->hv", q, h)

        return self._by_row(state, number, token, q, k, v, w)

    def wkv6(self, r, k, v, w, first, state, number):
        first = first.flat().vector().reshape(*state.shapes[number][:2], 1)

        def token(h, r, k, v, w):
            new = k[:, :, None] * v[:, None]
            return w[:, :, None] * h + new, np.einsum("hk,hkv->hv", r, h + first * new)

        return self._by_row(state, number, token, r, k, v, w)

    def wkv7(self, r, w, k, v, a, b, state, number):
        def token(h, r, w, k, v, a, b):
            read = np.einsum("hk,hkv->hv", a, h)
            h = w[:, :, None] * h + b[:, :, None] * read[:, None] + k[:, :, None] * v[:, None]
            return h, np.einsum("hk,hkv->hv", r, h)

        return self._by_row(state, number, token, r, w, k, v, a, b)

    def _by_row(self, state, number: int, token: Callable, *inputs):
        """As _by_token, of inputs and outputs in heads."""
        heads = state.shapes[number][0]

        def of_heads(h, *rows):
            h, y = token(h, *(row.reshape(heads, -1) for row in rows))
            return h, y.reshape(-1)

        return self._by_token(state, number, of_heads, *inputs)

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
