"""Convert the projectors of LLaVA 1.5 and 1.6: CLIP up to the selected layer, and two matrices.

Later layers are left out. The file names the last layer (`feature_layer`), because without it llama.cpp leaves out one
more.
"""

from localllm.arch.vision.anyres import UNPADDED
from localllm.convert.projectors.gemma3 import transformer_layer
from localllm.convert.projectors.parts import Part, ProjectorFacts, SeeingConfig, in_layers, sizes_of, with_bias
from localllm.convert.projectors.pixtral import pixtral

EPSILON = 1e-5  # a default of config.json
CLIP = "clip_vision_model"


def llava(c: SeeingConfig) -> ProjectorFacts:
    """Read LLaVA 1.5, or Pixtral, whose checkpoints have the same name. Raises ModelError."""
    c.vision.only("model_type", CLIP, "pixtral")
    return pixtral(c) if c.vision.get("model_type") == "pixtral" else llava15(c)


def llava15(c: SeeingConfig) -> ProjectorFacts:
    """Read LLaVA 1.5. Raises ModelError."""
    c.vision.only("hidden_act", "quick_gelu")
    c.whole.only("projector_hidden_act", "gelu")
    c.whole.only("vision_feature_select_strategy", "default")
    c.whole.only("multimodal_projector_bias", True)
    stored = c.vision.count("num_hidden_layers", maximum=1024)
    h = sizes_of(c, layers=last_layer(c, stored))
    metadata = {
        "projector_type": "mlp",
        "has_llava_projector": True,
        "vision.attention.layer_norm_epsilon": c.vision.number("layer_norm_eps", EPSILON),
        "vision.feature_layer": [h.layers],
    }
    parts = {
        "v.patch_embd.weight": Part("embeddings.patch_embedding.weight", h.convolution),
        "v.class_embd": Part("embeddings.class_embedding", (h.width,)),
        "v.position_embd.weight": Part("embeddings.position_embedding.weight", (h.patches + 1, h.width)),
        **with_bias("v.pre_ln", "pre_layrnorm", h.width),
        **in_layers(h.layers, "encoder.layers", transformer_layer(h)),
        **with_bias("mm.0", "linear_1", h.out, h.width),
        **with_bias("mm.2", "linear_2", h.out, h.out),
    }
    unread = [f"encoder.layers.{number}." for number in range(h.layers, stored)]
    return ProjectorFacts(h, metadata, parts, ("post_layernorm.", *unread))


def llava_next(c: SeeingConfig) -> ProjectorFacts:
    """Read LLaVA 1.6, with an embedding after each line of an image. Raises ModelError."""
    c.vision.only("model_type", CLIP)
    c.whole.only("use_image_newline_parameter", True)
    facts = llava15(c)
    metadata = {
        **facts.metadata,
        "vision.image_grid_pinpoints": sizes(c, facts.encoder.side),
        "vision.mm_patch_merge_type": UNPADDED,
    }
    newline = Part("image_newline", (facts.encoder.out,))
    return ProjectorFacts(facts.encoder, metadata, {**facts.parts, "v.image_newline": newline}, facts.unread)


def sizes(c: SeeingConfig, side: int) -> list[int]:
    """Return columns and rows of the image grids, concatenated. Raises ModelError."""
    pairs = c.whole.get("image_grid_pinpoints")
    for pair in pairs if isinstance(pairs, list) and pairs else [None]:
        lengths = pair if isinstance(pair, list) and len(pair) == 2 else [0]
        if any(type(length) is not int or length < side or length % side for length in lengths):
            raise c.whole.refusal(f"image_grid_pinpoints: expected pairs of multiples of {side}")
    return [length for rows, columns in pairs for length in (columns, rows)]


def last_layer(c: SeeingConfig, stored: int) -> int:
    """Return how many layers are used. Raises ModelError."""
    layer = c.whole.get("vision_feature_layer", -2)
    layer = layer[0] if isinstance(layer, list) and len(layer) == 1 else layer
    if not isinstance(layer, int) or isinstance(layer, bool) or not -stored <= layer <= stored or not layer:
        raise c.whole.refusal(f"vision_feature_layer: expected one layer, from 1 to {stored} or from -{stored} to -1")
    return layer if layer > 0 else stored + 1 + layer
