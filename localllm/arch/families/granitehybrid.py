"""Granite 4 (IBM 2025), and Bamba.

Unlike Granite 3: layers without key-value heads have Mamba 2 instead of attention; some models have no RoPE.
"""

from collections.abc import Sequence

from localllm.arch.attention import RMS_EPSILON, attend, project_qkv, read_attention, select_rope_factors
from localllm.arch.decoder import apply_decoder
from localllm.arch.families.granite import (
    HALVES,
    SHARED_HALVES,
    GraniteHyperparameters,
    apply_feed_forward,
    read_scales,
)
from localllm.arch.families.mamba2 import Mamba2Sizes, apply_mamba2, read_mamba2_sizes
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RecurrentLayerState,
    Weight,
    Weights,
    frozen,
)


@frozen
class GraniteHybridHyperparameters(GraniteHyperparameters):
    space: Mamba2Sizes

    def list_states(self) -> Sequence[PagedState | RecurrentLayerState]:  # type: ignore[override]
        """Return the state of each layer: keys and values, or Mamba 2's."""
        return [state if state.kv_heads else self.space.get_state(state.layer) for state in super().list_states()]


def read(fields: HyperparameterReader) -> GraniteHybridHyperparameters:
    attention = read_attention(fields, interleaved=True, every_layer=False)
    return GraniteHybridHyperparameters(
        **fields.read_common_fields(),
        attention=attention,
        epsilon=fields.read_epsilon(RMS_EPSILON),
        logit_scale=fields.read_number("logit_scale", 0.0) or 1.0,
        space=read_mamba2_sizes(fields),
        **read_scales(fields, attention.head_dim),
    )


def forward(b: Builder, w: Weights, h: GraniteHybridHyperparameters) -> Activation:
    x = b.scale(b.embed(w.token_embd, b.ids), h.embedding_scale)
    return b.scale(apply_decoder(b, w, h, block, x, factors=select_rope_factors(b, w, h)), 1 / h.logit_scale)


def block(
    b: Builder,
    w: Weights,
    h: GraniteHybridHyperparameters,
    state: PagedState | RecurrentLayerState,
    x: Activation,
    factors: Weight | None,
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    if isinstance(state, RecurrentLayerState):
        w.require("ssm_norm")
        y = apply_mamba2(b, w, h.space, h.epsilon, state, y)
    else:
        q, k, v = project_qkv(b, w, h, state.layer, y)
        y = b.linear(attend(b, h, state, q, k, v, factors), w.attn_output)
    return apply_feed_forward(b, w, h, b.add(x, b.scale(y, h.residual_scale)))


# A shared network, next to experts or alone.
ALONE = {name.removesuffix("_shexp"): its for name, its in SHARED_HALVES.items()}
CHECKPOINTS = {
    "GraniteMoeHybridForCausalLM": {
        "like": "GraniteForCausalLM", "layer": "norms @mamba.list_granitehybrid_tensors",
        "parts": {"experts": ("experts " + " ".join({**HALVES, **SHARED_HALVES}), " ".join(ALONE))},
        "tensors": {**HALVES, **SHARED_HALVES, **ALONE}, "only": {"position_embedding_type": "nope"},
        "read": "@mamba.read_granitehybrid",
    },
    "BambaForCausalLM": {
        "layer": "norms @mamba.list_granitehybrid_tensors gated", "rotated": True, "partial_rope": True,
        "only": {"attention_bias": False, "mlp_bias": False}, "amounts": {"vocab_size": "vocab"},
        "read": "@mamba.read_bamba", "defaults": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
