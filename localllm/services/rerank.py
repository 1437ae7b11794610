"""Opens a reranker from its file. Implements `localllm rerank`."""

from collections.abc import Iterator
from contextlib import contextmanager

from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import GGUFFile
from localllm.generation.embedding.reranker import Reranker
from localllm.text.tokenizer import Tokenizer


@contextmanager
def reranker(path: str, options: EngineOptions) -> Iterator[Reranker]:
    """Open the model. Raises ModelError, MemoryLimitError, UsageError."""
    file = GGUFFile.open(path)
    result = Reranker(file, Tokenizer.from_metadata(file.metadata, file.oddities), options)
    try:
        yield result
    finally:
        result.close()
