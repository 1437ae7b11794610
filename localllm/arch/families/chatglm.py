"""ChatGLM 3 and GLM-4 9B of 2024 (Zeng et al. 2024, arXiv 2406.12793).

Unlike llama: the first half of a head is rotated; queries, keys and values from one matrix, with biases; the gate's
matrix is the upper half of ffn_up.
"""

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.families.llama import forward
from localllm.arch.family import HyperparameterReader

__all__ = ["forward", "read"]


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(**TransformerHyperparameters.read_shared_fields(fields, interleaved=True))


CHECKPOINTS = {
    "GlmForCausalLM": {
        "like": "Glm4ForCausalLM", "layer": "attention fused_gated norms", "read": "@deepseek.read_chatglm",
    },
}  # fmt: skip
