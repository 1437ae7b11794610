"""Jamba (AI21 2024, arXiv 2403.19887, 2408.12570).

Unlike llama: most layers, those without key-value heads, have Mamba instead of attention, with norms for the inputs of
its scan; the others have no RoPE; some layers have experts, whose weights are not normalized.
"""

from collections.abc import Sequence

from localllm.arch.attention import RMS_EPSILON, TransformerHyperparameters, attend, project_qkv, read_attention
from localllm.arch.families.mamba import MambaSizes, apply_mamba, read_mamba_sizes
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RecurrentLayerState,
    RopeParameters,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_feed_forward_or_experts, read_routing


@frozen
class JambaHyperparameters(TransformerHyperparameters):
    selection: MambaSizes

    def get_rope(self, layer: int) -> RopeParameters | None:
        return None

    def list_states(self) -> Sequence[PagedState | RecurrentLayerState]:  # type: ignore[override]
        """Return the state of each layer: keys and values, or Mamba's."""
        return [state if state.kv_heads else self.selection.get_state(state.layer) for state in super().list_states()]


def read(fields: HyperparameterReader) -> JambaHyperparameters:
    return JambaHyperparameters(
        **fields.read_common_fields(),
        attention=read_attention(fields, interleaved=False, every_layer=False),
        epsilon=fields.read_epsilon(RMS_EPSILON),
        routing=read_routing(fields, normalized=False),
        selection=read_mamba_sizes(fields),
    )


def block(
    b: Builder, w: Weights, h: JambaHyperparameters, state: PagedState | RecurrentLayerState, x: Activation
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    if isinstance(state, RecurrentLayerState):
        for name in ("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm"):
            w.require(name)
        y = apply_mamba(b, w, h.selection, h.epsilon, state, y)
    else:
        y = b.linear(attend(b, h, state, *project_qkv(b, w, h, state.layer, y)), w.attn_output)
    x = b.add(x, y)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


MAMBA = {
    "ssm_in": "both_inner width", "ssm_conv1d": "reshape mamba.conv1d.weight[inner one kernel]: inner kernel",
    "ssm_conv1d.bias": "inner", "ssm_x": "rank_and_states inner", "ssm_dt": "inner rank",
    "ssm_a": "decay mamba.A_log: inner state", "ssm_d": "inner", "ssm_out": "width inner", "ssm_dt_norm": "rank",
    "ssm_b_norm": "state", "ssm_c_norm": "state",
}  # fmt: skip
CHECKPOINTS = {
    "JambaForCausalLM": {
        "layer": "norms", "parts": {"attends": ("attention", " ".join(MAMBA)), "mixes": ("experts", "gated")},
        "tensors": MAMBA, "only": {"mamba_conv_bias": True, "mamba_proj_bias": False}, "read": "@mamba.read_jamba",
    },
}  # fmt: skip
