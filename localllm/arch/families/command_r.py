"""Command R and R+ (Cohere 2024), Command R7B and Command A (2025, arXiv 2504.00698).

Unlike llama: attention and feed-forward network read the same layer norm, which has no bias, and are added together; R+
normalizes each head of queries and keys; a factor for the logits; the output matrix is the embedding matrix. In the
models of 2025, three of four layers have a sliding window; the others have full attention and no RoPE.
"""

from localllm.arch.attention import (
    LAYER_EPSILON,
    WindowedTransformerHyperparameters,
    attend,
    normalize_heads_by_layer_norm,
    project_qkv,
    read_windows,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward


@frozen
class CohereHyperparameters(WindowedTransformerHyperparameters):
    """The hyperparameters of Command R.

    Attributes:
        logit_scale: factor of the logits.
    """

    logit_scale: float


@frozen
class Cohere2Hyperparameters(CohereHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.attention.rope if self.windows[layer] else None


def read(fields: HyperparameterReader) -> CohereHyperparameters:
    shared, is_second = (
        CohereHyperparameters.read_shared_fields(fields, interleaved=True, epsilon=LAYER_EPSILON),
        fields.arch == "cohere2",
    )
    windows = read_windows(fields, period=4) if is_second else (None,) * shared["layers"]
    scale = fields.read_number("logit_scale") or 1.0
    return (Cohere2Hyperparameters if is_second else CohereHyperparameters)(
        **shared, windows=windows, logit_scale=scale
    )


def forward(b: Builder, w: Weights, h: CohereHyperparameters) -> Activation:
    logits = apply_decoder(b, w, h, block, norm=lambda x: b.layer_norm(x, w.output_norm, h.epsilon))
    return b.scale(logits, h.logit_scale)


def block(b: Builder, w: Weights, h: CohereHyperparameters, state: PagedState, x: Activation) -> Activation:
    y = b.layer_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    q, k = normalize_heads_by_layer_norm(b, w, h, q, k)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, y, b.swiglu))


CHECKPOINTS = {
    "CohereForCausalLM": {
        "layer": "attention gated attn_norm", "parts": {"head_norms": ("norms_of_each_head", "")},
        "layer_norm": "layer_norm_eps", "only": {"attention_bias": False, "tie_word_embeddings": True},
        "sizes": {"head_norms": "use_qk_norm?"}, "amounts": {"context_length": "model_max_length=context"},
        "keys": {"logit_scale": "logit_scale"}, "unsaid": {"rope.scaling.type": "none"},
        "defaults": {
            "tie_word_embeddings": True, "logit_scale": 0.0625, "rope_theta": 5e5, "max_position_embeddings": 8192,
        },
    },
    "Cohere2ForCausalLM": {
        "arch": "cohere2", "like": "CohereForCausalLM", "windows": 4,
        "only": {
            "attention_bias": False, "tie_word_embeddings": True, "use_qk_norm": False, "rotary_pct": 1.0,
            "sliding_window_pattern": 4,
        },
        "amounts": {
            "context_length": "model_max_length=context", "vocab_size": "vocab", "rope.dimension_count": "head_dim",
        },
        "keys": {"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"},
        "defaults": {
            "tie_word_embeddings": True, "logit_scale": 0.0625, "head_dim": 128, "sliding_window": 4096,
            "max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
