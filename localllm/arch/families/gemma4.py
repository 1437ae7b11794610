"""Gemma 4 (Google DeepMind 2026), E2B, E4B, 31B and 26B-A4B.

Unlike Gemma 3: heads of layers with a window have another length; values are normalized, and may be the keys before
their norm; scores are not scaled; the last layers may reuse the keys and values of earlier ones; some pairs of global
layers are not rotated (a frequency factor of 1e30). Each layer may add its own embedding of the token, gated by the
residual stream, and may multiply its output with a factor. Experts, each with a factor, may be added beside the
feed-forward network; their router reads the normalized residual stream.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.arch.attention import AttentionHyperparameters, WindowedTransformerHyperparameters, read_windows
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    Choice,
    HyperparameterReader,
    PagedState,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_gated_feed_forward, collect_expert_matrices, read_routing
from localllm.arch.rope import read_base
from localllm.arch.verbs import Routing
from localllm.errors import ModelError


@frozen
class Gemma4Hyperparameters(WindowedTransformerHyperparameters):
    """The hyperparameters of Gemma 4.

    Attributes:
        local: attention of the layers with a window.  own_states: number of first layers that compute keys and values.
    """

    local: AttentionHyperparameters
    own_states: int
    layer_width: int  # width of the per-layer embeddings, 0 for none
    logit_softcap: float

    def select_attention(self, layer: int) -> AttentionHyperparameters:
        return self.local if self.windows[layer] else self.attention

    def list_states(self) -> Sequence[PagedState]:
        """Return the states of the layers that compute keys and values."""
        return [
            PagedState(layer, a.kv_heads[layer], a.head_dim, a.head_dim, self.windows[layer])
            for layer, a in ((layer, self.select_attention(layer)) for layer in range(self.own_states))
        ]

    def find_state(self, layer: int) -> PagedState:
        """Return the KV cache that a layer reads: its own, or the last one of a layer with the same window."""
        return [s for s in self.list_states()[: layer + 1] if bool(s.window) == bool(self.windows[layer])][-1]


def read(fields: HyperparameterReader) -> Gemma4Hyperparameters:
    shared = Gemma4Hyperparameters.read_shared_fields(fields, interleaved=False)
    windows = read_windows(fields, period=None)
    own_states = shared["layers"] - fields.read_count("attention.shared_kv_layers", 0)
    if own_states < 1 or not set(map(bool, windows)) <= set(map(bool, windows[:own_states])):
        raise fields.make_error(
            f"{fields.format_key('attention.shared_kv_layers')} must leave layers of both types with own keys"
        )
    return Gemma4Hyperparameters(
        **shared,
        windows=windows,
        local=read_local_attention(fields, shared["attention"]),
        own_states=own_states,
        routing=read_routing(fields),
        layer_width=fields.read_count("embedding_length_per_layer_input", 0),
        logit_softcap=fields.read_number("final_logit_softcapping", 0.0),
    )


def read_local_attention(fields: HyperparameterReader, full: AttentionHyperparameters) -> AttentionHyperparameters:
    """Read the head counts, dimensions and RoPE of windowed layers. Raises ModelError."""
    head_dim = fields.read_count("attention.key_length_swa")
    if fields.read_count("attention.value_length_swa", head_dim) != head_dim:
        raise fields.make_value_error("attention.value_length_swa", f"{head_dim}, the key length")
    dims = fields.read_count("rope.dimension_count_swa", min(full.rope.dims, head_dim))
    if dims > head_dim or dims % 2:
        raise fields.make_error(
            f"rope.dimension_count_swa {dims} must be even and at most the head dimension, {head_dim}"
        )
    base = read_base(fields, "rope.freq_base_swa", 10000.0)
    return replace(full, head_dim=head_dim, rope=replace(full.rope, head_dim=head_dim, dims=dims, base=base))


def forward(b: Builder, w: Weights, h: Gemma4Hyperparameters) -> Activation:
    x, factors = b.scale(b.embed(w.token_embd, b.ids), h.width**0.5), w.get("rope_freqs")
    inputs = compute_layer_inputs(b, w, h, x) if h.layer_width else None
    for layer in range(h.layers):
        x = block(b, w.get_layer(layer), h, layer, x, factors)
        if inputs is not None:
            inputs_here = b.slice_columns(inputs, layer * h.layer_width, (layer + 1) * h.layer_width)
            x = add_layer_input(b, w.get_layer(layer), h, x, inputs_here)
        if factor := w.get_layer(layer).get("layer_output_scale"):
            x = b.scale(x, factor)
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    logits = b.linear(x, w.get("output") or w.token_embd)
    return b.softcap(logits, h.logit_softcap) if h.logit_softcap else logits


def compute_layer_inputs(b: Builder, w: Weights, h: Any, x: Activation) -> Activation:
    """Compute the per-layer inputs from their table and the embeddings, [tokens, layers * layer_width]."""
    y = b.scale(b.linear(x, w.per_layer_model_proj), h.width**-0.5)
    y = b.rms_norm(y, w.per_layer_proj_norm, h.epsilon, h.layer_width)
    return b.scale(b.add(y, b.scale(b.embed(w.per_layer_token_embd, b.ids), h.layer_width**0.5)), 0.5**0.5)


def add_layer_input(b: Builder, w: Weights, h: Gemma4Hyperparameters, x: Activation, inputs: Activation) -> Activation:
    """Add the layer's own embedding of the token, through a gate."""
    y = b.linear(b.geglu(b.linear(x, w.inp_gate), inputs), w.proj)
    return b.add(x, b.rms_norm(y, w.post_norm, h.epsilon))


