"""The text part of Qwen3-VL (2025).

It is computed as Qwen 3, with M-RoPE; and the first layers add outputs of the vision encoder's earlier layers to an
image's rows (DeepStack).
"""

from dataclasses import replace

from localllm.arch.attention import TransformerHyperparameters, select_rope_factors
from localllm.arch.decoder import apply_decoder
from localllm.arch.families import qwen3
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights, frozen
from localllm.arch.rope import SECTIONS, add_sections

__all__ = ["forward", "read"]


@frozen
class Qwen3VLHyperparameters(TransformerHyperparameters):
    """The hyperparameters of Qwen3-VL.

    Attributes:
        deep: number of layers that add a slice of an image's rows.
    """

    deep: int

    @property
    def row_width(self) -> int:
        return (1 + self.deep) * self.width


def read(fields: HyperparameterReader) -> Qwen3VLHyperparameters:
    """Read the hyperparameters. Raises ModelError, also for a file without sections."""
    h = qwen3.read(fields)
    if fields.read_raw(SECTIONS) is None:
        raise fields.make_error(f"{fields.format_key(SECTIONS)} is missing")
    attention = replace(h.attention, rope=add_sections(fields, h.attention.rope, interleaved=True))
    deep = fields.read_integer("n_deepstack_layers", 0, 0, h.layers)
    return Qwen3VLHyperparameters(**{**vars(h), "attention": attention}, deep=deep)


def forward(b: Builder, w: Weights, h: Qwen3VLHyperparameters) -> Activation:
    x = b.embed_inputs(lambda: b.embed(w.token_embd, b.ids), 1 + h.deep)
    return apply_decoder(b, w, h, block, x, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: Qwen3VLHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    """Apply one layer of Qwen 3, and add the slice of an image's rows for this layer."""
    x = qwen3.block(b, w, h, state, x, factors)
    return b.add_deepstack(x, 1 + state.layer) if state.layer < h.deep else x


CHECKPOINTS = {
    "Qwen3VLForConditionalGeneration": {
        "like": "Qwen3ForCausalLM", "sees": True, "scalings": "mrope", "read": "@qwen.read_qwen3vl",
        "defaults": {"rope_theta": 5e5},
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "arch": "qwen3vlmoe", "like": "Qwen3VLForConditionalGeneration",
        "layer": "attention head_norms norms experts:mlp.experts",
        "only": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "experts": "moe_intermediate_size num_experts|num_local_experts", "sizes": {"both_hidden": "2 * expert_hidden"},
        "amounts": {"expert_feed_forward_length": "expert_hidden"},
    },
}  # fmt: skip
