"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745): Pythia, Dolly, ...

Unlike llama: layer norms; GELU without a gate; biases everywhere; queries, keys and values from one matrix; RoPE
rotates only the beginning of a head, in pairs half the rotated dimensions apart. The feed-forward network may read what
attention reads.
"""

from localllm.arch.attention import LAYER_EPSILON, TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_ungated_feed_forward


@frozen
class GPTNeoXHyperparameters(TransformerHyperparameters):
    """The hyperparameters of GPT-NeoX.

    Attributes:
        parallel: whether attention and feed-forward network read the same residual stream.
    """

    parallel: bool


def read(fields: HyperparameterReader) -> GPTNeoXHyperparameters:
    shared = GPTNeoXHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    return GPTNeoXHyperparameters(**shared, parallel=fields.read_flag("use_parallel_residual"))


def forward(b: Builder, w: Weights, h: GPTNeoXHyperparameters) -> Activation:
    w.require("output")
    return apply_decoder(b, w, h, block, norm=make_final_layer_norm(b, w, h))


def block(b: Builder, w: Weights, h: GPTNeoXHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.layer_norm(x, w.attn_norm, h.epsilon))
    behind = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = b.layer_norm(x if h.parallel else behind, w.ffn_norm, h.epsilon)
    return b.add(behind, apply_ungated_feed_forward(b, w, y, b.gelu))


CHECKPOINTS = {
    "GPTNeoXForCausalLM": {
        "layer": "feed_forward norms",
        "tensors": {
            "attn_qkv": "grouped attention.query_key_value.weight: fused_rows width",
            "attn_qkv.bias": "grouped attention.query_key_value.bias: fused_rows", "attn_output": "width queries",
        },
        "biased": "attn_output feed_forward norms output_norm", "activations": "gelu exact_gelu",
        "approximated": "hidden_act", "partial_rope": True, "layer_norm": "layer_norm_eps",
        "only": {"attention_bias": True},
        "reads": {
            "num_key_value_heads": None, "rope_theta": "rope_theta|rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        "sizes": {"fused_rows": "3 * queries"}, "keys": {"use_parallel_residual": ("use_parallel_residual", True)},
        "metadata": {"attention.head_count_kv": None}, "defaults": {"hidden_act": "gelu", "rotary_pct": 0.25},
    },
}  # fmt: skip