def block(
    b: Builder, w: Weights, h: Gemma4Hyperparameters, layer: int, x: Activation, factors: Weight | None
) -> Activation:
    y = compute_attention(b, w, h, layer, b.rms_norm(x, w.attn_norm, h.epsilon), None if h.windows[layer] else factors)
    x = b.add(x, b.rms_norm(b.linear(y, w.attn_output), w.post_attention_norm, h.epsilon))
    y = apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.geglu)
    if h.routing:
        y = b.rms_norm(y, w.post_ffw_norm_1, h.epsilon)
        y = b.add(y, b.rms_norm(apply_mixture(b, w, h, h.routing, x), w.post_ffw_norm_2, h.epsilon))
    return b.add(x, b.rms_norm(y, w.post_ffw_norm, h.epsilon))


def apply_mixture(b: Builder, w: Weights, h: Gemma4Hyperparameters, routing: Routing, x: Activation) -> Activation:
    """Apply each token's experts to the residual stream, each output times the expert's factor."""
    router, (of_gate, up, down) = w.ffn_gate_inp, collect_expert_matrices(b, w, routing.experts)
    if not router.scale or not down.scale:
        raise ModelError(f"tensors {router.name} and {down.name} must have a scale")
    y = b.scale_columns(b.scale(b.rms_norm(x, None, h.epsilon), h.width**-0.5), router.scale.require_shape(h.width))
    choice = b.route(b.linear(y, replace(router, scale=None)), routing)
    rows = b.gather(b.rms_norm(x, w.pre_ffw_norm_2, h.epsilon), choice)
    y = b.geglu(b.expert_linear(rows, of_gate, choice), b.expert_linear(rows, up, choice))
    y = b.expert_linear(y, replace(down, scale=None), choice)
    return b.scatter(
        b.multiply_heads(y, look_up_factors(b, down.scale.require_shape(routing.experts), rows, choice)), choice
    )


def look_up_factors(b: Builder, factors: Weight, rows: Activation, choice: Choice) -> Activation:
    """Look up the factor of each row's expert, [rows, 1].

    This is a product with stacks of one-row matrices, each filled with an expert's factor.
    """
    many = factors.repeat(PLACES)
    data = many.tensor.data.reshape(*factors.shape, 1, -1)
    stack = replace(many, tensor=replace(many.tensor, shape=(*factors.shape, 1, PLACES), data=data))
    equal = b.add_scalar(b.scale(b.slice_columns(rows, 0, PLACES), 0.0), 1 / PLACES)
    return b.expert_linear(equal, stack, choice)


PLACES = 32


def compute_attention(
    b: Builder, w: Weights, h: Gemma4Hyperparameters, layer: int, x: Activation, factors: Weight | None
) -> Activation:
    """Compute the attention of a layer."""
    a, state, k, v = h.select_attention(layer), h.find_state(layer), None, None
    q = b.rms_norm(b.linear(x, w.attn_q), w.attn_q_norm.require_shape(a.head_dim), h.epsilon, a.head_dim)
    if state.layer == layer:
        raw = b.linear(x, w.attn_k)
        v = b.rms_norm(b.linear(x, w.attn_v) if w.get("attn_v", by_layer=True) else raw, None, h.epsilon, a.head_dim)
        k = b.rms_norm(raw, w.attn_k_norm.require_shape(a.head_dim), h.epsilon, a.head_dim)
        k = b.rope(k, a.rope, b.positions, factors)
    else:
        b.ignore(*(w.get(name, by_layer=True) for name in ("attn_k", "attn_k_norm", "attn_v")))
    return b.attend(b.rope(q, a.rope, b.positions, factors), k, v, state, AttentionScores(a.heads[layer], 1.0))


CHECKPOINTS = {
    "Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration": {
        "layer": "@gemma.list_gemma4_tensors", "whole": "@gemma.list_gemma4_global_tensors", "sees": True,
        "unread": r"model\.(audio_tower|embed_audio|embed_vision)\..*", "activations": "gelu",
        "only": {
            "attention_bias": False, "tie_word_embeddings": True, "use_bidirectional_attention": (False, "vision"),
        },
        "keys": {
            "sliding_window": "attention.sliding_window", "final_logit_softcapping": ("final_logit_softcapping", None),
        },
        "read": "@gemma.read_gemma4", "vocabulary": "gemma4",
        "defaults": {
            "tie_word_embeddings": True, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262144,
            "hidden_size_per_layer_input": 256, "sliding_window": 512, "max_position_embeddings": 131072,
        },
    },
}  # fmt: skip
