"""DeepSeek MoE (2024, arXiv 2401.06066), Ling (Ant 2025, arXiv 2503.05139), ERNIE 4.5 with experts (Baidu 2025).

Unlike llama: layers after the first ones have experts and a shared one. Their weights are normalized in ERNIE, whose
selection has a bias, and in Ling if the file says so.
"""

from localllm.arch.attention import Transformer, attend, qkv
from localllm.arch.decoder import decoder
from localllm.arch.feed_forward import SOFTMAX, feed_forward_or_experts, read_own_routing, read_routing, shared_expert
from localllm.arch.layer_state import Paged
from localllm.arch.metadata import Fields
from localllm.arch.rope import Rope
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights
from localllm.frozen import frozen


@frozen
class DeepSeek(Transformer):
    has_shared: bool  # there is a shared expert


def read(fields: Fields) -> DeepSeek:
    """Read the hyperparameters. Raises ModelError."""
    common = DeepSeek.shared_fields(fields, interleaved=True, rotates_all=True)
    if fields.arch == "deepseek2-ocr":
        return read_ocr(fields)
    if fields.arch == "ernie4_5-moe":
        has_shared = fields.count("expert_shared_feed_forward_length", 0) > 0
        return DeepSeek(**common, routing=read_routing(fields), has_shared=has_shared)
    normalized = fields.arch == "bailingmoe" and fields.flag("expert_weights_norm", False)
    scale = fields.number("expert_weights_scale", 0.0) or 1.0
    return DeepSeek(**common, routing=read_routing(fields, SOFTMAX, normalized, scale), has_shared=True)


def read_ocr(fields: Fields) -> DeepSeek:
    """Read the hyperparameters of DeepSeek-OCR's text model, whose rotated pairs are half a head apart.

    Raises ModelError.
    """
    common = DeepSeek.shared_fields(fields, interleaved=False, rotates_all=True)
    rope = common["attention"].rope
    if rope != Rope(rope.head_dim, rope.head_dim, False, original_context=rope.original_context):
        raise fields.unsupported(f"{fields.prefix}rope.*: only the base of 10000 is supported here")
    return DeepSeek(**common, routing=read_own_routing(fields, SOFTMAX), has_shared=True)


def forward(b: Builder, w: Weights, h: DeepSeek) -> Activation:
    """Compute the logits of the requested tokens."""
    return decoder(b, w, h, block)


def block(b: Builder, w: Weights, h: DeepSeek, state: Paged, x: Activation) -> Activation:
    """Apply one layer: attention, then the feed-forward network, each added to the residual stream."""
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y, beside = b.rms_norm(x, w.ffn_norm, h.epsilon), shared_expert if h.has_shared else None
    return b.add(x, feed_forward_or_experts(b, w, h.routing, y, b.swiglu, beside))
