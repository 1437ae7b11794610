"""The text part of CogVLM (Wang et al. 2023, arXiv 2311.03079).

It is computed as llama, with rotated pairs half a head apart. Every layer also has separate matrices for images, which
are not used for text.
"""

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.decoder import apply_decoder
from localllm.arch.families.llama import block
from localllm.arch.family import Activation, Builder, HyperparameterReader, RopeParameters, Weights

IMAGE_NAMES = {"attn_qkv": "vis_attn_qkv", "attn_output": "vis_attn_output", "ffn_gate": "vis_gate",
             "ffn_up": "vis_up", "ffn_down": "vis_down"}  # fmt: skip


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    """Read the hyperparameters.

    Raises ModelError, also for a rotation that llama.cpp does not compute for this family.
    """
    h = TransformerHyperparameters(**TransformerHyperparameters.read_shared_fields(fields, interleaved=False))
    a, rope = h.attention, h.attention.rope
    if rope != RopeParameters(a.head_dim, a.head_dim, False, original_context=rope.original_context):
        raise fields.make_unsupported_error(f"{fields.prefix}rope.*: RoPE must rotate whole heads with the base 10000")
    if a.heads != a.kv_heads or a.heads[0] * a.head_dim != h.width:
        raise fields.make_unsupported_error(
            f"{fields.format_key('attention.head_count_kv')} must equal attention.head_count"
        )
    return h


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    logits = apply_decoder(b, w, h, block, factors=None)
    for layer in range(h.layers):
        of_layer = w.get_layer(layer)
        for of_text, of_images in IMAGE_NAMES.items():
            b.ignore(of_layer.require(of_images).require_shape(*of_layer.require(of_text).shape))
    return logits
