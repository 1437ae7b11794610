"""Read checkpoints of BERT and its relatives, also as rerankers.

The relatives: RoBERTa, DistilBERT, EuroBERT, Jina Embeddings 2, ModernBERT and Nomic Embed.
"""

from collections.abc import Sequence

import numpy as np

from localllm.arch.metadata import MAX_LAYERS
from localllm.convert.config import CheckpointConfig
from localllm.convert.hyperparameters import CheckpointHyperparameters, Reader, name_layer_sizes, read_attention_sizes
from localllm.convert.transforms import Shape, Sizes, TensorSource, pick_rows

RANK = 4  # llama.cpp's pooling type for scores
CLASSIFIERS = {"mean": 1, "cls": 2}  # poolings before the classification head


def read_bert(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read BERT: a position table, layer norms, exact GELU."""
    config.require_value("hidden_act", "gelu")
    config.require_value("position_embedding_type", "absolute")
    config.require_value("is_decoder", False)
    return read_encoder(
        config, config.read_count("max_position_embeddings", 512), config.read_number("layer_norm_eps", 1e-12)
    )


def read_roberta(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read RoBERTa: like BERT, but the first rows of its position table are for padding and are dropped."""
    positions, padding = config.read_count("max_position_embeddings", 514), config.get("pad_token_id", 1)
    if not isinstance(padding, int) or not 0 <= padding < positions - 1:
        raise config.make_error(f"pad_token_id must be an integer from 0 to {positions - 2} (found {padding})")
    h = read_bert(config, declared)
    context = positions - padding - 1
    return h.update({"context": context, "positions": positions}, context_length=context)


def read_distilbert(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read DistilBERT: like BERT with other key names and a single token type without a table."""
    names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim",
             "num_hidden_layers": "n_layers", "hidden_act": "activation"}  # fmt: skip
    config.require_value("sinusoidal_pos_embds", False)  # stored like the others, but untested
    renamed = {name: config.get(key) for name, key in names.items()}
    return read_bert(config.update(layer_norm_eps=1e-12, **renamed), declared)


def read_encoder(config: CheckpointConfig, context: int, epsilon: float) -> CheckpointHyperparameters:
    """Read the hyperparameters that all encoders share.

    context: rows of the position table. epsilon: of the layer norms.
    """
    sizes = read_attention_sizes(config) | {"context": context, "types": config.read_count("type_vocab_size", 2)}
    sizes["labels"] = len(read_labels(config))
    metadata: dict[str, object] = {
        "block_count": sizes["layers"],
        "context_length": context,
        "embedding_length": sizes["width"],
        "feed_forward_length": sizes["hidden"],
        "attention.head_count": sizes["heads"],
        "attention.layer_norm_epsilon": epsilon,
        "attention.causal": False,
    }
    return CheckpointHyperparameters(sizes, metadata, {}, tied=True)


def read_labels(config: CheckpointConfig) -> list[str]:
    """Return the labels of the classification head's outputs, in order: id2label, or LABEL_0, LABEL_1, ..."""
    named = config.get("id2label")
    if isinstance(named, dict) and all(key.isdecimal() for key in named):
        return [str(named[key]) for key in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(config.read_count("num_labels", 2))]


def skip_padding_rows(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Drop the leading rows of a position table, which are for padding."""
    first = sizes["positions"] - sizes["context"]
    return pick_rows(sources[0], shape, lambda rows: np.asarray(rows) + first)


def read_rank(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read BERT with a classification head."""
    return add_labels(config, read_bert(config, declared))


def read_roberta_rank(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read RoBERTa with a classification head."""
    return add_labels(config, read_roberta(config, declared))


def add_labels(config: CheckpointConfig, h: CheckpointHyperparameters) -> CheckpointHyperparameters:
    return h.update(pooling_type=RANK, classifier__output_labels=read_labels(config))


def read_eurobert(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read EuroBERT: Llama with bidirectional attention. Its RoPE scaling is dropped, as by llama.cpp."""
    return declared(config).update(classifier__pooling_type=CLASSIFIERS.get(config.get("classifier_pooling")))


CODE_NAME = "qk-post-norm"  # in the name of the code that jina-embeddings-v2-base-code uses


def read_jina_bert(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Jina Embeddings 2: ALiBi and gated GELU, whose gate and up projections are one matrix."""
    config.require_value("hidden_act", "gelu")
    config.require_value("position_embedding_type", "alibi")
    config.require_value("feed_forward_type", "geglu")
    h = read_encoder(
        config, config.read_count("max_position_embeddings", 8192), config.read_number("layer_norm_eps", 1e-12)
    )
    return h.update(
        {"both_hidden": 2 * h.sizes["hidden"], "norms_heads": int(CODE_NAME in str(config.get("auto_map")))}
    )


def read_modern_bert(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read ModernBERT, whose RoPE has another base in layers with a sliding window."""
    config.require_value("hidden_activation", "gelu", "silu")
    for name in ("attention_bias", "mlp_bias", "norm_bias"):
        config.require_value(name, False)
    h = read_encoder(config, config.read_count("max_position_embeddings", 8192), config.read_number("norm_eps", 1e-5))
    pooling = config.get("classifier_pooling", "cls")
    bases = (("full", "global", 160000.0), ("sliding", "local", 10000.0))
    base, local = (
        config.get_section("rope_parameters")
        .get_section(f"{kind}_attention")
        .read_number("rope_theta", config.read_number(f"{old}_rope_theta", usual))
        for kind, old, usual in bases
    )
    period = config.read_count("global_attn_every_n_layers", 3)
    config.require_windows([number % period != 0 for number in range(h.sizes["layers"])])
    return h.update(
        {
            "fused_rows": 3 * h.sizes["width"],
            "both_hidden": 2 * h.sizes["hidden"],
            **name_layer_sizes("normed", [number > 0 for number in range(h.sizes["layers"])]),
        },
        attention__sliding_window=config.read_count("local_attention", 128),
        attention__sliding_window_pattern=period,
        rope__freq_base=base, rope__freq_base_swa=local, rope__scaling__type="none",
        hidden_activation=config.get("hidden_activation", "gelu"),
        attention__layer_norm_rms_epsilon=h.metadata["attention.layer_norm_epsilon"],  # unused; llama.cpp writes it
        vocab_size=h.sizes["vocab"],
        classifier__pooling_type=CLASSIFIERS.get(str(pooling)),
    )  # fmt: skip


def read_modern_bert_rank(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read ModernBERT with a classification head."""
    return add_labels(config, read_modern_bert(config, declared))


def read_nomic_bert_original(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Nomic Embed with its publisher's keys: RoPE, SwiGLU, or experts in some of the layers."""
    experts = config.get("moe_every_n_layers") or 0
    config.require_value("activation_function", "gelu" if experts else "swiglu")
    config.require_value("prenorm", False)
    config.require_value("rotary_emb_fraction", 1.0, 1)
    config.require_value("rotary_emb_interleaved", False)
    config.require_value("rotary_emb_scale_base")
    config.require_value("moe_every_n_layers", 0, 2)
    width, heads = config.read_count("n_embd"), config.read_count("n_head")
    trained = config.read_count("max_trained_positions", 2048)
    context = (
        min(config.read_count("n_positions"), trained) if not experts else 512
    )  # the context that both are trained for
    plain = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": config.read_count("n_inner")}
    plain |= {"num_hidden_layers": config.read_count("n_layer", maximum=MAX_LAYERS)}
    h = read_encoder(
        CheckpointConfig({**config.content, **plain}, config.path),
        context,
        config.read_number("layer_norm_epsilon", 1e-12),
    )
    h = h.update({"fused_rows": 3 * width}, rope__freq_base=config.read_number("rotary_emb_base", 10000.0))
    if not experts:
        return h
    count, mixes = config.read_count("num_experts"), [number % 2 for number in range(h.sizes["layers"])]
    return h.update(
        {"experts": count, "stacked": count * plain["intermediate_size"], **name_layer_sizes("mixes", mixes)},
        expert_count=count,
        expert_used_count=config.read_count("moe_top_k"),
        moe_every_n_layers=2,
    )


def read_nomic_bert(config: CheckpointConfig, declared: Reader) -> CheckpointHyperparameters:
    """Read Nomic Embed, with its publisher's keys or with those of transformers, which has no experts."""
    if config.get("n_embd") is not None:
        return read_nomic_bert_original(config, declared)
    config.require_value("hidden_act", "silu")
    rope = config.get_section("rope_parameters")
    rope.require_value("rope_type", "default")
    rope.require_value("partial_rotary_factor", 1.0, 1)
    h = read_encoder(
        config, config.read_count("max_position_embeddings", 2048), config.read_number("layer_norm_eps", 1e-12)
    )
    base = rope.read_number("rope_theta", config.read_number("rope_theta", 1000.0))
    return h.update({"fused_rows": 3 * h.sizes["width"]}, rope__freq_base=base)


def select_nomic_bert(config: CheckpointConfig) -> str:
    """Return the name of the record for Nomic Embed with experts, or without."""
    return "NomicBertModel+experts" if config.get("moe_every_n_layers") else "NomicBertModel"
