"""Gemma 3n (Google DeepMind 2025), E2B and E4B.

Unlike Gemma 4: four residual streams (AltUp, Baykal et al. 2023, arXiv 2301.13310): each layer predicts all of them,
computes the first one, and corrects the predictions by the difference. A low-rank product is added beside attention
(Laurel, Menghani et al. 2024, arXiv 2411.07501). The first layers keep only the largest twentieth of their gates'
values. All heads have the same length.
"""

from collections.abc import Sequence
from math import isfinite

import numpy as np

from localllm.arch.attention import LocalRopeTransformerHyperparameters, read_local_rope, read_windows
from localllm.arch.decoder import ignore_mtp_layers
from localllm.arch.families.gemma4 import compute_layer_inputs
from localllm.arch.family import Activation, AttentionScores, Builder, HyperparameterReader, PagedState, Weights, frozen

STREAMS, LAYER_WIDTH = 4, 256  # residual streams; width of the per-layer embeddings
OWN_STATES, SPARSE_LAYERS, DEVIATIONS = 20, 10, 1.6448533535003662  # defaults
NOTHING = 1e-30  # epsilon of norms that have none


@frozen
class Gemma3nHyperparameters(LocalRopeTransformerHyperparameters):
    """The hyperparameters of Gemma 3n.

    Attributes:
        own_states: number of first layers that compute keys and values.
        deviations: by layer, the cutoff of its gates in standard deviations above their mean, or None.
    """

    own_states: int
    layer_width: int
    deviations: tuple[float | None, ...]
    logit_softcap: float

    @property
    def scale(self) -> float:
        return 1.0

    def list_states(self) -> Sequence[PagedState]:
        """Return the states of the layers that compute keys and values."""
        return super().list_states()[: self.own_states]

    def find_state(self, layer: int) -> PagedState:
        """Return the KV cache that a layer reads: its own, or the last one of a layer with the same window."""
        return [s for s in self.list_states()[: layer + 1] if bool(s.window) == bool(self.windows[layer])][-1]


def read(fields: HyperparameterReader) -> Gemma3nHyperparameters:
    shared, windows = (
        Gemma3nHyperparameters.read_shared_fields(fields, interleaved=False),
        read_windows(fields, period=5),
    )
    layers = shared["layers"]
    own_states = layers - fields.read_count("attention.shared_kv_layers", max(layers - OWN_STATES, 0))
    if own_states < 1 or not set(map(bool, windows)) <= set(map(bool, windows[:own_states])):
        raise fields.make_error(
            f"{fields.format_key('attention.shared_kv_layers')} must leave layers of both types with own keys"
        )
    for name, expected in (("altup.num_inputs", STREAMS), ("altup.active_idx", 0)):
        if (value := fields.read_count(name, expected)) != expected:
            raise fields.make_unsupported_error(f"{fields.format_key(name)} must be {expected} (found {value})")
    return Gemma3nHyperparameters(
        **shared,
        windows=windows,
        local_rope=read_local_rope(fields, shared["attention"].rope.remove_scaling(10000.0)),
        own_states=own_states,
        layer_width=fields.read_count("embedding_length_per_layer_input", LAYER_WIDTH),
        deviations=read_deviations(fields, layers),
        logit_softcap=fields.read_factor("final_logit_softcapping", 30.0),
    )


def read_deviations(fields: HyperparameterReader, layers: int) -> tuple[float | None, ...]:
    """Read each layer's cutoff; minus infinity in the file means none. Raises ModelError."""
    name = "activation_sparsity_scale"
    factors = fields.read_raw(name)
    if factors is None:
        return tuple(DEVIATIONS if layer < SPARSE_LAYERS else None for layer in range(layers))
    if (
        not isinstance(factors, np.ndarray)
        or len(factors) != layers
        or not all(-10 < x < 10 for x in factors if isfinite(x))
    ):
        raise fields.make_value_error(name, f"a cutoff for each of {layers} layers")
    return tuple(float(x) if isfinite(x) else None for x in factors)


