"""Mamba 2 (Dao and Gu 2024, arXiv 2405.21060).

Unlike Mamba: columns form heads with one decay rate each, and groups of heads share B and C; all inputs come from one
matrix; the output is normalized.
"""

from collections.abc import Sequence

from localllm.arch.attention import RMS_EPSILON
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    Hyperparameters,
    RecurrentLayerState,
    Weights,
    frozen,
)
from localllm.arch.recurrent_verbs import HeadState


@frozen
class Mamba2Sizes:
    """The sizes of Mamba 2.

    Attributes:
        inner: number of columns of all heads together.  state_size: rows of a head's state.
        taps: kernel size of the convolution.
    """

    inner: int
    heads: int
    groups: int
    state_size: int
    taps: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """The widths of the convolution's inputs: the values, and B and C, which act as keys and queries."""
        return self.inner, self.groups * self.state_size, self.groups * self.state_size

    def get_state(self, layer: int) -> RecurrentLayerState:
        """Return a layer's state: the convolutions' last inputs, and the heads' states."""
        windows = [(self.taps - 1, columns) for columns in self.parts]
        return RecurrentLayerState(layer, (*windows, (self.heads, self.state_size, self.inner // self.heads)))


@frozen
class Mamba2Hyperparameters(Hyperparameters):
    space: Mamba2Sizes
    epsilon: float

    def list_states(self) -> Sequence[RecurrentLayerState]:
        return [self.space.get_state(layer) for layer in range(self.layers)]


def read_mamba2_sizes(fields: HyperparameterReader) -> Mamba2Sizes:
    """Read the ssm.* keys. Raises ModelError."""
    inner, heads = fields.read_count("ssm.inner_size"), fields.read_count("ssm.time_step_rank")
    groups = fields.read_count("ssm.group_count")
    if inner % heads or heads % groups:
        raise fields.make_error(
            f"ssm.inner_size {inner} must be divisible by ssm.time_step_rank {heads}, and that by ssm.group_count "
            f"{groups}"
        )
    return Mamba2Sizes(inner, heads, groups, fields.read_count("ssm.state_size"), fields.read_count("ssm.conv_kernel"))


def read(fields: HyperparameterReader) -> Mamba2Hyperparameters:
    return Mamba2Hyperparameters(
        **fields.read_common_fields(), space=read_mamba2_sizes(fields), epsilon=fields.read_epsilon(RMS_EPSILON)
    )


def block(b: Builder, w: Weights, h: Mamba2Hyperparameters, state: RecurrentLayerState, x: Activation) -> Activation:
    return b.add(x, apply_mamba2(b, w, h.space, h.epsilon, state, b.rms_norm(x, w.attn_norm, h.epsilon)))


def apply_mamba2(
    b: Builder, w: Weights, space: Mamba2Sizes, epsilon: float, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Compute the output of a layer without the residual."""
    w.require_biases("ssm_conv1d", "ssm_dt")
    gate, *parts, steps = (b.linear(x, part) for part in w.ssm_in.split(space.inner, *space.parts, space.heads))
    convolutions = enumerate(zip(parts, w.ssm_conv1d.split(*space.parts), strict=True))
    inner, keys, queries = (b.convolve(part, weight, state, number) for number, (part, weight) in convolutions)
    steps = b.softplus(steps, w.get_bias("ssm_dt"))
    rates, skip = (
        w.require_exact("ssm_a").require_shape(space.heads, 1),
        w.require_exact("ssm_d").require_shape(space.heads, 1),
    )
    heads = HeadState(state, 3, rates, space.groups, space.heads // space.groups)
    y = b.state_space(inner, steps, keys, queries, skip, heads)
    y = b.swiglu(gate, y)
    if norm := w.get("ssm_norm"):
        columns = space.inner // space.groups
        y = b.rms_norm(y, norm.require_shape(space.groups, columns).flatten(), epsilon, columns)
    return b.linear(y, w.ssm_out)


CHECKPOINTS = {
    "Mamba2ForCausalLM": {
        "layer": "attn_norm @mamba.list_mamba2_layer_tensors", "read": "@mamba.read_mamba2",
        "defaults": {"n_groups": 8, "num_heads": 128, "head_dim": 64, "state_size": 128, "conv_kernel": 4},
    },
}  # fmt: skip
