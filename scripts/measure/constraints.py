"""Measure constraints: microseconds per token mask, and milliseconds per token with the constraint and without.

    python scripts/measure constraints MODEL [--tokens 40] [--rounds 6]

Prints the least and the median time: other load on the computer only makes times longer.
"""

from pathlib import Path
from statistics import median
from time import perf_counter

from common import make_parser

import localllm
from localllm.generation.constraints.constraint import get_matcher, make_constraint

TEXT = '{"text": "It was a bright cold day in April, and the clocks were striking thirteen; his chin nuzzled into"}'
SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "minLength": 2000}}, "required": ["text"]}
KINDS = {
    "nothing": {},
    "schema": {"schema": SCHEMA},
    "regex": {"regex": "(?s:.{1,4000})"},
    "grammar": {"grammar": 'root ::= "{" word ":" " "? value "}"\nvalue ::= word | root\nword ::= "\\"" [^"]* "\\""'},
}


def told(seconds: list[float], unit: float) -> str:
    return f"least {min(seconds) * unit:.1f}, median {median(seconds) * unit:.1f}"


def masks(model: localllm.Model, kind: dict) -> tuple[float, list[float]]:
    """Measure the seconds until the first mask, and of each token's mask."""
    constraint = make_constraint(**kind)
    assert constraint
    started = perf_counter()
    first = get_matcher(constraint, model.tokenizer, model.engine.vocab_size)
    first_s, times = perf_counter() - started, []
    for _ in range(3):
        matcher = first.copy()
        for token in model.tokenizer.encode_inside(TEXT)[:-2]:
            before = perf_counter()
            matcher.compute_allowed_mask()
            between = perf_counter()
            matcher.accept(token)
            times.append(perf_counter() - between + between - before)
    return first_s, times


def main() -> None:
    parser = make_parser(__doc__, "model", rounds=6, threads=False)
    parser.add_argument("--tokens", type=int, default=40)
    asked = parser.parse_args()
    with localllm.open(asked.model, cache=False, context=2048) as model:
        print(f"{Path(asked.model).name}, {model.tokenizer.vocab_size} tokens in the vocabulary")
        for name, kind in KINDS.items():
            if kind:
                first_s, times = masks(model, kind)
                print(f"mask by {name}: first after {first_s:.2f} s, then us: {told(times, 1e6)}")
        steps: dict[str, list[float]] = {name: [] for name in KINDS}
        for seed in range(asked.rounds):
            for name, kind in KINDS.items():
                answer = model.generate(
                    "Once upon a time", asked.tokens, speculate="off", seed=seed, ignore_eos=True, **kind
                )
                "".join(answer)
                if len(answer.tokens) > 1:
                    steps[name].append(answer.decode_s / (len(answer.tokens) - 1))
        for name, times in steps.items():
            print(f"a token constrained by {name}, ms: {told(times, 1e3)}")
