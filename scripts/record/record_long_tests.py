#!/usr/bin/env python3
"""Record the tests that take long and therefore take turns at commits: tests/support/long_tests.txt.

    scripts/test --all --durations=0 --durations-min=0.05 | tee LOG
    python scripts/record/record_long_tests.py LOG

A function is listed if its cases take more than a thousandth of the time of all tests, with what their fixtures take.
The rules of the house (tests/test_*.py) run at every commit.
"""

import re
import sys
from collections import Counter
from pathlib import Path

LIST = Path(__file__).parents[2] / "tests/support/long_tests.txt"
SHARE = 0.001


def seconds_by_function(log: str) -> Counter[str]:
    """Return the time of each test function, by its file and name."""
    seconds = Counter[str]()
    for number, case in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(\S+::\w+)", log, re.M):
        seconds[case] += float(number)
    return seconds


def main() -> None:
    """Write the list."""
    seconds = seconds_by_function(Path(sys.argv[1]).read_text("utf-8"))
    least = SHARE * sum(seconds.values())
    long = [name for name, taken in seconds.items() if taken > least and not re.match(r"tests/test_", name)]
    LIST.write_text("".join(f"{name}\n" for name in sorted(long)), "utf-8")
    print(f"{len(long)} of {len(seconds)} functions take {sum(seconds[name] for name in long) / seconds.total():.0%}")


if __name__ == "__main__":
    main()
