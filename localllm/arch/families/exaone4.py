"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407).

Unlike llama: norms after attention and feed-forward network instead of before; each head of queries and keys is
normalized; rotated pairs are half a head apart. In the largest model three of four layers have a sliding window, and
only they rotate.
"""

from localllm.arch.attention import (
    WindowedTransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    read_windows,
    select_rope_factors,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RopeParameters,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_gated_feed_forward

LAYERS_OF_32B = 64  # the 32B model has windows, also in files that do not say so


@frozen
class EXAONE4Hyperparameters(WindowedTransformerHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.attention.rope if self.windows[layer] or not any(self.windows) else None


def read(fields: HyperparameterReader) -> EXAONE4Hyperparameters:
    shared = EXAONE4Hyperparameters.read_shared_fields(fields, interleaved=False)
    default = 4096 if shared["layers"] == LAYERS_OF_32B else 0
    return EXAONE4Hyperparameters(**shared, windows=read_windows(fields, period=4, default=default))


def forward(b: Builder, w: Weights, h: EXAONE4Hyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: EXAONE4Hyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, x)
    q, k = normalize_heads(b, w, h, q, k)
    y = b.linear(attend(b, h, state, q, k, v, factors), w.attn_output)
    x = b.add(x, b.rms_norm(y, w.post_attention_norm, h.epsilon))
    return b.add(x, b.rms_norm(apply_gated_feed_forward(b, w, x, b.swiglu), w.post_ffw_norm, h.epsilon))


CHECKPOINTS = {
    "Exaone4ForCausalLM": {
        "layer": "attention head_norms gated norms_behind", "scalings": "linear yarn llama3",
        "amounts": {"vocab_size": "vocab"}, "read": "@exaone.read_exaone4",
        "defaults": {"rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
    },
    "Exaone4_5_ForConditionalGeneration": {"like": "Exaone4ForCausalLM", "sees": True},
}  # fmt: skip
