"""Simulate how much n-gram speculation could speed answers up.

    python scripts/measure simulate-speculation MODEL [--tokens 256]

The model answers the prompts of speculation.py once, greedily and without guesses. Then steps are simulated, in
which one token costs 1 and each further one so much more, on which the machine has no influence:

    now      what generation.speculation chooses, of which every answer says what was right
    lengths  the same guesses, read as far as they are right: what nobody can know beforehand
    trees    up to four ways to go on in one step, the places where the end of the text has been before, likeliest first
    chains   the same with one way, which is what trees are to be compared with

Trees are chosen as well as their chances are known: what the first guess and others behind it were right in these very
answers. Numbers are tokens per time by those without guesses, geometric means by kind of prompt.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from common import make_parser
from speculation import EARLIER, PROMPTS, answer

from localllm import api
from localllm.generation.speculation.acceptance import (
    FIRST_CHANCES,
    GAIN,
    MAX_DRAFT_TOKENS,
    UNLIKELY,
    DraftSelector,
    StepCostModel,
)
from localllm.generation.speculation.ngram import (
    CopyProposer,
    NgramCache,
    NgramProposer,
    make_text_proposers,
    propose_copy,
)

COSTS = (0.32, 0.26, 0.2, 0.15, 0.1, 0.05)  # of a further token in a step
WAYS = 4


class Answer(NamedTuple):
    """A recorded answer.

    Attributes:
        kind: of prompt.  text: tokens before the answer, and its first one.  rest: its others.  before: of yesterday.
    """

    kind: str
    text: list[int]
    rest: list[int]
    before: list[int]

    def proposers(self) -> tuple[NgramProposer, CopyProposer]:
        written = NgramCache(1 << 30, None)
        if self.before:
            written.add(self.before)
        return make_text_proposers(self.text, written)


def recorded(path: str, tokens: int) -> list[Answer]:
    """Record the model's answers."""
    found = []
    with api.open_model(path, 2, 4096, cache=False) as model:
        for kind, prompt in PROMPTS.items():
            said = answer(model, prompt, tokens, "off")
            found.append(Answer(kind, [*said.prompt, said.tokens[0]], said.tokens[1:], []))
        for yesterday, today in EARLIER.values():
            first, said = (answer(model, prompt, tokens, "off") for prompt in (yesterday, today))
            text = [*said.prompt, said.tokens[0]]
            found.append(Answer("earlier", text, said.tokens[1:], [*first.prompt, *first.tokens]))
    return found


