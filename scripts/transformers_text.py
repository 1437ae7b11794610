"""Language models of transformers that read an image's rows, with the weights of a GGUF file, in float64."""

from functools import partial
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel, Qwen2VLTextModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

Tensors = dict[str, torch.Tensor]
WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm"}
LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip


def logits(text: dict, tensors: Tensors, tokens: torch.Tensor, rows: torch.Tensor, grids: list) -> torch.Tensor:
    """Behind the last token. tokens: -1 where a row of an image stands; grids: of each image, rows and columns that it
    has in the language model."""
    names = {name: f"{whole}.weight" for name, whole in WHOLE.items()}
    found = {names[stem]: values for name, values in tensors.items() if (stem := name.rsplit(".", 1)[0]) in names}
    for name, values in tensors.items():
        if name.startswith("blk."):
            _, number, part, end = name.split(".")
            found[f"layers.{number}.{LAYER[part]}.{end}"] = values
    model = MODELS[text["arch"]](text, found)
    embedded = found["embed_tokens.weight"][tokens.clamp(min=0)].clone()
    first, *deep = rows.split(embedded.shape[1], dim=1)
    embedded[tokens < 0] = first
    more = {"visual_pos_masks": (tokens < 0)[None], "deepstack_visual_embeds": deep} if deep else {}
    positions = positions_by_image(tokens, grids) if "sections" in text else torch.arange(len(tokens))[None]
    hidden = model(inputs_embeds=embedded[None], position_ids=positions, **more).last_hidden_state[0, -1]
    return hidden @ tensors.get("output.weight", tensors["token_embd.weight"]).T


def shared(text: dict, rope: dict | None = None) -> dict:
    """What all configurations have."""
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
    """As Qwen2-VL gives them: time, height and width, [3, 1, tokens]."""
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


MODELS = {"llama": llama, "qwen2": qwen2, "qwen2vl": qwen2vl, "qwen3vl": qwen3vl}
