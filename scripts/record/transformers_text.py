"""Language models of transformers that read an image's rows, with the weights of a GGUF file, in float64."""

from functools import partial
from types import SimpleNamespace

import torch
from transformers import (
    Gemma3TextConfig,
    Gemma3TextModel,
    Lfm2Config,
    Lfm2Model,
    LlamaConfig,
    LlamaModel,
    Qwen2Config,
    Qwen2Model,
    Qwen2VLTextConfig,
    Qwen3_5TextConfig,
    Qwen3_5TextModel,
    Qwen3VLTextConfig,
)
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel, Qwen2VLTextModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

Tensors = dict[str, torch.Tensor]
WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "token_embd_norm": "embedding_norm"}
LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip


GEMMA3 = {**LAYER, "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
          "post_ffw_norm": "post_feedforward_layernorm"}  # fmt: skip
LFM2 = {**LAYER, "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm", "attn_output": "self_attn.out_proj", "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"}  # fmt: skip
QWEN35 = {**LAYER, "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
          "attn_gate": "linear_attn.in_proj_z", "ssm_conv1d": "linear_attn.conv1d", "ssm_dt": "linear_attn.dt",
          "ssm_a": "linear_attn.A_log", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
          "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}  # fmt: skip
OF_LENGTH_1 = modeling_qwen3_5.l2norm
NAMES = {"gemma3": GEMMA3, "lfm2": LFM2, "qwen35": QWEN35}  # others: LAYER


def logits(text: dict, tensors: Tensors, tokens: torch.Tensor, rows: torch.Tensor, grids: list) -> torch.Tensor:
    """Compute the logits after the last token.

    tokens: -1 for a row of an image. grids: rows and columns of each image in the language model.
    """
    model = MODELS[text["arch"]](text, renamed(tensors, NAMES.get(text["arch"], LAYER)))
    embedded = model.get_input_embeddings()(tokens.clamp(min=0))
    first, *deep = rows.split(embedded.shape[1], dim=1)
    embedded[tokens < 0] = first
    more = {"visual_pos_masks": (tokens < 0)[None], "deepstack_visual_embeds": deep} if deep else {}
    positions = positions_by_image(tokens, grids) if "sections" in text else torch.arange(len(tokens))[None]
    if text["arch"] == "gemma3":
        more["attention_mask"] = masks_by_image(model.config, embedded[None], tokens, positions)
    hidden = model(inputs_embeds=embedded[None], position_ids=positions, **more).last_hidden_state[0, -1]
    return hidden @ tensors.get("output.weight", tensors["token_embd.weight"]).T


def renamed(tensors: Tensors, layer: dict[str, str]) -> Tensors:
    """Rename tensors to transformers' names; layer: the names of a layer's tensors."""
    names = {name: f"{whole}.weight" for name, whole in WHOLE.items()}
    found = {names[stem]: values for name, values in tensors.items() if (stem := name.rsplit(".", 1)[0]) in names}
    for name, values in tensors.items():
        if name.startswith("blk."):
            _, number, part = name.split(".", 2)
            stem, dot, end = part.rpartition(".") if part.endswith((".weight", ".bias")) else (part, "", "")
            found[f"layers.{number}.{layer[stem]}{dot}{end}"] = values
    return found


def masks_by_image(config: Gemma3TextConfig, embedded: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor):
    """Make Gemma 3's masks: the rows of an image see each other."""
    blocks = get_block_sequence_ids_for_mask((tokens < 0).int()[None])
    return create_masks_for_vision_model(config, embedded, None, None, positions, block_sequence_ids=blocks)


def shared(text: dict, rope: dict | None = None) -> dict:
    """Return the settings that all configurations share."""
    names = {"vocab": "vocab_size", "width": "hidden_size", "hidden": "intermediate_size", "layers":
             "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim":
             "head_dim", "epsilon": "rms_norm_eps"}  # fmt: skip
    parameters = {"rope_type": "default", "rope_theta": text["base"], **(rope or {})}
    return {**{name: text[key] for key, name in names.items()}, "rope_parameters": parameters}


def loaded(model: torch.nn.Module, tensors: Tensors) -> torch.nn.Module:
    model.double().load_state_dict(tensors)
    return model.eval()


def qwen2vl(text: dict, tensors: Tensors) -> torch.nn.Module:
    config = Qwen2VLTextConfig(**shared(text, {"mrope_section": text["sections"]}))
    return loaded(Qwen2VLTextModel(config), tensors)


def qwen3vl(text: dict, tensors: Tensors) -> torch.nn.Module:
    config = Qwen3VLTextConfig(**shared(text, {"mrope_section": text["sections"], "mrope_interleaved": True}))
    return loaded(Qwen3VLTextModel(config), tensors)


def positions_by_image(tokens: torch.Tensor, grids: list) -> torch.Tensor:
    """Make Qwen2-VL's positions: time, height and width, [3, 1, tokens]."""
    of = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=1)))
    of.get_vision_position_ids = partial(Qwen2VLModel.get_vision_position_ids, of)
    thw = torch.tensor([[1, *grid] for grid in grids])
    found, _ = Qwen2VLModel.get_rope_index(of, tokens.clamp(min=0)[None], (tokens < 0).int()[None], thw)
    return found


