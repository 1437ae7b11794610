"""MPT (MosaicML 2023, Introducing MPT-7B).

Unlike llama: scores decrease with distance (ALiBi), or a table of positions is added to the embeddings, and there is no
RoPE; layer norms; GELU without a gate; queries, keys and values from one matrix, which may be clamped and normalized.
"""

from localllm.arch.attention import LAYER_EPSILON, TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import apply_ungated_feed_forward


@frozen
class MPTHyperparameters(TransformerHyperparameters):
    """The hyperparameters of MPT.

    Attributes:
        limit: the largest magnitude of queries, keys and values, 0 for none.
        alibi_bias: llama.cpp's max_alibi_bias, from which slopes are computed.
    """

    limit: float
    alibi_bias: float

    def get_rope(self, layer: int) -> RopeParameters | None:
        return None


def read(fields: HyperparameterReader) -> MPTHyperparameters:
    shared = MPTHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    limit, bias = fields.read_number("attention.clamp_kqv", 0.0), fields.read_number("attention.max_alibi_bias")
    return MPTHyperparameters(**shared, limit=limit, alibi_bias=bias)


def forward(b: Builder, w: Weights, h: MPTHyperparameters) -> Activation:
    x = b.embed(w.token_embd, b.ids)
    if table := w.get("position_embd"):
        x = b.add(x, b.embed_positions(table, b.positions))
    return apply_decoder(b, w, h, block, x, lambda x: b.layer_norm(x, w.output_norm, h.epsilon))


def block(b: Builder, w: Weights, h: MPTHyperparameters, state: PagedState, x: Activation) -> Activation:
    heads = project_qkv(b, w, h, state.layer, b.layer_norm(x, w.attn_norm, h.epsilon))
    q, k, v = [b.clamp(y, h.limit) for y in heads] if h.limit else heads
    if w.get("attn_q_norm"):
        q, k = b.layer_norm(q, w.attn_q_norm, h.epsilon), b.layer_norm(k, w.attn_k_norm, h.epsilon)
    slopes = compute_alibi_slopes(h.attention.heads[state.layer], h.alibi_bias) if h.alibi_bias else ()
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, slopes=slopes), w.attn_output))
    return b.add(x, apply_ungated_feed_forward(b, w, b.layer_norm(x, w.ffn_norm, h.epsilon), b.gelu))


def compute_alibi_slopes(heads: int, bias: float) -> tuple[float, ...]:
    """Return each head's slope, a geometric series (Press et al. 2021).

    The heads beyond a power of 2 have slopes between those of the first ones.
    """
    power = 1 << heads.bit_length() - 1
    first = [2 ** (-bias * (head + 1) / power) for head in range(power)]
    return (*first, *(2 ** (-bias * (head + 0.5) / power) for head in range(heads - power)))


CHECKPOINTS = {
    "MPTForCausalLM MptForCausalLM": {
        "layer": "fused_attention feed_forward norms", "layer_norm": "layer_norm_epsilon",
        "only": {
            "attn_config.alibi": True, "attn_config.qk_ln": False, "attn_config.prefix_lm": False,
            "attn_config.softmax_scale": (), "no_bias": True, "logit_scale": (),
        },
        "reads": {
            "hidden_size": "1 * d_model", "num_attention_heads": "1 * n_heads", "num_key_value_heads": "n_heads",
            "num_hidden_layers": "1 * n_layers", "intermediate_size": "expansion_ratio=4 * d_model",
            "max_position_embeddings": "max_seq_len=2048", "head_dim": None,
        },
        "sizes": {"fused_rows": "3 * width"}, "keys": {"attn_config.alibi_bias_max": ("attention.max_alibi_bias", 8.0)},
        "metadata": {"rope.freq_base": None, "attention.head_count_kv": None}, "read": "@gpt.read_mpt",
        "defaults": {"tie_word_embeddings": True},
    },
}  # fmt: skip
