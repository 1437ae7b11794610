"""Test llama.cpp's C API as llguidance, outlines and guidance call it."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from localllm.compat import llama_cpp
from localllm.errors import UsageError

TEXT = "Hello world, hello"


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[llama_cpp.Llama]:
    with llama_cpp.Llama(tiny, n_ctx=256, n_threads=1, verbose=False) as opened:
        yield opened


def evaluate(llm: llama_cpp.Llama, ids: list[int], first: int) -> np.ndarray:
    """Return the logits of tokens from position `first` on, as guidance reads them."""
    batch = llama_cpp.llama_batch_init(64, 0, 256)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place], batch.logits[place] = token, first + place, True
        batch.seq_id[place][0], batch.n_seq_id[place] = 0, 1
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    pointer = llama_cpp.llama_get_logits(llm.ctx)
    llama_cpp.llama_batch_free(batch)
    return np.ctypeslib.as_array(pointer, shape=(len(ids), llm.n_vocab())).copy()


def test_batches_have_the_logits_of_the_model(llm: llama_cpp.Llama):
    """Check them after a range of the sequence was removed, too; eval ignores these batches."""
    ids = llm.tokenize(TEXT.encode())
    expected = llm.model.logits(ids)
    np.testing.assert_allclose(evaluate(llm, ids[:3], 0), expected[:3], rtol=0, atol=5e-4)
    np.testing.assert_allclose(evaluate(llm, ids[3:], 3), expected[3:], rtol=0, atol=5e-4)
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_seq_rm(memory, -1, 2, -1)
    np.testing.assert_allclose(evaluate(llm, ids[2:4], 2), expected[2:4], rtol=0, atol=5e-4)
    assert llm.n_tokens == 0


def test_batches_that_do_not_continue_the_sequence_are_refused(llm: llama_cpp.Llama):
    batch = llama_cpp.llama_batch_init(2, 0, 1)
    batch.n_tokens, batch.pos = 2, [100, 101]
    assert llama_cpp.llama_decode(llm.ctx, batch) == -1
    batch.pos = [0, 2]
    assert llama_cpp.llama_decode(llm.ctx, batch) == -1
    assert not llama_cpp.llama_memory_seq_rm(llm.ctx, 1, 0, -1) and not llama_cpp.llama_memory_seq_rm(llm.ctx, 0, 1, 2)
    with pytest.raises(UsageError, match="embeddings"):
        llama_cpp.llama_batch_init(2, 64, 1)


def test_the_vocabulary_has_the_bytes_of_every_token(llm: llama_cpp.Llama):
    """Return control tokens only if special is set."""
    vocab, tokenizer = llama_cpp.llama_model_get_vocab(llm.model), llm.model.tokenizer
    assert llama_cpp.llama_vocab_n_tokens(vocab) == len(tokenizer.pieces)
    assert (llama_cpp.llama_vocab_bos(vocab), llama_cpp.llama_vocab_eos(vocab)) == (llm.token_bos(), llm.token_eos())
    control, unknown = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL, llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
    buffer = ctypes.create_string_buffer(65)
    for token in range(len(tokenizer.pieces)):
        count = llama_cpp.llama_token_to_piece(vocab, token, buffer, 64, 0, True)
        assert buffer[:count] == tokenizer.token_bytes(token, True)
    attributes = [llama_cpp.llama_token_get_attr(vocab, token) for token in range(len(tokenizer.pieces))]
    assert {token for token, each in enumerate(attributes) if each in (control, unknown)} == tokenizer.control_ids
    some = llm.tokenize(b" world")[0]
    assert llama_cpp.llama_token_to_piece(vocab, some, buffer, 0, 0, True) < 0


def test_tokenize_writes_ids_through_a_pointer(llm: llama_cpp.Llama):
    vocab, data = llama_cpp.llama_model_get_vocab(llm.model), TEXT.encode()
    tokens, tokenize = (ctypes.c_int32 * 64)(), llama_cpp.llama_cpp._lib.llama_tokenize
    assert ctypes.cast(tokenize, ctypes.c_void_p).value
    text = ctypes.cast(ctypes.create_string_buffer(data), ctypes.c_void_p)
    count = tokenize(vocab, text, len(data), tokens, 64, False, False)
    assert [*tokens[:count]] == llm.tokenize(data, add_bos=False)
    assert tokenize(vocab, text, len(data), tokens, 1, False, False) == -count
    assert tokenize(vocab, None, 0, tokens, 64, False, False) == 0
    with pytest.raises(UsageError, match="was deleted"):
        llama_cpp.llama_vocab_eos(1)