def llama(text: dict, tensors: Tensors) -> torch.nn.Module:
    """Whose queries and keys have neighbours as pairs in the file, and a head's halves here."""
    found = dict(tensors)
    for name, values in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            heads = text["heads"] if "q_proj" in name else text["kv_heads"]
            found[name] = values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    return loaded(LlamaModel(LlamaConfig(**shared(text))), found)


def qwen2(text: dict, tensors: Tensors) -> torch.nn.Module:
    return loaded(Qwen2Model(Qwen2Config(**shared(text))), tensors)


def less_one(tensors: Tensors, but: str = "none") -> Tensors:
    """Norms as a checkpoint has them whose factor is 1 more; but: not those with that name."""
    return {name: values - float("norm" in name and but not in name) for name, values in tensors.items()}


def gemma3(text: dict, tensors: Tensors) -> torch.nn.Module:
    """Every sixth layer sees all, and turns by another base."""
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(text["layers"])]
    own = shared(text)
    own["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in (("full_attention", text["base"]), ("sliding_attention", 10000.0))
    }
    config = Gemma3TextConfig(
        **own, layer_types=kinds, sliding_window=text["window"], query_pre_attn_scalar=text["head_dim"]
    )
    return loaded(Gemma3TextModel(config), less_one(tensors))


def lfm2(text: dict, tensors: Tensors) -> torch.nn.Module:
    counts = text["kv_heads"]
    own = {**shared(text), "num_key_value_heads": max(counts), "norm_eps": text["epsilon"]}
    kinds = ["full_attention" if count else "conv" for count in counts]
    config = Lfm2Config(**own, layer_types=kinds, conv_L_cache=text["taps"], block_auto_adjust_ff_dim=False)
    found = {name: values[:, None] if "conv.conv" in name else values for name, values in tensors.items()}
    return loaded(Lfm2Model(config), found)


def qwen35(text: dict, tensors: Tensors) -> torch.nn.Module:
    """Convert Qwen 3.5: value heads are interleaved in the file, and grouped by key head here.

    The L2 norm's epsilon is that of the norms, since GGUF files have no other; in transformers it is 1e-6, as that of
    all models.
    """
    modeling_qwen3_5.l2norm = lambda x, dim, eps: OF_LENGTH_1(x, dim, text["epsilon"])
    keys, values, width = text["keys"], text["values"], text["inner"] // text["values"]
    rope = {"mrope_section": text["sections"], "mrope_interleaved": True,
            "partial_rotary_factor": text["turned"] / text["head_dim"]}  # fmt: skip
    config = Qwen3_5TextConfig(
        **shared(text, rope), full_attention_interval=text["interval"], linear_conv_kernel_dim=text["conv"],
        linear_key_head_dim=text["state"], linear_value_head_dim=width, linear_num_key_heads=keys,
        linear_num_value_heads=values,
    )  # fmt: skip

    def by_keys(numbers: torch.Tensor) -> torch.Tensor:
        """Rows of all values' heads."""
        return numbers.reshape(values // keys, keys, -1, *numbers.shape[1:]).transpose(0, 1).reshape(numbers.shape)

    def changed(name: str, numbers: torch.Tensor) -> torch.Tensor:
        first = 2 * keys * text["state"]
        if "in_proj_qkv" in name or "conv1d" in name:
            numbers = torch.cat((numbers[:first], by_keys(numbers[first:])))
            return numbers[:, None] if "conv1d" in name else numbers
        if any(part in name for part in ("in_proj_", ".dt", "A_log")):
            return by_keys((-numbers).log() if "A_log" in name else numbers)
        return by_keys(numbers.T).T if "linear_attn.out_proj" in name else numbers

    found = {name.replace("dt.bias", "dt_bias"): changed(name, numbers) for name, numbers in tensors.items()}
    return loaded(Qwen3_5TextModel(config), less_one(found, but="linear_attn.norm"))


MODELS = {"llama": llama, "qwen2": qwen2, "qwen2vl": qwen2vl, "qwen3vl": qwen3vl, "gemma3": gemma3, "lfm2": lfm2,
          "qwen35": qwen35}  # fmt: skip
