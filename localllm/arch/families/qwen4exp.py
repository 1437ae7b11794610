"""Qwen 4's experimental release (Alibaba 2026): Qwen3.8-Flash-Next.

Unlike Qwen 3.5 with experts: several residual streams instead of norms; attention is sparse: an indexer selects blocks
of keys by their mean; one layer adds embeddings of the n-grams that end at each token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

from localllm.arch.attention import RMS_EPSILON, read_attention
from localllm.arch.families.qwen35 import (
    Qwen35Hyperparameters,
    apply_delta_net,
    apply_gated_attention,
    read_attention_layers,
    read_delta_net,
)
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    LatentState,
    PagedState,
    RecurrentLayerState,
    RopeParameters,
    State,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_gated_shared_expert, apply_mixture_of_experts, read_routing
from localllm.arch.hyper_connections import concat_streams
from localllm.arch.ngram_embeddings import (
    NgramEmbeddingHyperparameters,
    add_ngram_embeddings,
    normalize_streams,
    read_ngram_embeddings,
)
from localllm.arch.rope import SECTIONS, add_sections

MOST_STREAMS, LARGEST_BLOCK = 16, 64
DELTA_STATES = 4  # states of a layer with the delta rule


@frozen
class BlockIndexerHyperparameters:
    """An indexer of blocks of keys.

    Attributes:
        heads, dim: number and dimension of its heads.  sizes: by layer, the tokens of a block, 0 for full attention.
        tokens: number of tokens of all selected blocks together.
    """

    heads: int
    dim: int
    sizes: tuple[int, ...]
    tokens: int


@frozen
class Qwen4ExpHyperparameters(Qwen35Hyperparameters):
    """The hyperparameters of Qwen 4.

    Attributes:
        streams: number of residual streams.  rank: of the matrix that mixes them.
    """

    streams: int
    rank: int
    blocks: BlockIndexerHyperparameters
    ngrams: NgramEmbeddingHyperparameters | None

    def list_states(self) -> Sequence[State]:  # type: ignore[override]
        return [state for layer in range(self.layers) for state in self.get_layer_states(layer)]

    def get_layer_states(self, layer: int) -> list[State]:
        """Return one layer's states.

        An attention layer has keys and values, and the indexer's keys of blocks and of the last tokens; any other has
        the delta rule's states, and those of the n-gram embeddings.
        """
        state, size = super().list_states()[layer], self.blocks.sizes[layer]
        if isinstance(state, RecurrentLayerState):
            has_sequences = self.ngrams and self.ngrams.layer == layer
            shapes = self.ngrams.list_state_shapes(self.streams * self.width) if self.ngrams and has_sequences else []
            return [replace(state, shapes=(*state.shapes, *shapes))]
        index = [LatentState(layer, self.blocks.dim, self.blocks.dim, is_index=True)] if size else []
        return [state, *index, *([RecurrentLayerState(layer, ((size - 1, self.blocks.dim),))] if size > 1 else [])]


def read(fields: HyperparameterReader) -> Qwen4ExpHyperparameters:
    common, heads, delta = (
        fields.read_common_fields(),
        read_attention(fields, interleaved=False),
        read_delta_net(fields),
    )
    attends = read_attention_layers(fields, common["layers"])
    if delta.key_dim != delta.value_dim:
        raise fields.make_unsupported_error(
            f"the key and value dimensions of the delta rule must be equal (found {delta.key_dim}, {delta.value_dim})"
        )
    if not fields.has(SECTIONS):
        raise fields.make_value_error(SECTIONS, "four integers")
    rope = add_sections(fields, heads.rope, interleaved=True)
    if rope.unrotated:
        raise fields.make_unsupported_error(f"{fields.format_key(SECTIONS)} must cover all rotated pairs")
    streams, rank = fields.read_count("hyper_connection.count"), fields.read_count("hyper_connection.low_rank")
    if not 2 <= streams <= MOST_STREAMS:
        raise fields.make_value_error("hyper_connection.count", f"a number from 2 to {MOST_STREAMS}")
    fields.read_count("expert_count")
    return Qwen4ExpHyperparameters(
        **common,
        attention=replace(heads, rope=rope),
        epsilon=fields.read_epsilon(RMS_EPSILON),
        delta=delta,
        attends=attends,
        score_scale=heads.head_dim**-0.5,
        routing=read_routing(fields),
        streams=streams,
        rank=rank,
        blocks=read_block_indexer(fields, rope),
        ngrams=read_ngram_embeddings(fields, attends, DELTA_STATES),
    )


def read_block_indexer(fields: HyperparameterReader, rope: RopeParameters) -> BlockIndexerHyperparameters:
    """Read the attention.indexer.* keys. Raises ModelError."""
    heads, dim, tokens = (
        fields.read_count(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k")
    )
    sizes = fields.read_counts("attention.compress_ratios", fields.read_layer_count(), 0)
    if dim < rope.dims:
        raise fields.make_error(f"attention.indexer.key_length {dim} is too small for rope.dimension_count {rope.dims}")
    if any(size > LARGEST_BLOCK or tokens % max(size, 1) for size in sizes):
        expected = (
            f"integers from 0 to {LARGEST_BLOCK} that divide {tokens}, {fields.format_key('attention.indexer.top_k')}"
        )
        raise fields.make_value_error("attention.compress_ratios", expected)
    return BlockIndexerHyperparameters(heads, dim, sizes, tokens)


def forward(b: Builder, w: Weights, h: Qwen4ExpHyperparameters) -> Activation:
    x = concat_streams(b, [b.embed(w.token_embd, b.ids)] * h.streams)
    for layer in range(h.layers):
        block, states = w.get_layer(layer), h.get_layer_states(layer)
        if h.ngrams and h.ngrams.layer == layer:
            x = add_ngram_embeddings(b, w, block, h, states[0], x)  # type: ignore[arg-type]
        y, add = enter_sublayer(b, block, h, x, "hc_attn")
        x = add(apply_mixer(b, block, h, states, y))
        y, add = enter_sublayer(b, block, h, x, "hc_ffn")
        x = add(
            b.add(
                apply_mixture_of_experts(b, block, h.routing, y, b.swiglu),  # type: ignore[arg-type]
                apply_gated_shared_expert(b, block, y, b.swiglu),
            )
        )
    y, _ = average_streams(b, w, h, b.select(x, b.wanted), "output_hc")
    return b.linear(y, w.get("output") or w.token_embd)


def enter_sublayer(
    b: Builder, w: Weights, h: Qwen4ExpHyperparameters, x: Activation, name: str
) -> tuple[Activation, Callable[[Activation], Activation]]:
    """Return the input of a sublayer, and a function that adds the sublayer's output to the streams."""
    y, normed = average_streams(b, w, h, x, name)
    weights = b.linear(normed, w.require(f"{name}_inject").require_shape(h.streams, h.streams * h.width))
    weights = b.scale(b.sigmoid(b.scale(weights, 1 / h.streams)), 2.0)
    return y, lambda output: b.add(x, b.mix_streams(output, weights, 1))


