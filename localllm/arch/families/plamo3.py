"""PLaMo 3 (Preferred Networks 2025).

Differs from Gemma 3: no soft-capping; SiLU gates; seven of eight layers have a sliding window, and may have a RoPE base
of their own.
"""

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    read_local_rope,
    read_windows,
)
from localllm.arch.families.plamo2 import add_feed_forward
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights


def read(fields: HyperparameterReader) -> LocalRopeTransformerHyperparameters:
    shared = LocalRopeTransformerHyperparameters.read_shared_fields(fields, interleaved=False)
    rope = shared["attention"].rope
    return LocalRopeTransformerHyperparameters(
        **shared,
        windows=read_windows(fields, period=8, default=0),
        local_rope=read_local_rope(fields, rope.remove_scaling(10000.0)),
    )


def block(
    b: Builder, w: Weights, h: LocalRopeTransformerHyperparameters, state: PagedState, x: Activation
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    q, k = normalize_heads(b, w, h, q, k)
    y = b.linear(attend(b, h, state, q, k, v), w.attn_output)
    return add_feed_forward(b, w, h, b.add(x, b.rms_norm(y, w.require_exact("post_attention_norm"), h.epsilon)))
