"""What several measurements share: arguments, whole processes, texts, tables."""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROSE = ROOT / "tests" / "support" / "prose.txt"


def make_parser(doc: str | None, *needed: str, rounds: int = 0, threads: bool = True) -> argparse.ArgumentParser:
    """Make a parser of arguments.

    needed: of "model", "models", and "peer", an interpreter; rounds: the default of --rounds, 0 for no such option.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if "model" in needed:
        parser.add_argument("model")
    if "models" in needed:
        parser.add_argument("models", nargs="+", metavar="MODEL")
    if "peer" in needed:
        parser.add_argument("--peer-python", required=True, metavar="PEER", help="a Python that has llama-cpp-python")
    if threads:
        parser.add_argument("-t", "--threads", type=int, default=2)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def localllm_command(*words: object) -> list[str]:
    return [sys.executable, "-m", "localllm", *map(str, words)]


def run_process(command: list[str], stdin: str = "", libraries: Path | None = None) -> tuple[float, float, str]:
    """Return a command's wall time in seconds, its peak memory in MB and its output; libraries: LD_LIBRARY_PATH.

    Raises SystemExit with its messages if it fails.
    """
    environment = os.environ | ({"LD_LIBRARY_PATH": str(libraries)} if libraries else {})
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as messages, tempfile.TemporaryFile() as given:
        given.write(stdin.encode())
        given.seek(0)
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=given, stdout=output, stderr=messages)
        _, status, usage = os.wait4(process.pid, 0)
        seconds, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
        output.seek(0)
        if process.returncode:
            messages.seek(0)
            shown = [word for word in command if len(word) < 200]
            raise SystemExit(f"{messages.read().decode(errors='replace')[-2000:]}\nfailed: {shown}")
        return seconds, usage.ru_maxrss / 1024, output.read().decode()


def time_of(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_time(work: Callable[[], object], times: int) -> float:
    """Return the median of the seconds of so many calls."""
    return statistics.median(time_of(work) for _ in range(times))


def draw_passages(text: str, count: int, seed: int, words: tuple[int, int] = (5, 60)) -> list[str]:
    """Draw passages of so many words, the same for the same seed."""
    all_words, chance, passages = text.split(), random.Random(seed), []
    for _ in range(count):
        length = chance.randint(*words)
        start = chance.randrange(len(all_words) - length)
        passages.append(" ".join(all_words[start : start + length]))
    return passages


def print_row(cells: Iterable[object]) -> None:
    """Print a line of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_header(cells: list[str]) -> None:
    print_row(cells)
    print_row(["---"] * len(cells))
