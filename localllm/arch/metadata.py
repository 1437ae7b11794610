"""Validated access to a file's metadata: the keys that begin with the architecture's name.

The types and ranges of all keys that GGUF defines are validated, also of those that no family reads; families then
validate the values they read more strictly. This includes the general.* keys, which all architectures have.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#llm and #general-metadata, and
the keys that llama.cpp writes beyond it.

Hyperparameters must agree with the tensors' shapes: if lengths disagree, the file is damaged. A setting that the family
does not read (Fields.asked has the names that it reads) is refused unless its value is neutral. Other keys are ignored
only where they have no effect, or where llama.cpp ignores them in files that are in use.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.files.gguf.header import printable
from localllm.files.gguf.metadata import Irregularities
from localllm.files.gguf.metadata_reader import MetadataReader, count_strings, format_value, is_integer, is_text

__all__ = ["HyperparameterReader", "format_value"]

MAX_COUNT, MAX_LAYERS = 1 << 24, 4096  # above the dimensions and the layers of any real model
LEAST_EPSILON, MOST_EPSILON = 1e-20, 0.1  # of a norm, far beyond those of real models


class HyperparameterReader(MetadataReader):
    """The hyperparameters of a file, by GGUF's names without the prefix of the architecture.

    Every method raises ModelError, with the key, for a value of a wrong type or out of range.

    Attributes:
        asked: the names that were read.
    """

    def __init__(
        self, metadata: Mapping[str, object], path: str, vocab_size: int, oddities: Irregularities | None = None
    ):
        """Wrap the metadata of the file at `path`.

        vocab_size: number of rows of the embedding matrix.  oddities: collects irregularities that are tolerated.
        """
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelError(f"{path}: general.architecture must be a string; is this a language model?")
        super().__init__(metadata, f"{arch}.", path, oddities)
        self.arch, self.vocab_size = arch, vocab_size
        self.asked = set[str]()

    @classmethod
    def from_file(cls, file: GGUFFile) -> "HyperparameterReader":
        """Wrap a file's metadata. Raises ModelError if vocabulary and embedding matrix differ in size."""
        embedding = file.tensors.get("token_embd.weight")
        count = count_strings(file.metadata, "tokenizer.ggml.tokens")
        size = embedding.shape[0] if embedding is not None else count or 0
        fields = cls(file.metadata, file.path, size, file.oddities)
        if count is not None and count != size:
            raise fields.make_error(f"the vocabulary has {count} tokens, but token_embd.weight has {size} rows")
        if (vocab_size := fields.read_count("vocab_size", size)) != size:
            if count is None:
                raise fields.make_error(
                    f"{fields.format_key('vocab_size')} is {vocab_size}, but the vocabulary has {size} tokens"
                )
            key = fields.format_key("vocab_size")
            fields.oddities.note(f"{key} is {vocab_size}, but there are {size} tokens and rows", key)
        return fields

    def read_raw(self, name: str, default: object = None) -> object:
        self.asked.add(name)
        return super().read_raw(name, default)

    def read_count(self, name: str, default: int | None = None) -> int:
        """Read an integer from 1 to MAX_COUNT; 0 is accepted if it is the default."""
        value = self.read_raw(name, default)
        if isinstance(value, np.ndarray) and self._is_uniform(value):
            value = value.flat[0].item()
        return self._check_count(name, value, 0 if default == 0 else 1)

    def _is_uniform(self, value: np.ndarray) -> bool:
        """Return whether a field has one value per layer, all of them equal."""
        layers = self.read_raw("block_count")
        return is_integer(layers) and value.shape == (layers,) and layers > 0 and bool((value == value[0]).all())

    def read_counts(self, name: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """Read one integer per layer; a single integer applies to all layers."""
        value = self.read_raw(name, default)
        if not isinstance(value, np.ndarray):
            return (self.read_count(name, default),) * layers
        if value.shape != (layers,):
            raise self.make_error(f"{self.format_key(name)} has {value.size} values for {layers} layers")
        return tuple(self._check_count(name, item.item(), 0 if default == 0 else 1) for item in value)

    def _check_count(self, name: str, value: object, least: int) -> int:
        if not is_integer(value) or not least <= value <= MAX_COUNT:
            raise self.make_value_error(name, f"a number from {least} to {MAX_COUNT}")
        return value

    def read_factor(self, name: str, default: float | None = None) -> float:
        """Read a number; 0 is an error."""
        value = self.read_number(name, default)
        if value == 0:
            raise self.make_error(f"{self.format_key(name)} must not be 0")
        return value

    def read_epsilon(self, name: str) -> float:
        """Read the epsilon of norms."""
        value = self.read_factor(name)
        if not LEAST_EPSILON <= value <= MOST_EPSILON:
            raise self.make_value_error(name, f"from {LEAST_EPSILON:g} to {MOST_EPSILON:g}")
        return value

    def read_layer_count(self) -> int:
        """Read block_count, the number of layers."""
        layers = self.read_count("block_count")
        if layers > MAX_LAYERS:
            raise self.make_value_error("block_count", f"a number from 1 to {MAX_LAYERS}")
        return layers

    def read_common_fields(self) -> dict[str, Any]:
        """Read the arguments of localllm.arch.hyperparameters.Hyperparameters."""
        mtp_layers = self.read_count("nextn_predict_layers", 0)
        if mtp_layers >= self.read_layer_count():
            raise self.make_error(
                f"{self.format_key('nextn_predict_layers')} must be below {self.format_key('block_count')}"
            )
        return {
            "arch": self.arch,
            "layers": self.read_layer_count() - mtp_layers,
            "mtp_layers": mtp_layers,
            "width": self.read_count("embedding_length"),
            "vocab_size": self.vocab_size,
            "context": self.read_count("context_length"),
        }


NO_LIMIT = (1 << 31) - 1  # some files write it for "no limit"
# Ranges of factors, far wider than in real models.
SCALE = 1e-6, 1e6
STRETCH = 1e-3, 1e6
BASE = 1.0, 1e12  # RoPE's; the largest known one is 3.6e9
# Architectures whose attention.causal may be false.
BIDIRECTIONAL = """
    dream llada llada-moe rnd1 bert eurobert llama-embed neo-bert t5encoder gemma-embedding jina-bert-v2
    jina-bert-v3 modern-bert nomic-bert nomic-bert-moe
"""
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
PER_LAYER = "attention.head_count", "attention.head_count_kv", "feed_forward_length"  # one value, or one per layer
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
UNBOUNDED = "activation_sparsity_scale"  # minus infinity in layers without sparsity
BY_LAYER = "attention.sliding_window_pattern attention.recurrent_layers"


def require_types(fields: HyperparameterReader) -> None:
    """Raise ModelError for a hyperparameter of a wrong type, and for any number that is not finite."""
    layers = fields.read_layer_count()
    for key in fields.metadata:
        if key.startswith(fields.prefix):
            name = key.removeprefix(fields.prefix)
            if name != UNBOUNDED:
                require_finite(fields, name)
            if rule := RULES.get(name):
                rule(fields, name, layers)


def require_finite(fields: HyperparameterReader, name: str) -> None:
    """Raise ModelError unless a number, or every element of an array, is finite."""
    value = fields.read_raw(name)
    if isinstance(value, float | np.ndarray) and not np.isfinite(value).all():
        raise fields.make_error(f"{fields.format_key(name)} must be finite (found {format_value(value)})")


def require_count(fields: HyperparameterReader, name: str, layers: int) -> None:
    """Validate an integer, or for the names in PER_LAYER an array with one per layer."""
    value = fields.read_raw(name)
    values = value.tolist() if isinstance(value, np.ndarray) and name in PER_LAYER else [value]
    if not all(is_integer(item) and 0 <= item <= NO_LIMIT for item in values):
        raise fields.make_value_error(name, f"a number from 0 to {NO_LIMIT}")
    if isinstance(value, np.ndarray) and len(values) != layers:
        raise fields.make_error(f"{fields.format_key(name)} has {len(values)} values for {layers} layers")


def require_epsilon(fields: HyperparameterReader, name: str, layers: int) -> None:
    fields.read_epsilon(name)


def require_flag(fields: HyperparameterReader, name: str, layers: int) -> None:
    if not fields.read_flag(name) and name == "attention.causal" and fields.arch not in BIDIRECTIONAL.split():
        message = "must be true: bidirectional attention is not supported in"
        raise fields.make_unsupported_error(f"{fields.format_key(name)} {message} {fields.arch} models")


def require_text(fields: HyperparameterReader, name: str, layers: int) -> None:
    fields.read_text(name)


def require_rope_type(fields: HyperparameterReader, name: str, layers: int) -> None:
    if fields.read_text(name) not in ROPE_TYPES:
        raise fields.make_error(f"rope scaling {format_value(fields.read_raw(name))} is not supported")


def require_sections(fields: HyperparameterReader, name: str, layers: int) -> None:
    """Validate the counts of RoPE pairs for up to four positions (M-RoPE)."""
    sections = fields.read_array(name, "iu", "an array of whole numbers")
    if len(sections) > 4 or not all(0 <= count <= NO_LIMIT for count in sections.tolist()):
        raise fields.make_value_error(name, "up to four whole numbers")


def require_layer_flags(fields: HyperparameterReader, name: str, layers: int) -> None:
    """Validate a flag per layer, or the period at which layers repeat. Raises ModelError."""
    value = fields.read_raw(name)
    if not isinstance(value, np.ndarray):
        return require_count(fields, name, layers)
    if value.dtype.kind not in "biu" or not ((value == 0) | (value == 1)).all() or len(value) != layers:
        raise fields.make_value_error(name, f"yes or no for each of {layers} layers")
    return None


def make_range_rule(minimum: float, maximum: float, or_zero: bool = False) -> "Rule":
    """Return a rule that accepts numbers in a range."""

    def require(fields: HyperparameterReader, name: str, layers: int) -> None:
        value = fields.read_number(name) if or_zero else fields.read_factor(name)
        if value and not minimum <= value <= maximum:
            raise fields.make_value_error(name, f"from {minimum:g} to {maximum:g}")

    return require


Rule = Callable[[HyperparameterReader, str, int], None]
RULES: dict[str, Rule] = {
    name: rule
    for names, rule in (
        (COUNTS, require_count),
        (EPSILONS, require_epsilon),
        (BASES, make_range_rule(*BASE)),
        (STRETCHES, make_range_rule(*STRETCH)),
        (SCALES, make_range_rule(*SCALE, or_zero=True)),
        (FLAGS, require_flag),
        (BY_LAYER, require_layer_flags),
        ("tensor_data_layout", require_text),
        ("rope.scaling.type", require_rope_type),
        ("rope.dimension_sections", require_sections),
    )
    for name in names.split()
}


ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
TEXTS = ("author", "basename", "description", "doi", "finetune", "license", "license.link", "license.name", "name",
         "organization", "quantized_by", "repo_url", "size_label", "type", "url", "uuid", "version")  # fmt: skip
LISTS = ("datasets", "languages", "tags")
GENERAL_COUNTS = ("file_type", "parameter_count", "quantization_version")
MODELS = ("model", "vocab")  # values of general.type in language models


def require_general(file: GGUFFile, kinds: tuple[str, ...] = MODELS) -> str:
    """Return the architecture's name, and note general metadata of a wrong type.

    kinds: allowed values of general.type. Raises ModelError for another one.
    """
    general = MetadataReader(file.metadata, "general.", file.path, file.oddities)
    for field in filter(general.has, (*TEXTS, *LISTS)):
        key = f"general.{field}"
        if not is_text(file.metadata, key) and (field in TEXTS or count_strings(file.metadata, key) is None):
            general.oddities.note(f"{key} is not a {'string' if field in TEXTS else 'list of strings'}")
    for field in filter(general.has, GENERAL_COUNTS):
        value = general.read_raw(field)
        if not is_integer(value) or not 0 <= value < 1 << 63:
            general.oddities.note(f"general.{field} is not a non-negative integer")
    kind = general.read_text("type", "model")
    if kind == "adapter" and kind not in kinds:
        raise ModelError(f"{file.path}: this is an adapter, not a model: use its model with --lora FILE")
    if kind not in kinds:
        raise general.make_error(f"general.type must be {' or '.join(kinds)} (found {format_value(kind)})")
    name = general.read_raw("architecture")
    if not isinstance(name, str):
        raise ModelError(f"{file.path}: general.architecture must be a string; is this a language model?")
    if not ARCHITECTURE.fullmatch(name):
        raise ModelError(f"{file.path}: general.architecture must be an architecture's name (found {printable(name)})")
    return name


EXPERT_TENSORS = "ffn_gate_inp.weight", "ffn_down_exps.weight"
# Hyperparameters, one value or one per layer: a layer's tensor, and its axis that must have that length.
LENGTHS = {
    "expert_feed_forward_length": ("ffn_down_exps.weight", -1),
    "expert_shared_feed_forward_length": ("ffn_down_shexp.weight", -1),
    "expert_chunk_feed_forward_length": ("ffn_down_chexps.weight", -1),
    "expert_count": ("ffn_gate_inp.weight", 0),
    "attention.q_lora_rank": ("attn_q_a.weight", 0),
    "attention.value_length_mla": ("attn_v_b.weight", 1),
}
# Hyperparameters: the tensor that at least one layer must have if the value is above 0.
TENSORS = {
    "expert_shared_count": "ffn_down_shexp.weight",
    "expert_shared_feed_forward_length": "ffn_down_shexp.weight",
    "attention.q_lora_rank": "attn_q_a.weight",
}
# Exceptions, by architecture:
EXPERT_LENGTH = "arctic"  # feed_forward_length is that of the experts, not of the dense network beside them
LENGTH_OF_BOTH = "qwen"  # feed_forward_length counts the gate's and the up matrix's rows together
ONE_EXPERT = "hunyuan-dense", "hunyuan_vl"  # files of dense models say that they have one expert
NO_EXPERTS = "granitehybrid", "graniteswitch", "deepseek2"  # files of dense models may have other keys of experts
LENGTH_SUFFIXES = "mla", "swa"  # suffixes of lengths of keys and values, in models that have several
# Hyperparameters that must not exceed the number of layers.
AT_MOST_ALL_LAYERS = "leading_dense_block_count", "interleave_moe_layer_step", "nextn_predict_layers"
# Hyperparameters that must be missing or 0 in a file without experts.
ABOUT_EXPERTS = ("expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count",
                 "expert_feed_forward_length", "expert_shared_feed_forward_length")  # fmt: skip


def require_agreement(fields: HyperparameterReader, tensors: Mapping[str, Tensor]) -> None:
    """Check that hyperparameters match the shapes of the tensors. Raises ModelError."""
    if not tensors:  # a vocabulary only
        return
    require_width(fields, tensors)
    require_heads(fields, tensors)
    require_feed_forward_length(fields, tensors)
    require_present(fields, tensors)
    require_experts_or_none(fields, tensors)
    for key, (name, axis) in LENGTHS.items():
        if not fields.has(f"{key}_swa") and (fields.read_raw(key) is not None or key == "expert_count"):
            require_lengths(fields, tensors, key, fields.read_counts(key, fields.read_layer_count(), 0), name, axis)
    if (
        fields.read_raw("expert_shared_count") is not None
        and fields.read_raw("expert_shared_feed_forward_length") is None
    ):
        length = fields.read_count("expert_shared_count", 0) * fields.read_count("expert_feed_forward_length", 0)
        require_lengths(
            fields, tensors, "expert_shared_count", (length,) * fields.read_layer_count(), "ffn_down_shexp.weight", -1
        )
    require_expert_layers(fields, tensors)


def require_width(fields: HyperparameterReader, tensors: Mapping[str, Tensor]) -> None:
    """Check embedding_length against the embedding matrix."""
    embedding, width = tensors.get("token_embd.weight"), fields.read_count("embedding_length")
    if embedding is not None and embedding.shape[-1] != width:
        problem = f"does not match the shape {list(embedding.shape)} of {embedding.name}"
        raise fields.make_error(f"{fields.format_key('embedding_length')} {width} {problem}")


def require_heads(fields: HyperparameterReader, tensors: Mapping[str, Tensor]) -> None:
    """Check the lengths of keys and values against their matrices, if all layers' heads are alike."""
    value = fields.read_raw("attention.head_count_kv", fields.read_raw("attention.head_count"))
    heads = value if is_integer(value) else 0
    for key, name in (("attention.key_length", "attn_k.weight"), ("attention.value_length", "attn_v.weight")):
        if not fields.has(key) or any(fields.has(f"{key}_{end}") for end in LENGTH_SUFFIXES):
            continue
        length = fields.read_count(key)
        for layer in range(fields.read_layer_count()) if heads else ():
            tensor = tensors.get(f"blk.{layer}.{name}")
            if tensor and len(tensor.shape) == 2 and tensor.shape[0] != heads * length:
                problem = f"does not match the shape {list(tensor.shape)} of {tensor.name}"
                raise fields.make_error(f"{fields.format_key(key)} {length} {problem}")


def require_present(fields: HyperparameterReader, tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors named in TENSORS exist, and that no count of layers exceeds their number."""
    layers = fields.read_layer_count()
    for key, name in TENSORS.items():
        if "expert" in key and has_no_experts(fields):
            continue
        is_there = any(f"blk.{layer}.{name}" in tensors for layer in range(layers))
        if fields.has(key) and not is_there and max(fields.read_counts(key, layers, 0)):
            first = next((n for n in range(layers) if f"blk.{n}.{EXPERT_TENSORS[0]}" in tensors), 0)
            missing = f"blk.{first if 'expert' in key else 0}.{name}"
            raise fields.make_error(
                f"{fields.format_key(key)} is {format_value(fields.read_raw(key))}, but the tensor {missing} is missing"
            )
    for key in AT_MOST_ALL_LAYERS:
        if fields.has(key) and max(fields.read_counts(key, layers, 0)) > layers:
            raise fields.make_error(
                f"{fields.format_key(key)} is {format_value(fields.read_raw(key))}, but there are only {layers} layers"
            )


def require_feed_forward_length(fields: HyperparameterReader, tensors: Mapping[str, Tensor]) -> None:
    """Check the feed-forward length, also of experts without expert_feed_forward_length."""
    key, names, experts = "feed_forward_length", ["ffn_down.weight"], "ffn_down_exps.weight"
    if fields.read_raw("expert_feed_forward_length") is None:
        names = [experts] if fields.arch == EXPERT_LENGTH else [*names, experts]
    for name in names:
        if any(f"blk.{layer}.{name}" in tensors for layer in range(fields.read_layer_count())):
            lengths = fields.read_counts(key, fields.read_layer_count(), None if fields.read_raw(key) is None else 0)
            lengths = tuple(length // 2 for length in lengths) if fields.arch == LENGTH_OF_BOTH else lengths
            require_lengths(fields, tensors, key, lengths, name, -1)


def require_experts_or_none(fields: HyperparameterReader, tensors: Mapping[str, Tensor]) -> None:
    """Check that a model with hyperparameters of experts has experts."""
    experts = max(fields.read_counts("expert_count", fields.read_layer_count(), 0))
    if (fields.arch in ONE_EXPERT and experts <= 1) or has_no_experts(fields):
        return
    for key in ABOUT_EXPERTS:
        if not experts and (value := max(fields.read_counts(key, fields.read_layer_count(), 0))):
            raise fields.make_error(
                f"{fields.format_key(key)} is {value}, but {fields.format_key('expert_count')} is 0"
            )
    is_expert = [part for part in tensors if part.split(".", 2)[2:] and part.split(".", 2)[2] in EXPERT_TENSORS]
    if experts and not is_expert and not any(".ffn_down.0." in name for name in tensors):
        raise fields.make_error(f"{fields.format_key('expert_count')} is {experts}, but no layer has experts")


def has_no_experts(fields: HyperparameterReader) -> bool:
    """Return whether a file without experts may have keys of experts, because its architecture is in NO_EXPERTS."""
    return fields.arch in NO_EXPERTS and not max(fields.read_counts("expert_count", fields.read_layer_count(), 0))


def require_lengths(
    fields: HyperparameterReader, tensors: Mapping[str, Tensor], key: str, lengths: Sequence[int], name: str, axis: int
) -> None:
    """Check one dimension of a tensor in each layer; some layers may lack the tensor."""
    for layer, length in enumerate(lengths):
        tensor = tensors.get(f"blk.{layer}.{name}")
        if tensor and (not -len(tensor.shape) <= axis < len(tensor.shape) or tensor.shape[axis] != length):
            problem = f"does not match the shape {list(tensor.shape)} of {tensor.name}"
            raise fields.make_error(f"{fields.format_key(key)} {format_value(fields.read_raw(key))} {problem}")


def require_expert_layers(fields: HyperparameterReader, tensors: Mapping[str, Tensor]) -> None:
    """Check that experts are in every n-th layer after the first dense ones, and in no others."""
    keys = [
        key for key in ("leading_dense_block_count", "interleave_moe_layer_step") if fields.read_raw(key) is not None
    ]
    dense, step = fields.read_count("leading_dense_block_count", 0), fields.read_count("interleave_moe_layer_step", 1)
    for layer in range(fields.read_layer_count() - fields.read_count("nextn_predict_layers", 0)) if keys else ():
        expected = layer >= dense and (layer + 1) % step == 0
        if expected != any(f"blk.{layer}.{name}" in tensors for name in EXPERT_TENSORS):
            values = ", ".join(f"{fields.format_key(key)} is {format_value(fields.read_raw(key))}" for key in keys)
            raise fields.make_error(f"{values}, but layer {layer} has {'no experts' if expected else 'experts'}")


ONE = 0.0, 1.0  # 0 means that the model has no such scale
# Settings, and the values at which they have no effect.
NEUTRAL = {
    "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,), "router_logit_softcapping": (0.0,),
    "attention.clamp_kqv": (0.0,), "attention.indexer.top_k": (0,), "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,), "attention.temperature_scale": (0.0,), "attention.scale": ONE,
    "attention.output_scale": ONE, "attention.value_scale": ONE, "embedding_length_per_layer_input": (0,),
    "embedding_scale": ONE, "expert_weights_scale": ONE, "expert_group_scale": ONE, "expert_group_count": (0, 1),
    "experts_per_group": (0, 1), "hyper_connection.count": (0, 1), "logit_scale": ONE, "residual_scale": ONE,
    "ssm.dt_b_c_rms": (False,),
}  # fmt: skip
# By architecture, settings in its files that llama.cpp does not read.
IGNORED_SETTINGS = {
    "phi3": ("attention.sliding_window",),
    "gemma4": ("attention.scale",),  # it is 1 in all models, not by the length of a head
}


def require_supported_values(fields: HyperparameterReader) -> None:
    """Raise ModelError if a setting that the family does not read has a value with an effect."""
    read_keys, window = fields.asked.union(IGNORED_SETTINGS.get(fields.arch, ())), "attention.sliding_window"
    for name, neutral in NEUTRAL.items():
        if name not in read_keys and fields.read_raw(name, neutral[0]) not in neutral:
            raise make_unsupported_error(fields, name)
    if window not in read_keys and 0 < fields.read_count(window, 0) < fields.read_count("context_length"):
        raise make_unsupported_error(fields, window)


def make_unsupported_error(fields: HyperparameterReader, name: str) -> Exception:
    """Make the error for a setting that a family does not support."""
    return fields.make_unsupported_error(
        f"{fields.format_key(name)} {format_value(fields.read_raw(name))} is not supported in {fields.arch} models"
    )
