"""Granite 3, with experts or without (IBM 2024, Granite 3.0 Language Models).

Unlike llama: factors for embeddings, sublayers' outputs, scores and logits.
"""

from typing import Any

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv, select_rope_factors
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RopeParameters,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_feed_forward_or_experts, apply_shared_expert, read_routing


@frozen
class GraniteHyperparameters(TransformerHyperparameters):
    """The hyperparameters of Granite.

    Attributes:
        logit_scale: divisor of the logits.  has_shared: whether there is a shared expert.
    """

    embedding_scale: float
    residual_scale: float
    score_scale: float
    logit_scale: float
    rotated: bool
    has_shared: bool

    @property
    def scale(self) -> float:
        return self.score_scale

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.attention.rope if self.rotated else None


def read(fields: HyperparameterReader) -> GraniteHyperparameters:
    common = GraniteHyperparameters.read_shared_fields(fields, interleaved=True)
    return GraniteHyperparameters(
        **common, logit_scale=fields.read_factor("logit_scale"), **read_scales(fields, common["attention"].head_dim)
    )


def read_scales(fields: HyperparameterReader, head_dim: int) -> dict[str, Any]:
    """Read Granite's scales. Raises ModelError."""
    return {
        "routing": read_routing(fields),
        "embedding_scale": fields.read_number("embedding_scale", 0.0) or 1.0,
        "residual_scale": fields.read_number("residual_scale", 0.0) or 1.0,
        "score_scale": fields.read_number("attention.scale", 0.0) or head_dim**-0.5,
        "has_shared": fields.read_count("expert_shared_feed_forward_length", 0) > 0,
        "rotated": fields.read_flag("rope.scaling.finetuned", True),
    }


def forward(b: Builder, w: Weights, h: GraniteHyperparameters) -> Activation:
    x = b.scale(b.embed(w.token_embd, b.ids), h.embedding_scale)
    return b.scale(apply_decoder(b, w, h, block, x, factors=select_rope_factors(b, w, h)), 1 / h.logit_scale)


def block(
    b: Builder, w: Weights, h: GraniteHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    y = b.linear(attend(b, h, state, q, k, v, factors), w.attn_output)
    return apply_feed_forward(b, w, h, b.add(x, b.scale(y, h.residual_scale)))


def apply_feed_forward(b: Builder, w: Weights, h: GraniteHyperparameters, x: Activation) -> Activation:
    """Apply the feed-forward network or the experts, and add the output to the residual stream."""
    y, beside = b.rms_norm(x, w.ffn_norm, h.epsilon), apply_shared_expert if h.has_shared else None
    y = apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, beside)
    return b.add(x, b.scale(y, h.residual_scale))


HALVES = {
    f"ffn_{name}_exps": f"{half}_half block_sparse_moe.input_linear.weight[experts both_hidden width]: "
    "experts expert_hidden width"
    for name, half in (("gate", "first"), ("up", "second"))
}
SHARED_HALVES = {
    "ffn_gate_shexp": "first_half shared_mlp.input_linear.weight[both_shared width]: shared_hidden width",
    "ffn_up_shexp": "second_half shared_mlp.input_linear.weight[both_shared width]: shared_hidden width",
    "ffn_down_shexp": "shared_mlp.output_linear.weight: width shared_hidden",
}
CHECKPOINTS = {
    "GraniteForCausalLM": {
        "like": "LlamaForCausalLM",
        "keys": {
            "attention_multiplier": ("attention.scale", 1.0), "embedding_multiplier": ("embedding_scale", 1.0),
            "residual_multiplier": ("residual_scale", 1.0), "logits_scaling": ("logit_scale", 1.0),
        },
    },
    "GraniteMoeForCausalLM": {
        "arch": "granitemoe", "like": "GraniteForCausalLM", "layer": "attention norms experts", "tensors": HALVES,
        "experts": "intermediate_size num_local_experts", "sizes": {"both_hidden": "2 * expert_hidden"},
    },
    "GraniteMoeSharedForCausalLM": {
        "arch": "granitemoe", "like": "GraniteMoeForCausalLM", "tensors": {**HALVES, **SHARED_HALVES},
        "sizes": {
            "both_hidden": "2 * expert_hidden", "shared_hidden": "shared_intermediate_size=0",
            "both_shared": "2 * shared_hidden",
        },
        "amounts": {
            "vocab_size": "vocab", "rope.dimension_count": "head_dim",
            "expert_shared_feed_forward_length": "?shared_hidden",
        },
    },
}  # fmt: skip
