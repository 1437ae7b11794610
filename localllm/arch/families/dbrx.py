"""DBRX (Databricks 2024).

Unlike llama: layer norms without biases; rotated pairs are half a head apart; queries, keys and values, from one
matrix, are clamped; experts.
"""

from localllm.arch.attention import LAYER_EPSILON, attend, qkv
from localllm.arch.decoder import decoder
from localllm.arch.families.olmo import OLMo
from localllm.arch.feed_forward import feed_forward_or_experts, read_routing
from localllm.arch.layer_state import Paged
from localllm.arch.metadata import Fields
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights


def read(fields: Fields) -> OLMo:
    """Read the hyperparameters. Raises ModelError."""
    shared = OLMo.shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON, rotates_all=True)
    return OLMo(**shared, limit=fields.number("attention.clamp_kqv"), routing=read_routing(fields))


def forward(b: Builder, w: Weights, h: OLMo) -> Activation:
    """Compute the logits of the requested tokens."""
    return decoder(b, w, h, block, norm=lambda x: b.layer_norm(x, w.output_norm, h.epsilon))


def block(b: Builder, w: Weights, h: OLMo, state: Paged, x: Activation) -> Activation:
    """Apply one layer: attention, then the experts, each added to the residual stream."""
    heads = qkv(b, w, h, state.layer, b.layer_norm(x, w.attn_norm, h.epsilon))
    q, k, v = (b.clamp(y, h.limit) for y in heads) if h.limit else heads
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, feed_forward_or_experts(b, w, h.routing, b.layer_norm(x, w.attn_output_norm, h.epsilon), b.swiglu))
