#!/usr/bin/env python3
"""Record what llama.cpp's sampler for filling in leaves of random logits, for tests/goldens/test_infill_sampler.py.

    PEER/bin/python scripts/record/record_llama_infill.py MODEL.gguf > tests/goldens/llama_infill.json

PEER is a virtual environment with llama-cpp-python (recorded: 0.3.36); of the model, only the vocabulary is read
(recorded: Qwen2.5-Coder's). The candidates are tokens that begin alike, others, and two that end an answer; a case has
the logits' seed and scale, what is added to those of the ends, and the tokens that are left.
"""

import ctypes
import itertools
import json
import sys

import llama_cpp as llama
import numpy as np

TEXTS = ["h", "he", "hel", "hell", "hello", " the", " them", " then", "\n", "\n\n", " a", " an", " and", "x", "return"]


def candidates(vocab) -> list[list]:
    """Return of each candidate its id, its text, and whether it ends an answer."""
    found = [[llama.llama_vocab_eos(vocab), "", True], [llama.llama_vocab_eot(vocab), "", True]]
    found = found[: len({token for token, _, _ in found})]
    buffer = (llama.llama_token * 8)()
    for text in TEXTS:
        if llama.llama_tokenize(vocab, text.encode(), len(text.encode()), buffer, 8, False, False) == 1:
            found.append([buffer[0], text, False])
    return found


def run(vocab, tokens: list[list], seed: int, scale: float, more: float) -> dict:
    """Return a case."""
    rows = (np.random.RandomState(seed).standard_normal(len(tokens)) * scale).astype(np.float32)
    rows[[is_end for _, _, is_end in tokens]] += np.float32(more)
    pairs = zip(tokens, rows, strict=True)
    data = (llama.llama_token_data * len(tokens))(*(llama.llama_token_data(t[0], float(x), 0.0) for t, x in pairs))
    array = llama.llama_token_data_array(data, len(tokens), -1, False)
    sampler = llama.llama_sampler_init_infill(vocab)
    llama.llama_sampler_apply(sampler, ctypes.byref(array))
    left = [array.data[place].id for place in range(array.size)]
    return {"seed": seed, "scale": scale, "more": more, "left": sorted(left)}


def main(path: str) -> None:
    llama.llama_backend_init()
    chosen = llama.llama_model_default_params()
    chosen.vocab_only = True
    vocab = llama.llama_model_get_vocab(llama.llama_model_load_from_file(path.encode(), chosen))
    tokens = candidates(vocab)
    settings = itertools.product(range(12), (0.2, 2.0, 4.0), (0.0, -3.0, -20.0))
    lines = ",\n".join(json.dumps(run(vocab, tokens, *each), separators=(",", ":")) for each in settings)
    head = json.dumps({"tokens": tokens, "end": llama.llama_vocab_eot(vocab)})
    print(f'{head[:-1]},"cases":[\n{lines}\n]}}')


if __name__ == "__main__":
    main(*sys.argv[1:])
