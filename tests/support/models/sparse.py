"""Models whose tokens see blocks of keys that an indexer chooses."""

import numpy as np

from .declaration import UNTIED, Dims, Shapes, declare
from .experts import ABSORBED, COMPRESSED_QUERIES, LATENT, ROUTER_BIAS
from .experts2 import BESIDE, BIASED_BESIDE, EIGHT, GUESSING, NORMED, SIGMOID, SOFTMAX
from .experts3 import HEAD, INDEXER
from .linear import DELTA, TAPS
from .numbers import Numbers
from .parts import ATTENTION, GATED, HEAD_NORMS, NORMS

# ---- MiniMax M3 ----

INDEX = {
    "indexer.q_proj.weight": "kv_heads * index_dim, width",
    "indexer.k_proj.weight": "index_dim, width",
    "indexer.q_norm.weight": "index_dim",
    "indexer.k_norm.weight": "index_dim",
}


def minimax_m3(more: dict, **dims):
    """Declare MiniMax M3: the first `dense` layers have neither experts nor an indexer.

    Where others choose, llama.cpp needs its flash attention, which rounds keys of dense layers.
    """

    def layer(d: Dims, number: int) -> Shapes:
        sparse = {**BIASED_BESIDE, **INDEX}
        return {**NORMS, **ATTENTION, **HEAD_NORMS, **(GATED if number < d.dense else sparse)}

    def metadata(d: Dims) -> dict:
        found = {"head_count": d.kv_heads, "key_length": d.index_dim, "top_k": d.blocks, "block_size": d.block}
        found = {f"attention.indexer.{name}": value for name, value in {**found, "local_blocks": d.local}.items()}
        found |= {"leading_dense_block_count": d.dense, "expert_shared_count": 1}
        return {**found, "rope.freq_base": 5e4, **more}

    given = {"heads": 6, "kv_heads": 3, "head_dim": 32, "rotated": 16, "index_dim": 24, "blocks": 4, "block": 4}
    given |= {"local": 1, "dense": 0, "layers": 3, "shared": 1, **EIGHT}
    return declare("minimax-m3", layer, UNTIED, metadata, **{**given, **dims})


# ---- GLM 5.3 Flash ----

MIXED = {
    f"hc_{half}_{part}.weight": shape
    for half in ("attn", "ffn")
    for part, shape in (("fn", "24, 4 * width"), ("base", "24"), ("scale", "3"))
}
POOLED = {
    **INDEXER,
    "indexer_compressor_gate.weight": "index_dim, width",
    "indexer_compressor_ape.weight": "pool, index_dim",
}
KEEPING = {**DELTA, "ssm_a": "heads"}


def glm5_next(kinds: str, more: dict, **dims):
    """kinds: of layers, "c" chooses keys, "a" attends to what was chosen before. The first has no experts."""

    def layer(d: Dims, number: int) -> Shapes:
        mix = {**COMPRESSED_QUERIES, **LATENT, **ABSORBED} if kinds[number] != "m" else KEEPING
        mix = {**mix, **POOLED} if kinds[number] == "c" else mix
        return {**NORMS, **MIXED, **mix, **(BIASED_BESIDE if number else GATED)}

    def metadata(d: Dims) -> dict:
        found = {"q_lora_rank": d.q_rank, "kv_lora_rank": d.kv_rank, "key_length": d.kv_rank, "value_length": d.kv_rank}
        found |= {"key_length_mla": d.nope, "value_length_mla": d.value, "layer_norm_epsilon": 2e-2}
        found |= {"head_count_kv": [int(kind != "m") for kind in kinds], "indexer.kpool_select_tail": True}
        found |= {"indexer.head_count": d.index_heads, "indexer.key_length": d.index_dim, "indexer.kpool": d.pool}
        found = {f"attention.{name}": value for name, value in {**found, "indexer.top_k": d.pools * d.pool}.items()}
        found["attention.indexer.types"] = [int(kind == "c") for kind in kinds]
        found |= {"hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": d.iterations}
        found |= {"hyper_connection.epsilon": 0.01, "kda.head_dim": d.delta, "ssm.conv_kernel": d.taps}
        return {**found, "leading_dense_block_count": 1, "expert_shared_count": 1, "rope.dimension_count": 0, **more}

    given = {"heads": 4, "kv_heads": None, "q_rank": 40, "kv_rank": 48, "nope": 24, "value": 20, "rotated": 0}
    given |= {"delta": 24, "taps": 4, "index_heads": 16, "index_dim": 32, "pool": 4, "pools": 3, "iterations": 5}
    given |= {"shared": 1, "width": 64, "layers": len(kinds), **EIGHT}
    return declare("glm5-next", layer, UNTIED, metadata, TAPS, **{**given, **dims})


# ---- DeepSeek-V4 ----


def compressor(name: str, dim: str) -> Shapes:
    """Declare the tensors that compress blocks, `parts` rows for each token."""
    return {
        f"{name}_compressor_kv.weight": f"parts * {dim}, width",
        f"{name}_compressor_gate.weight": f"parts * {dim}, width",
        f"{name}_compressor_ape.weight": f"ratio, parts * {dim}",
        f"{name}_compressor_norm.weight": dim,
    }


