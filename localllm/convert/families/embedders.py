"""More embedding and reranking models: Jina Embeddings 2, EmbeddingGemma, Qwen3 rerankers, Nomic Embed."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.convert.config import Config
from localllm.convert.families.bert import (
    BEHIND,
    BERT,
    CLASSIFIERS,
    NOMIC,
    QKV,
    RANK,
    UNREAD,
    encoder,
    labels,
    nomic_facts,
)
from localllm.convert.family import DerivedTensor, Family, Layer, Sizes
from localllm.convert.files import read_json, read_text, report_as_model_error
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import ATTENTION, FEED_FORWARD, GATED, NORMS_BEFORE
from localllm.convert.records import family_named
from localllm.convert.tensors import Shape, TensorSource, pick_rows, reshape, transpose

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
ANSWERS = "yes", "no"
OF_CODE = "qk-post-norm"  # in the name of the code that jina-embeddings-v2-base-code uses


def jina(config: Config) -> CheckpointFacts:
    """Read Jina Embeddings 2: ALiBi, gated GELU, gate and up projections in one matrix."""
    config.only("hidden_act", "gelu")
    config.only("position_embedding_type", "alibi")
    config.only("feed_forward_type", "geglu")
    h = encoder(config, config.count("max_position_embeddings", 8192), config.number("layer_norm_eps", 1e-12))
    return h.updated({"both_hidden": 2 * h.sizes["hidden"], "norms_heads": int(OF_CODE in str(config.get("auto_map")))})


def jina_layer(sizes: Sizes, number: int) -> Layer:
    """List a layer's tensors; models for code normalize queries and keys, and the attention's output twice."""
    layer = {**ATTENTION, **BEHIND, "ffn_up": ("both_hidden", "width"), "ffn_down": ("width", "hidden")}
    norms = dict.fromkeys(("attn_q_norm", "attn_k_norm", "attn_norm_2"), ("width",))
    return {**layer, **norms} if sizes["norms_heads"] else layer


def nomic(config: Config) -> CheckpointFacts:
    """Read Nomic Embed under its publisher's names, or under transformers' (only for the model without experts)."""
    if config.get("n_embd") is not None:
        return nomic_facts(config)
    config.only("hidden_act", "silu")
    rope = config.section("rope_parameters")
    rope.only("rope_type", "default")
    rope.only("partial_rotary_factor", 1.0, 1)
    h = encoder(config, config.count("max_position_embeddings", 2048), config.number("layer_norm_eps", 1e-12))
    base = rope.number("rope_theta", config.number("rope_theta", 1000.0))
    return h.updated({"fused_rows": 3 * h.sizes["width"]}, rope__freq_base=base)


def eurobert(config: Config) -> CheckpointFacts:
    """Read EuroBERT: like Llama with bidirectional attention. llama.cpp's reader ignores RoPE scaling."""
    for name in ("attention_bias", "mlp_bias"):
        config.only(name, False)
    h = decoder(config, scalings=())
    pooling = CLASSIFIERS.get(config.get("classifier_pooling"))
    return h.updated(
        attention__causal=False,
        rope__scaling__type="none",
        classifier__pooling_type=pooling,
    )


def is_ranker(config: Config) -> bool:
    """Return whether a Qwen3 checkpoint is a reranker that answers yes or no, by its model card or name."""
    names = (config.path.parent.name, str(config.get("_name_or_path")))
    card = read_text(config.path.parent / "README.md") or ""
    return "# qwen3-reranker" in card.lower() or any("qwen3-reranker" in name.lower() for name in names)


def qwen_ranking(config: Config) -> CheckpointFacts:
    """Read a reranker: the head is two rows of the output matrix."""
    path = config.path.parent / "tokenizer.json"
    with report_as_model_error(path):
        vocabulary = (read_json(path) or {})["model"]["vocab"]
        answers = {name: int(vocabulary[name]) for name in ANSWERS}
    h = QWEN3.read(config)
    if max(answers.values()) >= h.sizes["vocab"]:
        raise config.refusal("the tokens of yes and no are beyond the vocabulary")
    return h.updated({**answers, "labels": 2}, pooling_type=RANK, classifier__output_labels=[*ANSWERS])


