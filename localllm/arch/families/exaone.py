"""EXAONE 3 and 3.5 (LG AI Research 2024, arXiv 2408.03541, 2412.04862).

Unlike llama: rotated pairs are half a head apart. EXAONE 3.5 stretches the context by frequency factors, as Llama 3.
"""

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.families.llama import forward
from localllm.arch.family import HyperparameterReader

__all__ = ["forward", "read"]


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(**TransformerHyperparameters.read_shared_fields(fields, interleaved=False))


CHECKPOINTS = {
    "ExaoneForCausalLM": {
        "layer": "gated norms",
        "tensors": {
            "attn_q": "attn.attention.q_proj.weight: queries width",
            "attn_k": "attn.attention.k_proj.weight: keys width", "attn_v": "attn.attention.v_proj.weight: keys width",
            "attn_output": "attn.attention.out_proj.weight: width queries",
        },
        "scalings": "linear yarn llama3", "partial_rope": True,
        "reads": {"num_hidden_layers": "num_layers|num_hidden_layers", "rms_norm_eps": ("layer_norm_epsilon", 1e-5)},
        "read": "@exaone.read_exaone", "defaults": {"activation_function": "silu"},
    },
}  # fmt: skip
