#!/usr/bin/env python3
"""Measure what several prompts at once cost llama.cpp.

    PEER/bin/python scripts/measure/batch_llama_cpp.py MODEL

As llama-batched-bench does it: all prompts are read, 512 tokens at a time, then every step takes all of them one token
further, greedily. For the Python of an environment with llama-cpp-python; the same work as
`scripts/measure/measure_map.py MODEL --prompts 16 --single 0`.
"""

import argparse
import time

import llama_cpp
import numpy as np

MOST = 512  # tokens of a run


class Batch:
    """Runs tokens of several sequences."""

    def __init__(self, path: str, sequences: int, length: int, threads: int):
        """length: the most tokens of a sequence."""
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = sequences * (length // 256 + 1) * 256, MOST, MOST
        parameters.n_seq_max, parameters.n_threads, parameters.n_threads_batch = sequences, threads, threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(MOST, 0, 1)

    def run(self, items: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Read (token, position, sequence, whether its logits are wanted); the likeliest next token by sequence."""
        self._batch.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            self._batch.token[i], self._batch.pos[i], self._batch.logits[i] = token, position, wanted
            self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, sequence
        if llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        rows = {item[2]: llama_cpp.llama_get_logits_ith(self._context, i) for i, item in enumerate(items) if item[3]}
        return {s: int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for s, row in rows.items()}

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    options = parser.parse_args()
    llama_cpp.llama_backend_init()
    batch = Batch(options.model, options.prompts, options.length + options.tokens, options.threads)
    ids = np.random.default_rng(0).integers(0, batch.vocab_size, (options.prompts, options.length)).tolist()
    batch.run([(1, 0, 0, True)])  # the weights are in memory then
    batch.clear()
    last = options.length - 1
    items = [(token, place, s, place == last) for s, prompt in enumerate(ids) for place, token in enumerate(prompt)]
    newest: dict[int, int] = {}
    start = time.perf_counter()
    for first in range(0, len(items), MOST):
        newest |= batch.run(items[first : first + MOST])
    read = time.perf_counter() - start
    for step in range(options.tokens - 1):
        newest = batch.run([(token, options.length + step, s, True) for s, token in newest.items()])
    seconds = time.perf_counter() - start
    print(f"{seconds / options.prompts:.3f} s for each of {options.prompts} prompts, {read:.2f} s in all for reading")


if __name__ == "__main__":
    main()
