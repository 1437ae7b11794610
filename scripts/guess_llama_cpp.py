#!/usr/bin/env python3
"""What llama.cpp's layer that guesses says of a text; run by scripts/record_guesses.py with a Python that has
llama-cpp-python.

Reads a job per line of stdin, as JSON: {"model": path, "tokens": [...], "out": path}. Writes an .npz with `rows`
[tokens, vocab], the layer's logits behind each token, which it reads together with what the model made of the one
before, zeros before the first. One thread, keys and values in float32, the text in one batch.
"""

import ctypes
import json
import sys

import llama_cpp as llama
import numpy as np

CONTEXT, DECODE, OF_GUESSES = 128, 1, 1
HANDLE = ctypes.c_void_p


class Embedding(ctypes.Structure):
    """llama_embd."""

    _fields_ = [("data", HANDLE), ("rows", ctypes.c_size_t), ("columns", ctypes.c_size_t)]


def function(name: str, result, *arguments):
    """One that the package does not declare; some are C++."""
    found = getattr(llama.llama_cpp._lib, name)
    found.restype, found.argtypes = result, arguments
    return found


reveal = function("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, HANDLE, ctypes.c_bool, ctypes.c_bool)
revealed = function("_Z26llama_get_embeddings_nextnP13llama_context", HANDLE, HANDLE)
new_batch = function("llama_batch_ext_init", HANDLE, HANDLE)
add_token = function("llama_batch_ext_add_token", ctypes.c_int, HANDLE, ctypes.c_int, ctypes.c_int)
set_position = function("llama_batch_ext_set_pos", ctypes.c_bool, HANDLE, ctypes.c_int, ctypes.POINTER(ctypes.c_int32))
set_wanted = function("llama_batch_ext_set_output_logits", ctypes.c_bool, HANDLE, ctypes.c_int, ctypes.c_bool)
set_before = function("llama_batch_ext_set_embd_token", ctypes.c_bool, HANDLE, ctypes.c_int, Embedding)
process = function("llama_process", ctypes.c_int, HANDLE, ctypes.c_int, HANDLE)


def opened(model, kind: int):
    chosen = llama.llama_context_default_params()
    chosen.n_batch = chosen.n_ubatch = chosen.n_ctx = CONTEXT
    chosen.n_threads = chosen.n_threads_batch = 1
    chosen.type_k = chosen.type_v = 0  # GGML_TYPE_F32
    chosen.flash_attn_type, chosen.ctx_type = 0, kind
    context = llama.llama_init_from_model(model, chosen)
    reveal(context, True, False)
    return context


def read(context, tokens: list[int], before: np.ndarray | None = None) -> None:
    """All of them at once; before: float32 [tokens, width]."""
    batch = new_batch(context)
    for place, token in enumerate(tokens):
        add_token(batch, 0, token)
        set_position(batch, place, (ctypes.c_int32 * 4)(*4 * [place]))
        set_wanted(batch, place, True)
        if before is not None:
            set_before(batch, place, Embedding(before[place].ctypes.data, 1, before.shape[1]))
    if process(context, DECODE, batch):
        sys.exit("llama.cpp does not compute it")


def run(job: dict) -> None:
    of_model = llama.llama_model_default_params()
    of_model.use_extra_bufts, of_model.n_gpu_layers, of_model.load_mtp = False, 0, True
    model = llama.llama_model_load_from_file(job["model"].encode(), of_model)
    width, vocab = llama.llama_model_n_embd(model), llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    tokens, whole, layer = job["tokens"], opened(model, 0), opened(model, OF_GUESSES)
    read(whole, tokens)
    floats = ctypes.cast(revealed(whole), ctypes.POINTER(ctypes.c_float))
    made = np.ctypeslib.as_array(floats, (len(tokens), width))
    read(layer, tokens, np.concatenate([np.zeros((1, width), np.float32), made[:-1]]))
    rows = [np.ctypeslib.as_array(llama.llama_get_logits_ith(layer, i), (vocab,)) for i in range(len(tokens))]
    np.savez(job["out"], rows=np.stack(rows))


if __name__ == "__main__":
    for line in sys.stdin:
        run(json.loads(line))
