"""Encoders: BERT and XLM-RoBERTa, also with a head that scores pairs of texts; Nomic Embed; ModernBERT."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.family import DerivedTensor, Family, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, attention_sizes
from localllm.convert.layers import ATTENTION, FEED_FORWARD, GATED
from localllm.convert.tensors import Shape, TensorSource, pick_rows

RANK = 4  # llama.cpp's pooling type for scores
CLASSIFIERS = {"mean": 1, "cls": 2}  # poolings that the scores are computed from


def bert(config: Config) -> CheckpointFacts:
    """Read BERT: a position table, layer norms, exact GELU."""
    config.only("hidden_act", "gelu")
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    return encoder(config, config.count("max_position_embeddings", 512), config.number("layer_norm_eps", 1e-12))


def roberta(config: Config) -> CheckpointFacts:
    """Read RoBERTa: the table's first positions stand for padding and are cut off."""
    positions, padding = config.count("max_position_embeddings", 514), config.get("pad_token_id", 1)
    if not isinstance(padding, int) or not 0 <= padding < positions - 1:
        raise config.refusal(f"pad_token_id {padding} is not supported")
    h = bert(config)
    return replace(h.updated(context_length=positions - padding - 1), sizes={
        **h.sizes, "context": positions - padding - 1, "positions": positions,
    })  # fmt: skip


def distilbert(config: Config) -> CheckpointFacts:
    """Read DistilBERT: its own names; a single token type without a table."""
    names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim",
             "num_hidden_layers": "n_layers", "hidden_act": "activation"}  # fmt: skip
    config.only("sinusoidal_pos_embds", False)  # stored like the others, but untested
    return bert(config.updated(layer_norm_eps=1e-12, **{name: config.get(key) for name, key in names.items()}))


def encoder(config: Config, context: int, epsilon: float) -> CheckpointFacts:
    """Read the values that all encoders share."""
    sizes = attention_sizes(config) | {"context": context, "types": config.count("type_vocab_size", 2)}
    sizes["labels"] = len(labels(config))
    metadata: dict[str, object] = {
        "block_count": sizes["layers"],
        "context_length": context,
        "embedding_length": sizes["width"],
        "feed_forward_length": sizes["hidden"],
        "attention.head_count": sizes["heads"],
        "attention.layer_norm_epsilon": epsilon,
        "attention.causal": False,
    }
    return CheckpointFacts(sizes, metadata, {}, tied=True)


def labels(config: Config) -> list[str]:
    """Return the labels of a head's scores, in order."""
    named = config.get("id2label")
    if isinstance(named, dict) and all(key.isdecimal() for key in named):
        return [str(named[key]) for key in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(config.count("num_labels", 2))]


def ranking(read: Callable[[Config], CheckpointFacts]) -> Callable[[Config], CheckpointFacts]:
    """Wrap the reader of an encoder for the same model with a head for scores."""

    def read_ranking(config: Config) -> CheckpointFacts:
        return read(config).updated(pooling_type=RANK, classifier__output_labels=labels(config))

    return read_ranking


