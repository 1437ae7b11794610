"""ModernBERT."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.families.bert import CLASSIFIERS, encoder, with_labels
from localllm.convert.hyperparameters import CheckpointFacts


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
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
        {
            "fused_rows": 3 * h.sizes["width"],
            "both_hidden": 2 * h.sizes["hidden"],
            **{f"normed_{number}": int(number > 0) for number in range(h.sizes["layers"])},
        },
        attention__sliding_window=config.count("local_attention", 128),
        attention__sliding_window_pattern=period,
        rope__freq_base=base, rope__freq_base_swa=local, rope__scaling__type="none",
        hidden_activation=config.get("hidden_activation", "gelu"),
        attention__layer_norm_rms_epsilon=h.metadata["attention.layer_norm_epsilon"],  # unused; llama.cpp writes it
        vocab_size=h.sizes["vocab"],
        classifier__pooling_type=CLASSIFIERS.get(str(pooling)),
    )  # fmt: skip


def rank(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read ModernBERT with a head for scores."""
    return with_labels(config, read(config, declared))
