"""Mellum 2 (JetBrains 2026): Qwen 3 MoE with a sliding window, and unscaled RoPE, in three layers of four."""

from localllm.arch.attention import WindowedTransformerHyperparameters, read_windows
from localllm.arch.families.qwen3 import forward
from localllm.arch.family import HyperparameterReader, RopeParameters, frozen
from localllm.arch.feed_forward import read_routing

__all__ = ["forward", "read"]


@frozen
class MellumHyperparameters(WindowedTransformerHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters | None:
        rope = self.attention.rope
        return rope.remove_scaling(rope.base) if self.windows[layer] else rope


def read(fields: HyperparameterReader) -> MellumHyperparameters:
    shared = MellumHyperparameters.read_shared_fields(fields, interleaved=False)
    return MellumHyperparameters(
        **shared, windows=read_windows(fields, period=4, default=0), routing=read_routing(fields)
    )


CHECKPOINTS = {
    "MellumForCausalLM": {
        "layer": "attention head_norms norms experts", "named_as": "qwen3moe", "scalings": "yarn",
        "only": {"norm_topk_prob": True, "num_nextn_predict_layers": 0},
        "experts": "moe_intermediate_size num_experts|num_local_experts",
        "amounts": {"expert_feed_forward_length": "expert_hidden"}, "read": "@laguna.read_mellum",
        "defaults": {
            "head_dim": 128, "norm_topk_prob": True, "sliding_window": 1024,
            "rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 10000.0}},
        },
    },
}  # fmt: skip
