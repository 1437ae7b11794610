"""T5, Flan-T5, mT5 and UMT5, and their encoders alone (Sentence-T5).

T5: Raffel et al. 2020, arXiv 1910.10683; Flan-T5: Chung et al. 2022, 2210.11416; mT5: 2010.11934; Sentence-T5:
2108.08877.

Unlike llama: an encoder with bidirectional attention reads the text, and a decoder with cross-attention to the
encoder's output writes the answer. There is no RoPE. Biases by distance, which all layers share, are added to scores,
which are not scaled. The activation is ReLU, or GELU with a gate.
"""

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from localllm.arch.attention import RMS_EPSILON
from localllm.arch.decoder import pool_texts
from localllm.arch.encoder import read_encoder_pooling
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    HyperparameterReader,
    Hyperparameters,
    PagedState,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_gated_feed_forward, apply_ungated_feed_forward
from localllm.arch.verbs import FULL_ATTENTION

REACH = 128  # all distances from here on share a bias


@frozen
class T5Hyperparameters(Hyperparameters):
    """The hyperparameters of T5; `layers` is the number of encoder layers."""

    epsilon: float
    heads: int
    head_dim: int
    hidden: int
    buckets: int
    decoder_layers: int = field(default=0, kw_only=True)
    start_token: int | None = field(default=None, kw_only=True)

    @property
    def encode(self) -> Callable[..., object] | None:
        return encode

    def list_states(self) -> Sequence[PagedState]:
        """Return the KV states of the layers.

        First come those of each layer of the encoder or the decoder, whose tokens have their own positions; then, for
        each layer of the decoder, those of the encoder's output.
        """
        count = max(self.layers, self.decoder_layers) + self.decoder_layers
        return [PagedState(layer, self.heads, self.head_dim, self.head_dim) for layer in range(count)]


class T5EncoderHyperparameters(T5Hyperparameters):
    bidirectional: ClassVar[bool] = True

    @property
    def encode(self) -> None:
        return None


