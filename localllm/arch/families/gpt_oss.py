"""gpt-oss (OpenAI 2025, arXiv 2508.10925).

Unlike llama: rotated pairs are half a head apart; every second layer, from the first on, has a sliding window; each
head has a sink; biases everywhere; experts with another SwiGLU.
"""

from functools import partial

from localllm.arch.attention import LocallyRotated, attend, qkv, read_local_rope, read_windows
from localllm.arch.decoder import decoder
from localllm.arch.feed_forward import SOFTMAX_OF_CHOSEN, feed_forward_or_experts, read_routing
from localllm.arch.layer_state import Paged
from localllm.arch.metadata import Fields
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights

SHARPNESS, LIMIT = 1.702, 7.0  # of its SwiGLU
BIASED = "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"


def read(fields: Fields) -> LocallyRotated:
    """Read the hyperparameters. Raises ModelError."""
    shared = LocallyRotated.shared_fields(fields, interleaved=False)
    return LocallyRotated(
        **shared,
        windows=read_windows(fields, period=2),
        local_rope=read_local_rope(fields, shared["attention"].rope),
        routing=read_routing(fields, SOFTMAX_OF_CHOSEN),
    )


def forward(b: Builder, w: Weights, h: LocallyRotated) -> Activation:
    """Compute the logits of the requested tokens."""
    return decoder(b, w, h, block)


def block(b: Builder, w: Weights, h: LocallyRotated, state: Paged, x: Activation) -> Activation:
    """Apply one layer: attention, then the experts, each added to the residual stream."""
    w.require_biases(*BIASED)
    q, k, v = qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, sinks=w.attn_sinks), w.attn_output))
    gate = partial(b.swiglu_limited, sharpness=SHARPNESS, limit=LIMIT)
    return b.add(x, feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.post_attention_norm, h.epsilon), gate))
