"""gpt-oss (OpenAI 2025, arXiv 2508.10925).

Unlike llama: rotated pairs are half a head apart; every second layer, from the first on, sees a window; each head may
attend to nothing (its sink); biases everywhere; experts with another SwiGLU.
"""

from functools import partial

from localllm.arch.attention import Windowed, attend, qkv
from localllm.arch.experts import SOFTMAX_OF_CHOSEN, gated_or_mixture, read_routing
from localllm.arch.fields import Fields
from localllm.arch.states import Paged
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights

SHARPNESS, LIMIT = 1.702, 7.0  # of its SwiGLU


def read(fields: Fields) -> Windowed:
    """The hyperparameters. Raises ModelError."""
    shared, routing = Windowed.shared_fields(fields, interleaved=False), read_routing(fields, SOFTMAX_OF_CHOSEN)
    if fields.raw("attention.sliding_window_pattern") is not None:
        raise fields.error(f"{fields.key('attention.sliding_window_pattern')} is not supported")
    window = fields.count("attention.sliding_window", 0) or None
    windows = tuple(None if layer % 2 else window for layer in range(shared["layers"]))
    return Windowed(**shared, windows=windows, routing=routing)


def forward(b: Builder, w: Weights, h: Windowed) -> Activation:
    """Logits of the wanted tokens."""
    x = b.embed(w.token_embd, b.ids)
    for state in h.states():
        x = block(b, w.block(state.layer), h, state, x)
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.linear(x, w.get("output") or w.token_embd)


def block(b: Builder, w: Weights, h: Windowed, state: Paged, x: Activation) -> Activation:
    """One layer: attention, then the experts, each added to the residual stream."""
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, sinks=w.get("attn_sinks")), w.attn_output))
    gate = partial(b.swiglu_limited, sharpness=SHARPNESS, limit=LIMIT)
    return b.add(x, gated_or_mixture(b, w, h.routing, b.rms_norm(x, w.post_attention_norm, h.epsilon), gate))
