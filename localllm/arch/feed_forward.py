"""The feed-forward networks that families share."""

from collections.abc import Callable

from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights


def gated(b: Builder, w: Weights, x: Activation, gate: Callable[[Activation, Activation], Activation]) -> Activation:
    """Apply a gated network (Shazeer 2020), such as b.swiglu.

    Its gate matrix may be the upper half of ffn_up.
    """
    is_fused = w.get("ffn_gate") is None and w.ffn_up.shape[0] != w.ffn_down.shape[-1]
    of_gate, up = w.ffn_up.halves() if is_fused else (w.ffn_gate, w.ffn_up)
    return b.linear(gate(b.linear(x, of_gate), b.linear(x, up)), w.ffn_down)


def plain(b: Builder, w: Weights, x: Activation, activation: Callable[[Activation], Activation]) -> Activation:
    """Return two matrices with a function between, such as b.gelu."""
    return b.linear(activation(b.linear(x, w.ffn_up)), w.ffn_down)
