#!/usr/bin/env python3
"""Measure localllm and llama.cpp in turn on the same files, and print the ratios.

    python scripts/compare_llama_cpp.py --peer-python PEER/bin/python MODEL.gguf...

PEER is a virtual environment with llama-cpp-python; localllm is the one that runs this script. Every figure is the
median of `--rounds` rounds, each of which runs both programs, one after the other, in fresh processes: prefill of 512
tokens and decode of 64 in tokens per second, and for one whole `run` of 48 tokens (greedy, warm) the wall time and the
peak memory. Leave the machine idle.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PROMPT = "Once upon a time there was a small computer that wanted to talk."

OURS = """
import json, sys, time
from localllm.config import Config
from localllm.engine.model import Engine
from localllm.gguf_file import GGUFFile
path, threads = sys.argv[1], int(sys.argv[2])
file = GGUFFile.open(path)
engine = Engine(file, Config.from_metadata(file.metadata, path), threads, context=1024)
prefill = lambda: engine.forward([100] * 512, 0)
def decode():
    for position in range(64):
        engine.forward([100], position)
"""

THEIRS = """
import json, sys, time, llama_cpp
path, threads = sys.argv[1], int(sys.argv[2])
model = llama_cpp.Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
def prefill():
    model.reset()
    model.eval([100] * 512)
def decode():
    model.reset()
    for _ in range(64):
        model.eval([100])
"""

SPEED = """
def best(work, tokens):
    work()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return tokens / sorted(times)[1]
print(json.dumps({"prefill": best(prefill, 512), "decode": best(decode, 64)}))
"""

THEIR_RUN = """
import sys, llama_cpp
path, threads, prompt = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
for piece in model(prompt, max_tokens=48, temperature=0, stream=True):
    print(piece["choices"][0]["text"], end="", flush=True)
"""


def speeds(python: str, program: str, model: str, threads: int) -> dict[str, float]:
    """Tokens per second in a fresh process."""
    command = [python, "-c", program + SPEED, model, str(threads)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def one_shot(command: list[str]) -> dict[str, float]:
    """Wall time in seconds and peak memory in MB of a whole process."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed with {process.returncode}: {command}")
    return {"run s": time.perf_counter() - start, "peak MB": usage.ru_maxrss / 1024}


def measure(model: str, peer: str, threads: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians by figure: (ours, theirs)."""
    our_run = [sys.executable, "-m", "localllm", "run", model, "--raw", "-p", PROMPT, "-n", "48", "--temp", "0"]
    our_run += ["-c", "2048", "-t", str(threads)]
    their_run = [peer, "-c", THEIR_RUN, model, str(threads), PROMPT]
    for command in (our_run, their_run):
        one_shot(command)
    results = []
    for _ in range(rounds):
        ours = speeds(sys.executable, OURS, model, threads) | one_shot(our_run)
        theirs = speeds(peer, THEIRS, model, threads) | one_shot(their_run)
        results.append((ours, theirs))
    return {
        name: (statistics.median(o[name] for o, _ in results), statistics.median(t[name] for _, t in results))
        for name in results[0][0]
    }


def main() -> None:
    """Parse, measure, print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--peer-python", required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| model | figure | localllm | llama.cpp | ratio |\n|---|---|---|---|---|")
    for model in options.models:
        for name, (ours, theirs) in measure(model, options.peer_python, options.threads, options.rounds).items():
            row = [os.path.basename(model), name, f"{ours:.3g}", f"{theirs:.3g}", f"{ours / theirs:.2f}"]
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
