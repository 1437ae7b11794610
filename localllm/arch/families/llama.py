"""Llama (Touvron et al. 2023) and everything built like it: Mistral, Mixtral, SmolLM, InternLM 2, ERNIE 4.5, ..."""

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv, select_rope_factors
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights
from localllm.arch.feed_forward import apply_feed_forward_or_experts, read_routing


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    """Read the hyperparameters. Raises ModelError, also if RoPE does not rotate whole heads."""
    shared = TransformerHyperparameters.read_shared_fields(fields, interleaved=True, rotates_all=True, own_values=True)
    if (attention := shared["attention"]).value_dim != attention.head_dim:
        if not fields.has("attention.key_length"):  # value_length or head_count is damaged
            raise fields.make_unsupported_error("attention.value_length must equal attention.key_length")
        lengths = f"keys of dimension {attention.head_dim} and values of {attention.value_dim}"
        fields.oddities.note(f"{lengths}, in a {fields.arch} model")
    return TransformerHyperparameters(**shared, routing=read_routing(fields))


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


TEXT_DEFAULTS = {  # transformers' defaults
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
CHECKPOINTS = {
    "LLaMAForCausalLM LlamaForCausalLM LlamaModel MistralForCausalLM IQuestCoderForCausalLM VLlama3ForCausalLM": {
        "layer": "attention gated norms", "rotated": True, "scalings": "linear yarn llama3", "window_ignored": True,
        "amounts": {"vocab_size": "vocab", "rope.dimension_count": "head_dim"},
    },
    "InternLM3ForCausalLM": {"like": "LlamaForCausalLM", "scalings": "linear yarn llama3 dynamic"},
    "Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration": {
        "like": "LlamaForCausalLM", "sees": True, "defaults": {"num_attention_heads": 32},
    },
    "JanusForConditionalGeneration": {
        "like": "LlamaForCausalLM", "sees": True,
        "unread": r"(model\.)?(aligner|vqmodel|generation_(embeddings|aligner|head))\..*", "defaults": TEXT_DEFAULTS,
    },
    "VoxtralForConditionalGeneration": {
        "like": "LlamaForCausalLM", "sees": True, "unread": r"(model\.)?audio_tower\..*",
    },
    "MixtralForCausalLM": {
        "like": "LlamaForCausalLM", "layer": "attention norms experts",
        "experts": "intermediate_size num_local_experts", "defaults": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    },
    "Ernie4_5ForCausalLM Ernie4_5_ForCausalLM": {
        "arch": "ernie4_5", "layer": "attention gated norms", "scalings": "linear yarn llama3",
        "only": {"use_bias": False}, "defaults": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    },
    "XverseForCausalLM": {
        "arch": "xverse", "layer": "attention gated norms", "rotated": True,
        "amounts": {"rope.dimension_count": "head_dim"},
        "metadata": {"tensor_data_layout": "Meta AI original pth"},  # unused
    },
    "LlavaForConditionalGeneration LlavaNextForConditionalGeneration": {
        "like": "LlamaForCausalLM", "select": "@llama.select_vision",
    },
    "vision+llama": {
        "like": "LlamaForCausalLM", "sees": True, "unread": r"(model\.)?image_newline", "defaults": TEXT_DEFAULTS,
    },
    "vision+mistral": {
        "like": "vision+llama",
        "defaults": {
            **TEXT_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 1 << 17,
        },
    },
    "InternLM2ForCausalLM": {
        "arch": "internlm2", "layer": "gated norms",
        "tensors": {  # a group's rows are its queries, a key and a value
            "attn_q": "grouped_q attention.wqkv.weight[fused_rows width]: queries width",
            "attn_k": "grouped_k attention.wqkv.weight[fused_rows width]: keys width",
            "attn_v": "grouped_v attention.wqkv.weight[fused_rows width]: keys width", "attn_output": "width queries",
        },
        "only": {"bias": False}, "reads": {"head_dim": None}, "sizes": {"fused_rows": "queries + 2 * keys"},
        "defaults": {"rms_norm_eps": 1e-6},
    },
}  # fmt: skip
