"""Tell from a tensor's name whether it is quantized, and what it is for.

Source: llama.cpp's src/llama-quant.cpp; its dry runs are what tests compare with.
"""

import re

KEPT = re.compile(  # small or delicate matrices that keep the format they have
    r"""_norm\.weight | ffn_gate_inp\.weight | ffn_gate_tid2eid\.weight | altup | laurel | per_layer_model_proj
    | ^position_embd\.weight$ | ^token_types\.weight$ | ssm_conv1d | shortconv\.conv\.weight
    | indexer\.[kq]_proj\.weight | time_mix_(?:first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight
    | attn_rel_b\.weight | \.position_embd | sam\.pos_embd | sam\.neck\. | sam\.net_ | \.rel_pos | \.patch_embd
    | \.patch_merger | a\.rvq\.codebook | mm\.a\.code_embd""",
    re.VERBOSE,
)


KEPT_OF_ARCH = {  # more of them, of one architecture
    "clip": re.compile(r"^mm\.input_projection\.weight$"),  # Gemma 3's lies on its side: llama-quantize spoils the file
    "glm5-next": re.compile(
        r"""hc_ | indexer\.(?:attn_q_b|attn_k|proj) | indexer_compressor | ssm_(?:[fg]_[ab]|beta)\.weight
        | attn_kv_a_mqa\.weight | attn_[kv]_b\.weight""",
        re.VERBOSE,
    ),
}
IN_8_BITS = {"glm5-next": re.compile(r"attn_q_[ab]|nextn\.eh_proj")}  # and no less, whatever the recipe


def is_quantized(name: str, shape: tuple[int, ...], arch: str = "") -> bool:
    """Return whether a tensor is quantized: matrices and stacks are, vectors are not.

    shape: the length of a row last.
    """
    of_arch = KEPT_OF_ARCH.get(arch)
    is_kept = KEPT.search(name) or (of_arch and of_arch.search(name))
    return max(shape[:-1], default=1) > 1 and name.endswith("weight") and not is_kept


# ---- what a tensor is for

OUTPUT, EMBEDDING, QUERY, KEY, VALUE, ATTENTION_OUTPUT, UP, GATE, DOWN, OTHER = (
    "output",
    "embedding",
    "query",
    "key",
    "value",  # also fused with query and key, or made from the latent cache
    "attention output",
    "up",
    "gate",
    "down",
    "other",
)
ROLES = [  # parts of names, the first that is found
    (VALUE, ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")),
    (KEY, ("attn_k.weight",)),
    (QUERY, ("attn_q.weight",)),
    (ATTENTION_OUTPUT, ("attn_output.weight",)),
    (UP, ("ffn_up",)),
    (GATE, ("ffn_gate",)),
    (DOWN, ("ffn_down",)),
]


def role_of(name: str) -> str:
    """Return the role of a tensor, as far as the rules distinguish."""
    if name == "output.weight":
        return OUTPUT
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return EMBEDDING
    return next((role for role, parts in ROLES if any(part in name for part in parts)), OTHER)
