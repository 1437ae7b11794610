"""Ministral 3 and models with the same architecture, with experts or without (Mistral AI 2025).

Unlike llama: queries are scaled by the logarithm of their position beyond the original context; YaRN has the file's
betas, and its attention factor is divided by that of `yarn_log_multiplier`.
"""

from dataclasses import replace

from localllm.arch.attention import (
    AttentionHyperparameters,
    TransformerHyperparameters,
    attend,
    project_qkv,
    select_rope_factors,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights, frozen
from localllm.arch.feed_forward import apply_feed_forward_or_experts, read_routing
from localllm.arch.rope import compute_yarn_magnitude


@frozen
class Mistral3Hyperparameters(TransformerHyperparameters):
    """The hyperparameters of Ministral 3.

    Attributes:
        temperature: slope of scale_by_position for queries, 0 for none.
    """

    temperature: float


def read(fields: HyperparameterReader) -> Mistral3Hyperparameters:
    shared = Mistral3Hyperparameters.read_shared_fields(fields, interleaved=True)
    shared["attention"] = read_yarn(fields, shared["attention"])
    temperature = fields.read_number("attention.temperature_scale", 0.0)
    return Mistral3Hyperparameters(**shared, temperature=temperature, routing=read_routing(fields))


def read_yarn(fields: HyperparameterReader, attention: AttentionHyperparameters) -> AttentionHyperparameters:
    """Apply YaRN's keys, which llama.cpp reads for this family alone. Raises ModelError."""
    rope = attention.rope
    betas = (
        fields.read_factor("rope.scaling.yarn_beta_fast", 32.0),
        fields.read_factor("rope.scaling.yarn_beta_slow", 1.0),
    )
    multiplier = fields.read_number("rope.scaling.yarn_log_multiplier", 0.0)
    magnitude = rope.magnitude / compute_yarn_magnitude(rope.factor, multiplier) if rope.yarn else rope.magnitude
    return replace(attention, rope=replace(rope, yarn_betas=betas, magnitude=magnitude))


def forward(b: Builder, w: Weights, h: Mistral3Hyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: Mistral3Hyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    if h.temperature:
        q = b.scale_by_position(q, b.positions, h.temperature, h.attention.rope.original_context)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "Mistral3ForConditionalGeneration Ministral3ForCausalLM": {
        "like": "LlamaForCausalLM", "sees": True, "scalings": "bordered yarn", "read": "@llama.read_mistral3",
    },
}  # fmt: skip
