"""EXAONE 3."""

from localllm.convert.config import Config
from localllm.convert.families.llama import LLAMA_SCALING
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder, rotary_dims
from localllm.convert.layers import (
    ATTENTION,
    GATED,
    NORMS_BEFORE,
    as_stored,
)


def exaone(config: Config) -> CheckpointFacts:
    """Read EXAONE 3, which has GPT-2's names."""
    renamed = {"num_hidden_layers": config.get("num_layers", config.get("num_hidden_layers"))}
    renamed |= {"rms_norm_eps": config.number("layer_norm_epsilon", 1e-5)}
    h = decoder(config.updated(**renamed), scalings=LLAMA_SCALING, whole_heads=False)
    dims = rotary_dims(config, h.sizes["width"] // h.sizes["heads"])
    return h.updated(attention__layer_norm_epsilon=renamed["rms_norm_eps"], rope__dimension_count=dims)


EXAONE = Family(
    "exaone",
    {
        **{f"attn_{kind}": as_stored(f"attn.attention.{kind}_proj", *ATTENTION[f"attn_{kind}"]) for kind in "qkv"},
        "attn_output": as_stored("attn.attention.out_proj", *ATTENTION["attn_output"]),
        **GATED,
        **NORMS_BEFORE,
    },
    exaone,
    defaults={"activation_function": "silu"},
)