def behind_padding(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Take the last rows of a table of positions, which are those of tokens."""
    first = sizes["positions"] - sizes["context"]
    return pick_rows(sources[0], shape, lambda rows: np.asarray(rows) + first)


def nomic_facts(config: Config) -> CheckpointFacts:
    """Read Nomic Embed: GPT-2's names, RoPE, SwiGLU, or experts in every other layer."""
    experts = config.get("moe_every_n_layers") or 0
    config.only("activation_function", "gelu" if experts else "swiglu")
    config.only("prenorm", False)
    config.only("rotary_emb_fraction", 1.0, 1)
    config.only("rotary_emb_interleaved", False)
    config.only("rotary_emb_scale_base")
    config.only("moe_every_n_layers", 0, 2)
    width, heads = config.count("n_embd"), config.count("n_head")
    trained = config.count("max_trained_positions", 2048)
    context = min(config.count("n_positions"), trained) if not experts else 512  # the context that both are trained for
    plain = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": config.count("n_inner")}
    plain |= {"num_hidden_layers": config.count("n_layer", maximum=MOST_LAYERS)}
    h = encoder(Config({**config.content, **plain}, config.path), context, config.number("layer_norm_epsilon", 1e-12))
    h = h.updated({"fused_rows": 3 * width}, rope__freq_base=config.number("rotary_emb_base", 10000.0))
    if not experts:
        return h
    count = config.count("num_experts")
    metadata = {"expert_count": count, "expert_used_count": config.count("moe_top_k"), "moe_every_n_layers": 2}
    return h.updated({"experts": count, "stacked": count * plain["intermediate_size"]}, **metadata)


def modern(config: Config) -> CheckpointFacts:
    """Read ModernBERT: RoPE, with a base of its own in layers with a window."""
    config.only("hidden_activation", "gelu", "silu")
    for name in ("attention_bias", "mlp_bias", "norm_bias"):
        config.only(name, False)
    h = encoder(config, config.count("max_position_embeddings", 8192), config.number("norm_eps", 1e-5))
    pooling = config.get("classifier_pooling", "cls")
    bases = (("full", "global", 160000.0), ("sliding", "local", 10000.0))
    base, local = (
        config.section("rope_parameters")
        .section(f"{kind}_attention")
        .number("rope_theta", config.number(f"{old}_rope_theta", usual))
        for kind, old, usual in bases
    )
    period = config.count("global_attn_every_n_layers", 3)
    config.windows([number % period != 0 for number in range(h.sizes["layers"])])
    return h.updated(
        {"fused_rows": 3 * h.sizes["width"], "both_hidden": 2 * h.sizes["hidden"]},
        attention__sliding_window=config.count("local_attention", 128),
        attention__sliding_window_pattern=period,
        rope__freq_base=base, rope__freq_base_swa=local, rope__scaling__type="none",
        hidden_activation=config.get("hidden_activation", "gelu"),
        attention__layer_norm_rms_epsilon=h.metadata["attention.layer_norm_epsilon"],  # unused; llama.cpp writes it
        vocab_size=h.sizes["vocab"],
        classifier__pooling_type=CLASSIFIERS.get(str(pooling)),
    )  # fmt: skip


BEHIND = {"attn_output_norm": ("width",), "layer_output_norm": ("width",)}
EMBEDDINGS = {"token_types": ("types", "width"), "token_embd_norm": ("width",)}
BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down", *BEHIND, "token_embd_norm")
HEAD = {
    "cls.weight": ("width", "width"), "cls.bias": ("width",),
    "cls.output.weight": ("labels", "width"), "cls.output.bias": ("labels",),
}  # fmt: skip
# Heads for masked words and for other tasks.
UNREAD = re.compile(r"(pooler|cls|lm_head|head|decoder)\..*|embeddings\.position_ids")
TABLES: Layer = {**EMBEDDINGS, "position_embd": ("context", "width")}
BERT = Family(
    "bert",
    {**ATTENTION, **FEED_FORWARD, **BEHIND},
    bert,
    whole=TABLES,
    biased=BIASED,
    decodes=False,
    prefixes=("bert.", "roberta.", "distilbert."),
    unread=UNREAD,
)
TABLE = DerivedTensor(("context", "width"), {"position_embd.weight": ("positions", "width")}, behind_padding)
TABLES_BEHIND: Layer = {**EMBEDDINGS, "position_embd": TABLE}
ROBERTA = replace(BERT, read=roberta, whole=TABLES_BEHIND)
DISTILBERT = replace(
    BERT, read=distilbert, whole={"token_embd_norm": ("width",), "position_embd": ("context", "width")},
    unread=re.compile(rf"{UNREAD.pattern}|vocab_.*|(pre_)?classifier\..*"),
)  # fmt: skip
BERT_RANK = replace(
    BERT, read=ranking(bert), whole={**TABLES, **HEAD}, unread=re.compile(r"embeddings\.position_ids"),
    renamed={"pooler.dense": "cls", "classifier": "cls.output"},
)  # fmt: skip
ROBERTA_RANK = replace(
    ROBERTA, read=ranking(roberta), whole={**TABLES_BEHIND, **HEAD}, unread=UNREAD,
    renamed={"classifier.dense": "cls", "classifier.out_proj": "cls.output"},
)  # fmt: skip
QKV = {"attn_qkv": ("fused_rows", "width"), "attn_output": ("width", "queries")}
NOMIC = Family(
    "nomic-bert", {**QKV, **GATED, **BEHIND}, nomic_facts, whole=EMBEDDINGS, biased=(*BEHIND, "token_embd_norm"),
    decodes=False, unread=UNREAD,
)  # fmt: skip


def modern_layer(sizes: Sizes, number: int) -> Layer:
    """List a layer's tensors; the first layer has no norm in front."""
    layer = {**QKV, "ffn_up": ("both_hidden", "width"), "ffn_down": ("width", "hidden"), "ffn_norm": ("width",)}
    return {**layer, "attn_norm": ("width",)} if number else layer


MODERN_NORMS: Layer = {"token_embd_norm": ("width",), "output_norm": ("width",)}
MODERN = Family(
    "modern-bert", modern_layer, modern, whole=MODERN_NORMS,
    decodes=False, prefixes=("model.",), unread=UNREAD,
)  # fmt: skip
MODERN_RANK = replace(
    MODERN, read=ranking(modern), unread=re.compile("decoder.*"),
    whole={**MODERN_NORMS, "cls.weight": HEAD["cls.weight"], "cls.norm.weight": ("width",),
           "cls.output.weight": HEAD["cls.output.weight"], "cls.output.bias": ("labels",)},
    renamed={"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"},
)  # fmt: skip
