"""OLMo 2 and 3 (OLMo Team 2024, arXiv 2501.00656; 2025).

Unlike llama: norms after attention and feed-forward network instead of before; queries and keys are normalized across
all heads; rotated pairs are half a head apart. In OLMo 3, three of four layers have a sliding window, and RoPE without
scaling.
"""

from localllm.arch.attention import WindowedTransformerHyperparameters, attend, project_qkv, read_windows
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import apply_gated_feed_forward


@frozen
class OLMo2Hyperparameters(WindowedTransformerHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters:
        rope = self.attention.rope
        return rope.remove_scaling(rope.base) if self.windows[layer] else rope


def read(fields: HyperparameterReader) -> OLMo2Hyperparameters:
    shared = OLMo2Hyperparameters.read_shared_fields(fields, interleaved=False)
    return OLMo2Hyperparameters(**shared, windows=read_windows(fields, period=4, default=0))


def block(b: Builder, w: Weights, h: OLMo2Hyperparameters, state: PagedState, x: Activation) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, x)
    q, k = b.rms_norm(q, w.attn_q_norm, h.epsilon), b.rms_norm(k, w.attn_k_norm, h.epsilon)
    y = b.linear(attend(b, h, state, q, k, v), w.attn_output)
    x = b.add(x, b.rms_norm(y, w.post_attention_norm, h.epsilon))
    return b.add(x, b.rms_norm(apply_gated_feed_forward(b, w, x, b.swiglu), w.post_ffw_norm, h.epsilon))


CHECKPOINTS = {
    "Olmo2ForCausalLM": {
        "layer": "attention whole_norms gated norms_behind", "only": {"clip_qkv": ()}, "read": "@llama.read_olmo2",
        "defaults": {"rms_norm_eps": 1e-5},
    },
    "Olmo3ForCausalLM": {
        "like": "Olmo2ForCausalLM", "defaults": {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
    },
}  # fmt: skip
