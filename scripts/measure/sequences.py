"""Measure a decode step by the number of sequences.

    python scripts/measure sequences MODEL

A step of 1 to 16 sequences of one token each, in milliseconds and by what one alone takes, with activations in 16 bits
and in 8; and a fork of a long sequence. Medians; the counts take turns, so that the machine's moods meet all of them.
"""

import statistics

import numpy as np
from common import make_parser, median_time, time_of

from localllm import api

COUNTS, DEPTH, LONG = (1, 2, 4, 8, 12, 16), 128, 4096


def steps(model: api.Model, rounds: int, precise: bool) -> dict[int, float]:
    """Seconds of a step by the number of sequences, medians."""
    ids = np.random.default_rng(0).integers(0, model.tokenizer.vocab_size, (max(COUNTS), DEPTH)).tolist()
    sequences = [model.sequence() for _ in ids]
    for sequence, prompt in zip(sequences, ids, strict=True):
        sequence.append(prompt, "none")
    taken: dict[int, list[float]] = {count: [] for count in COUNTS}
    for token in range(rounds + 1):
        for count in COUNTS:
            requests = [(sequences[i], [ids[i][token % DEPTH]]) for i in range(count)]
            taken[count].append(time_of(lambda r=requests: model.step(r, precise)))
            for sequence in sequences[:count]:
                sequence.truncate(DEPTH)
    for sequence in sequences:
        sequence.close()
    return {count: statistics.median(times[1:]) for count, times in taken.items()}


def fork(model: api.Model) -> float:
    """Seconds of a fork of LONG tokens, the median."""
    sequence = model.sequence()
    sequence.append([100] * LONG, "none")
    return median_time(sequence.fork, 20)


def main() -> None:
    """Parse, measure, print."""
    options = make_parser(__doc__, "model", rounds=20).parse_args()
    with api.open_model(options.model, options.threads, LONG + 64) as model:
        for name, precise in (("16 bits", True), ("8 bits", False)):
            taken = steps(model, options.rounds, precise)
            cells = (f"{count}: {1e3 * time:.1f} ms ({time / taken[1]:.2f})" for count, time in taken.items())
            print(f"sequences in a step, {name}:  " + "  ".join(cells), flush=True)
        print(f"fork of {LONG} tokens: {1e3 * fork(model):.3f} ms")
