"""The parts of llama.cpp's C API that libraries use in addition to Llama: vocabularies, batches, logits.

llguidance and outlines read a vocabulary's tokens; guidance evaluates batches of sequence 0. Vocabulary handles are
integers, because llguidance passes them through Rust to `llama_tokenize`. Source: llama.h of llama.cpp.
"""

import ctypes
from collections.abc import MutableSequence, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.engine.sequence import Sequence as TokenSequence
    from localllm.text.tokenizer import Tokenizer

__all__ = [
    "LLAMA_TOKEN_ATTR_BYTE", "LLAMA_TOKEN_ATTR_CONTROL", "LLAMA_TOKEN_ATTR_NORMAL", "LLAMA_TOKEN_ATTR_UNDEFINED",
    "LLAMA_TOKEN_ATTR_UNKNOWN", "LLAMA_TOKEN_ATTR_UNUSED", "LLAMA_TOKEN_ATTR_USER_DEFINED", "llama_batch_free",
    "llama_batch_init", "llama_cpp", "llama_decode", "llama_get_logits", "llama_get_memory", "llama_memory_seq_rm",
    "llama_model_get_vocab", "llama_token_get_attr", "llama_token_to_piece", "llama_tokenize", "llama_vocab_bos",
    "llama_vocab_eos", "llama_vocab_n_tokens", "llama_vocab_p",
]  # fmt: skip

llama_vocab_p = ctypes.c_void_p
LLAMA_TOKEN_ATTR_UNDEFINED, LLAMA_TOKEN_ATTR_UNKNOWN, LLAMA_TOKEN_ATTR_UNUSED = 0, 1, 2
LLAMA_TOKEN_ATTR_NORMAL, LLAMA_TOKEN_ATTR_CONTROL, LLAMA_TOKEN_ATTR_USER_DEFINED, LLAMA_TOKEN_ATTR_BYTE = 4, 8, 16, 32
ATTRIBUTES = (
    LLAMA_TOKEN_ATTR_UNDEFINED, LLAMA_TOKEN_ATTR_NORMAL, LLAMA_TOKEN_ATTR_UNKNOWN, LLAMA_TOKEN_ATTR_CONTROL,
    LLAMA_TOKEN_ATTR_USER_DEFINED, LLAMA_TOKEN_ATTR_UNUSED, LLAMA_TOKEN_ATTR_BYTE,
)  # by the file's token types  # fmt: skip
_models: "WeakValueDictionary[int, Model]" = WeakValueDictionary()  # by handles of their vocabularies


class Context:
    """The evaluated tokens of sequence 0, and the logits of the latest batch."""

    def __init__(self, model: "Model") -> None:
        self._model = model
        self._sequence: TokenSequence | None = None
        self.logits = np.empty((0, 0), np.float32)

    def decode(self, tokens: Sequence[int], first: int) -> bool:
        """Evaluate tokens from position `first` on; return False if that is not the next one. Raises ContextError."""
        self._sequence = self._sequence or self._model.sequence()
        if first != len(self._sequence.tokens):
            return False
        self.logits = np.ascontiguousarray(self._sequence.append([*tokens], "all"), np.float32)
        return True

    def remove(self, first: int) -> None:
        """Remove the tokens from position `first` on."""
        if self._sequence and first < len(self._sequence.tokens):
            tokens = [int(token) for token in self._sequence.tokens[:first]]
            if (kept_tokens := self._sequence.truncate(first)) < first:
                self._sequence.append(tokens[kept_tokens:], "none")

    def close(self) -> None:
        """Free the sequence."""
        if self._sequence:
            self._sequence.close()
        self._sequence = None


class Batch:
    """Tokens to evaluate; fields as in llama.h."""

    def __init__(self, size: int) -> None:
        self.n_tokens, self.token, self.pos = 0, [0] * size, [0] * size
        self.n_seq_id, self.seq_id, self.logits = [1] * size, [[0] for _ in range(size)], [False] * size


def llama_model_get_vocab(model: "Model") -> int:
    """Return a handle for a model's vocabulary."""
    _models[id(model)] = model
    return id(model)


