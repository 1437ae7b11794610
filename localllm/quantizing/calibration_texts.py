"""Load the calibration texts: the user's files, or a mixture that comes with the program."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from localllm.errors import ModelError, UsageError
from localllm.files.text_file import read_text
from localllm.services.evaluation.scores import split_chunks, with_bos
from localllm.text.templates import ChatTemplate
from localllm.text.tokenizer import Tokenizer

CHUNK, CHUNKS = 512, 64  # tokens per chunk; the most chunks that are used
DATA = Path(__file__).resolve().parent.parent / "data" / "calibration"
# Ordered so that each half has prose, code and something else: see localllm.quant.hessian.
KINDS = (
    "prose.txt", "code.txt", "mathematics.txt", "languages.txt", "documentation.txt", "python.txt", "encyclopedia.txt",
    "chat.toml",
)  # fmt: skip


def load_chunks(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> list[np.ndarray]:
    """Tokenize files, or the built-in mixture if `texts` is empty, in chunks of at most `context` tokens.

    If there are more than CHUNKS chunks, evenly spaced ones are used. Raises UsageError.
    """
    size = min(CHUNK, context)
    chunks: list[np.ndarray] = []
    for name in texts or KINDS:
        tokens = tokenizer.encode(read_text(name), bos=True) if texts else tokenize_sample(name, tokenizer)
        try:
            chunks.extend(np.array(with_bos(chunk, tokenizer)) for chunk in split_chunks(tokens, size))
        except UsageError as error:
            if texts:
                raise UsageError(f"{name}: {error}") from None
    if not chunks:
        raise UsageError(f"every text has fewer than {size} tokens")
    places = np.unique(np.linspace(0, len(chunks) - 1, min(len(chunks), CHUNKS)).round().astype(int))
    return [chunks[place] for place in places]


def tokenize_sample(name: str, tokenizer: Tokenizer) -> list[int]:
    """Tokenize a file of the mixture."""
    text = (DATA / name).read_text(encoding="utf-8")
    if not name.endswith(".toml"):
        return tokenizer.encode(text, bos=True)
    tokens: list[int] = []
    for conversation in tomllib.loads(text)["conversations"]:
        try:
            template = ChatTemplate.of(tokenizer)
            rendered = tokenizer.markers.render(template, conversation["messages"], add_generation_prompt=False)
        except ModelError:  # a template may refuse a conversation or be broken; the others suffice
            continue
        tokens += tokenizer.encode_rendered(rendered)
    return tokens