def read(fields: HyperparameterReader) -> T5Hyperparameters:
    heads, common = fields.read_count("attention.head_count"), fields.read_common_fields()
    head_dim = fields.read_count("attention.key_length", common["width"] // heads)
    for name, expected in (("head_count_kv", heads), ("value_length", head_dim)):
        if fields.read_count(f"attention.{name}", expected) != expected:
            raise fields.make_error(f"{fields.format_key(f'attention.{name}')} must be {expected}")
    buckets = fields.read_count("attention.relative_buckets_count")
    if buckets % 4:
        raise fields.make_value_error("attention.relative_buckets_count", "a multiple of 4")
    sizes = fields.read_epsilon(RMS_EPSILON), heads, head_dim, fields.read_count("feed_forward_length"), buckets
    common = {**common, **dict(zip(("epsilon", "heads", "head_dim", "hidden", "buckets"), sizes, strict=True))}
    if fields.arch == "t5encoder":
        return T5EncoderHyperparameters(**common, pooling=read_encoder_pooling(fields))
    start = fields.read_count("decoder_start_token_id", 0)
    if start >= fields.vocab_size:
        raise fields.make_value_error("decoder_start_token_id", f"a token, below {fields.vocab_size}")
    common["context"] *= 2  # the encoder's context and the decoder's
    layers = fields.read_count("decoder_block_count", common["layers"])
    return T5Hyperparameters(**common, decoder_layers=layers, start_token=start)


def forward(b: Builder, w: Weights, h: T5Hyperparameters) -> Activation:
    """Compute the logits of the requested tokens, or a row per text for an encoder alone."""
    if h.bidirectional:
        return pool_texts(b, w, h, encode_text(b, w.get_submodel("enc."), h, b.embed(w.token_embd, b.ids)))
    x, decoder = b.embed(w.token_embd, b.ids), w.get_submodel("dec.")
    biases = compute_biases(b, decoder, h, both_ways=False)
    for state, read in zip(h.list_states()[: h.decoder_layers], h.list_states()[-h.decoder_layers :], strict=True):
        layer = decoder.get_layer(state.layer)
        x = add_attention(b, layer, h, state, x, biases=biases)
        q = b.linear(b.rms_norm(x, layer.cross_attn_norm, h.epsilon), layer.cross_attn_q)
        y = b.attend(q, None, None, read, AttentionScores(h.heads, 1.0, cross_attention=True))
        b.ignore(layer.get("cross_attn_rel_b", by_layer=True))
        x = add_feed_forward(b, layer, h, b.add(x, b.linear(y, layer.cross_attn_o)))
    x = b.rms_norm(b.select(x, b.wanted), decoder.output_norm, h.epsilon)
    return b.linear(x, w.get("output") or w.token_embd)


def encode(b: Builder, w: Weights, h: T5Hyperparameters) -> Activation:
    """Cache a text's keys and values for each layer of the decoder; return a dummy row."""
    x = encode_text(b, w.get_submodel("enc."), h, b.embed(w.token_embd, b.ids))
    for number, state in enumerate(h.list_states()[-h.decoder_layers :]):
        layer = w.get_submodel("dec.").get_layer(number)
        b.write_kv(b.linear(x, layer.cross_attn_k), b.linear(x, layer.cross_attn_v), state)
    return b.select(x, b.wanted)


def encode_text(b: Builder, w: Weights, h: T5Hyperparameters, x: Activation) -> Activation:
    """Apply the encoder to a text's embeddings."""
    biases = compute_biases(b, w, h, both_ways=True)
    for state in h.list_states()[: h.layers]:
        layer = w.get_layer(state.layer)
        x = add_feed_forward(b, layer, h, add_attention(b, layer, h, state, x, biases=biases, lookahead=FULL_ATTENTION))
    return b.rms_norm(x, w.output_norm, h.epsilon)


def add_attention(
    b: Builder, w: Weights, h: T5Hyperparameters, state: PagedState, x: Activation, **scores: Any
) -> Activation:
    """Add attention's output to x; a layer may have its own biases."""
    y, biases = b.rms_norm(x, w.attn_norm, h.epsilon), scores["biases"].get(state.layer, scores["biases"][0])
    q, k, v = (b.linear(y, part) for part in (w.attn_q, w.attn_k, w.attn_v))
    y = b.attend(q, k, v, state, AttentionScores(h.heads, 1.0, **{**scores, "biases": biases}))
    return b.add(x, b.linear(y, w.attn_o))


def add_feed_forward(b: Builder, w: Weights, h: T5Hyperparameters, x: Activation) -> Activation:
    """Add the feed-forward network's output to x."""
    w.ffn_up.require_shape(h.hidden, h.width)
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(
        x,
        apply_gated_feed_forward(b, w, y, b.geglu)
        if w.get("ffn_gate")
        else apply_ungated_feed_forward(b, w, y, b.relu),
    )


def compute_biases(b: Builder, w: Weights, h: T5Hyperparameters, both_ways: bool) -> dict[int, np.ndarray]:
    """Return biases by distance for each layer with a table, float32 [heads, 2 * REACH + 1].

    Raises ModelError.
    """
    numbers, buckets = compute_buckets(h.buckets, both_ways), {}
    for layer in range(h.layers if both_ways else h.decoder_layers):
        table = w.get_layer(layer).get("attn_rel_b", by_layer=True)
        if table is None and layer == 0:
            w.get_layer(0).require("attn_rel_b")
        if table:
            b.ignore(table)
            buckets[layer] = look_up_biases(table.require_shape(h.buckets, h.heads), numbers)
    return buckets


def look_up_biases(table: Weight, numbers: np.ndarray) -> np.ndarray:
    """Look up a table's biases by distance. Raises ModelError."""
    return np.ascontiguousarray(table.flatten().read_vector().reshape(table.shape)[numbers].T)


def compute_buckets(buckets: int, both_ways: bool) -> np.ndarray:
    """Return the bucket of each distance from -REACH to REACH.

    Near distances have their own, farther ones by their logarithms, in float32 as in llama.cpp. A decoder's keys are
    never after the query.
    """
    distance = np.arange(-REACH, REACH + 1)
    count = buckets // 2 if both_ways else buckets
    exact, far = count // 2, np.abs(distance) if both_ways else np.maximum(-distance, 0)
    logarithms = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    steps = logarithms * np.float32(count - exact) / np.log(REACH / exact)
    large = np.minimum(np.floor((exact + steps).astype(np.float32)).astype(int), count - 1)
    return np.where(far < exact, far, large) + (count * (distance > 0) if both_ways else 0)


CHECKPOINTS = {
    "T5ForConditionalGeneration T5WithLMHeadModel MT5ForConditionalGeneration UMT5ForConditionalGeneration UMT5Model": {
        "whole": "@t5.list_all_tensors", "last_norm": "dec.output_norm.weight",
        "unread": r"(en|de)coder\.embed_tokens\.weight",
        "read": "@t5.read", "defaults": {"tie_word_embeddings": True},
    },
    "T5EncoderModel": {
        "arch": "t5encoder", "like": "T5ForConditionalGeneration", "whole": "@t5.list_encoder_tensors", "last_norm": "",
        "decodes": False, "read": "@t5.read_encoder",
    },
}  # fmt: skip
