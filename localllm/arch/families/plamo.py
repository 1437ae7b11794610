"""PLaMo 13B (Preferred Networks 2023).

Unlike llama: attention and feed-forward network read the same norm and are added together; rotated pairs are half a
head apart.
"""

from localllm.arch.attention import Transformer, attend, qkv
from localllm.arch.decoder import decoder
from localllm.arch.feed_forward import gated_feed_forward
from localllm.arch.layer_state import Paged
from localllm.arch.metadata import Fields
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError, also if RoPE would rotate only a part of a head."""
    return Transformer(**Transformer.shared_fields(fields, interleaved=False, rotates_all=True))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    """Compute the logits of the requested tokens."""
    return decoder(b, w, h, block)


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation) -> Activation:
    """Apply one layer: attention and the feed-forward network, added to the residual stream."""
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = qkv(b, w, h, state.layer, y)
    of_heads = b.linear(attend(b, h, state, q, k, v), w.attn_output)
    return b.add(x, b.add(gated_feed_forward(b, w, y, b.swiglu), of_heads))
