"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838).

Unlike llama: layer norms without weights; queries, keys and values may be clamped.
"""

from localllm.arch.attention import LAYER_EPSILON, TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward


@frozen
class OLMoHyperparameters(TransformerHyperparameters):
    """The hyperparameters of OLMo.

    Attributes:
        limit: the largest magnitude of queries, keys and values, 0 for none.
    """

    limit: float


def read(fields: HyperparameterReader) -> OLMoHyperparameters:
    shared = OLMoHyperparameters.read_shared_fields(fields, interleaved=True, epsilon=LAYER_EPSILON)
    return OLMoHyperparameters(**shared, limit=fields.read_number("attention.clamp_kqv", 0.0))


def forward(b: Builder, w: Weights, h: OLMoHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, norm=lambda x: b.layer_norm(x, None, h.epsilon))


def block(b: Builder, w: Weights, h: OLMoHyperparameters, state: PagedState, x: Activation) -> Activation:
    heads = project_qkv(b, w, h, state.layer, b.layer_norm(x, None, h.epsilon))
    q, k, v = (b.clamp(y, h.limit) for y in heads) if h.limit else heads
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.layer_norm(x, None, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "OlmoForCausalLM OLMoForCausalLM": {
        "layer": "attention gated", "last_norm": "", "rotated": True, "only": {"attention_bias": False},
        "keys": {"clip_qkv": ("attention.clamp_kqv", None)},
        "metadata": {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
    },
}  # fmt: skip