def qwen_classes(config: Config) -> CheckpointFacts:
    """Read a reranker with a head of its own."""
    named = labels(config)
    h = QWEN3.read(config).updated({"labels": len(named)}, pooling_type=RANK)
    return h.updated(classifier__output_labels=named) if len(named) > 1 else h


def rows_of_answers(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the output matrix's rows of yes and no."""
    return pick_rows(sources[0], shape, lambda rows: np.array([sizes[name] for name in ANSWERS])[np.asarray(rows)])


def of_each(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """View experts' matrices, stored one below the other, as a stack."""
    return reshape(sources[0], shape)


def of_each_transposed(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Transpose experts' matrices, stored one below the other, into a stack."""
    return transpose(reshape(sources[0], (shape[0], shape[2], shape[1])))


def nomic_experts(sizes: Sizes, number: int) -> Layer:
    """List a layer's tensors: every other layer has experts, from the second one on."""
    if number % 2 == 0:
        return {**QKV, **FEED_FORWARD, **BEHIND}
    return {
        **QKV, **BEHIND, "ffn_gate_inp": ("experts", "width"),
        "ffn_up_exps": DerivedTensor(("experts", "hidden", "width"), {"mlp.experts.mlp.w1": STACKED}, of_each),
        "ffn_down_exps": DerivedTensor(
            ("experts", "width", "hidden"), {"mlp.experts.mlp.w2": STACKED}, of_each_transposed
        ),
    }  # fmt: skip


QWEN3 = family_named("Qwen3ForCausalLM")
STACKED = "stacked", "width"
JINA = Family(
    "jina-bert-v2", jina_layer, jina, decodes=False, prefixes=BERT.prefixes, unread=UNREAD,
    whole={"token_types": ("types", "width"), "token_embd_norm": ("width",)},
    biased=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down", "attn_q_norm", "attn_k_norm", "attn_norm_2",
            "token_embd_norm", *BEHIND),
)  # fmt: skip
NOMIC_PLAIN = replace(NOMIC, read=nomic)
NOMIC_MOE = replace(
    NOMIC, arch="nomic-bert-moe", layer=nomic_experts, unread=re.compile(rf"{UNREAD.pattern}|.*\.experts\.bias"),
    biased=(*NOMIC.biased, "attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)  # fmt: skip
EUROBERT = Family(
    "eurobert", {**ATTENTION, **GATED, **NORMS_BEFORE}, eurobert, decodes=False, whole={"output_norm": ("width",)},
    prefixes=("model.",), unread=UNREAD, defaults={"rms_norm_eps": 1e-5, "rope_theta": 250000.0},
)  # fmt: skip
HEAD = DerivedTensor(("labels", "width"), {"token_embd.weight": ("vocab", "width")}, rows_of_answers)
QWEN3_RANK_TIED = replace(
    QWEN3, read=qwen_ranking, decodes=False, whole={"output_norm": ("width",), "cls.output.weight": HEAD},
    more={"tokenizer.chat_templates": ["rerank"], "tokenizer.chat_template.rerank": RERANK},
)  # fmt: skip
QWEN3_RANK = replace(
    QWEN3_RANK_TIED,
    whole={"output_norm": ("width",), "cls.output.weight": replace(HEAD, of={"output.weight": ("vocab", "width")})},
)
QWEN3_CLASSES = replace(
    QWEN3_RANK_TIED, read=qwen_classes, renamed={"score": "cls.output"},
    whole={"output_norm": ("width",), "cls.output.weight": ("labels", "width")},
)  # fmt: skip


def select_nomic(config: Config) -> Family:
    """Select the family with experts, or without."""
    return NOMIC_MOE if config.get("moe_every_n_layers") else NOMIC_PLAIN


def select_qwen3(config: Config) -> Family:
    """Select the family of a chat model, or of a reranker."""
    if not is_ranker(config):
        return QWEN3
    return QWEN3_RANK_TIED if config.flag("tie_word_embeddings") else QWEN3_RANK
