"""GLM 4 0414 (GLM Team 2024, arXiv 2406.12793; 2025).

Unlike llama: norms behind attention and feed-forward network too; gate and up are fused; rotation leaves the end of a
head; queries, keys and values may have biases.
"""

from localllm.arch.attention import Transformer, attend, qkv
from localllm.arch.decoder import decoder
from localllm.arch.feed_forward import gated
from localllm.arch.fields import Fields
from localllm.arch.states import Paged
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights


def read(fields: Fields) -> Transformer:
    """The hyperparameters. Raises ModelError."""
    if any(fields.raw("rope.dimension_sections", ())):
        raise fields.unsupported("positions in images are not supported: rope.dimension_sections")
    return Transformer(**Transformer.shared_fields(fields, interleaved=True))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    """Logits of the wanted tokens."""
    return decoder(b, w, h, block)


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation) -> Activation:
    """One layer: attention, then the feed-forward network, each normalized and added to the residual stream."""
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    y = b.linear(attend(b, h, state, q, k, v), w.attn_output)
    x = b.add(x, b.rms_norm(y, w.post_attention_norm, h.epsilon))
    y = gated(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu)
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, h.epsilon))
