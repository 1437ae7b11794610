"""Convert the projectors of models with a SigLIP encoder: Gemma 3, Idefics 3, SmolVLM and LFM2-VL."""

from functools import partial
from math import isqrt, prod

from localllm.convert.projectors.parts import (
    EncoderSizes,
    Parts,
    ProjectorDeclaration,
    ProjectorTensor,
    VisionConfig,
    add_defaults,
    declare_tensor,
    declare_with_bias,
    read_encoder_sizes,
    repeat_in_layers,
)
from localllm.convert.transforms import (
    DerivedSource,
    Shape,
    TensorSource,
    as_float32,
    from_array,
    map_values,
    to_float32,
)

USUAL_MERGE = 4  # readers' default


def read_gemma3(c: VisionConfig) -> ProjectorDeclaration:
    """Read Gemma 3, whose projector is a norm and a matrix. Raises ModelError."""
    c.vision.require_value("hidden_act", "gelu_pytorch_tanh")
    h = read_encoder_sizes(c)
    rows = isqrt(c.whole.read_count("mm_tokens_per_image", 256))
    merge = h.side // h.patch // rows
    if not merge:
        raise c.whole.make_error(
            f"mm_tokens_per_image: {rows} rows per side must be at most {h.side // h.patch}, the patches per side"
        )
    metadata = {
        "projector_type": "gemma3",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.read_number("layer_norm_eps", 1e-6),
        "vision.projector.scale_factor": None if merge == USUAL_MERGE else merge,
    }
    norm = ProjectorTensor(
        "mm_soft_emb_norm.weight", (h.width,), lambda source: map_values(source, lambda numbers: numbers + 1)
    )
    # It is transposed, so that no block format fits it. F32 is lossless.
    matrix = ProjectorTensor("mm_input_projection_weight", (h.width, h.out), to_float32)
    return ProjectorDeclaration(
        h, metadata, {**list_encoder_tensors(h), "mm.soft_emb_norm.weight": norm, "mm.input_projection.weight": matrix}
    )


def list_encoder_tensors(h: EncoderSizes) -> dict[str, ProjectorTensor]:
    """List the encoder's tensors under transformers' names."""
    return {
        **declare_with_bias("v.patch_embd", "embeddings.patch_embedding", *h.convolution),
        "v.position_embd.weight": ProjectorTensor("embeddings.position_embedding.weight", (h.patches, h.width)),
        **repeat_in_layers(h.layers, "encoder.layers", list_layer_tensors(h)),
        **declare_with_bias("v.post_ln", "post_layernorm", h.width),
    }


def list_layer_tensors(h: EncoderSizes) -> Parts:
    """List the tensors of a layer of SigLIP, which are also those of CLIP."""
    return {
        **declare_with_bias("ln1", "layer_norm1", h.width),
        **declare_with_bias("attn_q", "self_attn.q_proj", h.width, h.width),
        **declare_with_bias("attn_k", "self_attn.k_proj", h.width, h.width),
        **declare_with_bias("attn_v", "self_attn.v_proj", h.width, h.width),
        **declare_with_bias("attn_out", "self_attn.out_proj", h.width, h.width),
        **declare_with_bias("ln2", "layer_norm2", h.width),
        **declare_with_bias("ffn_up", "mlp.fc1", h.hidden, h.width),
        **declare_with_bias("ffn_down", "mlp.fc2", h.width, h.hidden),
    }


IDEFICS3_DEFAULTS = {  # values that config.json may omit
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 32,
}  # fmt: skip


def read_idefics3(c: VisionConfig) -> ProjectorDeclaration:
    """Read Idefics 3, whose projector is a matrix. Raises ModelError."""
    c = add_defaults(c, IDEFICS3_DEFAULTS)
    c.vision.require_value("hidden_act", "gelu_pytorch_tanh")
    h, merge = read_encoder_sizes(c), c.whole.read_count("scale_factor", 2)
    metadata = {
        "projector_type": "idefics3",
        "use_gelu": True,
        # llama.cpp's converter writes 1e-5 as default; transformers uses this.
        "vision.attention.layer_norm_epsilon": c.vision.read_number("layer_norm_eps", 1e-6),
        "vision.projector.scale_factor": merge,
        "vision.preproc_image_size": c.pictures.get_section("size").read_count("longest_edge", h.side),
    }
    matrix = ProjectorTensor("modality_projection.proj.weight", (h.out, merge**2 * h.width))
    return ProjectorDeclaration(h, metadata, {**list_encoder_tensors(h), "mm.model.fc.weight": matrix})


PATCHES, MERGE, HIDDEN = 256, 2, 2560  # values that LFM2-VL's config.json may omit


def read_lfm2vl(c: VisionConfig) -> ProjectorDeclaration:
    """Read LFM2-VL, whose projector is a norm and two matrices. Raises ModelError."""
    c.vision.require_value("model_type", "siglip2_vision_model")
    c.vision.require_value("hidden_act", "gelu_pytorch_tanh")
    c.whole.require_value("projector_hidden_act", "gelu")
    c.whole.require_value("vision_feature_layer", -1)
    patches = c.vision.read_count("num_patches", PATCHES)
    if isqrt(patches) ** 2 != patches:
        raise c.vision.make_error(f"num_patches must be a square number (found {patches})")
    patch = c.vision.read_count("patch_size", 16)
    h = read_encoder_sizes(c, patch=patch, side=isqrt(patches) * patch)
    merge, hidden = c.whole.read_count("downsample_factor", MERGE), c.whole.read_count("projector_hidden_size", HIDDEN)
    metadata = {
        "projector_type": "lfm2",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.read_number("layer_norm_eps", 1e-6),
        "vision.projector.scale_factor": merge,
    }
    matrix = declare_with_bias if c.whole.read_flag("projector_bias", True) else declare_tensor
    together, by_colours = merge**2 * h.width, partial(to_convolution, shape=h.convolution)
    stored = (h.width, prod(h.convolution[1:]))
    parts = {
        **list_encoder_tensors(h),
        "v.patch_embd.weight": ProjectorTensor("embeddings.patch_embedding.weight", stored, by_colours),
        **(
            declare_with_bias("mm.input_norm", "layer_norm", together)
            if c.whole.read_flag("projector_use_layernorm", True)
            else {}
        ),
        **matrix("mm.1", "linear_1", hidden, together),
        **matrix("mm.2", "linear_2", h.out, hidden),
    }
    return ProjectorDeclaration(h, metadata, parts)


def to_convolution(source: TensorSource, shape: Shape) -> DerivedSource:
    """Convert a matrix with channels-last columns to a convolution, [width, channels, patch, patch]."""
    width, colours, patch, _ = shape
    numbers = as_float32(source.read_rows(0, width), source.dtype).reshape(width, patch, patch, colours)
    return from_array(numbers.transpose(0, 3, 1, 2))