def forward(b: Builder, w: Weights, h: Gemma3nHyperparameters) -> Activation:
    x = b.scale(b.embed(w.token_embd, b.ids), h.width**0.5)
    inputs = compute_layer_inputs(b, w, h, x)
    streams = b.head_linear(
        repeat_columns(b, x, STREAMS - 1), w.altup_proj.require_shape(STREAMS - 1, h.width, h.width)
    )
    x = b.concat_heads(x, match_norm(b, h, streams, x), 1)
    for layer in range(h.layers):
        inputs_here = b.slice_columns(inputs, layer * h.layer_width, (layer + 1) * h.layer_width)
        x = block(b, w.get_layer(layer), h, layer, x, inputs_here)
    ignore_mtp_layers(b, w, h)
    x = b.rms_norm(merge_streams(b, w, h, b.select(x, b.wanted)), w.output_norm, h.epsilon)
    return b.softcap(b.linear(x, w.get("output") or w.token_embd), h.logit_softcap)


def merge_streams(b: Builder, w: Weights, h: Gemma3nHyperparameters, x: Activation) -> Activation:
    """Compute the mean of the streams, each scaled to the norm of the first one."""
    total, remaining = b.slice_columns(x, 0, h.width), b.slice_columns(x, h.width, STREAMS * h.width)
    projected = b.head_linear(remaining, w.altup_unembd_proj.require_shape(STREAMS - 1, h.width, h.width))
    projected = match_norm(b, h, projected, total)
    for stream in range(STREAMS - 1):
        total = b.add(total, b.slice_columns(projected, stream * h.width, (stream + 1) * h.width))
    return b.scale(total, 1 / STREAMS)


def match_norm(b: Builder, h: Gemma3nHyperparameters, streams: Activation, x: Activation) -> Activation:
    """Scale each stream to the norm of x."""
    length = b.scale(b.head_dots(x, b.rms_norm(x, None, NOTHING), 1), 1 / h.width)
    return b.multiply_heads(b.rms_norm(streams, None, NOTHING, h.width), length)


def repeat_columns(b: Builder, x: Activation, count: int) -> Activation:
    """Concatenate `count` copies of x."""
    every = x
    for _ in range(count - 1):
        every = b.concat_heads(every, x, 1)
    return every


def block(
    b: Builder, w: Weights, h: Gemma3nHyperparameters, layer: int, streams: Activation, inputs: Activation
) -> Activation:
    """Apply one layer: predict all streams, compute the first one, and correct the others by it."""
    guesses = b.add(
        streams, b.mix_streams(streams, b.linear(compute_router(b, w, h, streams), w.altup_predict_coef), STREAMS)
    )
    active = b.slice_columns(guesses, 0, h.width)
    x = apply_sublayers(b, w, h, layer, active)
    surprise = b.add(x, b.scale(active, -1))
    strengths = b.add_scalar(b.linear(compute_router(b, w, h, x), w.altup_correct_coef), 1)
    corrected = b.add(guesses, b.mix_streams(surprise, strengths, 1))
    first, others = b.slice_columns(corrected, 0, h.width), b.slice_columns(corrected, h.width, STREAMS * h.width)
    y = b.linear(b.scale_columns(first, w.altup_correct_scale), w.inp_gate)
    y = b.rms_norm(b.linear(b.geglu(y, inputs), w.proj), w.post_norm, h.epsilon)
    return b.concat_heads(first, b.add(others, repeat_columns(b, y, STREAMS - 1)), 1)


def compute_router(b: Builder, w: Weights, h: Gemma3nHyperparameters, x: Activation) -> Activation:
    """Compute AltUp's router outputs for the first stream or its update, [tokens, STREAMS], from -1 to 1."""
    y = b.rms_norm(b.slice_columns(x, 0, h.width), w.altup_router_norm, h.epsilon)
    return b.softcap(b.linear(b.scale(y, 1 / h.width), w.altup_router), 1.0)


