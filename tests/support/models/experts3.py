"""Decoders with a mixture of experts that came later, and dense ones of their time."""

from dataclasses import replace

import numpy as np

from .declaration import EMBEDDING, TIED, UNTIED, Dims, Shapes, declare
from .dense import FULL, LLAMA, WIDE, YARN
from .dense2 import with_own
from .experts import ABSORBED, COMPRESSED_QUERIES, FOUR, LATENT, MIXTURE, QUERIES
from .experts2 import BESIDE, BIASED_BESIDE, EIGHT, GROUPS, GUESSING, NORMED, QWEN, SIGMOID, SOFTMAX, mixed
from .golden import OF_IMAGES
from .linear import DELTA, kimi
from .numbers import Numbers
from .parts import ATTENTION, EXPERTS, GATED, HEAD_NORMS, NORMS, biased

LONG = {"rope_factors_long.weight": "head_dim // 2", "rope_factors_short.weight": "head_dim // 2"}
BIASED_HEAD = biased(UNTIED, "output_norm", "output")
SMALLER = {
    "ffn_gate_chexps.weight": "experts // together, small_hidden, width",
    "ffn_up_chexps.weight": "experts // together, small_hidden, width",
    "ffn_down_chexps.weight": "experts // together, width, small_hidden",
}
BARE = {**BESIDE, "exp_probs_b": "experts"}
INDEXER = {
    "indexer.attn_q_b.weight": "index_heads * index_dim, q_rank", "indexer.attn_k.weight": "index_dim, width",
    "indexer.k_norm.weight": "index_dim", "indexer.k_norm.bias": "index_dim",
    "indexer.proj.weight": "index_heads, width",
}  # fmt: skip
GATE = {"attn_gate.weight": "heads * head_dim, width"}
CENTERED_HEADS = {"attn_q_norm.weight": "heads, head_dim", "attn_k_norm.weight": "kv_heads, head_dim"}
HEAD_BIASES = {"attn_q_norm.bias": "heads, head_dim", "attn_k_norm.bias": "kv_heads, head_dim"}
CHAMELEON = {"vocab": 8196 + 300, "width": 64, "heads": 4, "kv_heads": 2}
GROVE = {"hidden": 48, "heads": 4, "kv_heads": 2, "head_dim": 32, "expert_hidden": 40, "small_hidden": 24}


def of_text(n: Numbers, shape: tuple[int, ...]) -> np.ndarray:
    """Rows for tokens, of which those of images say little."""
    rows = n.normal(shape, 2.5 * shape[-1] ** -0.5)
    rows[4:OF_IMAGES] *= 0.1
    return rows


def grovemoe(**dims):
    """Experts for groups of `together`."""
    return declare(
        "grovemoe", {**MIXTURE, **HEAD_NORMS, **SMALLER}, UNTIED,
        lambda d: {"experts_per_group": d.together, "expert_chunk_feed_forward_length": d.small_hidden,
                   "expert_group_scale": 0.3, "rope.freq_base": 5e4}, **GROVE, **dims,
    )  # fmt: skip


def hrm_text(whole, in_stack: int, cycles: int, low: int, **dims):
    """Two stacks; the number of layers counts every pass."""
    stacks = {**ATTENTION, **GATE, **GATED}
    metadata = {"hrm.layers_per_stack": in_stack, "hrm.h_cycles": cycles, "hrm.l_cycles": low, "hrm.prefix_lm": True,
                "embedding_scale": 1.7, "rope.freq_base": 5e4}  # fmt: skip
    return declare(
        "hrm_text", lambda d, number: stacks if number < 2 * in_stack else {}, {**whole, "hrm.z_l_init": "width"},
        metadata, layers=in_stack * cycles * (low + 1), **dims,
    )  # fmt: skip


STREAMS = {"hyper_connection.count": 3, "hyper_connection.epsilon": 0.02, "hyper_connection.magnitude": 1.7}
HYPER = {
    f"hc_{half}_{part}.weight": shape for half in ("attn", "ffn")
    for part, shape in (("fn", "2 * streams, streams * width"), ("base", "2 * streams"), ("scale", "2"))
}  # fmt: skip
HEAD = {"output_hc_fn.weight": "streams, streams * width", "output_hc_base.weight": "streams",
        "output_hc_scale.weight": "1"}  # fmt: skip


def hunyuan4(chooses: str, **more):
    """Streams, and indexers in some layers, or in none."""
    gate = {"attn_gate.weight": "heads * value, width", "attn_sinks.weight": "heads", **HYPER}
    made = indexed("hy_v4", chooses, always=gate, width=48, layers=3, index_dim=28, streams=3, **more)
    return replace(made, whole={**UNTIED, **HEAD})


