"""Records in a file's metadata how it was quantized, and describes it."""

from collections.abc import Mapping, Sequence

TEXTS, TOKENS, VERSION = "localllm.quantize.texts", "localllm.quantize.tokens", "localllm.quantize.version"
SCALED = "localllm.quantize.scaled"
OURS = "localllm's mixture"  # name of the default calibration texts


def calibration(texts: Sequence[str], tokens: int, version: str) -> dict[str, object]:
    """Build the metadata of a calibrated file; texts: names of text files.  tokens: how many tokens were used."""
    return {TEXTS: list(texts) or [OURS], TOKENS: tokens, VERSION: version}


def describe_quantization(metadata: Mapping[str, object]) -> str | None:
    """Describe the calibration in one line; None if there is no record of it."""
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
