"""Baichuan 1 and 2 (Yang et al. 2023, arXiv 2309.10305), Refact (Small Magellanic Cloud AI 2023).

Unlike llama: Refact and the 13B models of Baichuan have ALiBi instead of RoPE. Files do not say which; the number of
layers decides.
"""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.families.mpt import compute_alibi_slopes
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward

LAYERS_OF_7B, LAYERS_OF_13B = 32, 40
ALIBI_BIAS = 8.0  # llama.cpp's max_alibi_bias, from which slopes are computed


@frozen
class BaichuanHyperparameters(TransformerHyperparameters):
    """The hyperparameters of Baichuan.

    Attributes:
        rotated: whether it has RoPE instead of ALiBi.
    """

    rotated: bool

    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.attention.rope if self.rotated else None


def read(fields: HyperparameterReader) -> BaichuanHyperparameters:
    """Read the hyperparameters. Raises ModelError, also for a Baichuan of another size."""
    shared, rotated = BaichuanHyperparameters.read_shared_fields(fields, interleaved=True), False
    if fields.arch == "baichuan":
        if shared["layers"] not in (LAYERS_OF_7B, LAYERS_OF_13B):
            expected = f"{LAYERS_OF_7B} or {LAYERS_OF_13B} (found {shared['layers']})"
            raise fields.make_unsupported_error(
                f"{fields.format_key('block_count')} of a Baichuan model must be {expected}"
            )
        rotated = shared["layers"] == LAYERS_OF_7B
    return BaichuanHyperparameters(**shared, rotated=rotated)


def block(b: Builder, w: Weights, h: BaichuanHyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    slopes = () if h.rotated else compute_alibi_slopes(h.attention.heads[state.layer], ALIBI_BIAS)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, slopes=slopes), w.attn_output))
    return b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


CHECKPOINTS = {
    "BaichuanForCausalLM BaiChuanForCausalLM": {
        "layer": "gated norms",
        "tensors": {
            "attn_q": "stacked_q self_attn.W_pack.weight[fused_rows width]: queries width",
            "attn_k": "stacked_k self_attn.W_pack.weight[fused_rows width]: keys width",
            "attn_v": "stacked_v self_attn.W_pack.weight[fused_rows width]: keys width", "attn_output": "width queries",
        },
        "reads": {"max_position_embeddings": "max_position_embeddings|model_max_length"},
        "sizes": {"fused_rows": "queries + 2 * keys"}, "amounts": {"rope.dimension_count": "head_dim"},
        "metadata": {"tensor_data_layout": "Meta AI original pth"},  # unused
        "read": "@llama.read_baichuan",
    },
    "GPTRefactForCausalLM": {
        "arch": "refact", "layer": "norms",
        "tensors": {
            "attn_q": "attn.q.weight: queries width",
            "attn_k": "first_half attn.kv.weight[both_keys width]: keys width",
            "attn_v": "second_half attn.kv.weight[both_keys width]: keys width", "attn_output": "width queries",
            "ffn_gate": "first_half mlp.gate_up_proj.weight[both_hidden width]: hidden width",
            "ffn_up": "second_half mlp.gate_up_proj.weight[both_hidden width]: hidden width",
            "ffn_down": "width hidden",
        },
        "only": {
            "hidden_act": "silu", "hidden_activation": "silu", "activation_function": "silu", "multi_query": True,
            "scale_attn_weights": True,
        },
        "sizes": {"both_keys": "2 * head_dim", "both_hidden": "2 * hidden"}, "metadata": {"rope.freq_base": None},
        "read": "@gpt.read_refact",
    },
}  # fmt: skip
