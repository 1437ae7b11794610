"""Qwen 1.5 and 2 with experts (Yang et al. 2024, arXiv 2407.10671).

Unlike Qwen 2: experts, whose weights are not normalized, and a shared one, whose output is gated.
"""

from localllm.arch.attention import Transformer, attend, qkv
from localllm.arch.decoder import decoder
from localllm.arch.feed_forward import feed_forward_or_experts, gate_output, read_routing
from localllm.arch.layer_state import Paged
from localllm.arch.metadata import Fields
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError."""
    shared = Transformer.shared_fields(fields, interleaved=False)
    return Transformer(**shared, routing=read_routing(fields, normalized=False))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    """Compute the logits of the requested tokens."""
    return decoder(b, w, h, block)


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation) -> Activation:
    """Apply one layer: attention, then the experts, each added to the residual stream."""
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, feed_forward_or_experts(b, w, h.routing, y, b.swiglu, gate_output))