def dots3note(**more):
    """Two of three layers see a window, by heads and latent rows of other sizes."""
    local = {"heads": "3", "kv_rank": "48", "nope": "20", "value": "24"}
    gate = {"attn_gate.weight": "heads, width", "attn_k_norm.weight": "rotated"}
    count = more.get("layers", 3)
    pattern = [layer % 3 != 1 or layer >= count - more.get("guessing", 0) for layer in range(count)]
    given = {"attention.head_count": [3 if one else 4 for one in pattern], "rope.freq_base": 1e5, **SIGMOID, **NORMED,
             "attention.key_length_swa": 64, "attention.value_length_swa": 48,
             "rope.freq_base_swa": 2e4, "attention.kv_lora_rank_swa": 48, "attention.key_length_mla_swa": 36,
             "attention.value_length_mla_swa": 24, "expert_weights_scale": 1.5}  # fmt: skip
    given |= {"attention.sliding_window_pattern": pattern, "attention.indexer.types": [int(not one) for one in pattern]}
    chooses = "".join(str(int(not one)) for one in pattern)
    made = indexed("dots3note", chooses, always=gate, metadata=given, window=9, **{"layers": count, **more})

    def layer(d: Dims, number: int) -> Shapes:
        found = made.layer(d, number)
        if number >= d.layers - d.guessing:
            found = {name: shape for name, shape in found.items() if name not in BIASED_BESIDE} | GATED
        return {name: with_own(shape, local) for name, shape in found.items()} if pattern[number] else found

    return replace(made, layer=layer)


def indexed(arch: str, chooses: str = "1" * 9, **more):
    """Latent attention with an indexer in some layers; the first layer is dense."""
    always, mixture = {**NORMS, **COMPRESSED_QUERIES, **LATENT, **ABSORBED, **more.get("always", {})}, BIASED_BESIDE

    def layer(d: Dims, number: int) -> Shapes:
        found = {**always, **(INDEXER if chooses[number] == "1" else {}), **(mixture if number else GATED)}
        return {**found, **(GUESSING if number >= d.layers - d.guessing else {})}

    def metadata(d: Dims) -> dict:
        found = {"attention.q_lora_rank": d.q_rank, "attention.kv_lora_rank": d.kv_rank}
        found |= {"attention.key_length": d.kv_rank + d.rotated, "attention.value_length": d.kv_rank}
        found |= {"attention.key_length_mla": d.nope + d.rotated, "attention.value_length_mla": d.value}
        found |= {"leading_dense_block_count": 1, "expert_shared_count": 1}
        if "1" in chooses:
            found |= {"attention.indexer.head_count": d.index_heads, "attention.indexer.key_length": d.index_dim}
            found |= {"attention.indexer.top_k": d.top_k}
        found |= {"nextn_predict_layers": d.guessing} if d.guessing else {}
        return {**found, **more.get("metadata", {})}

    given = {"heads": 4, "kv_heads": 1, "q_rank": 40, "kv_rank": 64, "nope": 24, "value": 32, "rotated": 16,
             "layers": 2, "index_heads": 16, "index_dim": 64, "top_k": 12, "shared": 1, "guessing": 0,
             **EIGHT}  # fmt: skip
    dims = {name: value for name, value in more.items() if name not in ("metadata", "always")}
    return declare(arch, layer, UNTIED, metadata, **{**given, **dims})


LING3_DELTA = {
    **{name: shape for name, shape in DELTA.items() if name not in ("ssm_f_b.weight", "ssm_g_b.weight")},
    "ssm_f_a.weight": "heads * delta, width", "ssm_g_a.weight": "heads * delta, width",
}  # fmt: skip


def ling3(kinds: str, queries: Shapes, metadata: dict, **dims):
    """Kimi Linear with gates and rotations."""
    made = kimi(kinds, LING3_DELTA, **dims)

    def layer(d: Dims, number: int) -> Shapes:
        found, attends = made.layer(d, number), kinds[number] == "a"
        if attends:
            found = {name: shape for name, shape in found.items() if name != "attn_q.weight"} | queries
            found |= {"attn_gate.weight": "heads, width"}
        guess = {**GUESSING, "layer_output_norm.weight": "width"} if number >= d.layers - d.guessing else {}
        return {**found, **{name: shape for name, shape in guess.items() if "shared_head" not in name}}

    def more(d: Dims) -> dict:
        found = {"kda.gate_lower_bound": -4.0, "rope.freq_base": 5e4, **SIGMOID, **metadata}
        found |= {"attention.q_lora_rank": d.q_rank} if d.q_rank else {}
        found |= {"nextn_predict_layers": d.guessing} if d.guessing else {}
        return {**made.metadata(d), "expert_weights_norm": True, **found}

    dims = {**made.dims, "q_rank": 0, "guessing": 0, **dims}
    return replace(made, arch="bailingmoe3", layer=layer, metadata=more, dims=dims)


