"""PLaMo 13B (Preferred Networks 2023).

Unlike llama: attention and feed-forward network read the same norm and are added together; rotated pairs are half a
head apart.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    """Read the hyperparameters. Raises ModelError, also if RoPE does not rotate whole heads."""
    return TransformerHyperparameters(
        **TransformerHyperparameters.read_shared_fields(fields, interleaved=False, rotates_all=True)
    )


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    of_heads = b.linear(attend(b, h, state, q, k, v), w.attn_output)
    return b.add(x, b.add(apply_gated_feed_forward(b, w, y, b.swiglu), of_heads))
