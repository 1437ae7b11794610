"""A small byte-level vocabulary of any size, so that a runner accepts the file."""

from typing import Any

from tiny_model import MERGES, SPECIAL_TOKENS, byte_pieces

NORMAL, CONTROL = 1, 3


def pieces(size: int) -> list[str]:
    """Return special tokens, one per byte, merged ones, and others up to `size`."""
    known = SPECIAL_TOKENS + byte_pieces() + [merge.replace(" ", "") for merge in MERGES]
    return (known + [f"<{n}>" for n in range(len(known), size)])[:size]


def vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a file."""
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": pieces(size), "bos_token_id": 0, "eos_token_id": 2}
    found |= {"token_type": [CONTROL if n < len(SPECIAL_TOKENS) else NORMAL for n in range(size)]}
    found |= {"merges": MERGES if size >= 268 else [], "add_bos_token": False}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}
