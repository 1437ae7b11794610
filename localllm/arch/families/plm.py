"""PLM (Deng et al. 2025, arXiv 2503.12167). Like the oldest files of DeepSeek-V2, with a squared ReLU for a gate."""

from localllm.arch.attention import RMS_EPSILON
from localllm.arch.families.deepseek2 import DeepSeek2Hyperparameters, attend_to_keys
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights
from localllm.arch.feed_forward import apply_ungated_feed_forward
from localllm.arch.rope import read_rope


def read(fields: HyperparameterReader, interleaved: bool = True) -> DeepSeek2Hyperparameters:
    dims, heads = fields.read_count("rope.dimension_count"), fields.read_count("attention.head_count")
    usual = fields.read_count("embedding_length") // heads  # default length of a head
    key_dim = fields.read_count("attention.key_length", usual)
    if key_dim <= dims or fields.read_count("attention.head_count_kv", heads) != heads:
        raise fields.make_error(
            f"the key dimension {key_dim} must exceed rope.dimension_count {dims}, and attention.head_count_kv be "
            f"{heads}"
        )
    return DeepSeek2Hyperparameters(
        **fields.read_common_fields(),
        epsilon=fields.read_epsilon(RMS_EPSILON),
        heads=heads,
        key_dim=key_dim - dims,
        value_dim=fields.read_count("attention.value_length", usual),
        latent=fields.read_count("attention.kv_lora_rank"),
        keeps_latent=False,
        rope=read_rope(fields, dims, interleaved),
        scale=key_dim**-0.5,
        temperature=0.0,
        temperature_length=1,
        routing=None,
    )


def block(b: Builder, w: Weights, h: DeepSeek2Hyperparameters, state: PagedState, x: Activation) -> Activation:
    y = attend_to_keys(b, w, h, state, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(y, w.attn_output))
    return b.add(x, apply_ungated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.relu_squared))


CHECKPOINTS = {
    "PLMForCausalLM": {
        "layer": "norms feed_forward",
        "tensors": {
            "attn_q": "queries width", "attn_kv_a_mqa": "latent_and_key width", "attn_kv_a_norm": "latent",
            "attn_kv_b": "both_rows latent", "attn_output": "width values",
        },
        "activations": "relu2", "only": {"q_lora_rank": ()}, "reads": {"head_dim": "1 * qk_rope_head_dim"},
        "sizes": {
            "latent": "kv_lora_rank", "latent_and_key": "kv_lora_rank + qk_rope_head_dim",
            "values": "heads * v_head_dim", "queries": "heads * qk_nope_head_dim + heads * qk_rope_head_dim",
            "both_rows": "heads * qk_nope_head_dim + heads * v_head_dim",
        },
        "amounts": {
            "vocab_size": "vocab", "attention.kv_lora_rank": "latent",
            "attention.key_length": "qk_nope_head_dim + qk_rope_head_dim", "attention.value_length": "v_head_dim",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        "defaults": {"hidden_act": "relu2"},
    },
}  # fmt: skip
