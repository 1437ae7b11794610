"""Convert the projectors of LLaVA 1.5 and 1.6, Pixtral and Mistral Small 3.1: an encoder and two matrices.

LLaVA uses CLIP up to a selected layer; later layers are omitted. The file states the last layer (`feature_layer`),
because otherwise llama.cpp would omit one more.
"""

from functools import partial

from localllm.arch.vision.llava import UNPADDED
from localllm.convert.files import read_json, report_as_model_error
from localllm.convert.projectors.parts import (
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
from localllm.convert.projectors.siglip import list_layer_tensors
from localllm.convert.transforms import DerivedSource, TensorSource, as_float32, from_array, interleave_rope_rows

EPSILON = 1e-5  # a default of config.json
CLIP = "clip_vision_model"


def read_llava(c: VisionConfig) -> ProjectorDeclaration:
    """Read LLaVA 1.5 or Pixtral, which have the same class name. Raises ModelError."""
    c.vision.require_value("model_type", CLIP, "pixtral")
    return declare_pixtral(c) if c.vision.get("model_type") == "pixtral" else read_llava15(c)


def read_llava15(c: VisionConfig) -> ProjectorDeclaration:
    """Read LLaVA 1.5. Raises ModelError."""
    c.vision.require_value("hidden_act", "quick_gelu")
    c.whole.require_value("projector_hidden_act", "gelu")
    c.whole.require_value("vision_feature_select_strategy", "default")
    c.whole.require_value("multimodal_projector_bias", True)
    stored = c.vision.read_count("num_hidden_layers", maximum=1024)
    h = read_encoder_sizes(c, layers=count_used_layers(c, stored))
    metadata = {
        "projector_type": "mlp",
        "has_llava_projector": True,
        "vision.attention.layer_norm_epsilon": c.vision.read_number("layer_norm_eps", EPSILON),
        "vision.feature_layer": [h.layers],
    }
    parts = {
        "v.patch_embd.weight": ProjectorTensor("embeddings.patch_embedding.weight", h.convolution),
        "v.class_embd": ProjectorTensor("embeddings.class_embedding", (h.width,)),
        "v.position_embd.weight": ProjectorTensor("embeddings.position_embedding.weight", (h.patches + 1, h.width)),
        **declare_with_bias("v.pre_ln", "pre_layrnorm", h.width),
        **repeat_in_layers(h.layers, "encoder.layers", list_layer_tensors(h)),
        **declare_with_bias("mm.0", "linear_1", h.out, h.width),
        **declare_with_bias("mm.2", "linear_2", h.out, h.out),
    }
    unread = [f"encoder.layers.{number}." for number in range(h.layers, stored)]
    return ProjectorDeclaration(h, metadata, parts, ("post_layernorm.", *unread))


def read_llava_next(c: VisionConfig) -> ProjectorDeclaration:
    """Read LLaVA 1.6, which adds an embedding after each line of an image. Raises ModelError."""
    c.vision.require_value("model_type", CLIP)
    c.whole.require_value("use_image_newline_parameter", True)
    facts = read_llava15(c)
    metadata = {
        **facts.metadata,
        "vision.image_grid_pinpoints": list_grid_sizes(c, facts.encoder.side),
        "vision.mm_patch_merge_type": UNPADDED,
    }
    newline = ProjectorTensor("image_newline", (facts.encoder.out,))
    return ProjectorDeclaration(facts.encoder, metadata, {**facts.parts, "v.image_newline": newline}, facts.unread)


def list_grid_sizes(c: VisionConfig, side: int) -> list[int]:
    """List the columns and rows of each grid of tiles, in one list. Raises ModelError.

    side: of a tile in pixels.
    """
    pairs = c.whole.get("image_grid_pinpoints")
    for pair in pairs if isinstance(pairs, list) and pairs else [None]:
        lengths = pair if isinstance(pair, list) and len(pair) == 2 else [0]
        if any(type(length) is not int or length < side or length % side for length in lengths):
            raise c.whole.make_error(f"image_grid_pinpoints must be pairs of multiples of {side}")
    return [length for rows, columns in pairs for length in (columns, rows)]


def count_used_layers(c: VisionConfig, stored: int) -> int:
    """Return how many of the stored layers are used. Raises ModelError."""
    layer = c.whole.get("vision_feature_layer", -2)
    layer = layer[0] if isinstance(layer, list) and len(layer) == 1 else layer
    if not isinstance(layer, int) or isinstance(layer, bool) or not -stored <= layer <= stored or not layer:
        raise c.whole.make_error(f"vision_feature_layer must be one layer, from 1 to {stored} or from -{stored} to -1")
    return layer if layer > 0 else stored + 1 + layer


PIXTRAL_EPSILON = 1e-5  # epsilon of the encoder's norms, in no config.json
BASE = 10000.0  # RoPE base, readers' default
BREAK = "[IMG_BREAK]"
PIXTRAL_DEFAULTS = {  # values that config.json may omit
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 1024, "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip


def declare_pixtral(c: VisionConfig) -> ProjectorDeclaration:
    """Read Pixtral. Raises ModelError."""
    return read_pixtral(c, 1, c.whole.read_flag("multimodal_projector_bias", True))


def read_mistral3(c: VisionConfig) -> ProjectorDeclaration:
    """Read Mistral Small 3.1. Raises ModelError."""
    c.vision.require_value("model_type", "pixtral")
    c.whole.merge_text_config({}).require_value("rms_norm_eps", PIXTRAL_EPSILON)  # all norms share one epsilon
    return read_pixtral(
        c, c.whole.read_count("spatial_merge_size", 2), c.whole.read_flag("multimodal_projector_bias", False)
    )


def read_pixtral(c: VisionConfig, merge: int, biased: bool) -> ProjectorDeclaration:
    """Read Pixtral's encoder and projector. Raises ModelError.

    merge: patches per side that become one token. biased: the projector has biases.
    """
    c = add_defaults(c, PIXTRAL_DEFAULTS)
    require_expressible(c)
    h = read_encoder_sizes(c)
    metadata: dict[str, object] = {
        "projector_type": "pixtral",
        "use_silu": True,
        "vision.attention.layer_norm_epsilon": PIXTRAL_EPSILON,
        "vision.spatial_merge_size": merge if merge > 1 else None,
    }
    reorder, matrix = (
        partial(interleave_rope_rows, head_dim=h.width // h.heads),
        declare_with_bias if biased else declare_tensor,
    )
    layer = {
        **declare_tensor("ln1", "attention_norm", h.width),
        **declare_tensor("ln2", "ffn_norm", h.width),
        "attn_q.weight": ProjectorTensor("attention.q_proj.weight", (h.width, h.width), reorder),
        "attn_k.weight": ProjectorTensor("attention.k_proj.weight", (h.width, h.width), reorder),
        **declare_tensor("attn_v", "attention.v_proj", h.width, h.width),
        **declare_tensor("attn_out", "attention.o_proj", h.width, h.width),
        **declare_tensor("ffn_gate", "feed_forward.gate_proj", h.hidden, h.width),
        **declare_tensor("ffn_up", "feed_forward.up_proj", h.hidden, h.width),
        **declare_tensor("ffn_down", "feed_forward.down_proj", h.width, h.hidden),
    }
    parts = {
        **declare_tensor("v.patch_embd", "patch_conv", *h.convolution),
        **declare_tensor("v.pre_ln", "ln_pre", h.width),
        **repeat_in_layers(h.layers, "transformer.layers", layer),
        **(list_merger_tensors(h.width, merge) if merge > 1 else {}),
        **matrix("mm.1", "linear_1", h.out, h.width),
        **matrix("mm.2", "linear_2", h.out, h.out),
        "v.token_embd.img_break": declare_line_end(c),
    }
    return ProjectorDeclaration(h, metadata, parts)


def require_expressible(c: VisionConfig) -> None:
    """Raise ModelError for settings that differ from those GGUF's readers assume."""
    c.vision.require_value("hidden_act", "silu")
    c.vision.require_value("rope_theta", BASE)
    c.vision.get_section("rope_parameters").require_value("rope_theta", BASE)
    c.whole.require_value("projector_hidden_act", "gelu")
    c.whole.require_value("vision_feature_layer", -1)


def list_merger_tensors(width: int, merge: int) -> Parts:
    """List the tensors that merge neighbouring patches into one token."""
    return {
        **declare_tensor("mm.input_norm", "norm", width),
        **declare_tensor("mm.patch_merger", "patch_merger.merging_layer", width, merge**2 * width),
    }


def declare_line_end(c: VisionConfig) -> ProjectorTensor:
    """Declare the embedding that follows each line of an image: the row of [IMG_BREAK]."""
    text = c.whole.merge_text_config({})
    vocab = text.read_count("vocab_size")
    return ProjectorTensor("embed_tokens.weight", (vocab, c.out), partial(take_row, number=find_break_token(c, vocab)))


def take_row(source: TensorSource, number: int) -> DerivedSource:
    """Take a row of a matrix as a vector."""
    return from_array(as_float32(source.read_rows(number, number + 1), source.dtype).reshape(-1))


def find_break_token(c: VisionConfig, vocab: int) -> int:
    """Return the id of [IMG_BREAK]. Raises ModelError."""
    folder = c.whole.path.parent
    for name in ("tokenizer_config.json", "tokenizer.json"):
        content = read_json(folder / name) or {}
        with report_as_model_error(folder / name):
            tokens = {int(number): token for number, token in (content.get("added_tokens_decoder") or {}).items()}
            tokens |= {int(token["id"]): token for token in content.get("added_tokens") or ()}
            ids = [number for number, token in tokens.items() if token["content"] == BREAK]
        if ids and 0 <= ids[0] < vocab:
            return ids[0]
    raise c.whole.make_error(f"tokenizer_config.json or tokenizer.json must have the token {BREAK}")