MOE3 = {
    "bailingmoe3": ling3("mma", QUERIES, {"swiglu_clamp_exp": [0.0, 0.5, 0.4], "swiglu_clamp_shexp": [0.6, 0.0, 0.5]}),
    "bailingmoe3_seeing": ling3(
        "ama", COMPRESSED_QUERIES, {"rope.dimension_sections": [2, 3, 2, 1], **GROUPS, "expert_weights_scale": 1.5},
        q_rank=40, guessing=1, heads=4, delta=20, value=24, nope=20, **{**EIGHT, "shared_hidden": 32},
    ),
    "deepseek32": indexed("deepseek32", metadata={
        **SIGMOID, **NORMED, **GROUPS, **YARN, "expert_weights_scale": 2.5, "rope.freq_base": 3e4,
        "rope.scaling.yarn_log_multiplier": 0.1,
    }),
    "deepseek32_odd": indexed(
        "deepseek32", metadata={**SOFTMAX, "rope.freq_base": 2e4}, index_heads=13, index_dim=128, top_k=7, layers=4,
        guessing=1, nope=20, value=24, kv_rank=40,
    ),
    "hy_v4": hunyuan4("101", metadata={
        **SIGMOID, **NORMED, **STREAMS, "rope.freq_base": 1e5, "attention.indexer.types": [1, 0, 1],
        "swiglu_clamp_exp": [0.0, 0.5, 0.7],
    }),
    "hy_v4_full": hunyuan4("000", metadata={**SOFTMAX, **STREAMS, "expert_weights_scale": 1.5}),
    "dots3note": dots3note(),
    "dots3note_odd": dots3note(layers=5, index_heads=9, top_k=6, guessing=1),
    "glm_dsa": indexed("glm-dsa", metadata={**NORMED, "expert_weights_scale": 2.0, "rope.freq_base": 1e6}),
    "glm_dsa_shared": indexed(
        "glm-dsa", "1010", layers=4, guessing=1, top_k=10, width=64,
        metadata={**SIGMOID, **NORMED, "attention.indexer.types": [1, 0, 1], "rope.freq_base": 1e5},
    ),
    "phimoe": declare(
        "phimoe", {**biased(NORMS), **biased(ATTENTION), **EXPERTS}, BIASED_HEAD, {"rope.freq_base": 5e4}, **WIDE,
        experts=4, used=2,
    ),
    "phimoe_longrope": declare(
        "phimoe", {**biased(NORMS), **biased(ATTENTION, "attn_output"), **EXPERTS}, {**BIASED_HEAD, **LONG},
        {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2}, **WIDE, head_dim=32, **FOUR,
    ),
    "smallthinker": declare(
        "smallthinker", MIXTURE, TIED, {**SIGMOID, "rope.freq_base": 5e4, "rope.freq_base_swa": 2e4}, **WIDE,
        layers=3, window=4096, expert_hidden=40, **FOUR,
    ),
    "smallthinker_softmax": declare(
        "smallthinker", MIXTURE, UNTIED, {**SOFTMAX, "rope.freq_base": 5e4}, **FULL, head_dim=40, hidden=40,
        experts=8, used=3, expert_hidden=40,
    ),
    "grovemoe": grovemoe(experts=8, used=3, together=2),
    "grovemoe_few": grovemoe(experts=12, used=3, together=4),
    "hy_v3": mixed(
        "hy_v3", QWEN, BARE, {**NORMED, "expert_weights_scale": 2.5, "rope.freq_base": 5e4},
        guess={**GUESSING, "nextn.embed_tokens.weight": "vocab, width"}, layers=4, guessing=1, shared=1, length=True,
        **EIGHT,
    ),
    "hy_v3_softmax": mixed("hy_v3", QWEN, BESIDE, {**SOFTMAX}, TIED, layers=3, dense=2, shared=1, length=True),
    "hrm_text": hrm_text({**EMBEDDING, "output.weight": "vocab, width"}, 2, 2, 3, **WIDE),
    "hrm_text_tied": hrm_text(EMBEDDING, 1, 3, 1, **FULL, head_dim=40, rotated=20),
    "chameleon": declare(
        "chameleon", {**LLAMA, **CENTERED_HEADS}, UNTIED, **CHAMELEON,
        values={"output.weight": of_text},
    ),
    "chameleon_swin": declare(
        "chameleon", {**LLAMA, **CENTERED_HEADS, **HEAD_BIASES}, TIED,
        {"swin_norm": True, "rope.freq_base": 2e4}, **CHAMELEON,
        values={"token_embd.weight": of_text},
    ),
}  # fmt: skip
