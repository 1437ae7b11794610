"""Llama and everything built like it: Mistral, SmolLM, TinyLlama, ..."""

from localllm.arch.builder import Activation, Builder
from localllm.arch.weights import Weight, Weights

INTERLEAVED_ROPE = True


def forward(b: Builder, w: Weights) -> Activation:
    """Logits of the selected tokens."""
    x = b.embed(w.token_embd)
    for layer in range(b.config.layers):
        x = block(b, w.block(layer), x, layer, w.get("rope_freqs"))
    x = b.rms_norm(b.select(x), w.output_norm)
    return b.linear(x, w.get("output") or w.token_embd)


def block(b: Builder, w: Weights, x: Activation, layer: int, rope_factors: Weight | None) -> Activation:
    """One layer: attention, then the feed-forward network, each added to the residual stream."""
    h = b.rms_norm(x, w.attn_norm)
    q, k, v = b.linear(h, w.attn_q), b.linear(h, w.attn_k, cached=True), b.linear(h, w.attn_v, cached=True)
    q, k = b.rope(q, rope_factors), b.rope(k, rope_factors)
    x = b.add(x, b.linear(b.attend(q, k, v, layer), w.attn_output))
    h = b.rms_norm(x, w.ffn_norm)
    return b.add(x, b.linear(b.swiglu(b.linear(h, w.ffn_gate), b.linear(h, w.ffn_up)), w.ffn_down))
