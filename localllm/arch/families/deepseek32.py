"""DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv 2512.02556), GLM 5 (Zhipu AI 2026).

Unlike DeepSeek-V3: a token attends only to the keys that an indexer selects (sparse attention). The indexer has queries
of its own, computed from the low-rank ones, one key for all its heads, cached beside the latent row, and a weight for
each head. Some layers of GLM 5.2 reuse the selection of the last layer with an indexer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.arch.decoder import compute_logits
from localllm.arch.families.deepseek2 import (
    DeepSeek2Hyperparameters,
    project_from_low_rank,
    project_low_rank_queries,
    read_latent_attention,
)
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    HyperparameterReader,
    LatentState,
    PagedState,
    RopeParameters,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, apply_shared_expert, read_file_routing

KEY_EPSILON = 1e-6  # of the norm of an indexer's keys
TYPES = "attention.indexer.types"
LONG = 1 << 20  # files with such contexts do not list the layers with an indexer: the first two, then every fourth


@frozen
class IndexerHyperparameters:
    """An indexer, which selects `count` keys in some of the layers.

    Attributes:
        heads, dim: its heads and their dimension.  at_end: whether RoPE rotates the end of a head, not its beginning.
        layers: those that have an indexer.
    """

    heads: int
    dim: int
    rope: RopeParameters
    at_end: bool
    epsilon: float
    count: int
    layers: tuple[int, ...]

    def list_states(self) -> list[LatentState]:
        """Return the indexers' states."""
        return [LatentState(layer, self.dim, self.dim, is_index=True) for layer in self.layers]


@frozen
class DeepSeek32Hyperparameters(DeepSeek2Hyperparameters):
    indexer: IndexerHyperparameters

    def list_states(self) -> Sequence[LatentState | PagedState]:
        return [*super().list_states(), *self.indexer.list_states()]


def read(fields: HyperparameterReader) -> DeepSeek32Hyperparameters:
    if fields.read_raw("attention.key_length_mla") is None:
        raise fields.make_unsupported_error(
            f"{fields.arch} models with fused matrices of keys and values are not supported"
        )
    common, is_glm = read_latent_attention(fields), fields.arch == "glm-dsa"
    layers = common["layers"]
    usual = [1] * layers
    if is_glm and fields.read_count("context_length") >= LONG:
        usual = [int(layer < 2 or layer % 4 == 2) for layer in range(layers)]
    return DeepSeek32Hyperparameters(
        **common,
        routing=read_file_routing(fields, SIGMOID if is_glm else None),
        indexer=read_indexer(fields, common["rope"], is_glm, usual),
    )


