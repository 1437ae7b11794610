"""Phi 1, 1.5 and 2 (Li et al. 2023, arXiv 2309.05463; Javaheripi et al. 2023).

Unlike llama: attention and feed-forward network read the same layer norm and are added together; GELU without a gate;
biases everywhere, also for the logits; RoPE rotates only the beginning of a head, in pairs half the rotated dimensions
apart.
"""

from localllm.arch.attention import LAYER_EPSILON, TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_ungated_feed_forward


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(
        **TransformerHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    )


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    w.require_biases("output")
    return apply_decoder(b, w, h, block, norm=make_final_layer_norm(b, w, h))


def block(b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation) -> Activation:
    y = b.layer_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_ungated_feed_forward(b, w, y, b.gelu))


CHECKPOINTS = {
    "PhiForCausalLM": {
        "layer": "attention feed_forward attn_norm", "biased": "attention feed_forward attn_norm output_norm output",
        "activations": "gelu", "partial_rope": True, "layer_norm": "layer_norm_eps",
        "only": {"qk_layernorm": False, "tie_word_embeddings": False},
        "defaults": {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
