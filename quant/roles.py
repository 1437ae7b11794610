"""Determines from a tensor's name whether it is quantized, and its role in the model.

Source: llama.cpp's src/llama-quant.cpp; tests compare with its dry runs.
"""

import re

KEPT = re.compile(  # small or sensitive matrices, which are not quantized
    r"""_norm\.weight | ffn_gate_inp\.weight | ffn_gate_tid2eid\.weight | altup | laurel | per_layer_model_proj
    | ^position_embd\.weight$ | ^token_types\.weight$ | ssm_conv1d | shortconv\.conv\.weight
    | indexer\.[kq]_proj\.weight | time_mix_(?:first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight
    | attn_rel_b\.weight | \.position_embd | sam\.pos_embd | sam\.neck\. | sam\.net_ | \.rel_pos | \.patch_embd
    | \.patch_merger | a\.rvq\.codebook | mm\.a\.code_embd""",
    re.VERBOSE,
)


KEPT_OF_ARCH = {  # further matrices that are not quantized, by architecture
    "clip": re.compile(r"^mm\.input_projection\.weight$"),  # Gemma 3's is transposed: llama-quantize breaks the file
    "glm5-next": re.compile(
        r"""hc_ | indexer\.(?:attn_q_b|attn_k|proj) | indexer_compressor | ssm_(?:[fg]_[ab]|beta)\.weight
        | attn_kv_a_mqa\.weight | attn_[kv]_b\.weight""",
        re.VERBOSE,
    ),
}
IN_8_BITS = {"glm5-next": re.compile(r"attn_q_[ab]|nextn\.eh_proj")}  # matrices that get Q8_0 in every recipe


def is_quantized(name: str, shape: tuple[int, ...], arch: str = "") -> bool:
    """Return whether a tensor is quantized: matrices and stacks of matrices are, vectors are not.

    shape: its last number is the length of a row.
    """
    of_arch = KEPT_OF_ARCH.get(arch)
    is_kept = KEPT.search(name) or (of_arch and of_arch.search(name))
    return max(shape[:-1], default=1) > 1 and name.endswith("weight") and not is_kept


# ---- roles

OUTPUT, EMBEDDING, QUERY, KEY, VALUE, ATTENTION_OUTPUT, UP, GATE, DOWN, OTHER = (
    "output",
    "embedding",
    "query",
    "key",
    "value",  # also fused with query and key (attn_qkv), or expanded from MLA's latent cache (attn_kv_b)
    "attention output",
    "up",
    "gate",
    "down",
    "other",
)
ROLES = [  # (role, substrings of names); the first match counts
    (VALUE, ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")),
    (KEY, ("attn_k.weight",)),
    (QUERY, ("attn_q.weight",)),
    (ATTENTION_OUTPUT, ("attn_output.weight",)),
    (UP, ("ffn_up",)),
    (GATE, ("ffn_gate",)),
    (DOWN, ("ffn_down",)),
]


def role_of(name: str) -> str:
    """Return the role of a tensor; OTHER if it has none of the roles above."""
    if name == "output.weight":
        return OUTPUT
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return EMBEDDING
    return next((role for role, parts in ROLES if any(part in name for part in parts)), OTHER)