def get_model(vocab: int) -> "Model":
    """Return the model of a vocabulary handle. Raises UsageError."""
    model = _models.get(vocab)
    if model is None:
        raise UsageError("the model of this vocabulary was deleted: keep a reference to it")
    return model


def get_tokenizer(vocab: int) -> "Tokenizer":
    """Return the tokenizer of a vocabulary handle. Raises UsageError."""
    return get_model(vocab).tokenizer


def llama_vocab_n_tokens(vocab: int) -> int:
    """Return the vocabulary size."""
    return get_tokenizer(vocab).vocab_size


def llama_vocab_bos(vocab: int) -> int:
    """Return the BOS token, or -1."""
    return -1 if (token := get_tokenizer(vocab).bos_id) is None else token


def llama_vocab_eos(vocab: int) -> int:
    """Return the EOS token, or -1."""
    return -1 if (token := get_tokenizer(vocab).eos_id) is None else token


def llama_token_get_attr(vocab: int, token: int) -> int:
    """Return a token's type as one of LLAMA_TOKEN_ATTR_*."""
    types = get_model(vocab).file.metadata.get("tokenizer.ggml.token_type")
    return ATTRIBUTES[int(types[token])] if isinstance(types, np.ndarray) else LLAMA_TOKEN_ATTR_NORMAL


def llama_token_to_piece(vocab: int, token: int, buffer: Any, length: int, lstrip: int, special: bool) -> int:
    """Write a token's bytes to `buffer`; return their count, negative if it exceeds `length`.

    lstrip: maximum leading spaces to omit.
    """
    data = get_tokenizer(vocab).token_bytes(token, bool(special))
    for _ in range(lstrip):
        data = data.removeprefix(b" ")
    if len(data) > length:
        return -len(data)
    buffer[: len(data)] = data
    return len(data)


def write_tokens(
    vocab: int,
    text: int,
    length: int,
    tokens: MutableSequence[int],
    capacity: int,
    add_special: bool,
    parse_special: bool,
) -> int:
    """Write a text's token ids; return their count, negative if it exceeds `capacity`.

    text: the address of `length` bytes.
    """
    data = ctypes.string_at(text, length).decode(errors="replace") if length else ""
    ids = get_tokenizer(vocab).encode(data, parse_special, add_special, add_special)
    if len(ids) > capacity:
        return -len(ids)
    for index, token in enumerate(ids):
        tokens[index] = token
    return len(ids)


TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32,
    ctypes.c_bool, ctypes.c_bool,
)  # fmt: skip
llama_tokenize = TOKENIZE(write_tokens)
llama_cpp = SimpleNamespace(_lib=SimpleNamespace(llama_tokenize=llama_tokenize))  # llguidance expects this path


def llama_batch_init(n_tokens: int, embd: int, n_seq_max: int) -> Batch:
    """Return an empty batch. Raises UsageError for a batch of embeddings."""
    if embd:
        raise UsageError("batches of embeddings are not supported; pass token ids")
    return Batch(n_tokens)


def llama_batch_free(batch: Batch) -> None:
    """Do nothing, since Python frees batches."""


def llama_get_memory(ctx: Context) -> Context:
    """Return the context, which is its own memory."""
    return ctx


def llama_memory_seq_rm(memory: Context, seq_id: int, p0: int, p1: int) -> bool:
    """Remove the tokens from p0 on; return False for a range with an end, or a sequence other than 0."""
    if seq_id > 0 or p1 >= 0:
        return False
    memory.remove(max(p0, 0))
    return True


def llama_decode(ctx: Context, batch: Batch) -> int:
    """Evaluate a batch; return 0, or -1 if its positions are not consecutive. Raises ContextError."""
    first, count = batch.pos[0], batch.n_tokens
    if batch.pos[:count] != [*range(first, first + count)] or any(ids[0] for ids in batch.seq_id[:count]):
        return -1
    return 0 if ctx.decode(batch.token[:count], first) else -1


def llama_get_logits(ctx: Context) -> "ctypes._Pointer[ctypes.c_float]":
    """Return a pointer to the logits of the latest batch, float32 [n_tokens, vocab]."""
    return ctx.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
