"""Convert the projector of Idefics 3 and SmolVLM: SigLIP and a matrix."""

from localllm.convert.projectors.gemma3 import siglip
from localllm.convert.projectors.parts import Part, ProjectorFacts, SeeingConfig, sizes_of, with_defaults

DEFAULTS = {  # values that config.json may omit
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}


def idefics3(c: SeeingConfig) -> ProjectorFacts:
    """Read the configuration. Raises ModelError."""
    c = with_defaults(c, DEFAULTS)
    c.vision.only("hidden_act", "gelu_pytorch_tanh")
    h, merge = sizes_of(c), c.whole.count("scale_factor", 2)
    metadata = {
        "projector_type": "idefics3",
        "use_gelu": True,
        # llama.cpp's converter writes 1e-5 as default; transformers uses this.
        "vision.attention.layer_norm_epsilon": c.vision.number("layer_norm_eps", 1e-6),
        "vision.projector.scale_factor": merge,
        "vision.preproc_image_size": c.pictures.section("size").count("longest_edge", h.side),
    }
    matrix = Part("modality_projection.proj.weight", (h.out, merge**2 * h.width))
    return ProjectorFacts(h, metadata, {**siglip(h), "mm.model.fc.weight": matrix})
