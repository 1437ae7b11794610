"""Qwen 3, with experts or without (Yang et al. 2025, arXiv 2505.09388); OpenELM (2404.14619).

Unlike llama: rotated pairs are half a head apart; each head of queries and keys is normalized before RoPE.
"""

from localllm.arch.attention import (
    TransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    select_rope_factors,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights
from localllm.arch.feed_forward import apply_feed_forward_or_experts, read_routing


def read(fields: HyperparameterReader) -> TransformerHyperparameters:
    return TransformerHyperparameters(
        **TransformerHyperparameters.read_shared_fields(fields, interleaved=False), routing=read_routing(fields)
    )


def forward(b: Builder, w: Weights, h: TransformerHyperparameters) -> Activation:
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: TransformerHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    q, k = normalize_heads(b, w, h, q, k)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu))


# The template around a query and a document, as llama.cpp's converter writes it.
RERANK = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: Given a web search query, retrieve relevant passages that answer the query
<Query>: {query}
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
CHECKPOINTS = {
    "Qwen3Model": {"like": "Qwen3ForCausalLM"},
    "Qwen3ForCausalLM": {
        "select": "@qwen.select", "layer": "attention head_norms gated norms", "scalings": "linear yarn llama3",
        "window_ignored": True,
    },
    "Qwen3MoeForCausalLM": {
        "arch": "qwen3moe", "like": "Qwen3ForCausalLM", "layer": "attention head_norms norms experts",
        "only": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "experts": "moe_intermediate_size num_experts|num_local_experts",
        "amounts": {"expert_feed_forward_length": "expert_hidden"}, "defaults": {"norm_topk_prob": False},
    },
    "Qwen3ForCausalLM+tied_ranker": {  # the head is two rows of the output matrix
        "like": "Qwen3ForCausalLM",
        "whole": {
            "output_norm": "width",
            "cls.output.weight": "@qwen.take_answer_rows token_embd.weight[vocab width]: labels width",
        },
        "decodes": False, "read": "@qwen.read_ranker",
        "more": {"tokenizer.chat_templates": ["rerank"], "tokenizer.chat_template.rerank": RERANK},
    },
    "Qwen3ForCausalLM+ranker": {
        "like": "Qwen3ForCausalLM+tied_ranker",
        "whole": {
            "output_norm": "width",
            "cls.output.weight": "@qwen.take_answer_rows output.weight[vocab width]: labels width",
        },
    },
    "Qwen3ForSequenceClassification": {  # a head of its own
        "like": "Qwen3ForCausalLM+tied_ranker", "whole": {"output_norm": "width", "cls.output.weight": "labels width"},
        "renamed": {"score": "cls.output"}, "read": "@qwen.read_classifier",
    },
    "InternVLForConditionalGeneration": {"like": "Qwen3ForCausalLM", "select": "@llama.select_vision"},
    "vision+qwen3": {"like": "Qwen3ForCausalLM", "sees": True, "unread": r"(model\.)?image_newline"},
}  # fmt: skip
