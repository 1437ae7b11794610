"""Compare many prompts batched with the same prompts one after another.

    python scripts/measure map MODEL [--peer-python PEER]

Prompts of random tokens, answered one after another (a part of them) and by continuous batching, greedily: seconds for
each, how often that is the faster, the longest time between two tokens of an answer while others are read, and how many
answers are the same. `--shared` tokens are the same in all prompts. With a peer, the same work by llama.cpp.
"""

import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from common import make_parser
from peer import ask_for_json

from localllm import api
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.request import PromptTask
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.scheduler import Generation


def one_after_another(model: api.Model, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Answer prompts one by one, each with an empty cache; return seconds per prompt, and the answers."""
    chosen = GenerationOptions(tokens, sampling=SamplingOptions(temperature=0), speculate="off")
    answers = []
    start = time.perf_counter()
    for prompt in prompts:
        sequences = PrefixCache(model.engine)
        answer = Generation(sequences, model.tokenizer, PromptTask(prompt, model.tokenizer.stream(), chosen))
        answers.append(answer.tokens if "".join(answer) is not None else [])
    return (time.perf_counter() - start) / len(prompts), answers


def at_once(
    model: api.Model, prompts: list[list[int]], tokens: int, parallel: int, precise: bool
) -> tuple[float, float, float, list[list[int]]]:
    """Answer prompts batched; return seconds per prompt, the longest pause, Python's share of the time, answers."""
    chosen = GenerationOptions(tokens, sampling=SamplingOptions(temperature=0))
    requests = [model.session.request(prompt, chosen) for prompt in prompts]
    run, native = model.engine.backend.run, [0.0]

    def timed(*arguments):
        start = time.perf_counter()
        rows = run(*arguments)
        native[0] += time.perf_counter() - start
        return rows

    model.engine.backend.run = timed
    pause, start = 0.0, time.perf_counter()
    with closing(model.batch(requests, parallel, precise)) as batch:
        turn, writing = start, False
        for _ in batch:
            now = time.perf_counter()
            pause, turn = max(pause, now - turn if writing else 0.0), now
            writing = any(one.has_begun for one in batch.running)
    seconds = time.perf_counter() - start
    model.engine.backend.run = run
    return seconds / len(prompts), pause, 1 - native[0] / seconds, [request.answers[0].tokens for request in requests]


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser(__doc__, "model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--shared", type=int, default=0, help="of them, the same in all")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--single", type=int, default=16, help="prompts that are answered one after another")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--arithmetic", choices=["16", "8", "both"], default="both", help="bits of activations")
    parser.add_argument("--peer-python", metavar="PEER", help="a Python that has llama-cpp-python")
    options = parser.parse_args()
    with api.open_model(options.model, options.threads, options.length + options.tokens + 1) as model:
        ids = np.random.default_rng(0).integers(0, model.tokenizer.vocab_size, (options.prompts, options.length))
        ids[:, : options.shared] = ids[0, : options.shared]
        prompts = ids.tolist()
        model.logits(prompts[0])  # the weights are in memory then
        if options.single:
            alone, expected = one_after_another(model, prompts[: options.single], options.tokens)
            print(f"one after another: {alone:.3f} s for each of {options.single} prompts", flush=True)
        for bits in ("16", "8") if options.arithmetic == "both" else (options.arithmetic,):
            seconds, pause, python, answers = at_once(model, prompts, options.tokens, options.parallel, bits == "16")
            told = f"at once, {bits} bits: {seconds:.3f} s for each of {options.prompts}, longest pause {pause:.2f} s, "
            told += f"{100 * python:.1f} % of the time in Python"
            if options.single:
                same = sum(one == other for one, other in zip(expected, answers, strict=False))
                told += f", {alone / seconds:.2f} times as fast, {same} of {options.single} answers the same"
            print(told, flush=True)
    if options.peer_python:
        job = {"model": options.model, "prompts": prompts, "tokens": options.tokens, "threads": options.threads}
        with tempfile.TemporaryDirectory() as folder:
            taken = ask_for_json(options.peer_python, Path(folder), job="batch", **job)
        print(f"llama.cpp: {taken['all'] / len(prompts):.3f} s for each, {taken['read']:.2f} s in all for reading")
