"""ModernBERT (Warner et al. 2024, arXiv 2412.13663), Granite Embedding R2 (2508.21085).

Unlike BERT: queries and keys are rotated; norms, without biases, precede the parts of a layer (pre-norm); the
activation is GELU with a gate, or SwiGLU; two of three layers have a sliding window and another RoPE base.
"""

from dataclasses import field

from localllm.arch.attention import attend, project_qkv, read_local_rope, read_windows
from localllm.arch.decoder import pool_texts, read_pooling
from localllm.arch.encoder import EncoderHyperparameters, read_encoder_fields
from localllm.arch.families.bert import OTHER_HEADS
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward

ACTIVATIONS = {"gelu": False, "silu": True}


@frozen
class ModernBERTHyperparameters(EncoderHyperparameters):
    """The hyperparameters of ModernBERT.

    Attributes:
        silu: whether the activation is SwiGLU instead of GELU with a gate.
    """

    local_rope: RopeParameters
    silu: bool
    classifier_pooling: str = field(default="mean", kw_only=True)
    has_gelu_classifier = True

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.local_rope if self.windows[layer] else self.attention.rope


def read(fields: HyperparameterReader) -> ModernBERTHyperparameters:
    shared, activation = read_encoder_fields(fields), fields.read_text("hidden_activation", "gelu")
    if activation not in ACTIVATIONS:
        raise fields.make_value_error("hidden_activation", "gelu or silu")
    return ModernBERTHyperparameters(
        **shared,
        windows=read_windows(fields, period=3, default=0, all_first=True),
        local_rope=read_local_rope(fields, shared["attention"].rope),
        silu=ACTIVATIONS[activation],
        classifier_pooling=read_pooling(fields, "classifier.pooling_type") or "mean",
    )


def forward(b: Builder, w: Weights, h: ModernBERTHyperparameters) -> Activation:
    x = b.layer_norm(b.embed(w.token_embd, b.ids), w.token_embd_norm, h.epsilon)
    for state in h.list_states():
        x = block(b, w.get_layer(state.layer), h, state, x)
    return pool_texts(b, w, h, b.layer_norm(x, w.output_norm, h.epsilon))


def block(b: Builder, w: Weights, h: ModernBERTHyperparameters, state: PagedState, x: Activation) -> Activation:
    norm = w.get("attn_norm", by_layer=True)  # the first layer has none: the embeddings' norm precedes it
    q, k, v = project_qkv(b, w, h, state.layer, b.layer_norm(x, norm, h.epsilon) if norm else x)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = b.layer_norm(x, w.ffn_norm, h.epsilon)
    gate = b.swiglu if h.silu else lambda gate, up: b.multiply(b.gelu_erf(gate), up)
    return b.add(x, apply_gated_feed_forward(b, w, y, gate))


NORMS = {"token_embd_norm": "width", "output_norm": "width"}
CHECKPOINTS = {
    "ModernBertModel ModernBertForMaskedLM": {
        "layer": "fused_attention fused_gated ffn_norm",
        "parts": {"normed": ("attn_norm", "")},  # all but the first
        "whole": NORMS, "decodes": False, "prefixes": "model.",
        "unread": OTHER_HEADS, "read": "@bert.read_modern_bert",
    },
    "ModernBertForSequenceClassification": {
        "like": "ModernBertModel",
        "whole": {
            **NORMS, "cls.weight": "width width", "cls.norm.weight": "width", "cls.output.weight": "labels width",
            "cls.output.bias": "labels",
        },
        "renamed": {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}, "unread": "decoder.*",
        "read": "@bert.read_modern_bert_rank",
    },
}  # fmt: skip
