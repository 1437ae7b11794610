"""Measure single-line infilling made from HumanEval: exact matches, and the time to the first token.

    python scripts/real_models.py human-eval qwen-0.5b
    localllm serve MODEL --port 8081                         # and llama-server -m MODEL --port 8082
    python scripts/measure infill http://127.0.0.1:8081 http://127.0.0.1:8082

From each of 200 canonical solutions one line is left out, both drawn by a seed, and asked for by /infill, greedily, up
to the end of a line. Then the same is asked with its first character typed, as an editor does, which a warm cache
answers. With --around N there are about N characters of other problems around each case, three quarters of them before
it, as in an editor's file: 7000 are 2000 tokens. Every server gets every case before the next one, so that load of the
machine meets all of them. A line for each server: the share of lines that are right to the character, and medians of
both times; a last one tells of how many cases the answers agree.
"""

import gzip
import json
import random
import statistics
import sys
import time
import urllib.request
from typing import NamedTuple

from common import make_parser
from real_models import read_table

TOKENS = 64  # of a line at most


class Case(NamedTuple):
    """A text with a gap: what stands before it, the line that was left out, and what stands after it."""

    prefix: str
    line: str
    suffix: str


class Result(NamedTuple):
    """A server's line, and seconds to the first token: of the line, and after one more character."""

    text: str
    cold: float
    warm: float


def make_cases(rows: list[dict[str, str]], count: int, seed: int, around: int = 0) -> list[Case]:
    """Draw cases from HumanEval's rows; blank lines and comments are not asked for.

    around: characters of other rows around each.
    """
    cases = list[Case]()
    for row in rows:
        lines = row["canonical_solution"].splitlines(keepends=True)
        for number, line in enumerate(lines):
            if line.strip() and not line.lstrip().startswith("#"):
                before = row["prompt"] + "".join(lines[:number])
                cases.append(Case(before, line.rstrip("\n"), "\n" + "".join(lines[number + 1 :])))
    drawn = random.Random(seed).sample(cases, min(count, len(cases)))
    others = "\n".join(row["prompt"] + row["canonical_solution"] for row in rows)
    before, behind = around // 4 * 3, around // 4
    if not around:
        return drawn
    return [Case(f"{others[:before]}\n{one.prefix}", one.line, one.suffix + others[-behind:]) for one in drawn]


def ask(url: str, case: Case, typed: str, tokens: int) -> tuple[str, float]:
    """Return the text that a server puts into the gap, and the seconds until its first token."""
    body = {
        "input_prefix": case.prefix, "input_suffix": case.suffix, "prompt": typed, "n_predict": tokens, "stream": True,
        "temperature": 0, "samplers": ["temperature"], "stop": ["\n"], "cache_prompt": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url.rstrip('/')}/infill", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begin
                text += json.loads(line[6:])["content"]
    return text, first


def main() -> None:
    parser = make_parser(__doc__, threads=False)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=47)
    parser.add_argument("--around", type=int, default=0)
    given = parser.parse_args()
    with gzip.open(read_table()["human-eval"].path, "rt", encoding="utf-8") as lines:
        cases = make_cases([json.loads(line) for line in lines], given.cases, given.seed, given.around)
    done, results = 0, {url: list[Result]() for url in given.urls}
    try:
        for done, case in enumerate(cases):
            for url in given.urls:
                text, seconds = ask(url, case, "", TOKENS)
                results[url].append(Result(text, seconds, ask(url, case, case.line[:1], 1)[1]))
            print(f"\r{done + 1} of {len(cases)}", end="", file=sys.stderr, flush=True)
        done = len(cases)
    except KeyboardInterrupt:  # what there is so far
        pass
    print(file=sys.stderr)
    for url, found in results.items():
        if done:
            print(f"{url}: {summary(cases[:done], found[:done])}")
    alike = sum(
        len({one.text for one in answers}) == 1 for answers in list(zip(*results.values(), strict=False))[:done]
    )
    print(f"the same text from all: {alike} of {done}")


def summary(cases: list[Case], results: list[Result]) -> str:
    """Tell how many lines are right, and the medians of times."""
    right = sum(one.text == case.line for one, case in zip(results, cases, strict=True))
    cold, warm = (1000 * statistics.median(times) for times in zip(*(one[1:] for one in results), strict=True))
    return f"{right} of {len(cases)} lines exact; first token {cold:.0f} ms, one more character {warm:.0f} ms"
