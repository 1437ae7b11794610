"""Spark 2.5 (iFLYTEK 2026).

Unlike llama: layers with a window have another RoPE; a gate for each head; GELU in the gates of the feed-forward
network; rotated pairs are half the rotated dimensions apart.
"""

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    gate_heads,
    project_qkv,
    read_local_rope_dims,
    read_windows,
)
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_gated_feed_forward


def read(fields: HyperparameterReader) -> LocalRopeTransformerHyperparameters:
    shared = LocalRopeTransformerHyperparameters.read_shared_fields(fields, interleaved=False)
    local_rope = read_local_rope_dims(fields, shared["attention"].rope)
    return LocalRopeTransformerHyperparameters(
        **shared, windows=read_windows(fields, period=None), local_rope=local_rope
    )


def block(
    b: Builder, w: Weights, h: LocalRopeTransformerHyperparameters, state: PagedState, x: Activation
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    attended = attend(b, h, state, q, k, v)
    attended = gate_heads(b, h, state, attended, b.sigmoid(b.linear(y, w.attn_gate)))
    x = b.add(x, b.linear(attended, w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.geglu))
