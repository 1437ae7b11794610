"""Check that hyperparameters agree with the tensors' shapes and are supported by the family.

If lengths disagree, the file is damaged. A setting that the family does not read (Fields.asked has the names that it
reads) is refused unless its value is neutral. Other keys of GGUF are ignored only where they have no effect, or where
llama.cpp ignores them in files that are in use.
"""

from collections.abc import Mapping, Sequence

from localllm.arch.metadata import Fields
from localllm.files.gguf.file import Tensor
from localllm.files.gguf.metadata_reader import is_whole, show

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
OTHERS = "mla", "swa"  # suffixes of lengths of keys and values, in models that have several
# Hyperparameters that must not exceed the number of layers.
MOST_LAYERS = "leading_dense_block_count", "interleave_moe_layer_step", "nextn_predict_layers"
# Hyperparameters that must be missing or 0 in a file without experts.
ABOUT_EXPERTS = ("expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count",
                 "expert_feed_forward_length", "expert_shared_feed_forward_length")  # fmt: skip


def require_agreement(fields: Fields, tensors: Mapping[str, Tensor]) -> None:
    """Compare hyperparameters with tensors. Raises ModelError."""
    if not tensors:  # a vocabulary only
        return
    require_width(fields, tensors)
    require_heads(fields, tensors)
    require_feed_forward_length(fields, tensors)
    require_present(fields, tensors)
    require_experts_or_none(fields, tensors)
    for key, (name, axis) in LENGTHS.items():
        if not fields.has(f"{key}_swa") and (fields.raw(key) is not None or key == "expert_count"):
            require_lengths(fields, tensors, key, fields.counts(key, fields.layers(), 0), name, axis)
    if fields.raw("expert_shared_count") is not None and fields.raw("expert_shared_feed_forward_length") is None:
        length = fields.count("expert_shared_count", 0) * fields.count("expert_feed_forward_length", 0)
        require_lengths(
            fields, tensors, "expert_shared_count", (length,) * fields.layers(), "ffn_down_shexp.weight", -1
        )
    require_experts(fields, tensors)


def require_width(fields: Fields, tensors: Mapping[str, Tensor]) -> None:
    """Check embedding_length against the embedding matrix."""
    embedding, width = tensors.get("token_embd.weight"), fields.count("embedding_length")
    if embedding is not None and embedding.shape[-1] != width:
        problem = f"does not match the shape {list(embedding.shape)} of {embedding.name}"
        raise fields.error(f"{fields.key('embedding_length')} {width} {problem}")


def require_heads(fields: Fields, tensors: Mapping[str, Tensor]) -> None:
    """Check the lengths of keys and values against their matrices, if all layers' heads are alike."""
    value = fields.raw("attention.head_count_kv", fields.raw("attention.head_count"))
    heads = value if is_whole(value) else 0
    for key, name in (("attention.key_length", "attn_k.weight"), ("attention.value_length", "attn_v.weight")):
        if not fields.has(key) or any(fields.has(f"{key}_{end}") for end in OTHERS):
            continue
        length = fields.count(key)
        for layer in range(fields.layers()) if heads else ():
            tensor = tensors.get(f"blk.{layer}.{name}")
            if tensor and len(tensor.shape) == 2 and tensor.shape[0] != heads * length:
                problem = f"does not match the shape {list(tensor.shape)} of {tensor.name}"
                raise fields.error(f"{fields.key(key)} {length} {problem}")


