"""Measure localllm and llama.cpp in turn on the same files, and print the ratios.

    python scripts/measure peers --peer-python PEER MODEL.gguf...

Every figure is the
median of `--rounds` rounds, each of which runs both programs, one after the other, in fresh processes. Leave the
machine idle. The figures:

    prefill, decode   tokens per second, of 512 tokens at once and 128 one by one; with --prefill-depth D and
                      --decode-depth D also of 512 and 32 after D others
    load              seconds to open the model with its tokenizer; the file is in memory, imports are done
    run               seconds of a whole process that writes 48 tokens, greedy, in a context of 2048
    peak              the most memory that it has, in MB, with the pages of the file that it read
    --one-shot        the same of 8 tokens: both with their defaults, which is all the context that the model was
                      trained for; then llama.cpp at its leanest (-c 4096 --no-repack; it never warms up here)
    --verify          the time of 4 tokens in one step by that of 1 token, of localllm: as speculation verifies them,
                      with activations of 8 bits, and with 16 bits as always
"""

import argparse
import json
import os
import statistics
import sys
from typing import Any

from common import make_parser, print_header, print_row, run_process

PROMPT = "Once upon a time there was a small computer that wanted to talk."

# Tokens of many sorts, since experts of a mixture are chosen by token.
IDS = """
def ids(count, position):
    return [37 * i % 499 for i in range(position, position + count)]
"""

OURS = """
import json, sys, time
from localllm import api
path, settings = sys.argv[1], json.loads(sys.argv[2])
start = time.perf_counter()
opened = api.open_model(path, settings["threads"], settings["context"])
load = time.perf_counter() - start
sequence = opened.sequence()
def read(count, position, logits="last", precise=True):
    sequence.truncate(position)
    sequence.append(ids(count, position), logits, precise)
"""

THEIRS = """
import json, sys, time, llama_cpp
path, settings = sys.argv[1], json.loads(sys.argv[2])
threads = {"n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
start = time.perf_counter()
model = llama_cpp.Llama(path, n_ctx=settings["context"], n_batch=512, verbose=False, **threads)
load = time.perf_counter() - start
def read(count, position):
    model.n_tokens = position
    model.eval(ids(count, position))
"""

MEASURE = """
def median_time(work, times=3):
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[times // 2]
def write(count, position):
    for p in range(position, position + count):
        read(1, p)
figures = {}
for name, work, count, depth in settings["tests"]:
    if depth:
        read(depth, 0)
    figures[name] = count / median_time(lambda: globals()[work](count, depth))
figures["load, s"] = load
if settings["verify"]:
    one = median_time(lambda: read(1, 64), 15)
    for name, precise in (("verifying 4 tokens / 1 token", False), ("4 tokens / 1 token", True)):
        figures[name] = median_time(lambda: read(4, 64, "all", precise), 15) / one
print(json.dumps(figures))
"""

THEIR_RUN = """
import json, sys, llama_cpp
path, settings = sys.argv[1], json.loads(sys.argv[2])
if settings["lean"]:
    defaults = llama_cpp.llama_cpp.llama_model_default_params
    def lean():
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters
    llama_cpp.llama_cpp.llama_model_default_params = lean
threads = {"n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
model = llama_cpp.Llama(path, n_ctx=settings["context"], verbose=False, **threads)
for piece in model(settings["prompt"], max_tokens=settings["tokens"], temperature=0, stream=True):
    print(piece["choices"][0]["text"], end="", flush=True)
"""

Figures = dict[str, float]


def speeds(python: str, program: str, model: str, settings: dict[str, Any]) -> Figures:
    """Measure in a fresh process."""
    _, _, printed = run_process([python, "-c", IDS + program + MEASURE, model, json.dumps(settings)])
    return json.loads(printed.splitlines()[-1])


def our_run(model: str, threads: int, tokens: int, context: int) -> list[str]:
    """Return the command that answers once; context 0: the default."""
    command = [sys.executable, "-m", "localllm", "run", model, "--raw", "-p", PROMPT, "-n", str(tokens), "--temp", "0"]
    return [*command, "-t", str(threads), "-c", str(context)]


def their_run(python: str, model: str, threads: int, tokens: int, context: int, lean: bool = False) -> list[str]:
    settings = {"threads": threads, "prompt": PROMPT, "tokens": tokens, "context": context, "lean": lean}
    return [python, "-c", THEIR_RUN, model, json.dumps(settings)]


def runs(options: argparse.Namespace, model: str) -> list[tuple[str, list[str], list[str]]]:
    """Whole processes to compare: a name, our command, theirs."""
    peer, threads = options.peer_python, options.threads
    pairs = [("run", our_run(model, threads, 48, 2048), their_run(peer, model, threads, 48, 2048))]
    if options.one_shot:
        ours = our_run(model, threads, 8, 0)
        pairs.append(("8 tokens, defaults", ours, their_run(peer, model, threads, 8, 0)))
        pairs.append(("8 tokens, lean peer", ours, their_run(peer, model, threads, 8, 4096, lean=True)))
    return pairs


def tests(options: argparse.Namespace) -> list[tuple[str, str, int, int]]:
    """Return what MEASURE times: (name, function, tokens, depth)."""
    found = [("prefill", "read", 512, 0), ("decode", "write", 128, 0)]
    if options.prefill_depth:
        found.append((f"prefill @ d{options.prefill_depth}", "read", 512, options.prefill_depth))
    if options.decode_depth:
        found.append((f"decode @ d{options.decode_depth}", "write", 32, options.decode_depth))
    return found


def one_round(options: argparse.Namespace, model: str) -> tuple[Figures, Figures]:
    """Everything once: (ours, theirs)."""
    plan = tests(options)
    context = max(1024, *(count + depth for _, _, count, depth in plan))
    settings = {"threads": options.threads, "context": context, "tests": plan, "verify": options.verify}
    ours = speeds(sys.executable, OURS, model, settings)
    theirs = speeds(options.peer_python, THEIRS, model, settings | {"verify": False})
    for name, our_command, their_command in runs(options, model):
        for figures, command in ((ours, our_command), (theirs, their_command)):
            figures[f"{name}, s"], figures[f"{name}, peak MB"], _ = run_process(command)
    return ours, theirs


def rows(options: argparse.Namespace, model: str) -> list[list[str]]:
    """Return the table's lines for a model: medians."""
    for _, our_command, their_command in runs(options, model):  # so that all files are in memory
        run_process(our_command)
        run_process(their_command)
    results = [one_round(options, model) for _ in range(options.rounds)]
    lines = []
    for name in results[0][0]:
        ours = statistics.median(figures[name] for figures, _ in results)
        theirs = [figures[name] for _, figures in results if name in figures]
        pair = [f"{statistics.median(theirs):.4g}", f"{ours / statistics.median(theirs):.2f}"] if theirs else ["", ""]
        lines.append([os.path.basename(model), name, f"{ours:.4g}", *pair])
    return lines


def main() -> None:
    """Parse, measure, print a Markdown table."""
    parser = make_parser(__doc__, "peer", "models", rounds=3)
    parser.add_argument("--prefill-depth", type=int, default=0, metavar="D", help="also prefill after D tokens")
    parser.add_argument("--decode-depth", type=int, default=0, metavar="D", help="also decode after D tokens")
    parser.add_argument("--one-shot", action="store_true", help="also short answers with the defaults of both")
    parser.add_argument("--verify", action="store_true", help="also 4 tokens in one step against 1")
    options = parser.parse_args()
    print_header(["model", "figure", "localllm", "llama.cpp", "ratio"])
    for model in options.models:
        for row in rows(options, model):
            print_row(row)