def apply_sublayers(b: Builder, w: Weights, h: Gemma3nHyperparameters, layer: int, active: Activation) -> Activation:
    """Apply attention and Laurel, then the feed-forward network, to one stream."""
    normed = b.rms_norm(active, w.attn_norm, h.epsilon)
    narrow = b.linear(b.linear(normed, w.laurel_l), w.laurel_r)
    laurel = b.add(normed, b.rms_norm(narrow, w.laurel_post_norm, h.epsilon))
    y = b.linear(compute_attention(b, w, h, layer, normed), w.attn_output)
    x = b.add(active, b.rms_norm(y, w.post_attention_norm, h.epsilon))
    x = b.scale(b.add(x, laurel), 0.5**0.5)
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    gate, deviations = b.linear(y, w.ffn_gate), h.deviations[layer]
    if deviations is not None:
        gate = apply_gaussian_topk(b, w.ffn_gate.shape[0], deviations, gate)
    y = b.linear(b.geglu(gate, b.linear(y, w.ffn_up)), w.ffn_down)
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, h.epsilon))


def apply_gaussian_topk(b: Builder, columns: int, deviations: float, x: Activation) -> Activation:
    """Subtract mean + `deviations` standard deviations from each row, and clamp at 0."""
    normed = b.layer_norm(x, None, NOTHING)  # the standard deviation divides by columns, not by columns - 1
    deviation = b.scale(b.head_dots(x, normed, 1), 1 / columns)
    return b.multiply_heads(b.relu(b.add_scalar(normed, -deviations * (columns / (columns - 1)) ** 0.5)), deviation)


def compute_attention(b: Builder, w: Weights, h: Gemma3nHyperparameters, layer: int, x: Activation) -> Activation:
    """Compute the heads' outputs; the last layers attend to the keys and values of earlier ones."""
    state, head_dim = h.find_state(layer), h.attention.head_dim
    rope = h.local_rope if h.windows[layer] else h.attention.rope
    q = b.rms_norm(b.linear(x, w.attn_q), w.attn_q_norm.require_shape(head_dim), h.epsilon, head_dim)
    k = v = None
    if state.layer == layer:
        v = b.rms_norm(b.linear(x, w.attn_v), None, h.epsilon, head_dim)
        k = b.rms_norm(b.linear(x, w.attn_k), w.attn_k_norm.require_shape(head_dim), h.epsilon, head_dim)
        k = b.rope(k, rope, b.positions)
    else:
        b.ignore(*(w.get(name, by_layer=True) for name in ("attn_k", "attn_k_norm", "attn_v")))
    return b.attend(b.rope(q, rope, b.positions), k, v, state, AttentionScores(h.attention.heads[layer], h.scale))


CHECKPOINTS = {
    "Gemma3nForCausalLM Gemma3nForConditionalGeneration": {
        "layer": "@gemma.list_gemma3n_tensors", "whole": "@gemma.GEMMA3N_WHOLE", "sees": True,
        "unread": r"model\.(audio_tower|embed_audio|embed_vision)\..*", "activations": "gelu",
        "only": {
            "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True, "attention_bias": False,
            "tie_word_embeddings": True,
        },
        "keys": {"final_logit_softcapping": "final_logit_softcapping", "sliding_window": "attention.sliding_window"},
        "read": "@gemma.read_gemma3n",
        "defaults": {
            "tie_word_embeddings": True, "rope_theta": 1e6, "head_dim": 256, "num_attention_heads": 8,
            "num_key_value_heads": 2, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256, "laurel_rank": 64, "sliding_window": 512,
            "final_logit_softcapping": 30.0, "num_kv_shared_layers": 15, "max_position_embeddings": 32768,
        },
    },
}  # fmt: skip
