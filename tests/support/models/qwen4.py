"""Qwen 4: embeddings of token sequences, residual streams through gates, attention to blocks of keys."""

import numpy as np

from .declaration import EMBEDDING, Dims, Shapes, declare
from .experts2 import EIGHT
from .recurrent import DELTA_NET, GATED_ATTENTION, MIXTURE, STRENGTHS, ssm
from .sparse import INDEX

INDEX_OF_BLOCKS = {**INDEX, "indexer.q_proj.weight": "index_heads * index_dim, width"}
STREAMS = {"norm": "streams * width", "down": "rank_of_gates, streams * width", "up": "streams * width, rank_of_gates"}
SEQUENCES = {
    "ple_key.weight": "streams * width, width",
    "ple_value.weight": "width, width",
    "ple_norm_key.weight": "streams * width",
    "ple_norm_query.weight": "streams * width",
    "ple_norm_conv.weight": "streams * width",
    "ple_conv1d.weight": "streams * width, near",
}
FACTORS = 0x2C9277B5D1A3, 0x5851F42D4C95, 0x14057B7EF767, 0x9E3779B97F4B  # of ids
PRIMES = 61, 67, 71, 73, 79, 83  # rows of the table, for each hash


def qwen4exp(kinds: str, more: dict, end: int = 0, fused: bool = False, tied: bool = False, **dims):
    """kinds: of layers, "a" attends, "s" has sequences of tokens. end: a token at which these begin anew.

    llama.cpp chooses keys, not blocks: up to block - 1 of one block more where fewer tokens stand behind the last whole
    one. So blocks are of one token, or all are seen, but in PARTLY.
    """
    halves = [f"hc_{half}" for half in ("attn", "ffn")]
    of_halves = {f"{half}_{part}.weight": shape for half in halves for part, shape in STREAMS.items()}
    of_halves |= {f"{half}_inject.weight": "streams, streams * width" for half in halves}
    apart = {"ffn_gate_exps.weight", "ffn_up_exps.weight"}
    of_both = {"ffn_gate_up_exps.weight": "experts, 2 * expert_hidden, width"}
    experts = {**{name: shape for name, shape in MIXTURE.items() if name not in apart}, **of_both} if fused else MIXTURE

    def layer(d: Dims, number: int) -> Shapes:
        mix = {**GATED_ATTENTION, **INDEX_OF_BLOCKS} if kinds[number] == "a" else {**DELTA_NET, **STRENGTHS}
        return {**of_halves, **mix, **experts, **(SEQUENCES if kinds[number] == "s" else {})}

    def metadata(d: Dims) -> dict:
        indexer = {"head_count": d.index_heads, "key_length": d.index_dim, "top_k": d.blocks * max(d.block, 1)}
        found = {**ssm(d), **{f"attention.indexer.{name}": value for name, value in indexer.items()}}
        found |= {"hyper_connection.count": d.streams, "hyper_connection.low_rank": d.rank_of_gates}
        found |= {"rope.freq_base": 1e5, "expert_shared_feed_forward_length": d.shared_hidden}
        if d.block:
            found["attention.compress_ratios"] = [d.block * (kind == "a") for kind in kinds]
        return {**found, **(of_sequences(d) if "s" in kinds else {}), **more}

    def of_sequences(d: Dims) -> dict:
        sizes = np.array(PRIMES[: d.hashes], np.uint64)
        found = {"layers": [kinds.index("s")], "ngram_size": d.length, "heads_per_ngram": d.hashes // (d.length - 1)}
        found |= {"conv_kernel": d.near, "eos_token_id": end, "head_vocab_sizes": sizes}
        found |= {"layer_multipliers": np.array(FACTORS[: d.length], np.uint64), "head_offsets": sizes.cumsum() - sizes}
        found = {f"ple.{name}": value for name, value in found.items()}
        return {**found, "embedding_length_per_layer_input": d.width // d.hashes}

    whole = {**EMBEDDING, **{f"output_hc_{part}.weight": shape for part, shape in STREAMS.items()}}
    whole |= {} if tied else {"output.weight": "vocab, width"}
    whole |= {"per_layer_token_embd.weight": f"{sum(PRIMES)}, width // hashes"} if "s" in kinds else {}
    given = {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotated": 16, "state": 24, "inner": 96, "rank": 4, "groups": 2}
    given |= {"taps": 4, "streams": 4, "rank_of_gates": 20, "index_heads": 13, "index_dim": 24, "block": 4}
    given |= {"blocks": 32, "shared_hidden": 40, "hidden": 0, "width": 64, "layers": len(kinds), **EIGHT}
    signs = {"output_hc_norm.weight": lambda n, shape: n.uniform(shape, 0.5, 1.5) * n.signs(shape)} if tied else {}
    return declare("qwen4exp", layer, whole, metadata, signs, **{**given, **dims})


SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
QWEN4 = {
    "qwen4exp": qwen4exp(
        "dsda", {**SECTIONS, "full_attention_interval": 4}, 142,
        length=3, hashes=4, near=4, width=128, kv_heads=4, groups=4,
    ),
    "qwen4exp_blocks_of_one": qwen4exp(
        "daa", {**SECTIONS, "attention.recurrent_layers": [True, False, False]}, fused=True, tied=True,
        block=1, blocks=6, streams=3, index_dim=40,
    ),
    "qwen4exp_odd": qwen4exp(
        "sa", {**SECTIONS, "full_attention_interval": 2, "ple.image_token_id": 5}, 221,
        length=2, hashes=1, near=3, width=75, block=0, streams=2, rank_of_gates=7, taps=3, heads=3, kv_heads=1,
    ),
}  # fmt: skip
# llama.cpp's rows are right in each fourth place, from the third on: where three tokens stand behind blocks.
PARTLY = {
    "qwen4exp_blocks": qwen4exp(
        "sa", {**SECTIONS, "full_attention_interval": 2}, 7,
        length=4, hashes=3, near=2, width=66, block=4, blocks=3, index_dim=32,
    ),
}  # fmt: skip
RIGHT = slice(2, None, 4)