def read_indexer(
    fields: HyperparameterReader, rope: RopeParameters, interleaved: bool, usual: Sequence[int],
    needs_first: bool = True, at_end: bool = False, epsilon: float = KEY_EPSILON,
) -> IndexerHyperparameters:  # fmt: skip
    """Read the indexer's hyperparameters. Raises ModelError.

    usual: whether each layer has an indexer, for files that do not list them.  needs_first: whether the first layer
    must have one, as in most models.
    """
    heads, dim, count = (
        fields.read_count(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k")
    )
    if rope.dims > dim - at_end:
        raise fields.make_error(f"attention.indexer.key_length {dim} is too small for rope.dimension_count {rope.dims}")
    expected, chooses = f"yes or no for each of {len(usual)} layers", list(usual)
    if fields.read_raw(TYPES) is not None:
        chooses = fields.read_array(TYPES, "biu", expected).tolist()
    if len(chooses) != len(usual) or not any(chooses[:1] if needs_first else chooses):
        raise fields.make_value_error(TYPES, expected)
    choosing = tuple(layer for layer, does in enumerate(chooses) if does)
    return IndexerHyperparameters(heads, dim, replace(rope, interleaved=interleaved), at_end, epsilon, count, choosing)


def forward(b: Builder, w: Weights, h: DeepSeek32Hyperparameters) -> Activation:
    x, selected = b.embed(w.token_embd, b.ids), None
    for state in h.list_layer_states():
        block = w.get_layer(state.layer)
        y = b.rms_norm(x, block.attn_norm, h.epsilon)
        narrow = project_low_rank_queries(b, block, h.epsilon, y)
        if index := find_index_state(h.indexer, state.layer):
            selected = select_indexed_keys(b, block, h.indexer, index, narrow, y)
        attended = attend_to_selected(b, block, h, state, AttentionScores(h.heads, h.scale, chosen=selected), narrow, y)
        x = b.add(x, b.linear(attended, block.attn_output))
        y = b.rms_norm(x, block.ffn_norm, h.epsilon)
        x = b.add(x, apply_feed_forward_or_experts(b, block, h.routing, y, b.swiglu, apply_shared_expert))
    return compute_logits(b, w, h, x)


def find_index_state(indexer: IndexerHyperparameters, layer: int) -> LatentState | None:
    """Return the state of a layer's indexer; None if it has none."""
    return next((state for state in indexer.list_states() if state.layer == layer), None)


def select_indexed_keys(
    b: Builder, w: Weights, indexer: IndexerHyperparameters, index: LatentState, narrow: Activation, x: Activation
) -> Activation:
    """Select the keys that tokens attend to.

    The heads' weights are not scaled, as that has no effect.
    """
    w.require_biases("indexer.k_norm")
    q = b.linear(narrow, w.require("indexer.attn_q_b"))
    k = b.layer_norm(b.linear(x, w.require("indexer.attn_k")), w.require("indexer.k_norm"), indexer.epsilon)
    q, k = rotate_index_heads(b, indexer, q, indexer.heads), rotate_index_heads(b, indexer, k, 1)
    return b.select_keys(q, k, b.linear(x, w.require("indexer.proj")), index, indexer.count)


def rotate_index_heads(b: Builder, indexer: IndexerHyperparameters, x: Activation, heads: int) -> Activation:
    """Apply RoPE to an indexer's heads."""
    if not indexer.at_end:
        return b.rope(x, replace(indexer.rope, head_dim=indexer.dim), b.positions)
    return rotate_tail(b, indexer.rope, x, heads, indexer.dim)


def rotate_tail(b: Builder, rope: RopeParameters, x: Activation, heads: int, dim: int) -> Activation:
    """Apply RoPE to the end of heads of `dim` dimensions.

    rope: its dims are those of the rotated end.
    """
    plain = dim - rope.dims
    behind = b.rope(b.slice_columns(x, plain, dim, dim), rope, b.positions)
    return b.concat_heads(b.slice_columns(x, 0, plain, dim), behind, heads)


def attend_to_selected(
    b: Builder, w: Weights, h: DeepSeek2Hyperparameters, state: Any, scores: AttentionScores, narrow: Activation,
    x: Activation, key_norm: Weight | None = None,
) -> Activation:  # fmt: skip
    """Compute the heads' outputs from latent rows.

    Queries are multiplied by the keys' matrices, and results by the values' matrices.
    """
    plain, rotated, latent, key = project_from_low_rank(b, w, h, b.linear(narrow, w.attn_q_b), x, key_norm=key_norm)
    q = b.concat_heads(b.head_linear(plain, w.attn_k_b), rotated, h.heads)
    return b.head_linear(b.attend(q, b.concat_heads(latent, key, 1), None, state, scores), w.attn_v_b)


CHECKPOINTS = {
    "DeepseekV32ForCausalLM": {
        "like": "DeepseekV3ForCausalLM", "layer": "@deepseek.list_deepseek2_tensors @deepseek.list_indexer_tensors",
        "named_as": "deepseek2", "read": "@deepseek.read_deepseek32",
    },
    "GlmMoeDsaForCausalLM": {
        "arch": "glm-dsa", "like": "DeepseekV32ForCausalLM",
        "layer": "@deepseek.list_deepseek2_tensors @deepseek.list_indexer_tensors",
        "only": {"rope_interleave": True, "moe_layer_freq": 1, "attention_bias": False},
        "read": "@deepseek.read_glm_dsa",
        "defaults": {
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "n_shared_experts": 1, "rms_norm_eps": 1e-5, "first_k_dense_replace": 3,
        },
    },
}  # fmt: skip
