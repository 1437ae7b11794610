"""MiniMax-01 and M1 (MiniMax 2025, arXiv 2501.08313).

Unlike M2: seven layers of eight have lightning attention: a state matrix for each head, which decays at the head's own
rate, slower in later layers; a sublayer's output is added not to the residual stream but to its norm, scaled; the
router's scores are a softmax.
"""

from collections.abc import Sequence

from localllm.arch.attention import TransformerHyperparameters, attend
from localllm.arch.families.qwen35 import read_attention_layers
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RecurrentLayerState,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_mixture_of_experts, read_routing


@frozen
class MiniMax01Hyperparameters(TransformerHyperparameters):
    """The hyperparameters of MiniMax-01.

    Attributes:
        attends: by layer, whether it has attention instead of lightning attention.
    """

    attends: tuple[bool, ...]
    residual_scale: float

    def list_states(self) -> Sequence[PagedState | RecurrentLayerState]:  # type: ignore[override]
        """Return the state of each layer: keys and values, or the heads' matrices."""
        dim = self.attention.head_dim
        recurrent = [
            RecurrentLayerState(layer, ((heads, dim, dim),)) for layer, heads in enumerate(self.attention.heads)
        ]
        return [state if self.attends[state.layer] else recurrent[state.layer] for state in super().list_states()]

    def compute_slopes(self, layer: int) -> list[float]:
        """Return the heads' decay slopes: ALiBi's (Press et al. 2021), smaller in later layers."""
        heads = self.attention.heads[layer]
        slower = 1 - layer / max(self.layers - 1, 1) + 1e-5
        return [slower * 2 ** (-8 * (head + 1) / heads) for head in range(heads)]


def read(fields: HyperparameterReader) -> MiniMax01Hyperparameters:
    shared = MiniMax01Hyperparameters.read_shared_fields(fields, interleaved=False)
    routing = read_routing(fields)
    if routing is None:
        raise fields.make_error(f"{fields.format_key('expert_count')} is missing")
    attends = read_attention_layers(fields, shared["layers"], interval=8)
    return MiniMax01Hyperparameters(
        **shared, routing=routing, attends=attends, residual_scale=fields.read_factor("residual_scale")
    )


def block(
    b: Builder, w: Weights, h: MiniMax01Hyperparameters, state: PagedState | RecurrentLayerState, x: Activation
) -> Activation:
    """Apply one layer: attention or lightning attention, then experts.

    Each output is added to its input.
    """
    assert h.routing is not None
    x = b.rms_norm(x, w.attn_norm, h.epsilon)
    if isinstance(state, RecurrentLayerState):
        y = apply_lightning_attention(b, w, h, state, x)
    else:
        q, k, v = (b.linear(x, matrix) for matrix in (w.attn_q, w.attn_k, w.attn_v))
        y = attend(b, h, state, q, k, v)
    x = b.add(b.linear(y, w.attn_output), b.scale(x, h.residual_scale))
    x = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(apply_mixture_of_experts(b, w, h.routing, x, b.swiglu), b.scale(x, h.residual_scale))


def apply_lightning_attention(
    b: Builder, w: Weights, h: MiniMax01Hyperparameters, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Compute the heads' outputs, normalized and gated. Queries, keys and values are ordered head by head."""
    ((heads, dim, _),) = state.shapes
    every = b.linear(x, w.attn_qkv.require_shape(3 * heads * dim, h.width))
    every = b.multiply(every, b.sigmoid(every))
    q, k, v = (b.slice_columns(every, first * dim, (first + 1) * dim, 3 * dim) for first in range(3))
    y = b.lightning_attention(q, k, v, h.compute_slopes(state.layer), state, 0)
    return b.multiply(b.rms_norm(y, w.attn_norm_2, h.epsilon), b.sigmoid(b.linear(x, w.attn_gate)))


CHECKPOINTS = {
    "MiniMaxText01ForCausalLM MiniMaxM1ForCausalLM": {
        "layer": "norms experts", "parts": {"attends": ("attention", "attn_qkv attn_gate attn_norm_2 attn_output")},
        "tensors": {
            "attn_qkv": "self_attn.qkv_proj.weight: fused_rows width",
            "attn_gate": "self_attn.output_gate.weight: queries width", "attn_norm_2": "self_attn.norm.weight: queries",
            "attn_output": "self_attn.out_proj.weight: width queries",
        },
        "named_as": "minimax-m2", "partial_rope": True,
        "only": {
            "layernorm_full_attention_beta": 1, "layernorm_linear_attention_beta": 1, "layernorm_mlp_beta": 1,
            "postnorm": True, "shared_intermediate_size": 0,
        },
        "experts": "intermediate_size num_local_experts", "sizes": {"fused_rows": "3 * queries"},
        "amounts": {"rope.dimension_count": "rotary_dim"},
        "keys": {"layernorm_full_attention_alpha": ("residual_scale", 1.0)}, "read": "@minimax.read_minimax_01",
    },
}  # fmt: skip
