"""Measure the speedup by speculation.

    python scripts/measure speculation MODEL [--draft DRAFT]

Tokens per second of answers with guesses by those without, which take turns, so that the machine's moods meet both; of
each the best round. Without --draft: guesses from the text, for prompts whose answers repeat much of them, and others;
and then from earlier sessions, whose prompts were nearly the same: without what was written there, and with it.
With --draft, of a pair by make_draft_pair.py: what a draft model brings, and by that what it could bring at most with
so many right guesses in a row and what steps cost: the best length's (1 + a + ... + a^n) / (cost(n + 1) + n * draft).
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from common import make_parser, time_of

from localllm import api
from localllm.generation.scheduler import Generation
from localllm.generation.speculation.ngram import NgramCache

LETTER = """Dear Mrs. Miller,
thank you for your letter of 3 March. We have looked at the roof of the garden house, and we agree that it has to be \
repaired before winter. Our carpenter, Mr. Jones, can begin on Monday, 14 October, and will need about four days. The \
price for wood, nails and paint is 480 dollars; the work itself is 720 dollars. Please tell us until Friday whether \
this suits you, and where he may park his van.
With kind regards,
Anna Brown, Brown and Sons"""
CODE = """def read_table(path, separator=","):
    \"\"\"Read a table from a text file.\"\"\"
    rows = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            rows.append(line.split(separator))
    return rows


def write_table(path, rows, separator=","):
    \"\"\"Write a table to a text file.\"\"\"
    with open(path, "w") as file:
        for row in rows:
            file.write(separator.join(row) + "\\n")
"""
RECORD = """name: Eleanor Whitfield
street: 27 Willow Crescent
city: Portsmouth
postal code: PO4 8QT
phone: +44 23 9255 0182
email: eleanor.whitfield@example.org
order number: 2024-118-7731
article: garden chair, oak, set of four
delivery: Tuesday, 21 May, between 9 and 12 o'clock"""
FORM = """{"name": "", "street": "", "city": "", "postal_code": "", "phone": "", "email": "", "order_number": "", \
"article": "", "delivery": ""}"""
PROMPTS = {
    "repeat": f"Repeat the following text word by word:\n\n{LETTER}",
    "edit": f"Rewrite the letter. Change the name Miller to Smith and leave everything else as it is.\n\n{LETTER}",
    "code": f"Rename the function read_table to load_table. Print all of the code again.\n\n```python\n{CODE}```",
    "form": f"{RECORD}\n\nFill in this JSON form with the record above:\n{FORM}",
    "story": "Write a story about a lighthouse keeper and a storm.",
    "explanation": "Explain how a refrigerator works.",
}

EARLIER = {  # what was asked yesterday, and is asked today
    "letter": (
        f"Make this letter more polite:\n\n{LETTER}",
        f"Make this letter more polite:\n\n{LETTER}".replace("Miller", "Smith").replace("four days", "a week"),
    ),
    "program": (
        "Write a Python class for a bank account, with methods to deposit, to withdraw and to print the balance.",
        "Write a Python class for a bank account, with methods to deposit, to withdraw, and to show the balance.",
    ),
    "recipe": ("Give me a recipe for apple pie.", "Give me a recipe for an apple pie."),
}


def answer(model: api.Model, prompt: str | list[int], tokens: int, speculate: Any) -> Generation:
    """Return a greedy one, finished."""
    if isinstance(prompt, str):
        generation = model.chat([{"role": "user", "content": prompt}], tokens, speculate=speculate, temperature=0)
    else:
        generation = model.generate(prompt, tokens, speculate=speculate, temperature=0)
    for _ in generation:
        pass
    return generation


def in_turn(
    model: api.Model,
    prompt: str | list[int],
    tokens: int,
    how: Any,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> list[Generation]:
    """Return the fastest answers without and with guesses; before: called before each."""
    best: list[Generation] = []
    for number in range(rounds):
        for place, speculate in enumerate(("off", how)):
            before()
            generation = answer(model, prompt, tokens, speculate)
            if number == 0:
                best.append(generation)
            elif generation.decode_s < best[place].decode_s:
                best[place] = generation
    return best


def told(name: str, off: Generation, on: Generation) -> float:
    """Print a line; tokens per second of the one by those of the other."""
    ratio, same = off.decode_s / on.decode_s, "same text" if off.tokens == on.tokens else "ANOTHER TEXT"
    speed = (len(off.tokens) - 1) / off.decode_s
    print(
        f"{name}: {ratio:.2f} ({speed:.1f} to {speed * ratio:.1f} tokens/s), {len(on.tokens)} tokens, "
        f"{on.steps} steps, {on.accepted} of {on.drafted} guesses right, {same}",
        flush=True,
    )
    return ratio


def measure_earlier(model: api.Model, tokens: int, rounds: int) -> None:
    """Print what texts of an earlier session bring."""
    sequences = model.session.cache
    for name, (yesterday, today) in EARLIER.items():
        first = answer(model, yesterday, tokens, "off")
        for what in ("without", "with"):

            def remember(is_known: bool = what == "with", first: Generation = first) -> None:
                sequences.ngrams = NgramCache(model.engine.vocab_size, None) if is_known else None
                if sequences.ngrams:
                    sequences.ngrams.add([*first.prompt, *first.tokens])

            told(f"{name}, {what} yesterday's", *in_turn(model, today, tokens, "ngram", rounds, remember))
    sequences.ngrams = None


def step_seconds(model: api.Model, counts: range, depth: int = 64) -> dict[int, float]:
    """Of steps of so many tokens, medians."""
    sequence = model.sequence()
    sequence.append([100 + i for i in range(depth)], "none")
    taken: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(9):
        for count in counts:
            ids = [200 + i for i in range(count)]
            taken[count].append(time_of(lambda ids=ids: sequence.append(ids, "all")))
            sequence.truncate(depth)
    sequence.close()
    return {count: statistics.median(times[1:]) for count, times in taken.items()}


def measure_draft(model: api.Model, draft: api.Model, tokens: int, rounds: int) -> None:
    """Print what it brings and what it could bring."""
    off, on = in_turn(model, [300, 301, 302], tokens, draft, rounds)
    ratio = told("draft model", off, on)
    steps, each = step_seconds(model, range(1, 17)), step_seconds(draft, range(1, 2))[1]
    text = on.prompt + on.tokens
    said = np.argmax(draft.logits(text), axis=1)[len(on.prompt) - 1 : -1]
    right = float(np.mean(said == on.tokens))
    length, most = max(
        (
            (length, sum(right**i for i in range(length + 1)) * steps[1] / (steps[length + 1] + length * each))
            for length in range(16)
        ),
        key=lambda found: found[1],
    )
    costs = ", ".join(f"{count}: {steps[count] / steps[1]:.2f}" for count in (2, 3, 4, 5, 6, 8, 16))
    print(f"  {100 * right:.0f} % agree; steps of more tokens cost {costs}")
    print(
        f"  a guess costs {each / steps[1]:.3f} of a step; {length} guesses could bring {most:.2f}: {ratio / most:.2f}"
    )


def main() -> None:
    """Parse, measure, print."""
    parser = make_parser(__doc__, "model", rounds=3)
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    with api.open_model(options.model, options.threads, 4096, cache=False) as model:
        if options.draft:
            with api.open_model(options.draft, options.threads, 4096) as draft:
                measure_draft(model, draft, options.tokens, options.rounds)
        else:
            for name, prompt in PROMPTS.items():
                told(name, *in_turn(model, prompt, options.tokens, "ngram", options.rounds))
            measure_earlier(model, options.tokens, options.rounds)
