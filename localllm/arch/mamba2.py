"""Mamba 2 (Dao and Gu 2024, arXiv 2405.21060).

Unlike Mamba: columns are heads, each of which forgets at one rate, and groups of which share what they write by and
read by; all of it comes from one matrix; the result is normalized.
"""

from collections.abc import Sequence

from localllm.arch.attention import RMS_EPSILON
from localllm.arch.fields import Fields
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.states import Recurrent
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights
from localllm.frozen import frozen


@frozen
class Mamba2(Hyperparameters):
    """`inner` columns in `heads`, whose state has `state_size` rows; the convolution has `taps`."""

    inner: int
    heads: int
    groups: int
    state_size: int
    taps: int
    epsilon: float

    @property
    def parts(self) -> tuple[int, int, int]:
        """Columns of what goes through the convolution: what is written, by what, and what it is read by."""
        return self.inner, self.groups * self.state_size, self.groups * self.state_size

    def states(self) -> Sequence[Recurrent]:
        """Of every layer the last tokens and the states."""
        windows = [(self.taps - 1, columns) for columns in self.parts]
        shapes = (*windows, (self.heads, self.state_size, self.inner // self.heads))
        return [Recurrent(layer, shapes) for layer in range(self.layers)]


def read(fields: Fields) -> Mamba2:
    """The hyperparameters. Raises ModelError."""
    inner, heads = fields.count("ssm.inner_size"), fields.count("ssm.time_step_rank")
    groups = fields.count("ssm.group_count")
    if inner % heads or heads % groups:
        raise fields.error(f"{inner} columns do not make {heads} heads in {groups} groups")
    return Mamba2(
        **fields.common(),
        inner=inner,
        heads=heads,
        groups=groups,
        state_size=fields.count("ssm.state_size"),
        taps=fields.count("ssm.conv_kernel"),
        epsilon=fields.epsilon(RMS_EPSILON),
    )


def forward(b: Builder, w: Weights, h: Mamba2) -> Activation:
    """Logits of the wanted tokens."""
    x = b.embed(w.token_embd, b.ids)
    for state in h.states():
        block = w.block(state.layer)
        x = b.add(x, mixed(b, block, h, state, b.rms_norm(x, block.attn_norm, h.epsilon)))
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.linear(x, w.get("output") or w.token_embd)


def mixed(b: Builder, w: Weights, h: Mamba2, state: Recurrent, x: Activation) -> Activation:
    """What a layer adds to the residual stream."""
    w.require_biases("ssm_conv1d", "ssm_dt")
    gate, *parts, steps = (b.linear(x, part) for part in w.ssm_in.split(h.inner, *h.parts, h.heads))
    convolutions = enumerate(zip(parts, w.ssm_conv1d.split(*h.parts), strict=True))
    inner, keys, queries = (b.convolve(part, weight, state, number) for number, (part, weight) in convolutions)
    steps = b.softplus(steps, w.bias("ssm_dt"))
    rates, skip = w.exactly("ssm_a").shaped(h.heads, 1), w.exactly("ssm_d").shaped(h.heads, 1)
    y = b.state_space(inner, steps, keys, queries, rates, skip, state, number=3, groups=h.groups)
    y = b.swiglu(gate, y)
    if norm := w.get("ssm_norm"):
        y = b.rms_norm(y, norm.shaped(h.groups, h.inner // h.groups).flat(), h.epsilon, h.inner // h.groups)
    return b.linear(y, w.ssm_out)
