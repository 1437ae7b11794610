"""Gemma 3n's language model: four residual streams, and an embedding of each token for each layer."""

from collections.abc import Callable, Sequence
from math import inf
from statistics import NormalDist

import numpy as np

from localllm.convert.config import Config
from localllm.convert.family import DerivedTensor, Layer, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, windows_of
from localllm.convert.layers import ATTENTION, GATED, HEAD_NORMS, NORMS_BEFORE, NORMS_BEHIND, as_it_is
from localllm.convert.tensors import Shape, TensorSource, pad_rows, stack

STREAMS = 4


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Gemma 3n: layers with and without a window; the last layers share keys and values of earlier ones."""
    hidden, layers = config.get("intermediate_size"), config.count("num_hidden_layers")
    h = declared(config.updated(intermediate_size=same_everywhere(config, hidden)))
    shared, narrow = config.count("num_kv_shared_layers", 0), config.count("hidden_size_per_layer_input")
    if shared >= layers:
        raise config.refusal(f"num_kv_shared_layers should be below {layers}")
    windows = windows_of(config, layers)
    local = config.section("rope_parameters").section("sliding_attention")
    return h.updated(
        {
            "streams": STREAMS,
            "predictions": STREAMS * STREAMS,
            "others": STREAMS - 1,
            "narrow": narrow,
            "all_narrow": layers * narrow,
            "known": config.count("vocab_size_per_layer_input", h.sizes["vocab"]),
            "rank": config.count("laurel_rank"),
            "own_keys": layers - shared,
        },
        feed_forward_length=hidden,
        rope__freq_base_swa=local.number("rope_theta", config.number("rope_local_base_freq", 10000.0)),
        attention__sliding_window_pattern=windows,
        attention__shared_kv_layers=shared,
        altup__active_idx=0,
        altup__num_inputs=STREAMS,
        embedding_length_per_layer_input=narrow,
        activation_sparsity_scale=deviations(config, layers),
    )


def same_everywhere(config: Config, hidden: object) -> object:
    """Read a number that may be given per layer. Raises ModelError if layers differ."""
    if isinstance(hidden, list) and len({*map(str, hidden)}) != 1:
        raise config.refusal("intermediate_size should be the same for all layers")
    return hidden[0] if isinstance(hidden, list) else hidden


def deviations(config: Config, layers: int) -> list[float] | None:
    """Convert the share of gates that is cut off to standard deviations above the mean, per layer."""
    shares = config.get("activation_sparsity_pattern")
    if shares is None:
        return None
    shares = shares if isinstance(shares, list) else [shares] * layers
    if len(shares) != layers or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
        raise config.refusal(f"activation_sparsity_pattern should be {layers} numbers from 0 to 1")
    return [float(np.float32(NormalDist().inv_cdf(share))) if share else -inf for share in shares]


def of_streams(name: str) -> DerivedTensor:
    """Stack the matrices of all streams but the first."""
    stored = {f"model.{name}.{number}.weight": ("width", "width") for number in range(STREAMS - 1)}
    return DerivedTensor(("others", "width", "width"), stored, lambda sources, shape, sizes: stack(sources))


def below(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
    """Cut off the rows of image and audio tokens, which have no embeddings per layer."""
    return pad_rows(sources[0], shape[0])


def whole(sizes: Sizes) -> Layer:
    return WHOLE


WHOLE: Layer = {
    "altup_proj": of_streams("altup_projections"),
    "altup_unembd_proj": of_streams("altup_unembed_projections"),
    "per_layer_token_embd": DerivedTensor(
        ("vocab", "all_narrow"), {"model.embed_tokens_per_layer.weight": ("known", "all_narrow")}, below
    ),
    "per_layer_model_proj": ("all_narrow", "width"),
    "per_layer_proj_norm": ("narrow",),
}
LAYER: Layer = {
    **ATTENTION,
    **HEAD_NORMS,
    **GATED,
    **NORMS_BEFORE,
    **NORMS_BEHIND,
    "altup_correct_scale": as_it_is("altup.correct_output_scale", "width"),
    "altup_correct_coef": ("streams", "streams"),
    "altup_router": ("streams", "width"),
    "altup_predict_coef": ("predictions", "streams"),
    "altup_router_norm": ("width",),
    "laurel_l": ("rank", "width"),
    "laurel_r": ("width", "rank"),
    "laurel_post_norm": ("width",),
    "inp_gate": ("narrow", "width"),
    "proj": ("width", "narrow"),
    "post_norm": ("width",),
}
# Unused tensors that published checkpoints have in layers with shared keys and values.
UNREAD_KEYS: Layer = {
    name: DerivedTensor(
        dimensions, {f"self_attn.{its}.weight": dimensions}, lambda sources, shape, sizes: sources[0], needed=False
    )
    for name, its, dimensions in (
        ("attn_k", "k_proj", ("keys", "width")),
        ("attn_v", "v_proj", ("keys", "width")),
        ("attn_k_norm", "k_norm", ("head_dim",)),
    )
}


def layer(sizes: Sizes, number: int) -> Layer:
    return LAYER if number < sizes["own_keys"] else {**LAYER, **UNREAD_KEYS}
