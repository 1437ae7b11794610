"""Unicode normalization to NFC, for tokenizers whose originals do it first; llama.cpp never does.

Texts come in decomposed form ("e" and an accent for "é"), as of file names on macOS and of PDFs. A GGUF file does not
say whether to compose, but for those that localllm converts: it follows from the pre-tokenizer, or from the
architecture. Source: the tokenizers of transformers (qwen2, qwen3_5, cohere, gpt_neox, which OLMo, MPT, Mamba and
ModernBERT have, too).
"""

import re
from collections.abc import Mapping
from typing import Any
from unicodedata import normalize

NORMALIZER, COMPOSING, NOTHING = "localllm.normalizer", "nfc", "none"  # a key that localllm writes, and its values
PRETOKENIZERS = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "olmo", "mpt", "modern-bert")
ARCHITECTURES = ("gptneox",)
GROWTH = 3  # times as many bytes as composed, at most
_MAY_CHANGE = re.compile("[\u0300-\U0010ffff]")  # what stands before is composed, whatever follows
_SHORT = 1 << 12  # characters: the standard library takes quadratic time for long runs of marks


def uses_nfc(metadata: Mapping[str, Any]) -> bool:
    """Return whether the original tokenizer applies NFC."""
    declared = metadata.get(NORMALIZER)
    if declared in (COMPOSING, NOTHING):
        return declared == COMPOSING
    return usually_uses_nfc(metadata.get("tokenizer.ggml.pre"), metadata.get("general.architecture"))


def usually_uses_nfc(pretokenizer: Any, architecture: Any) -> bool:
    """Return whether tokenizers with these names apply NFC."""
    return pretokenizer in PRETOKENIZERS or architecture in ARCHITECTURES


def to_nfc(text: str) -> str:
    """Convert to NFC in linear time."""
    if text.isascii() or not _MAY_CHANGE.search(text):
        return text
    if len(text) <= _SHORT:
        return normalize("NFC", text)
    from tokenizers import normalizers  # 15 ms, which few texts need

    return str(normalizers.NFC().normalize_str(text))
