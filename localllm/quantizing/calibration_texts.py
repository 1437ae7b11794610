"""What a model reads while it is calibrated: people's texts, or a mixture of kinds that comes with the program."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from localllm.errors import ModelError, UsageError
from localllm.files.text_file import read_text
from localllm.services.chunks import split_chunks, with_bos
from localllm.text.templates import ChatTemplate
from localllm.text.tokenizer import Tokenizer

CHUNK, CHUNKS = 512, 64  # tokens of a chunk, and how many are read at most
DATA = Path(__file__).resolve().parent.parent / "data" / "calibration"
# In this order, so that each half has prose, code and something else: see localllm.quant.hessian.
KINDS = (
    "prose.txt", "code.txt", "mathematics.txt", "languages.txt", "documentation.txt", "python.txt", "encyclopedia.txt",
    "chat.toml",
)  # fmt: skip


def chunks_of(tokenizer: Tokenizer, texts: Sequence[str], context: int) -> list[np.ndarray]:
    """Token ids of files, or of the mixture if none is named, in chunks of at most `context` tokens.

    If there are more than enough, some of them, chosen evenly. Raises UsageError.
    """
    size = min(CHUNK, context)
    chunks: list[np.ndarray] = []
    for name in texts or KINDS:
        tokens = tokenizer.encode(read_text(name), bos=True) if texts else tokens_of(name, tokenizer)
        try:
            chunks.extend(np.array(with_bos(chunk, tokenizer)) for chunk in split_chunks(tokens, size))
        except UsageError as error:
            if texts:
                raise UsageError(f"{name}: {error}") from None
    if not chunks:
        raise UsageError(f"the model's vocabulary makes fewer than {size} tokens of every text")
    places = np.unique(np.linspace(0, len(chunks) - 1, min(len(chunks), CHUNKS)).round().astype(int))
    return [chunks[place] for place in places]


def tokens_of(name: str, tokenizer: Tokenizer) -> list[int]:
    """Of a file of the mixture."""
    text = (DATA / name).read_text(encoding="utf-8")
    if not name.endswith(".toml"):
        return tokenizer.encode(text, bos=True)
    tokens: list[int] = []
    for conversation in tomllib.loads(text)["conversations"]:
        try:
            template = ChatTemplate.of(tokenizer)
            rendered = tokenizer.markers.render(template, conversation["messages"], add_generation_prompt=False)
        except ModelError:  # which a template may refuse, or be broken altogether: the rest will do
            continue
        tokens += tokenizer.encode_rendered(rendered)
    return tokens
