"""HRM-Text: the hierarchical reasoning model (Wang et al. 2025, arXiv 2506.21734) as a language model (2026).

Two stacks of layers alternate: in each of several cycles, the low one runs several times, then the high one; every pass
has keys and values of its own. A stack's input is the sum of both stacks' last outputs. Norms have no weights, and
attention's output is gated.
"""

from collections.abc import Iterator

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import compute_logits
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward


@frozen
class HRMTextHyperparameters(TransformerHyperparameters):
    """The hyperparameters of HRM-Text.

    Attributes:
        in_stack: number of layers of a stack.  cycles: number of passes of the high stack.
        low_cycles: number of passes of the low stack before each pass of the high stack.
    """

    embedding_scale: float
    in_stack: int
    cycles: int
    low_cycles: int


def read(fields: HyperparameterReader) -> HRMTextHyperparameters:
    """Read the hyperparameters. Attention to the prompt is causal, as in llama.cpp. Raises ModelError."""
    in_stack, cycles, low = (fields.read_count(f"hrm.{name}") for name in ("layers_per_stack", "h_cycles", "l_cycles"))
    if fields.read_layer_count() != in_stack * cycles * (low + 1):
        expected = f"{cycles} cycles of {low + 1} stacks of {in_stack} layers"
        raise fields.make_error(f"block_count {fields.read_layer_count()} must equal the layers of {expected}")
    return HRMTextHyperparameters(
        **HRMTextHyperparameters.read_shared_fields(fields, interleaved=False),
        embedding_scale=fields.read_number("embedding_scale", 0.0) or 1.0,
        in_stack=in_stack,
        cycles=cycles,
        low_cycles=low,
    )


def forward(b: Builder, w: Weights, h: HRMTextHyperparameters) -> Activation:
    states = iter(h.list_states())
    high, low = b.scale(b.embed(w.token_embd, b.ids), h.embedding_scale), None
    for _ in range(h.cycles):
        for _ in range(h.low_cycles):
            both = b.add(high, low) if low is not None else b.add_vector(high, w.require_exact("hrm.z_l_init"))
            low = apply_stack(b, w, h, states, 0, both)
        high = apply_stack(b, w, h, states, h.in_stack, b.add(high, low))
    return compute_logits(b, w, h, high, norm=lambda x: x)


def apply_stack(
    b: Builder, w: Weights, h: HRMTextHyperparameters, states: Iterator[PagedState], first: int, x: Activation
) -> Activation:
    """Apply the layers from index `first` on, and a norm."""
    for layer in range(first, first + h.in_stack):
        x = block(b, w.get_layer(layer), h, next(states), x)
    return b.rms_norm(x, None, h.epsilon)


def block(b: Builder, w: Weights, h: HRMTextHyperparameters, state: PagedState, x: Activation) -> Activation:
    y = b.rms_norm(x, None, h.epsilon)
    attended = attend(b, h, state, *project_qkv(b, w, h, state.layer, y))
    x = b.add(x, b.linear(b.multiply(attended, b.sigmoid(b.linear(y, w.attn_gate))), w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, None, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "HrmTextForCausalLM": {
        "tensors": {
            "attn_gate": "@hrm_text.gate attn.gqkv_proj.weight[all_queries width]: queries width",
            "attn_q": "@hrm_text.queries attn.gqkv_proj.weight[all_queries width]: queries width",
            "attn_k": "@hrm_text.keys attn.gqkv_proj.weight[all_queries width]: queries width",
            "attn_v": "@hrm_text.values attn.gqkv_proj.weight[all_queries width]: queries width",
            "attn_output": "attn.o_proj.weight: width queries",
            "ffn_gate": "first_half mlp.gate_up_proj.weight[both_hidden width]: hidden width",
            "ffn_up": "second_half mlp.gate_up_proj.weight[both_hidden width]: hidden width",
            "ffn_down": "width hidden",
        },
        "whole": {"hrm.z_l_init": "model.z_L_init: width"}, "last_norm": "", "named": "@hrm_text.join_stacks",
        "named_as": "llama", "only": {"attention_bias": False, "mlp_bias": False},
        "amounts": {"rope.dimension_count": "head_dim"}, "read": "@hrm_text.read", "defaults": {"head_dim": 128},
    },
}  # fmt: skip
