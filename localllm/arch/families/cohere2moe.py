"""Command A with experts (Cohere 2026).

Unlike Command R7B: experts in all but the first layers; the first layers and the MTP layer have RoPE with and without
a window; the shared expert's output and that of the others are averaged; some files have RMS norms.
"""

from localllm.arch.attention import LAYER_EPSILON, RMS_EPSILON, attend, project_qkv, read_windows
from localllm.arch.decoder import MtpOutput, apply_decoder, apply_mtp_layer
from localllm.arch.families.command_r import Cohere2Hyperparameters
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
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, apply_shared_expert, read_file_routing


@frozen
class Cohere2MoEHyperparameters(Cohere2Hyperparameters):
    """The hyperparameters of Command A with experts.

    Attributes:
        centered: whether norms are layer norms instead of RMS norms.
        dense: number of first layers, which have no experts.  has_shared: whether there is a shared expert.
    """

    centered: bool
    dense: int
    has_shared: bool

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.attention.rope if layer < self.dense or layer >= self.layers else super().get_rope(layer)


def read(fields: HyperparameterReader) -> Cohere2MoEHyperparameters:
    """Read the hyperparameters. Raises ModelError, also if the file does not list its windows."""
    centered = not fields.has(RMS_EPSILON)
    epsilon = LAYER_EPSILON if centered else RMS_EPSILON
    return Cohere2MoEHyperparameters(
        **Cohere2MoEHyperparameters.read_shared_fields(fields, interleaved=True, epsilon=epsilon, rotates_all=True),
        windows=read_windows(fields, period=None),
        logit_scale=fields.read_number("logit_scale") or 1.0,
        centered=centered,
        dense=fields.read_count("leading_dense_block_count", 0),
        has_shared=fields.read_count("expert_shared_count", 0) > 0,
        routing=read_file_routing(fields, SIGMOID),
    )


def apply_norm(b: Builder, h: Cohere2MoEHyperparameters, x: Activation, weight: Weight) -> Activation:
    """Apply a layer norm or an RMS norm."""
    return (b.layer_norm if h.centered else b.rms_norm)(x, weight, h.epsilon)


def forward(b: Builder, w: Weights, h: Cohere2MoEHyperparameters) -> Activation:
    return b.scale(apply_decoder(b, w, h, block, norm=lambda x: apply_norm(b, h, x, w.output_norm)), h.logit_scale)


def block(b: Builder, w: Weights, h: Cohere2MoEHyperparameters, state: PagedState, x: Activation) -> Activation:
    y, both = apply_norm(b, h, x, w.attn_norm), h.has_shared and state.layer >= h.dense
    q, k, v = project_qkv(b, w, h, state.layer, y)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_shared_expert if both else None)
    return b.add(x, b.scale(y, 0.5) if both else y)


def draft(b: Builder, w: Weights, h: Cohere2MoEHyperparameters, hidden: Activation) -> MtpOutput:
    output = apply_mtp_layer(b, w, h, hidden, block, lambda x, weight: apply_norm(b, h, x, weight))
    return MtpOutput(output.hidden, b.scale(output.logits, h.logit_scale))


CHECKPOINTS = {
    "Cohere2MoeForCausalLM": {
        "layer": "attention attn_norm", "parts": {"< leading_dense": ("gated", "experts shared_expert")},
        "named_as": "dots1",
        "only": {
            "attention_bias": False, "prefix_dense_sliding_window_pattern": 1,
            "shared_expert_combination_strategy": "average", "num_nextn_predict_layers": 0,
            "expert_selection_fn": ("softmax", "sigmoid"),
        },
        "amounts": {"vocab_size": "vocab", "rope.dimension_count": "head_dim"},
        "keys": {
            "logit_scale": "logit_scale", "sliding_window": "attention.sliding_window",
            "norm_topk_prob": ("expert_weights_norm", True),
        },
        "read": "@cohere.read",
        "defaults": {
            "tie_word_embeddings": True, "logit_scale": 0.0625, "head_dim": 128, "sliding_window": 4096,
            "max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
