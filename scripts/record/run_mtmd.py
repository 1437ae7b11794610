#!/usr/bin/env python3
"""Record the image rows of llama.cpp's mtmd, for scripts/record/record_pictures.py; needs llama-cpp-python.

Reads a job per line of stdin, as JSON: {"model": path, "mmproj": path, "images": [.npy of uint8 [rows, columns, 3]],
"text": with mtmd's marker where an image stands, "out": path}. Writes an .npz with `tokens`, -1 for a row of an image,
`rows`, float32 [rows of all images, width], and `logits`, float32 [vocab], behind the last token. One thread, keys and
values in float32, no flash attention.
"""

import ctypes
import json
import sys

import llama_cpp as llama
import llama_cpp.mtmd_cpp as mtmd
import numpy as np
from run_llama_cpp import opened

BATCH = 512


def run(job: dict) -> None:
    model, context = opened(job["model"], n_ctx=2048, n_batch=BATCH, n_ubatch=BATCH)
    chosen = mtmd.mtmd_context_params_default()
    chosen.use_gpu, chosen.print_timings, chosen.n_threads, chosen.flash_attn_type = False, False, 1, 0
    chosen.warmup = False
    eye = mtmd.mtmd_init_from_file(job["mmproj"].encode(), model, chosen)
    if not eye:
        sys.exit(f"mtmd does not open {job['mmproj']}")
    pixels = [np.load(path) for path in job["images"]]
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * len(pixels))(
        *(
            mtmd.mtmd_bitmap_init(image.shape[1], image.shape[0], image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
            for image in pixels
        )
    )
    text = job["text"].encode()
    given, chunks = mtmd.mtmd_input_text(text, len(text), True, True), mtmd.mtmd_input_chunks_init()
    if mtmd.mtmd_tokenize(eye, chunks, ctypes.byref(given), bitmaps, len(pixels)):
        sys.exit("mtmd does not make tokens of it")
    tokens, rows = list[int](), list[np.ndarray]()
    width = llama.llama_model_n_embd_inp(model)
    for number in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, number)
        count = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        if mtmd.mtmd_input_chunk_get_type(chunk) == 0:
            found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(ctypes.c_size_t()))
            tokens += found[:count]
            continue
        if mtmd.mtmd_encode_chunk(eye, chunk):
            sys.exit("mtmd does not encode it")
        rows.append(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(eye), (count, width)).copy())
        tokens += [-1] * count
    past = llama.llama_pos(0)
    if mtmd.mtmd_helper_eval_chunks(eye, context, chunks, 0, 0, BATCH, True, ctypes.byref(past)):
        sys.exit("llama.cpp does not read it")
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (vocab,)).copy()
    np.savez(job["out"], tokens=np.array(tokens, np.int32), rows=np.concatenate(rows), logits=logits, past=past.value)
    mtmd.mtmd_free(eye)
    llama.llama_free(context)
    llama.llama_model_free(model)


if __name__ == "__main__":
    for line in sys.stdin:
        run(json.loads(line))
