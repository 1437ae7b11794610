"""Llama (Touvron et al. 2023) and everything built like it: Mistral, SmolLM, TinyLlama, ..."""

from localllm.arch.attention import Transformer
from localllm.arch.fields import Fields
from localllm.arch.states import Paged
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights


def read(fields: Fields) -> Transformer:
    """The hyperparameters. Raises ModelError."""
    if experts := fields.count("expert_count", 0):
        raise fields.error(f"mixtures of experts are not supported yet ({experts} experts)")
    return Transformer(**Transformer.shared_fields(fields, interleaved=True))


def forward(b: Builder, w: Weights, h: Transformer) -> Activation:
    """Logits of the wanted tokens."""
    x = b.embed(w.token_embd, b.ids)
    for state in h.states():
        x = block(b, w.block(state.layer), h, state, x, w.get("rope_freqs"))
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.linear(x, w.get("output") or w.token_embd)


def block(b: Builder, w: Weights, h: Transformer, state: Paged, x: Activation, factors: Weight | None) -> Activation:
    """One layer: attention, then the feed-forward network, each added to the residual stream."""
    a = h.attention
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = b.linear(y, w.attn_q), b.linear(y, w.attn_k), b.linear(y, w.attn_v)
    q, k = b.rope(q, a.rope, b.positions, factors), b.rope(k, a.rope, b.positions, factors)
    y = b.attend(q, k, v, state, heads=a.heads[state.layer], scale=a.head_dim**-0.5)
    x = b.add(x, b.linear(y, w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, b.linear(b.swiglu(b.linear(y, w.ffn_gate), b.linear(y, w.ffn_up)), w.ffn_down))
