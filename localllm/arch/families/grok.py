"""Grok 1 and 2 (xAI 2024, 2025).

Unlike llama: GELU; rotated pairs are half a head apart; norms after attention and feed-forward network, too; factors
for embeddings, scores and logits; soft caps on scores, and on logits in some files; Grok 2 has a feed-forward network
beside the experts. As in llama.cpp, the files' router cap and attention temperature are ignored.
"""

from dataclasses import replace

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import apply_feed_forward_or_experts, apply_gated_feed_forward, read_routing

UNREAD = "router_logit_softcapping", "attention.temperature_length"


@frozen
class GrokHyperparameters(TransformerHyperparameters):
    """The hyperparameters of Grok; soft caps are the largest magnitudes of scores and logits."""

    embedding_scale: float
    score_scale: float
    score_softcap: float
    logit_scale: float
    logit_softcap: float

    @property
    def scale(self) -> float:
        return self.score_scale


def read(fields: HyperparameterReader) -> GrokHyperparameters:
    """Read the hyperparameters, with Grok 1's defaults. Raises ModelError."""
    fields.asked.update(UNREAD)
    common = GrokHyperparameters.read_shared_fields(fields, interleaved=False, rotates_all=True)
    attention = common.pop("attention")
    return GrokHyperparameters(
        **common,
        attention=replace(attention, rope=read_yarn(fields, attention.rope)),
        routing=read_routing(fields),
        embedding_scale=fields.read_factor("embedding_scale", 78.38367176906169),
        score_scale=fields.read_factor("attention.output_scale", 0.08838834764831845),
        score_softcap=fields.read_factor("attn_logit_softcapping", 30.0),
        logit_scale=fields.read_factor("logit_scale", 0.5773502691896257),
        logit_softcap=fields.read_number("final_logit_softcapping", 0.0),
    )


def read_yarn(fields: HyperparameterReader, rope: RopeParameters) -> RopeParameters:
    """Read YaRN, whose beta_fast is 8 by default. Raises ModelError."""
    if fields.read_number("rope.scaling.yarn_ext_factor", float(rope.yarn)) != rope.yarn:
        raise fields.make_value_error("rope.scaling.yarn_ext_factor", f"{float(rope.yarn)}")
    if not rope.yarn and fields.read_number("rope.scaling.yarn_attn_factor", 1.0) != 1:
        raise fields.make_value_error("rope.scaling.yarn_attn_factor", "1")
    fast, slow = (
        fields.read_factor("rope.scaling.yarn_beta_fast", 8.0),
        fields.read_factor("rope.scaling.yarn_beta_slow", 1.0),
    )
    return replace(rope, yarn_betas=(fast, slow))


def forward(b: Builder, w: Weights, h: GrokHyperparameters) -> Activation:
    logits = b.scale(
        apply_decoder(b, w, h, block, b.scale(b.embed(w.token_embd, b.ids), h.embedding_scale)), h.logit_scale
    )
    return b.softcap(logits, h.logit_softcap) if h.logit_softcap else logits


def block(b: Builder, w: Weights, h: GrokHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    y = b.linear(attend(b, h, state, q, k, v, softcap=h.score_softcap), w.attn_output)
    x = b.add(x, b.rms_norm(y, w.attn_output_norm, h.epsilon))
    normed = b.rms_norm(x, w.ffn_norm, h.epsilon)
    y = apply_feed_forward_or_experts(b, w, h.routing, normed, b.geglu)
    if w.get("ffn_up"):
        y = b.scale(b.add(y, apply_gated_feed_forward(b, w, normed, b.geglu)), 0.5**0.5)
    return b.add(x, b.rms_norm(y, w.get("layer_output_norm") or w.post_ffw_norm, h.epsilon))
