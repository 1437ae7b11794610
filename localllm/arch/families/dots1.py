"""dots.llm1 (rednote 2025, arXiv 2506.05767), Ling 2 (Ant 2025, arXiv 2510.22115), Hunyuan 3 (Tencent 2026).

Unlike Qwen 3: layers after the first ones have experts and a shared one; files name the router's score function.
Ling 2 rotates a part of each head; it and Hunyuan 3, whose scores are sigmoids, may have MTP
layers.
"""

from localllm.arch.attention import Transformer, attend, qkv, rms_norm_heads
from localllm.arch.decoder import decoder
from localllm.arch.feed_forward import SIGMOID, feed_forward_or_experts, read_own_routing, shared_expert
from localllm.arch.layer_state import Paged
from localllm.arch.metadata import Fields
from localllm.arch.mtp import MtpOutput, mtp_output
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights


def read(fields: Fields) -> Transformer:
    """Read the hyperparameters. Raises ModelError."""
    common = Transformer.shared_fields(fields, interleaved=False, rotates_all=fields.arch != "bailingmoe2")
    function = SIGMOID if fields.arch == "hy_v3" else None
    return Transformer(**common, routing=read_own_routing(fields, function))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    """Compute the logits of the requested tokens."""
    return decoder(b, w, h, block)


def block(
    b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation, factors: Weight | None = None
) -> Activation:
    """Apply one layer: attention, then the feed-forward network, each added to the residual stream."""
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, *rms_norm_heads(b, w, h, q, k), v, factors), w.attn_output))
    return b.add(
        x, feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu, shared_expert)
    )


def draft(b: Builder, w: Weights, h: Transformer, hidden: Activation) -> MtpOutput:
    """Apply the MTP layer."""
    return mtp_output(b, w, h, hidden, block)