def average_streams(
    b: Builder, w: Weights, h: Qwen4ExpHyperparameters, x: Activation, name: str
) -> tuple[Activation, Activation]:
    """Return the gated mean of the normalized streams, and these streams.

    The gate of each element is computed from all streams.
    """
    normed, width = normalize_streams(b, h, x, w.require(f"{name}_norm").flatten()), h.width
    narrow = b.linear(normed, w.require(f"{name}_down").require_shape(h.rank, h.streams * width))
    narrow = b.scale(narrow, 1 / h.streams)
    gates = b.linear(
        b.multiply(narrow, b.sigmoid(narrow)), w.require(f"{name}_up").require_shape(h.streams * width, h.rank)
    )
    gated = b.multiply(normed, b.sigmoid(gates))
    parts = [b.slice_columns(gated, i * width, (i + 1) * width) for i in range(h.streams)]
    return b.scale(reduce(b.add, parts), 1 / h.streams), normed


def apply_mixer(
    b: Builder, w: Weights, h: Qwen4ExpHyperparameters, states: Sequence[State], x: Activation
) -> Activation:
    """Mix a layer's tokens by the delta rule, with a sigmoid gate, or by attention."""
    state, *indexer_states = states
    if isinstance(state, PagedState):
        return apply_gated_attention(b, w, h, state, x, select_blocks(b, w, h, indexer_states, x))
    assert isinstance(state, RecurrentLayerState)
    return apply_delta_net(b, w, h, state, x, lambda gate, y: b.multiply(y, b.sigmoid(gate)))


def select_blocks(
    b: Builder, w: Weights, h: Qwen4ExpHyperparameters, states: Sequence[State], x: Activation
) -> Activation | None:
    """Select the keys that tokens attend to, None for all of them.

    These are the keys of the selected blocks, and those after the last whole block. A block's key is rotated like its
    first token.
    """
    dim, of_queries = h.blocks.dim, h.blocks.heads * h.blocks.dim
    q_proj, k_proj = (
        w.require(f"indexer.{k}_proj").require_shape(n, h.width) for k, n in (("q", of_queries), ("k", dim))
    )
    q_norm, k_norm = (w.require(f"indexer.{kind}_norm").require_shape(dim) for kind in "qk")
    if not states:
        b.ignore(q_proj, k_proj, q_norm, k_norm)
        return None
    index, *last = states
    size, rope = h.blocks.sizes[index.layer], replace(h.attention.rope, head_dim=dim)
    q = b.rms_norm(b.linear(x, q_proj), q_norm, h.epsilon, dim)
    k = b.linear(x, k_proj)
    k = b.mean(k, last[0], 0) if last else k  # type: ignore[arg-type]
    k = b.rope(b.rms_norm(k, k_norm, h.epsilon), replace(rope, position_offset=size - 1), b.positions)
    return b.select_keys(b.rope(q, rope, b.positions), k, None, index, h.blocks.tokens // size, size)  # type: ignore[arg-type]


CHECKPOINTS = {
    "Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration": {
        "like": "Qwen3_5MoeForCausalLM", "layer": "@qwen.list_qwen4exp_tensors",
        "whole": "@qwen.list_qwen4exp_global_tensors",
        "last_norm": "", "named": "", "named_as": "qwen35moe",
        "unread": r"(?:model\.)?mtp\..*"
        r"|.*\.ple_embedding\.(?:layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes)",
        "only": {"attention_bias": False, "mtp_num_hidden_layers": (0, 1), "indexer_kv_heads": 1},
        "read": "@qwen.read_qwen4exp", "of_tensors": "@qwen.read_constants",
    },
}  # fmt: skip
