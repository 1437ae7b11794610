"""Access a checkpoint's config.json, with the type and range of every value checked."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.arch.metadata import MAX_COUNT
from localllm.convert.files import read_json
from localllm.errors import ModelError
from localllm.files.gguf.header import printable

LARGEST = 1e38  # maximum of accepted values


def quote(value: object) -> str:
    """Format a value for an error message as JSON, "missing" for None."""
    return "missing" if value is None else printable(json.dumps(value, ensure_ascii=False))


class CheckpointConfig:
    """An object in config.json, whose methods check the values that they return.

    They raise ModelError with the path and the key of a value of a wrong type.
    """

    def __init__(
        self,
        content: Mapping[str, object],
        path: Path,
        warnings: list[str] | None = None,
        asked: set[str] | None = None,
        prefix: str = "",
    ):
        """Wrap a JSON object.

        warnings, asked: collect warnings for the user, and the keys that are read; shared with nested objects. prefix:
        the object's own position in the file, such as "text_config.".
        """
        self.content, self.path, self.prefix = content, path, prefix
        self.warnings = [] if warnings is None else warnings  # lines for the user
        self.asked = set[str]() if asked is None else asked

    @classmethod
    def open(cls, folder: Path) -> "CheckpointConfig":
        """Read config.json in a checkpoint's folder. Raises ModelError if there is none."""
        content = read_json(folder / "config.json")
        if content is None:
            raise ModelError(f"{folder}: the folder of a Hugging Face checkpoint must have a config.json")
        return cls(content, folder / "config.json")

    @property
    def architecture(self) -> str:
        """The model class, such as "LlamaForCausalLM": the first of `architectures`, or ""."""
        names = self.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else ""

    def merge_text_config(self, defaults: Mapping[str, object]) -> "CheckpointConfig":
        """Return a copy in which text_config (of vision models) overrides the outer values.

        defaults: values for keys that both omit. The outer tie_word_embeddings takes precedence.
        """
        content = {**defaults, **self.content, **self.get_section("text_config").content}
        if "tie_word_embeddings" in self.content:  # here the outer value counts
            content["tie_word_embeddings"] = self.content["tie_word_embeddings"]
        return self.replace_content(content)

    def update(self, **changes: object) -> "CheckpointConfig":
        """Return a copy with some values replaced or added."""
        return self.replace_content({**self.content, **changes})

    def replace_content(self, content: Mapping[str, object]) -> "CheckpointConfig":
        """Return a copy with other values that shares warnings and read keys."""
        return CheckpointConfig(content, self.path, self.warnings, self.asked, self.prefix)

    def get_section(self, name: str) -> "CheckpointConfig":
        """Return a nested object, empty if the key is missing. Raises ModelError for a value of another type."""
        content = self.get(name)
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise self.make_error(f"{name} must be an object")
        return CheckpointConfig(content, self.path, self.warnings, self.asked, f"{self.prefix}{name}.")

    def find_key(self, key: str) -> tuple["CheckpointConfig", str]:
        """Split a dotted key such as "attn_config.alibi" into the section that holds it and its last name."""
        *sections, name = key.split(".")
        config = self
        for section in sections:
            config = config.get_section(section)
        return config, name

    def make_error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def get(self, name: str, default: object = None) -> Any:
        """Return a value without checking its type; null counts as missing."""
        self.asked.add(self.prefix + name)
        value = self.content.get(name)
        return default if value is None else value

    def read_count(self, name: str, default: int | None = None, maximum: int = MAX_COUNT) -> int:
        """Return an integer from 1 to `maximum`, or the default. Raises ModelError."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not (1 <= value <= maximum or value == default):
            raise self.make_error(f"{name} must be an integer from 1 to {maximum} (found {quote(value)})")
        return value

    def read_number(self, name: str, default: float | None = None) -> float:
        """Return a positive value below 1e38, so that it fits in float32. Raises ModelError."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST:
            raise self.make_error(f"{name} must be a positive number (found {quote(value)})")
        return float(value)

    def read_numbers(self, name: str, count: int) -> list[float]:
        """Return a list of exactly `count` positive values. Raises ModelError."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self.make_error(f"{name} must be a list of {count} numbers")
        return [CheckpointConfig({name: value}, self.path).read_number(name) for value in values]

    def read_flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean. Raises ModelError for a value of another type."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.make_error(f"{name} must be true or false (found {quote(value)})")
        return value

    def require_value(self, name: str, *allowed: object) -> None:
        """Raise ModelError unless a value is missing, null or one of `allowed`, the ones GGUF can express."""
        value = self.get(name)
        if value is not None and value not in allowed:
            choices = " or ".join(quote(choice) for choice in allowed)
            raise self.make_error(f"{name} must be {choices} (found {quote(value)})")

    def require_windows(self, expected: Sequence[bool]) -> None:
        """Raise ModelError if layer_types contradicts `expected`.

        expected: for each layer, whether the architecture gives it a sliding window.
        """
        types = self.get("layer_types")
        if types is not None and types != ["sliding_attention" if window else "full_attention" for window in expected]:
            raise self.make_error("layer_types must have sliding_attention in the usual layers only")


MAX_NAMES = 8  # names in a warning
# Patterns of names, by topic.
TRAINING = """
    .*dropout.* .*pdrop .*init(ializer)?(_.*)? init_.* initializer_.* .*_loss(_.*)? .*loss_coef .*loss_weight
    rescale_prenorm_residual L_bp_cycles seed moe_norm_min gradient_checkpointing label_smoothing layerdrop time_step_.*
    use_router_bias_update sparse_prediction sparse_pred_ignore_index bias_update_rate pad_token reference_compile
    deterministic_flash_attn
