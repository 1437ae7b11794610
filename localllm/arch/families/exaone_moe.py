"""K-EXAONE (LG AI Research 2026).

Unlike dots.llm1: three of four layers have a sliding window, and only they have RoPE; files may have factors for
frequencies, and MTP layers.
"""

from localllm.arch.attention import WindowedTransformerHyperparameters, read_windows, select_rope_factors
from localllm.arch.decoder import apply_decoder
from localllm.arch.families.dots1 import block
from localllm.arch.family import Activation, Builder, HyperparameterReader, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import read_file_routing


@frozen
class EXAONEMoEHyperparameters(WindowedTransformerHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters | None:
        return self.attention.rope if self.windows[layer] else None


def read(fields: HyperparameterReader) -> EXAONEMoEHyperparameters:
    shared = EXAONEMoEHyperparameters.read_shared_fields(fields, interleaved=False, rotates_all=True)
    return EXAONEMoEHyperparameters(**shared, windows=read_windows(fields, period=4), routing=read_file_routing(fields))


def forward(b: Builder, w: Weights, h: EXAONEMoEHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


CHECKPOINTS = {
    "ExaoneMoeForCausalLM ExaoneMoEForCausalLM": {
        "layer": "attention head_norms norms mtp",
        "parts": {"< leading_dense": ("gated", "experts shared_expert router_bias")}, "named": "@qwen.rename_mtp",
        "scalings": "linear yarn llama3", "only": {"scoring_func": "sigmoid", "moe_router_use_sigmoid": True},
        "experts": "moe_intermediate_size",
        "amounts": {
            "vocab_size": "vocab", "expert_shared_count": "num_shared_experts", "expert_group_count": "n_group=1",
            "expert_group_used_count": "topk_group=1",
        },
        "keys": {
            "routed_scaling_factor": ("expert_weights_scale", 1.0), "norm_topk_prob": ("expert_weights_norm", True),
        },
        "metadata": {"nextn_predict_layers": 0}, "read": "@exaone.read_exaone_moe",
        "defaults": {
            "rms_norm_eps": 1e-5, "sliding_window_pattern": 4, "num_shared_experts": 1, "routed_scaling_factor": 2.5,
        },
    },
}  # fmt: skip
