"""Mamba (Gu and Dao 2023, arXiv 2312.00752), and Falcon Mamba (Zuo et al. 2024), which normalizes the scan's inputs.

Layers have no attention, but a short convolution and a selective scan: each column has a state whose decay, input and
output depend on the token.
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


@frozen
class MambaSizes:
    """The sizes of Mamba.

    Attributes:
        inner: number of columns, each with a state of `state_size` elements.  taps: kernel size of the convolution.
        rank: of the time steps' projection.  normalized: whether the scan's inputs are normalized.
    """

    inner: int
    state_size: int
    taps: int
    rank: int
    normalized: bool

    def get_state(self, layer: int) -> RecurrentLayerState:
        """Return a layer's state: the convolution's last inputs, and the columns' states."""
        return RecurrentLayerState(layer, ((self.taps - 1, self.inner), (self.state_size, self.inner)))


@frozen
class MambaHyperparameters(Hyperparameters):
    selection: MambaSizes
    epsilon: float

    def list_states(self) -> Sequence[RecurrentLayerState]:
        return [self.selection.get_state(layer) for layer in range(self.layers)]


def read_mamba_sizes(fields: HyperparameterReader) -> MambaSizes:
    """Read the ssm.* keys. Raises ModelError."""
    return MambaSizes(
        inner=fields.read_count("ssm.inner_size"),
        state_size=fields.read_count("ssm.state_size"),
        taps=fields.read_count("ssm.conv_kernel"),
        rank=fields.read_count("ssm.time_step_rank"),
        normalized=fields.read_flag("ssm.dt_b_c_rms", False),
    )


def read(fields: HyperparameterReader) -> MambaHyperparameters:
    return MambaHyperparameters(
        **fields.read_common_fields(), selection=read_mamba_sizes(fields), epsilon=fields.read_epsilon(RMS_EPSILON)
    )


def block(b: Builder, w: Weights, h: MambaHyperparameters, state: RecurrentLayerState, x: Activation) -> Activation:
    return b.add(x, apply_mamba(b, w, h.selection, h.epsilon, state, b.rms_norm(x, w.attn_norm, h.epsilon)))


def apply_mamba(
    b: Builder, w: Weights, s: MambaSizes, epsilon: float, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Compute the output of a layer without the residual."""
    w.require_biases("ssm_conv1d", "ssm_dt")
    inner, gate = (b.linear(x, part) for part in w.ssm_in.split(s.inner, s.inner))
    inner = b.convolve(inner, w.ssm_conv1d, state)
    of_scan = [b.linear(inner, part) for part in w.ssm_x.split(s.rank, s.state_size, s.state_size)]
    norms = [w.get("ssm_dt_norm"), w.get("ssm_b_norm"), w.get("ssm_c_norm")]
    if s.normalized or any(norms):
        of_scan = [b.rms_norm(x, norm, epsilon) for x, norm in zip(of_scan, norms, strict=True)]
    steps, keys, queries = of_scan
    steps = b.softplus(b.linear(steps, w.ssm_dt))
    y = b.selective_scan(inner, steps, keys, queries, w.require_exact("ssm_a"), w.require_exact("ssm_d"), state)
    return b.linear(b.swiglu(gate, y), w.ssm_out)


CHECKPOINTS = {
    "MambaForCausalLM MambaLMHeadModel": {
        "layer": "attn_norm",
        "tensors": {
            "ssm_in": "both_inner width", "ssm_conv1d": "reshape mixer.conv1d.weight[inner one kernel]: inner kernel",
            "ssm_conv1d.bias": "inner", "ssm_x": "rank_and_states inner", "ssm_dt": "inner rank",
            "ssm_a": "decay mixer.A_log: inner state", "ssm_d": "inner", "ssm_out": "width inner",
        },
        "biased": "ssm_dt", "read": "@mamba.read_mamba", "defaults": {"tie_word_embeddings": True},
    },
    "FalconMambaForCausalLM": {"like": "MambaForCausalLM", "read": "@mamba.read_falcon_mamba"},
}  # fmt: skip