WINDOWED = {
    **NORMS, **MIXED, **BESIDE, "attn_sinks.weight": "heads", "attn_q_a.weight": "q_rank, width",
    "attn_q_a_norm.weight": "q_rank", "attn_q_b.weight": "heads * head_dim, q_rank",
    "attn_kv.weight": "head_dim, width", "attn_kv_a_norm.weight": "head_dim",
    "attn_output_a.weight": "groups * o_rank, heads * head_dim // groups",
    "attn_output_b.weight": "width, groups * o_rank",
}  # fmt: skip
CHOOSING = {
    **compressor("indexer", "index_dim"), "indexer.proj.weight": "index_heads, width",
    "indexer.attn_q_b.weight": "index_heads * index_dim, q_rank",
}  # fmt: skip


def of_ratio(shapes: Shapes, ratio: int) -> Shapes:
    """Of blocks of so many tokens, which overlap if they are chosen."""
    return {
        name: shape.replace("ratio", str(ratio)).replace("parts", str(1 + (ratio == 4)))
        for name, shape in shapes.items()
    }


def deepseek4(ratios: list[int], hashed: int, more: dict, guessing: int = 0, **dims):
    """ratios: of each layer, tokens of the blocks that it sees. The first `hashed` layers go by ids."""

    def layer(d: Dims, number: int) -> Shapes:
        ratio = ratios[number]
        far = compressor("attn", "head_dim") | (CHOOSING if ratio == 4 else {}) if ratio else {}
        routed = {"ffn_gate_tid2eid.weight": "vocab, used"} if number < hashed else ROUTER_BIAS
        guess = GUESSING if number >= d.layers - guessing else {}
        return {**WINDOWED, **of_ratio(far, ratio), **routed, **guess}

    def metadata(d: Dims) -> dict:
        found = {"q_lora_rank": d.q_rank, "output_group_count": d.groups, "output_lora_rank": d.o_rank}
        found |= {"indexer.head_count": d.index_heads, "indexer.key_length": d.index_dim, "indexer.top_k": d.blocks}
        found |= {"compress_ratios": ratios, "compress_rope_freq_base": 4e4}
        found = {f"attention.{name}": value for name, value in found.items()}
        found |= {"hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": d.iterations}
        found |= {"hyper_connection.epsilon": 0.01, "hash_layer_count": hashed, "expert_gating_func": 4}
        found |= {"nextn_predict_layers": guessing} if guessing else {}
        return {**found, "expert_shared_count": d.shared, "embedding_length_out": 4 * d.width, **more}

    def experts(numbers: Numbers, shape: tuple[int, ...]) -> np.ndarray:
        """Of each token other ones, as in released tables."""
        return ((numbers.integers(shape[0], 4)[:, None] + np.arange(shape[1])) % 4).astype(np.int32)

    given = {"heads": 4, "kv_heads": 1, "head_dim": 32, "rotated": 16, "q_rank": 40, "groups": 2, "o_rank": 24}
    given |= {"index_heads": 16, "index_dim": 64, "blocks": 3, "window": 9, "iterations": 5, "shared": 1, "width": 64}
    head = {name: shape.replace("streams", "4") for name, shape in HEAD.items()}
    values = {"ffn_gate_tid2eid.weight": experts}
    dims = {**given, "layers": len(ratios), **EIGHT, **dims}
    return declare("deepseek4", layer, {**UNTIED, **head}, metadata, values, **dims)


SPARSE = {
    "deepseek4": deepseek4(
        [0, 4, 128, 4],
        2,
        {
            **NORMED,
            "expert_weights_scale": 1.5,
            "rope.freq_base": 5e3,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "swiglu_clamp_exp": [0.6, 0.0, 0.5, 0.9],
            "swiglu_clamp_shexp": [0.0, 0.7, 0.8, 0.6],
        },
    ),
    "deepseek4_odd": deepseek4(
        [4, 0, 4, 0],
        0,
        {
            "expert_weights_norm": False,
            "expert_weights_scale": 0.0,
            "rope.scaling.factor": 2.0,
            "swiglu_clamp_exp": 0.7,
        },
        guessing=1,
        heads=6,
        groups=3,
        head_dim=40,
        rotated=24,
        index_heads=13,
        blocks=7,
        iterations=1,
        shared=2,
        width=68,
        window=3,
    ),
    "glm5_next": glm5_next(
        "mcam", {**NORMED, "expert_weights_scale": 2.5, "kda.gate_lower_bound": -4.0, "swiglu_clamp_exp": [0.6] * 4}
    ),
    "glm5_next_odd": glm5_next(
        "cm",
        {**SIGMOID, "swiglu_clamp_exp": [0.0, 0.5], "swiglu_clamp_shexp": [0.7, 0.0]},
        heads=3,
        pool=3,
        pools=4,
        index_dim=24,
        index_heads=13,
        delta=20,
        iterations=1,
    ),
    "minimax_m3": minimax_m3({**SIGMOID, **NORMED, "expert_weights_scale": 2.0}),
    "minimax_m3_whole": minimax_m3({**SIGMOID, **NORMED}, blocks=32, dense=1, layers=2),
    "minimax_m3_odd": minimax_m3(SOFTMAX, heads=4, kv_heads=2, index_dim=40, blocks=3, block=5, local=2, layers=2),
}
