"""Texts in decomposed form ("e" and an accent for "é"), as of file names on macOS and of PDFs: composed where the
tokenizer of the original does so before it cuts them (NFC). llama.cpp never does.

A GGUF file does not say it, but for those that localllm converts: it follows from the pre-tokenizer, or from the
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


def composes(metadata: Mapping[str, Any]) -> bool:
    """Whether the original's tokenizer composes texts."""
    said = metadata.get(NORMALIZER)
    if said in (COMPOSING, NOTHING):
        return said == COMPOSING
    return usually_composes(metadata.get("tokenizer.ggml.pre"), metadata.get("general.architecture"))


def usually_composes(pretokenizer: Any, architecture: Any) -> bool:
    """The same by these names alone."""
    return pretokenizer in PRETOKENIZERS or architecture in ARCHITECTURES


def composed(text: str) -> str:
    """The text in NFC, in linear time."""
    if text.isascii() or not _MAY_CHANGE.search(text):
        return text
    if len(text) <= _SHORT:
        return normalize("NFC", text)
    from tokenizers import normalizers  # 15 ms, which few texts need

    return str(normalizers.NFC().normalize_str(text))