def require_present(fields: Fields, tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors named in TENSORS exist, and that no count of layers exceeds their number."""
    layers = fields.layers()
    for key, name in TENSORS.items():
        if "expert" in key and has_none(fields):
            continue
        is_there = any(f"blk.{layer}.{name}" in tensors for layer in range(layers))
        if fields.has(key) and not is_there and max(fields.counts(key, layers, 0)):
            first = next((n for n in range(layers) if f"blk.{n}.{EXPERT_TENSORS[0]}" in tensors), 0)
            missing = f"blk.{first if 'expert' in key else 0}.{name}"
            raise fields.error(f"{fields.key(key)} is {show(fields.raw(key))}, but the tensor {missing} is missing")
    for key in MOST_LAYERS:
        if fields.has(key) and max(fields.counts(key, layers, 0)) > layers:
            raise fields.error(f"{fields.key(key)} is {show(fields.raw(key))}, but there are only {layers} layers")


def require_feed_forward_length(fields: Fields, tensors: Mapping[str, Tensor]) -> None:
    """Check the feed-forward length, also of experts without expert_feed_forward_length."""
    key, names, experts = "feed_forward_length", ["ffn_down.weight"], "ffn_down_exps.weight"
    if fields.raw("expert_feed_forward_length") is None:
        names = [experts] if fields.arch == EXPERT_LENGTH else [*names, experts]
    for name in names:
        if any(f"blk.{layer}.{name}" in tensors for layer in range(fields.layers())):
            lengths = fields.counts(key, fields.layers(), None if fields.raw(key) is None else 0)
            lengths = tuple(length // 2 for length in lengths) if fields.arch == LENGTH_OF_BOTH else lengths
            require_lengths(fields, tensors, key, lengths, name, -1)


def require_experts_or_none(fields: Fields, tensors: Mapping[str, Tensor]) -> None:
    """Check that a model with hyperparameters of experts has experts."""
    experts = max(fields.counts("expert_count", fields.layers(), 0))
    if (fields.arch in ONE_EXPERT and experts <= 1) or has_none(fields):
        return
    for key in ABOUT_EXPERTS:
        if not experts and (value := max(fields.counts(key, fields.layers(), 0))):
            raise fields.error(f"{fields.key(key)} is {value}, but {fields.key('expert_count')} is 0")
    is_expert = [part for part in tensors if part.split(".", 2)[2:] and part.split(".", 2)[2] in EXPERT_TENSORS]
    if experts and not is_expert and not any(".ffn_down.0." in name for name in tensors):
        raise fields.error(f"{fields.key('expert_count')} is {experts}, but no layer has experts")


def has_none(fields: Fields) -> bool:
    """Return whether a file has no experts but may have keys of experts (NO_EXPERTS)."""
    return fields.arch in NO_EXPERTS and not max(fields.counts("expert_count", fields.layers(), 0))


def require_lengths(
    fields: Fields, tensors: Mapping[str, Tensor], key: str, lengths: Sequence[int], name: str, axis: int
) -> None:
    """Check one dimension of a tensor in each layer; some layers may lack the tensor."""
    for layer, length in enumerate(lengths):
        tensor = tensors.get(f"blk.{layer}.{name}")
        if tensor and (not -len(tensor.shape) <= axis < len(tensor.shape) or tensor.shape[axis] != length):
            problem = f"does not match the shape {list(tensor.shape)} of {tensor.name}"
            raise fields.error(f"{fields.key(key)} {show(fields.raw(key))} {problem}")


def require_experts(fields: Fields, tensors: Mapping[str, Tensor]) -> None:
    """Check that experts are in every n-th layer after the first dense ones, and in no others."""
    keys = [key for key in ("leading_dense_block_count", "interleave_moe_layer_step") if fields.raw(key) is not None]
    dense, step = fields.count("leading_dense_block_count", 0), fields.count("interleave_moe_layer_step", 1)
    for layer in range(fields.layers() - fields.count("nextn_predict_layers", 0)) if keys else ():
        expected = layer >= dense and (layer + 1) % step == 0
        if expected != any(f"blk.{layer}.{name}" in tensors for name in EXPERT_TENSORS):
            values = ", ".join(f"{fields.key(key)} is {show(fields.raw(key))}" for key in keys)
            raise fields.error(f"{values}, but layer {layer} has {'no experts' if expected else 'experts'}")


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
PASSED_OVER = {
    "phi3": ("attention.sliding_window",),
    "gemma4": ("attention.scale",),  # it is 1 in all models, not by the length of a head
}


def require_supported_values(fields: Fields) -> None:
    """Raise ModelError for a setting with an effect that the family has not read."""
    read_keys, window = fields.asked.union(PASSED_OVER.get(fields.arch, ())), "attention.sliding_window"
    for name, neutral in NEUTRAL.items():
        if name not in read_keys and fields.raw(name, neutral[0]) not in neutral:
            raise refusal(fields, name)
    if window not in read_keys and 0 < fields.count(window, 0) < fields.count("context_length"):
        raise refusal(fields, window)


def refusal(fields: Fields, name: str) -> Exception:
    """Make the error for a setting that a family does not support."""
    return fields.unsupported(f"{fields.key(name)} {show(fields.raw(name))} is not supported in {fields.arch} models")
