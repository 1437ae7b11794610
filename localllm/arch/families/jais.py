"""Jais (Sengupta et al. 2023, arXiv 2308.16149).

Unlike llama: ALiBi instead of RoPE; scores are divided by a head's length, not by its root; layer norms; biases
everywhere; queries, keys and values from one matrix.
"""

from localllm.arch.attention import LAYER_EPSILON, attend, project_qkv
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.families.mpt import MPTHyperparameters, compute_alibi_slopes
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward


@frozen
class JaisHyperparameters(MPTHyperparameters):
    @property
    def scale(self) -> float:
        return 1 / self.attention.head_dim


def read(fields: HyperparameterReader) -> JaisHyperparameters:
    shared = JaisHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    return JaisHyperparameters(**shared, limit=0.0, alibi_bias=fields.read_number("attention.max_alibi_bias", 0.0))


def forward(b: Builder, w: Weights, h: JaisHyperparameters) -> Activation:
    w.require("output")
    return apply_decoder(b, w, h, block, norm=make_final_layer_norm(b, w, h))


def block(b: Builder, w: Weights, h: JaisHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.layer_norm(x, w.attn_norm, h.epsilon))
    slopes = compute_alibi_slopes(h.attention.heads[state.layer], h.alibi_bias) if h.alibi_bias else ()
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, slopes=slopes), w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.layer_norm(x, w.ffn_norm, h.epsilon), b.swiglu))
