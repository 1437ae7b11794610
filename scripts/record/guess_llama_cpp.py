#!/usr/bin/env python3
"""Record the output of llama.cpp's MTP layers for a text.

Run by scripts/record/record_guesses.py with a Python that has llama-cpp-python.

Reads a job per line of stdin, as JSON: {"model": path, "head": path or null, "tokens": [...], "out": path}. Writes an
.npz with `rows` [tokens, vocab], the logits behind each token of the model's layer, or of the head (EAGLE-3) that a
file of its own has: it reads a token together with what the model made of the one before, zeros before the first. One
thread, keys and values in float32, the text in one batch.
"""

import ctypes
import json
import sys

import llama_cpp as llama
import numpy as np

CONTEXT, ENCODE, DECODE, OF_GUESSES = 128, 0, 1, 1
HANDLE = ctypes.c_void_p


class Embedding(ctypes.Structure):
    """llama_embd."""

    _fields_ = [("data", HANDLE), ("rows", ctypes.c_size_t), ("columns", ctypes.c_size_t)]


def function(name: str, result, *arguments):
    """Return a function of the library that the package does not declare; some are C++."""
    found = getattr(llama.llama_cpp._lib, name)
    found.restype, found.argtypes = result, arguments
    return found


reveal = function("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, HANDLE, ctypes.c_bool, ctypes.c_bool)
revealed = function("_Z26llama_get_embeddings_nextnP13llama_context", HANDLE, HANDLE)
reveal_layer = function(
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, HANDLE, ctypes.c_uint32, ctypes.c_bool
)
revealed_layer = function("_Z30llama_get_embeddings_layer_inpP13llama_contextj", HANDLE, HANDLE, ctypes.c_uint32)
layers_of = function("_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), HANDLE)
new_batch = function("llama_batch_ext_init", HANDLE, HANDLE)
add_row = function("llama_batch_ext_add_embd", ctypes.c_int, HANDLE, ctypes.c_int, Embedding)
add_token = function("llama_batch_ext_add_token", ctypes.c_int, HANDLE, ctypes.c_int, ctypes.c_int)
set_position = function("llama_batch_ext_set_pos", ctypes.c_bool, HANDLE, ctypes.c_int, ctypes.POINTER(ctypes.c_int32))
set_wanted = function("llama_batch_ext_set_output_logits", ctypes.c_bool, HANDLE, ctypes.c_int, ctypes.c_bool)
set_before = function("llama_batch_ext_set_embd_token", ctypes.c_bool, HANDLE, ctypes.c_int, Embedding)
process = function("llama_process", ctypes.c_int, HANDLE, ctypes.c_int, HANDLE)


def opened(model, kind: int, other=None):
    """other: the context of the model that this one guesses for."""
    chosen = llama.llama_context_default_params()
    chosen.n_batch = chosen.n_ubatch = chosen.n_ctx = CONTEXT
    chosen.n_threads = chosen.n_threads_batch = 1
    chosen.type_k = chosen.type_v = 0  # GGML_TYPE_F32
    chosen.flash_attn_type, chosen.ctx_type, chosen.ctx_other = 0, kind, other
    return llama.llama_init_from_model(model, chosen)


def read(context, tokens: list[int], before: np.ndarray | None = None) -> None:
    """Read all tokens at once; before: hidden states, float32 [tokens, width]."""
    batch = new_batch(context)
    for place, token in enumerate(tokens):
        add_token(batch, 0, token)
        set_position(batch, place, (ctypes.c_int32 * 4)(*4 * [place]))
        set_wanted(batch, place, True)
        if before is not None:
            set_before(batch, place, Embedding(before[place].ctypes.data, 1, before.shape[1]))
    require(process(context, DECODE, batch))


def encode(context, rows: np.ndarray) -> None:
    """Return a head's encoding of the inputs of the model's layers: float32 [tokens, columns]."""
    batch = new_batch(context)
    for place, row in enumerate(rows):
        add_row(batch, 0, Embedding(row.ctypes.data, 1, len(row)))
        set_position(batch, place, (ctypes.c_int32 * 4)(*4 * [place]))
        set_wanted(batch, place, True)
    require(process(context, ENCODE, batch))


def require(code: int) -> None:
    if code:
        sys.exit("llama.cpp does not compute it")


def rows_at(place, *shape: int) -> np.ndarray:
    """Return a copy of floats there."""
    return np.ctypeslib.as_array(ctypes.cast(place, ctypes.POINTER(ctypes.c_float)), shape).copy()


def load(path: str):
    of_model = llama.llama_model_default_params()
    of_model.use_extra_bufts, of_model.n_gpu_layers, of_model.load_mtp = False, 0, True
    return llama.llama_model_load_from_file(path.encode(), of_model)


def by_layer(model, tokens: list[int]):
    """Return the context of the model's own layer, and what it goes on with."""
    whole, layer = opened(model, 0), opened(model, OF_GUESSES)
    for context in (whole, layer):
        reveal(context, True, False)
    read(whole, tokens)
    return layer, rows_at(revealed(whole), len(tokens), llama.llama_model_n_embd(model))


def by_head(model, path: str, tokens: list[int]):
    """Return the same of a head in another file."""
    whole, other = opened(model, 0), load(path)
    layers = layers_of(other)[:3]
    for layer in layers:
        reveal_layer(whole, layer, True)
    read(whole, tokens)
    width = llama.llama_model_n_embd(model)
    shown = [rows_at(revealed_layer(whole, layer), len(tokens), width) for layer in layers]
    guessing = opened(other, 0, whole)
    reveal(guessing, True, True)
    encode(guessing, np.ascontiguousarray(np.concatenate(shown, axis=1)))
    return guessing, rows_at(revealed(guessing), len(tokens), llama.llama_model_n_embd(other))


def run(job: dict) -> None:
    model, tokens = load(job["model"]), job["tokens"]
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    guessing, made = by_head(model, job["head"], tokens) if job["head"] else by_layer(model, tokens)
    read(guessing, tokens, np.concatenate([np.zeros_like(made[:1]), made[:-1]]))
    rows = [rows_at(llama.llama_get_logits_ith(guessing, place), vocab) for place in range(len(tokens))]
    np.savez(job["out"], rows=np.stack(rows))


if __name__ == "__main__":
    for line in sys.stdin:
        run(json.loads(line))