"""
LOADING = """
    _.* architectures auto_map model_type .*dtype .*version torchscript use_cache return_dict use_bfloat16 .*_class
    .*attn_implementation.* attn_impl attn_type use_flash.* flash_.* fused_.* use_fused.* use_kernels?.* .*_backend
    model_parallel pretraining_tp tensor_parallel.* (num_)?logits_to_keep unsloth.* onnx.*
    transformers\\.js.* .*fp32.* use_associative_scan moe_shared_expert_overlap auto_map(\\..*)?
    chunk_size_feed_forward .*chunk_size pruned_heads tf_legacy_loss task_specific_params problem_type finetuning_task
    id2label(\\..*)? label2id(\\..*)? quantization_config(\\..*)? is_decoder is_encoder_decoder keys_to_ignore.*
    output_(attentions|hidden_states|router_logits|scores|past) cross_attention_hidden_size prefix cache_implementation
"""
GENERATING = """
    .*_token_ids? .*_token_index .*_tokens_index (im|image|video|eod|boi|eoi)_.*id max_length min_length max_new_tokens
    do_sample early_stopping num_beams num_beam_groups num_return_sequences diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    return_dict_in_generate suppress_tokens begin_suppress_tokens remove_invalid_values
    exponential_decay_length_penalty
"""
OTHER_MODALITIES = """
    .*(vision|image|video|audio|speech|projector|patch|spatial|visual).* vit_.* text_config(\\..*)? vq_config
    aligner_config mm_.* gen_.* downsample_factor scale_factor merged_hidden_size out_hidden_size mtp_.*
"""
# Implied by other keys, or the same in all checkpoints of an architecture.
IMPLIED = """
    qk_head_dim max_window_layers _sliding_window_pattern intermediate_size max_position_embeddings n_positions n_ctx
    seq_length num_key_value_heads num_attention_heads num_local_experts type_vocab_size vocab_size expand
    time_step_rank .*bias tie_word_embeddings is_gated_act num_kv_heads learned_pos_emb first_k_dense_replace
    norm_topk_prob attn_temperature_tuning .*\\.mrope_interleaved
    number_of_conv_states classifier_activation norm_type swiglu_alpha dense_act_fn block_multiple_of altup_coef_clip
    vocab_size_per_layer_input per_layer_config\\..* mlp_layer_types layer_types bos_token_id sliding_window_pattern
    linear_.* index_.* ngram_.* ple_.* .*_ngram.* heads_per_ngram ffn_config\\..*
    rope_(parameters|scaling)\\.(.*\\.)?(rope_type|type|finetuned) attn_config\\..* qk_layernorms
