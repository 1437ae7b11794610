"""Draft heads in files of their own (EAGLE-3)."""

from localllm.engine.draft_head_source import is_head
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.speculation.draft_model import ModelDrafter
from localllm.text.tokenizer import Tokenizer

TOKENS = "tokenizer.ggml.tokens"


def attach_draft_head(path: str, cache: PrefixCache, tokenizer: Tokenizer) -> bool:
    """Attach a file's draft head to the model; return whether it has one.

    Raises as Engine.load_draft_head, and UsageError for a head whose vocabulary differs from this tokenizer's.
    """
    engine = cache.engine
    if path == engine.draft_head_path:
        return True
    file = GGUFFile.open(path)
    if not is_head(file):
        file.close()
        return False
    if file.metadata.get(TOKENS) is not None:
        try:
            ModelDrafter(cache, Tokenizer.from_metadata(file.metadata)).require_vocabulary(tokenizer)
        except ModelError as error:
            raise type(error)(f"{path}: {error}") from None
    engine.load_draft_head(file)
    return True
