"""Command R7B and Command A (Cohere 2025, arXiv 2504.00698).

Unlike Command R: three of four layers have a sliding window; the others have full attention and no RoPE.
"""

from localllm.arch.attention import LAYER_EPSILON, read_windows
from localllm.arch.families.command_r import Cohere, forward
from localllm.arch.family import Fields, Rope, frozen

__all__ = ["forward", "read"]


@frozen
class Cohere2(Cohere):
    def rope(self, layer: int) -> Rope | None:
        return self.attention.rope if self.windows[layer] else None


def read(fields: Fields) -> Cohere2:
    shared = Cohere2.shared_fields(fields, interleaved=True, epsilon=LAYER_EPSILON)
    windows = read_windows(fields, period=4)
    return Cohere2(**shared, windows=windows, logit_scale=fields.number("logit_scale") or 1.0)


CHECKPOINTS = {
    "Cohere2ForCausalLM": {
        "like": "CohereForCausalLM", "windows": 4,
        "only": {
            "attention_bias": False, "tie_word_embeddings": True, "use_qk_norm": False, "rotary_pct": 1.0,
            "sliding_window_pattern": 4,
        },
        "amounts": {
            "context_length": "model_max_length=context", "vocab_size": "vocab", "rope.dimension_count": "head_dim",
        },
        "keys": {"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"},
        "defaults": {
            "tie_word_embeddings": True, "logit_scale": 0.0625, "head_dim": 128, "sliding_window": 4096,
            "max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
