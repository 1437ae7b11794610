"""Convert the projector of LFM2-VL: SigLIP 2 and two matrices, with or without a norm in front."""

from functools import partial
from math import isqrt, prod

from localllm.convert.projectors.gemma3 import siglip
from localllm.convert.projectors.parts import Part, ProjectorFacts, SeeingConfig, plain, sizes_of, with_bias
from localllm.convert.tensors import DerivedSource, Shape, TensorSource, as_float32, from_array

EPSILON = 1e-6  # epsilon of norms that config.json may omit
PATCHES, MERGE, HIDDEN = 256, 2, 2560  # a default of config.json


def lfm2vl(c: SeeingConfig) -> ProjectorFacts:
    """Read the configuration. Raises ModelError."""
    c.vision.only("model_type", "siglip2_vision_model")
    c.vision.only("hidden_act", "gelu_pytorch_tanh")
    c.whole.only("projector_hidden_act", "gelu")
    c.whole.only("vision_feature_layer", -1)
    patches = c.vision.count("num_patches", PATCHES)
    if isqrt(patches) ** 2 != patches:
        raise c.vision.refusal(f"num_patches: {patches} is not a square number")
    patch = c.vision.count("patch_size", 16)
    h = sizes_of(c, patch=patch, side=isqrt(patches) * patch)
    merge, hidden = c.whole.count("downsample_factor", MERGE), c.whole.count("projector_hidden_size", HIDDEN)
    metadata = {
        "projector_type": "lfm2",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.number("layer_norm_eps", EPSILON),
        "vision.projector.scale_factor": merge,
    }
    matrix = with_bias if c.whole.flag("projector_bias", True) else plain
    together, by_colours = merge**2 * h.width, partial(convolution, shape=h.convolution)
    stored = (h.width, prod(h.convolution[1:]))
    parts = {
        **siglip(h),
        "v.patch_embd.weight": Part("embeddings.patch_embedding.weight", stored, by_colours),
        **(with_bias("mm.input_norm", "layer_norm", together) if c.whole.flag("projector_use_layernorm", True) else {}),
        **matrix("mm.1", "linear_1", hidden, together),
        **matrix("mm.2", "linear_2", h.out, hidden),
    }
    return ProjectorFacts(h, metadata, parts)


def convolution(source: TensorSource, shape: Shape) -> DerivedSource:
    """Turn a matrix whose rows keep a pixel's colours together into a convolution [width, colours, patch, patch]."""
    width, colours, patch, _ = shape
    numbers = as_float32(source.rows(0, width), source.dtype).reshape(width, patch, patch, colours)
    return from_array(numbers.transpose(0, 3, 1, 2))
