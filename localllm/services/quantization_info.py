"""What a file was quantized with, as its metadata says: a line for people."""

from collections.abc import Mapping, Sequence
from typing import Any

TEXTS, TOKENS, VERSION = "localllm.quantize.texts", "localllm.quantize.tokens", "localllm.quantize.version"
SCALED = "localllm.quantize.scaled"
OURS = "localllm's mixture"  # stands for texts that nobody has named


def calibration(texts: Sequence[str], tokens: int, version: str) -> dict[str, Any]:
    """The metadata of a file that was calibrated. texts: names of files; tokens: how many were read of them."""
    return {TEXTS: list(texts) or [OURS], TOKENS: tokens, VERSION: version}


def made_with(metadata: Mapping[str, Any]) -> str | None:
    """The line; None for a file that does not say."""
    texts, tokens, version = (metadata.get(name) for name in (TEXTS, TOKENS, VERSION))
    if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
        size = f", {tokens} tokens" if isinstance(tokens, int) else ""
        scaled = metadata.get(SCALED)
        size += f", {scaled} scalings folded away" if isinstance(scaled, int) else ""
        by = f" (localllm {version})" if isinstance(version, str) else ""
        return f"calibrated on {', '.join(texts)}{size}{by}"
    matrix, text = (metadata.get(f"quantize.imatrix.{name}") for name in ("file", "dataset"))
    if isinstance(matrix, str):
        return f"importance matrix {matrix}" + (f" of {text}" if isinstance(text, str) else "")
    return None
