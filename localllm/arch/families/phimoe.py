"""Phi 3.5 with experts (Abdin et al. 2024, arXiv 2404.14219).

Unlike Phi 3: biases, also of the norms; experts. As in llama.cpp, for which the files are made, norms subtract no mean,
and the weights of the two used experts are normalized.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv, select_rope_factors
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights
from localllm.arch.feed_forward import apply_mixture_of_experts, read_routing


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(
        **TransformerHyperparameters.read_shared_fields(fields, interleaved=False), routing=read_routing(fields)
    )


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    w.require_biases("output_norm", "output")
    norm = lambda x: apply_rms_norm_with_bias(b, h, x, w.output_norm)  # noqa: E731
    return apply_decoder(b, w, h, block, norm=norm, factors=select_rope_factors(b, w, h))


def apply_rms_norm_with_bias(b: Builder, h: TransformerHyperparameters, x: Activation, weight: Weight) -> Activation:
    """Apply an RMS norm, and add a bias."""
    assert weight.bias
    return b.add_vector(b.rms_norm(x, weight, h.epsilon), weight.bias)


def block(
    b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    w.require_biases("attn_norm", "ffn_norm", "attn_output")
    q, k, v = project_qkv(b, w, h, state.layer, apply_rms_norm_with_bias(b, h, x, w.attn_norm))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    assert h.routing
    return b.add(x, apply_mixture_of_experts(b, w, h.routing, apply_rms_norm_with_bias(b, h, x, w.ffn_norm), b.swiglu))


CHECKPOINTS = {
    "PhiMoEForCausalLM": {
        "like": "Phi3ForCausalLM", "layer": "attention norms experts", "biased": "attention norms output_norm output",
        "only": {"attention_bias": True, "lm_head_bias": True, "num_experts_per_tok": 2},
        "experts": "intermediate_size num_local_experts", "read": "@llama.read_phimoe",
        "defaults": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "attention_bias": False, "lm_head_bias": False},
    },
}  # fmt: skip