def right(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many drafts are accepted, from the first on."""
    return next(
        (n for n, pair in enumerate(zip(guesses, tokens, strict=False)) if pair[0] != pair[1]),
        min(len(guesses), len(tokens)),
    )


def now(said: Answer, each: float) -> float:
    """Return the time that the answer takes."""
    costs = StepCostModel()
    for count in range(1, MAX_DRAFT_TOKENS + 2):
        costs.record(count, 1 + each * (count - 1))
    guesses, rest, spent = DraftSelector(said.proposers(), costs), said.rest, 0.0
    while rest:
        draft = guesses.draft(len(rest) - 1)
        drawn = rest[: right(draft, rest) + 1]
        guesses.push(drawn)
        rest, spent = rest[len(drawn) :], spent + 1 + each * len(draft)
    return spent


def lengths(said: Answer, each: float) -> float:
    """As `now`, of the best proposer at each place as much as is right, if that pays later on, too."""
    proposers, longest = said.proposers(), list[int]()
    for place, token in enumerate(said.rest):
        drafts = ([guess.token for guess in islice(one.propose() or (), MAX_DRAFT_TOKENS)] for one in proposers)
        longest.append(max(right(draft, said.rest[place:]) for draft in drafts))
        for one in proposers:
            one.push([token])
    left = [0.0] * (len(said.rest) + 1)
    for place in reversed(range(len(said.rest))):
        ends = ((count, min(place + count + 1, len(said.rest))) for count in range(longest[place] + 1))
        left[place] = min(1 + each * count + left[end] for count, end in ends)
    return left[0]


Way = list[tuple[int, int]]  # tokens and trust


def ways(grams: NgramProposer, copies: CopyProposer, most: int) -> list[Way]:
    """Ways to go on with different first tokens: of the longest end that was there before, then of shorter ones."""
    found: dict[int, Way] = {}
    places = [(grams.agreed, grams.place)] if grams.agreed else []
    if copies._place is not None:
        places.append((copies._followed, copies._place))
    places.sort(reverse=True)
    state = grams._link[grams._last]
    while state > 0 and len(places) < 8 * most:
        places += [(grams._length[state], grams._end[after]) for after in grams._next[state].values()]
        state = grams._link[state]
    for agreed, place in places:
        way = [
            (guess.token, guess.trust) for guess in islice(propose_copy(grams.tokens, place, agreed), MAX_DRAFT_TOKENS)
        ]
        if way:
            found.setdefault(way[0][0], way)
    return list(found.values())[:most]


class Chances:
    """That a way is right if those before it are not, by its number and trust, from experience."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], list[float]] = defaultdict(lambda: [1.0, 3.0])

    def of(self, number: int, trust: int) -> float:
        hits, seen = self._seen[number, min(trust, 8)]
        return FIRST_CHANCES[trust] if number == 0 else hits / seen

    def learn(self, found: list[Way], token: int) -> None:
        for number, way in enumerate(found):
            seen = self._seen[number, min(way[0][1], 8)]
            seen[1] += 1
            if way[0][0] == token:
                seen[0] += 1
                return


def tree(found: list[Way], chances: Chances, each: float) -> list[int]:
    """Return how much of each path is read: nodes by their probability."""
    heap, left = list[tuple[float, int, int]](), 1.0
    for number, way in enumerate(found):
        chance = left * chances.of(number, way[0][1])
        left -= chance
        heapq.heappush(heap, (-chance, number, 1))
    depths, best, expected, rate = [0] * len(found), [0] * len(found), 1.0, GAIN
    while heap and sum(depths) < MAX_DRAFT_TOKENS and -heap[0][0] > UNLIKELY:
        chance, number, depth = heapq.heappop(heap)
        depths[number], expected = depth, expected - chance
        if (promised := expected / (1 + each * sum(depths))) > rate:
            rate, best = promised, [*depths]
        if depth < len(found[number]):
            heapq.heappush(heap, (chance * FIRST_CHANCES[found[number][depth][1]], number, depth + 1))
    return best


def trees(said: Answer, each: float, most: int, chances: Chances) -> float:
    """As `now`."""
    (grams, copies), rest, spent = said.proposers(), said.rest, 0.0
    while rest:
        found = ways(grams, copies, most)
        read = tree(found, chances, each)
        come = max(
            (right([token for token, _ in way[:n]], rest) for way, n in zip(found, read, strict=True)), default=0
        )
        chances.learn(found, rest[0])
        drawn = rest[: come + 1]
        for one in (grams, copies):
            one.push(drawn)
        rest, spent = rest[len(drawn) :], spent + 1 + each * sum(read)
    return spent


def main() -> None:
    """Parse, record, print."""
    parser = make_parser(__doc__, "model", threads=False)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    said, chances = recorded(options.model, options.tokens), Chances()
    for one in said:
        trees(one, 0.0, WAYS, chances)  # to know how often ways are right
    kinds = list(dict.fromkeys(one.kind for one in said))
    print("each further token, how", *kinds, "all", sep="  ")
    for each in COSTS:
        for name, time in (
            ("now", now), ("lengths", lengths), ("chains", lambda one, each: trees(one, each, 1, chances)),
            ("trees", lambda one, each: trees(one, each, WAYS, chances)),
        ):  # fmt: skip
            gained: dict[str, list[float]] = defaultdict(list)
            for one in said:
                gained[one.kind].append(math.log(len(one.rest) / time(one, each)))
            means = [float(np.mean(gained[kind])) for kind in kinds]
            print(
                f"{each:.2f}  {name:7}",
                *(f"{math.exp(mean):.2f}" for mean in [*means, float(np.mean(means))]),
                sep="  ",
            )