"""
IGNORED_KEYS = re.compile("|".join(f"(?:{name})" for name in
                                  f"{TRAINING} {LOADING} {GENERATING} {OTHER_MODALITIES} {IMPLIED}"
                                   .split()))  # fmt: skip
GENERATION_KEYS = re.compile(
    r".*_token_id|_.*|max_length|min_length|max_new_tokens|min_new_tokens|max_time|do_sample|use_cache|.*version"
    r"|cache_implementation|cache_config|return_.*|output_.*|num_return_sequences|assistant_.*|num_assistant.*"
    r"|early_stopping|chat_format|trust_remote_code|transformers.*|stop_strings|renormalize_logits|low_memory"
    r"|is_assistant|prompt_lookup.*|compile_config|disable_compile|max_matching_ngram_size|prefill_chunk_size|max_window_size"
)
TOKENIZER_KEYS = re.compile(
    r"add_(bos|eos|prefix)_(token|space)|.*_token|.*_tokens|.*_token_id|added_tokens_decoder|chat_template|_.*|.*_class"
    r"|model_max_length|max_length|clean_up_tokenization_spaces|padding_side|truncation_side|auto_map|.*version|legacy"
    r"|use_fast|from_slow|fast|sp_model_kwargs|split_special_tokens|errors|special_tokens_map_file|tokenizer_file"
    r"|name_or_path|use_default_system_prompt|do_lower_case|do_basic_tokenize|never_split|strip_accents|vocab_file"
    r"|tokenize_chinese_chars|spaces_between_special_tokens|model_input_names|additional_special_tokens|stride"
    r"|truncation_strategy|truncation|pad_to_multiple_of|pad_token_type_id|extra_ids|backend|is_local|processor_class"
    r"|image_.*|audio_.*|video_.*|vision_.*|model_specific_special_tokens|local_files_only|mask_token|unsloth.*|.*_regex"
    r"|merges_file|max_model_input_sizes|trim_offsets|encoding|lang.*|codebook.*|tool_parser_type|response_schema"
)


def warn_unused_config(config: CheckpointConfig) -> list[str]:
    """Return a warning that names the keys of config.json that no reader used, except harmless ones."""
    layers = config.content.get("layer_types")
    has_no_windows = isinstance(layers, list) and "sliding_attention" not in layers
    is_off = config.content.get("use_sliding_window") is False or has_no_windows
    names = [name for name in list_unread(config.content, config.asked) if not (is_off and name == "sliding_window")]
    return format_warning("config.json", [name for name in names if not IGNORED_KEYS.fullmatch(name)])


def list_unread(content: Mapping[str, object], read_keys: Collection[str], prefix: str = "") -> Iterable[str]:
    """Yield the dotted keys of values that no reader used and that may have an effect."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if not may_have_effect(value):
            continue
        if name not in read_keys:
            yield name
        elif isinstance(value, dict):
            yield from list_unread(value, read_keys, f"{name}.")


def may_have_effect(value: object) -> bool:
    """Return whether a value can change the model; null, false, 0, 1.0 and empty values cannot."""
    return bool(value) and not (isinstance(value, float) and value == 1)


def warn_unused(
    file: str, content: Mapping[str, object], read_keys: Collection[str], meaningless: re.Pattern[str]
) -> list[str]:
    """Return a warning that names the unread keys of another JSON file.

    meaningless: matches keys that need no warning.
    """
    names = [name for name, value in content.items() if may_have_effect(value) and name not in read_keys]
    return format_warning(file, [name for name in names if not meaningless.fullmatch(name)])


def format_warning(file: str, names: list[str]) -> list[str]:
    """Return a list with one warning about unknown keys, or an empty list without any."""
    more_names = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    listed = ", ".join(printable(name, 60) for name in names[:MAX_NAMES])
    return [f"{file}: ignored (unknown): {listed}{more_names}"] if names else []
