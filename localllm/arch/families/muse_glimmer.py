"""Muse Glimmer (Meta 2026).

Unlike llama: three of four layers have a sliding window, and only they have RoPE; heads of queries and keys,
embeddings, and the outputs of attention and feed-forward network are normalized; attention's output is gated; logits
have a factor and a soft cap.
"""

from localllm.arch.attention import (
    LocalRopeTransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    read_windows,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward
from localllm.arch.rope import read_base

BEHIND = 1e-8  # epsilon of the norms after attention and feed-forward network


@frozen
class MuseGlimmerHyperparameters(LocalRopeTransformerHyperparameters):
    """The hyperparameters of Muse Glimmer.

    Attributes:
        logit_scale: factor of the logits.  logit_softcap: soft cap of the scaled logits, 0 for none.
    """

    logit_scale: float
    logit_softcap: float

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.local_rope if self.windows[layer] else None


def read(fields: HyperparameterReader) -> MuseGlimmerHyperparameters:
    shared = MuseGlimmerHyperparameters.read_shared_fields(fields, interleaved=True)
    rope = shared["attention"].rope
    if rope.yarn or rope.by_factors:
        raise fields.make_unsupported_error(f"{fields.format_key('rope.scaling.type')} must be linear or none")
    return MuseGlimmerHyperparameters(
        **shared,
        windows=read_windows(fields, period=4),
        local_rope=rope.remove_scaling(read_base(fields, "rope.freq_base_swa", rope.base)),
        logit_scale=fields.read_factor("logit_scale"),
        logit_softcap=fields.read_number("final_logit_softcapping", 30.0),
    )


def forward(b: Builder, w: Weights, h: MuseGlimmerHyperparameters) -> Activation:
    x = b.rms_norm(b.embed(w.token_embd, b.ids), None, h.epsilon)
    logits = b.scale(apply_decoder(b, w, h, block, x), h.logit_scale)
    return b.softcap(logits, h.logit_softcap) if h.logit_softcap else logits


def block(b: Builder, w: Weights, h: MuseGlimmerHyperparameters, state: PagedState, x: Activation) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    q, k = normalize_heads(b, w, h, q, k)
    attended = b.multiply(attend(b, h, state, q, k, v), b.sigmoid(b.linear(y, w.attn_gate)))
    x = b.add(x, b.rms_norm(b.linear(attended, w.attn_output), w.post_attention_norm, BEHIND))
    y = apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu)
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, BEHIND))


CHECKPOINTS = {
    "MuseGlimmerForConditionalGeneration": {
        "layer": "attention gated",
        "tensors": {
            "attn_q_norm": "ones: head_dim", "attn_k_norm": "ones: head_dim",
            "attn_gate": "self_attn.gate_proj.weight: queries width",
            "attn_norm": "offset input_layernorm.weight: width",
            "post_attention_norm": "offset post_attention_layernorm.weight: width",
            "ffn_norm": "offset pre_feedforward_layernorm.weight: width",
            "post_ffw_norm": "offset post_feedforward_layernorm.weight: width",
        },
        "rotated": True, "sees": True, "named_as": "gemma3", "unread": r"(model\.)?vision_(adapter|projection)\..*",
        "only": {"attention_bias": False, "post_norm_eps": BEHIND},
        "keys": {
            "sliding_window": "attention.sliding_window", "output_multiplier": "logit_scale",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        "read": "@llama.read_muse_glimmer", "defaults": {"rms_norm_eps": 1e-5, "sliding_window": 2048},
    },
}  # fmt: skip
