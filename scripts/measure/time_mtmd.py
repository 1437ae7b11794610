#!/usr/bin/env python3
"""Time llama.cpp's mtmd for a picture: MODEL MMPROJ PICTURE.npy THREADS.

Run by scripts/measure/measure_pictures.py with a Python that has llama-cpp-python. The picture is encoded twice, the
second time counts.
"""

import ctypes
import sys
import time

import llama_cpp as llama
import llama_cpp.mtmd_cpp as mtmd
import numpy as np


def main() -> None:
    path, projector, picture, threads = sys.argv[1:]
    of_model = llama.llama_model_default_params()
    of_model.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(path.encode(), of_model)
    chosen = mtmd.mtmd_context_params_default()
    chosen.use_gpu, chosen.print_timings, chosen.n_threads, chosen.warmup = False, False, int(threads), False
    eye = mtmd.mtmd_init_from_file(projector.encode(), model, chosen)
    pixels = np.load(picture)
    bitmap = mtmd.mtmd_bitmap_init(*pixels.shape[1::-1], pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
    text, chunks = b"<__media__>", mtmd.mtmd_input_chunks_init()
    given = mtmd.mtmd_input_text(text, len(text), True, True)
    if mtmd.mtmd_tokenize(eye, chunks, ctypes.byref(given), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap), 1):
        sys.exit("mtmd does not make tokens of it")
    images = [
        chunk
        for number in range(mtmd.mtmd_input_chunks_size(chunks))
        if mtmd.mtmd_input_chunk_get_type(chunk := mtmd.mtmd_input_chunks_get(chunks, number)) == 1
    ]
    for _ in range(2):
        begin = time.perf_counter()
        for chunk in images:
            if mtmd.mtmd_encode_chunk(eye, chunk):
                sys.exit("mtmd does not encode it")
        taken = time.perf_counter() - begin
    print(taken / len(images))


if __name__ == "__main__":
    main()
