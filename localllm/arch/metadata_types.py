"""The types of GGUF's hyperparameters: integers, numbers, texts or flags, also ignored ones.

Families check what they read, and more strictly. Source: the GGUF specification,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm, and the keys that llama.cpp writes beyond it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from localllm.arch.metadata import Fields
from localllm.files.gguf.metadata_reader import is_whole, show

MOST = (1 << 31) - 1  # some files have it for "no limit"
SCALE = 1e-6, 1e6  # what a factor may be: those of real models are far within
STRETCH = 1e-3, 1e6
BASE = 1.0, 1e12  # of rotations; the largest known one is 3.6e9
LOOKING_AHEAD = (
    "dream",
    "llada",
    "llada-moe",
    "rnd1",
    "bert",
    "eurobert",
    "llama-embed",
    "neo-bert",
    "t5encoder",
    "gemma-embedding",
    "jina-bert-v2",
    "jina-bert-v3",
    "modern-bert",
    "nomic-bert",
    "nomic-bert-moe",
)
ROPE_TYPES = "none", "linear", "yarn", "longrope"
COUNTS = """
    vocab_size context_length embedding_length block_count feed_forward_length expert_count expert_used_count
    expert_shared_count expert_feed_forward_length expert_shared_feed_forward_length expert_group_count
    expert_group_used_count expert_gating_func leading_dense_block_count interleave_moe_layer_step moe_every_n_layers
    nextn_predict_layers moe_latent_size experts_per_group expert_chunk_feed_forward_length
    attention.key_length_mla_swa attention.value_length_mla_swa attention.kv_lora_rank_swa hyper_connection.count
    kda.head_dim attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k
    attention.indexer.kpool attention.indexer.block_size attention.indexer.local_blocks
    hyper_connection.sinkhorn_iterations hyper_connection.low_rank
    ple.ngram_size ple.heads_per_ngram ple.conv_kernel ple.eos_token_id ple.image_token_id
    hrm.layers_per_stack hrm.h_cycles hrm.l_cycles full_attention_interval embedding_length_out
    embedding_length_per_layer_input decoder_start_token_id decoder_block_count pooling_type n_deepstack_layers
    attention.head_count attention.head_count_kv attention.key_length attention.value_length attention.key_length_mla
    attention.value_length_mla attention.key_length_swa attention.value_length_swa attention.q_lora_rank
    attention.kv_lora_rank attention.sliding_window attention.shared_kv_layers attention.temperature_length
    attention.group_norm_groups attention.relative_buckets_count
    rope.dimension_count rope.dimension_count_swa rope.scaling.original_context_length
    ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count shortconv.l_cache
"""
PER_LAYER = "attention.head_count", "attention.head_count_kv", "feed_forward_length"  # one number, or as many as layers
EPSILONS = """
    attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.group_norm_epsilon hyper_connection.epsilon
"""
BASES = "rope.freq_base rope.freq_base_swa"
STRETCHES = "rope.scaling.factor rope.scaling.attn_factor rope.scale_linear"
SCALES = """
    attention.scale attention.output_scale attention.value_scale attention.clamp_kqv attention.max_alibi_bias
    attention.temperature_scale attn_logit_softcapping final_logit_softcapping router_logit_softcapping
    logit_scale embedding_scale residual_scale expert_weights_scale expert_group_scale
    hyper_connection.magnitude
    rope.scaling.yarn_log_multiplier rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow
"""
FLAGS = """
    use_parallel_residual rope.scaling.finetuned attention.causal ssm.dt_b_c_rms expert_weights_norm swin_norm
    hrm.prefix_lm attention.indexer.kpool_select_tail
"""
UNBOUNDED = "activation_sparsity_scale"  # which is minus infinity where nothing is cut
BY_LAYER = "attention.sliding_window_pattern attention.recurrent_layers"


def require_kinds(fields: Fields) -> None:
    """Raise ModelError for a hyperparameter of the wrong kind, and for any number that is not finite."""
    layers = fields.layers()
    for key in fields.metadata:
        if key.startswith(fields.prefix):
            name = key.removeprefix(fields.prefix)
            if name != UNBOUNDED:
                require_finite(fields, name)
            if rule := RULES.get(name):
                rule(fields, name, layers)


def require_finite(fields: Fields, name: str) -> None:
    """Check that a number, or all of an array, is finite."""
    value = fields.raw(name)
    if isinstance(value, float | np.ndarray) and not np.isfinite(value).all():
        raise fields.error(f"{fields.key(name)} should be finite, is {show(value)}")


def require_count(fields: Fields, name: str, layers: int) -> None:
    """Check one integer; of some hyperparameters, one for each layer."""
    value = fields.raw(name)
    values = value.tolist() if isinstance(value, np.ndarray) and name in PER_LAYER else [value]
    if not all(is_whole(item) and 0 <= item <= MOST for item in values):
        raise fields.wrong(name, f"a number from 0 to {MOST}")
    if isinstance(value, np.ndarray) and len(values) != layers:
        raise fields.error(f"{fields.key(name)} has {len(values)} values for {layers} layers")


def require_epsilon(fields: Fields, name: str, layers: int) -> None:
    fields.epsilon(name)


def require_flag(fields: Fields, name: str, layers: int) -> None:
    if not fields.flag(name) and name == "attention.causal" and fields.arch not in LOOKING_AHEAD:
        raise fields.unsupported(f"{fields.arch} models that look ahead are not supported: attention.causal is false")


def require_text(fields: Fields, name: str, layers: int) -> None:
    fields.text(name)


def require_rope_type(fields: Fields, name: str, layers: int) -> None:
    if fields.text(name) not in ROPE_TYPES:
        raise fields.error(f"rope scaling {show(fields.raw(name))} is not supported")


def require_sections(fields: Fields, name: str, layers: int) -> None:
    """Check how many pairs of a head turn by which of up to four positions."""
    sections = fields.array(name, "iu", "an array of whole numbers")
    if len(sections) > 4 or not all(0 <= count <= MOST for count in sections.tolist()):
        raise fields.wrong(name, "up to four whole numbers")


def require_by_layer(fields: Fields, name: str, layers: int) -> None:
    """Check a flag for each layer, or a period."""
    value = fields.raw(name)
    if not isinstance(value, np.ndarray):
        return require_count(fields, name, layers)
    if value.dtype.kind not in "biu" or not ((value == 0) | (value == 1)).all() or len(value) != layers:
        raise fields.wrong(name, f"yes or no for each of {layers} layers")
    return None


def between(least: float, most: float, or_zero: bool = False) -> "Rule":
    """Return the rule for a number in a range."""

    def require(fields: Fields, name: str, layers: int) -> None:
        value = fields.number(name) if or_zero else fields.factor(name)
        if value and not least <= value <= most:
            raise fields.wrong(name, f"from {least:g} to {most:g}")

    return require


Rule = Callable[[Fields, str, int], Any]
RULES: dict[str, Rule] = {
    name: rule
    for names, rule in (
        (COUNTS, require_count),
        (EPSILONS, require_epsilon),
        (BASES, between(*BASE)),
        (STRETCHES, between(*STRETCH)),
        (SCALES, between(*SCALE, or_zero=True)),
        (FLAGS, require_flag),
        (BY_LAYER, require_by_layer),
        ("tensor_data_layout", require_text),
        ("rope.scaling.type", require_rope_type),
        ("rope.dimension_sections", require_sections),
    )
    for name in names.split()
}
