"""SmolLM 3 (Bakouch et al. 2025, Hugging Face). Unlike llama: every fourth layer has no RoPE."""

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.families.llama import forward
from localllm.arch.family import HyperparameterReader, RopeParameters, frozen

__all__ = ["forward", "read"]


@frozen
class SmolLM3Hyperparameters(TransformerHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.attention.rope if (layer + 1) % 4 else None


def read(fields: HyperparameterReader) -> SmolLM3Hyperparameters:
    return SmolLM3Hyperparameters(**SmolLM3Hyperparameters.read_shared_fields(fields, interleaved=True))


CHECKPOINTS = {
    "SmolLM3ForCausalLM": {
        "like": "LlamaForCausalLM", "read": "@llama.read_smollm3",
        "defaults": {"tie_word_embeddings": True, "rope_theta": 2e6},
    },
}  # fmt: skip
