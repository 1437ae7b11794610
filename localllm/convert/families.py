"""The architectures that can be converted: by the name in config.json, the weights that the GGUF architecture has.

To add one: an entry in FAMILIES, with what a layer holds under gguf's names (its TensorNameMap knows the others').
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What the checkpoints of a GGUF architecture have in common. Shapes are made of the sizes in Hyperparameters."""

    arch: str  # general.architecture
    layer: Mapping[
        str, tuple[str, ...]
    ]  # of every layer: name without "blk.N." and ".weight" -> shape; a bias may come
    rotated: tuple[str, ...] = ()  # matrices whose rows are in the order of halves, where GGUF has pairs


LLAMA = Family(
    "llama",
    layer={
        "attn_norm": ("width",),
        "attn_q": ("queries", "width"),
        "attn_k": ("keys", "width"),
        "attn_v": ("keys", "width"),
        "attn_output": ("width", "queries"),
        "ffn_norm": ("width",),
        "ffn_gate": ("hidden", "width"),
        "ffn_up": ("hidden", "width"),
        "ffn_down": ("width", "hidden"),
    },
    rotated=("attn_q", "attn_k"),
)

FAMILIES = {"LlamaForCausalLM": LLAMA, "LLaMAForCausalLM": LLAMA, "MistralForCausalLM": LLAMA}
