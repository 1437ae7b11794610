"""Decoders with a mixture of experts that came later, and dense ones of their time."""

import numpy as np

from .declaration import EMBEDDING, TIED, UNTIED, declare
from .dense import FULL, LLAMA, WIDE
from .experts import FOUR, MIXTURE
from .experts2 import BESIDE, EIGHT, GUESSING, NORMED, QWEN, SIGMOID, SOFTMAX, mixed
from .golden import OF_IMAGES
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


MOE3 = {
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
