"""Convert Gemma 3's projector: SigLIP, a norm and a matrix."""

from math import isqrt

from localllm.convert.projectors.parts import (
    EncoderSizes,
    Part,
    Parts,
    ProjectorFacts,
    SeeingConfig,
    in_layers,
    sizes_of,
    with_bias,
)
from localllm.convert.tensors import map_values, to_float32

USUAL_MERGE = 4  # readers' default


def gemma3(c: SeeingConfig) -> ProjectorFacts:
    """Read the configuration. Raises ModelError."""
    c.vision.only("hidden_act", "gelu_pytorch_tanh")
    h = sizes_of(c)
    rows = isqrt(c.whole.count("mm_tokens_per_image", 256))
    merge = h.side // h.patch // rows
    if not merge:
        raise c.whole.refusal(f"mm_tokens_per_image: {rows} rows on each side of {h.side // h.patch} patches")
    metadata = {
        "projector_type": "gemma3",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.number("layer_norm_eps", 1e-6),
        "vision.projector.scale_factor": None if merge == USUAL_MERGE else merge,
    }
    norm = Part("mm_soft_emb_norm.weight", (h.width,), lambda source: map_values(source, lambda numbers: numbers + 1))
    # It is transposed, so that no block format fits it. F32 is lossless.
    matrix = Part("mm_input_projection_weight", (h.width, h.out), to_float32)
    return ProjectorFacts(
        h, metadata, {**siglip(h), "mm.soft_emb_norm.weight": norm, "mm.input_projection.weight": matrix}
    )


def siglip(h: EncoderSizes) -> dict[str, Part]:
    """List the encoder's tensors under transformers' names."""
    return {
        **with_bias("v.patch_embd", "embeddings.patch_embedding", *h.convolution),
        "v.position_embd.weight": Part("embeddings.position_embedding.weight", (h.patches, h.width)),
        **in_layers(h.layers, "encoder.layers", transformer_layer(h)),
        **with_bias("v.post_ln", "post_layernorm", h.width),
    }


def transformer_layer(h: EncoderSizes) -> Parts:
    """List the tensors of a layer of SigLIP or CLIP."""
    return {
        **with_bias("ln1", "layer_norm1", h.width),
        **with_bias("attn_q", "self_attn.q_proj", h.width, h.width),
        **with_bias("attn_k", "self_attn.k_proj", h.width, h.width),
        **with_bias("attn_v", "self_attn.v_proj", h.width, h.width),
        **with_bias("attn_out", "self_attn.out_proj", h.width, h.width),
        **with_bias("ln2", "layer_norm2", h.width),
        **with_bias("ffn_up", "mlp.fc1", h.hidden, h.width),
        **with_bias("ffn_down", "mlp.fc2", h.width, h.hidden),
    }
