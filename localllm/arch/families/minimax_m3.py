"""MiniMax M3 (MiniMax 2026).

Unlike MiniMax M2: each head is normalized on its own; the first layers have no experts, the others also a shared one;
SwiGLU as in gpt-oss. After the first layers, each key-value head attends only to the blocks of keys that an indexer
selects for it, with queries and a key of its own, and to the last blocks (MiniMax Sparse Attention).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from localllm.arch.attention import TransformerHyperparameters, attend, normalize_heads, project_qkv
from localllm.arch.families.gpt_oss import LIMIT, SHARPNESS
from localllm.arch.family import Activation, Builder, HyperparameterReader, LatentState, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_feed_forward_or_experts, apply_shared_expert, read_file_routing


@frozen
class MiniMaxM3Hyperparameters(TransformerHyperparameters):
    """The hyperparameters of MiniMax M3.

    Attributes:
        dense: number of first layers, with full attention.  index_dim: the dimension of an indexer's heads.
        blocks, block: the number of selected blocks, and their size in positions.
        local: number of last blocks that are always selected.
    """

    dense: int
    index_dim: int
    blocks: int
    block: int
    local: int

    def list_states(self) -> Sequence[PagedState | LatentState]:  # type: ignore[override]
        """Return keys and values, and the keys of the indexers."""
        indexes = (
            LatentState(n, self.index_dim, self.index_dim, is_index=True) for n in range(self.dense, self.layers)
        )
        return [*super().list_states(), *indexes]

    def get_indexer_state(self, layer: int) -> LatentState | None:
        """Return the state of a layer's indexer."""
        return LatentState(layer, self.index_dim, self.index_dim, is_index=True) if layer >= self.dense else None


def read(fields: HyperparameterReader) -> MiniMaxM3Hyperparameters:
    common = TransformerHyperparameters.read_shared_fields(fields, interleaved=False)
    names = ("head_count", "key_length", "top_k", "block_size", "local_blocks")
    heads, dim, blocks, block, local = (fields.read_count(f"attention.indexer.{name}") for name in names)
    dense, dims = fields.read_count("leading_dense_block_count", 0), common["attention"].rope.dims
    if {*common["attention"].kv_heads} != {heads} or dim < dims or local > blocks:
        problem = f"attention.indexer: head_count {heads}, key_length {dim}, top_k {blocks} and local_blocks {local}"
        raise fields.make_error(f"{problem} are inconsistent")
    return MiniMaxM3Hyperparameters(
        **common,
        routing=read_file_routing(fields, None),
        dense=dense,
        index_dim=dim,
        blocks=blocks,
        block=block,
        local=local,
    )


def block(b: Builder, w: Weights, h: MiniMaxM3Hyperparameters, state: PagedState, x: Activation) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    q, k, v = project_qkv(b, w, h, state.layer, y)
    selected = None
    if index := h.get_indexer_state(state.layer):
        selected = select_blocks(b, w, h, index, y)
        w.require_biases("exp_probs_b")
    y = attend(b, h, state, *normalize_heads(b, w, h, q, k), v, chosen=selected)
    x, gate = b.add(x, b.linear(y, w.attn_output)), partial(b.swiglu_limited, sharpness=SHARPNESS, limit=LIMIT)
    return b.add(
        x,
        apply_feed_forward_or_experts(b, w, h.routing, b.rms_norm(x, w.ffn_norm, h.epsilon), gate, apply_shared_expert),
    )


def select_blocks(b: Builder, w: Weights, h: MiniMaxM3Hyperparameters, index: LatentState, x: Activation) -> Activation:
    """Select the keys that the heads attend to."""

    def heads(name: str) -> Activation:
        y, norm = b.linear(x, w.require(f"indexer.{name}_proj")), w.require(f"indexer.{name}_norm")
        y = b.rms_norm(y, norm.require_shape(h.index_dim), h.epsilon, h.index_dim)
        return b.rope(y, replace(h.attention.rope, head_dim=h.index_dim), b.positions)

    return b.select_key_blocks(heads("q"), heads("k"), index, h.blocks, h.block, h.local)


AFTER = (  # with experts
    "ffn_gate_shexp ffn_up_shexp ffn_down_shexp exp_probs_b.bias "
    "indexer.q_proj.weight indexer.k_proj.weight indexer.q_norm.weight indexer.k_norm.weight"
)
CHECKPOINTS = {
    "MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration": {
        "layer": "attention head_norms norms", "parts": {"< leading_dense": ("gated", f"experts {AFTER}")},
        "tensors": {
            "indexer.q_proj.weight": "full self_attn.index_q_proj.weight: index_queries width",
            "indexer.k_proj.weight": "full self_attn.index_k_proj.weight: index_dim width",
            "indexer.q_norm.weight": "offset self_attn.index_q_norm.weight: index_dim",
            "indexer.k_norm.weight": "offset self_attn.index_k_norm.weight: index_dim",
            "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj.weight: shared_hidden width",
            "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj.weight: shared_hidden width",
            "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj.weight: width shared_hidden",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction.bias: experts",
        },
        "offset_norms": True, "sees": True, "named_as": "dots1", "unread": r"patch_merge_mlp\..*",
        "activations": "silu swigluoai", "partial_rope": True,
        "only": {
            "use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True, "swiglu_alpha": SHARPNESS,
            "swiglu_limit": LIMIT, "scoring_func": "sigmoid", "qk_norm_type": "per_head",
        },
        "keys": {"routed_scaling_factor": "expert_weights_scale"},
        "metadata": {"expert_weights_norm": True, "expert_gating_func": 2}, "read": "@minimax.read_minimax_m3",
        "defaults": {"rope_theta": 5e6},
    },
}  # fmt: skip
