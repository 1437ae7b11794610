"""Measure localllm embed, llama.cpp and sentence-transformers in turn on the same sentences.

    python scripts/measure embed --peer-python PEER --torch-python TORCH CHECKPOINT MODEL.gguf...

TORCH is a Python that has sentence-transformers; CHECKPOINT is the folder that the
files were made from. Whole processes, warm, of 2 threads each: 2000 sentences of 5 to 60 words become an array of
vectors in a file. A round runs each program once, and the figures are medians of `--rounds`; llama.cpp's batch is the
best of those that were tried before. Leave the machine idle. Also the first vector of a start, a query over a folder of
1000 files the second time, and the smallest cosine with what sentence-transformers makes of the checkpoint.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from common import PROSE, draw_passages, localllm_command, make_parser, print_header, print_row, run_process

SENTENCES, FILES = 2000, 1000
BATCHES = [(512, 64), (256, 32), (2048, 64), (512, 1)]  # tokens and texts of a batch at most

LLAMA_CPP = """
import sys
import numpy as np
import llama_cpp as llama
path, given, out, tokens, texts, threads = *sys.argv[1:4], *map(int, sys.argv[4:7])
lines = open(given, encoding="utf-8").read().splitlines()
silent = llama.llama_log_callback(lambda *told: None)
llama.llama_log_set(silent, None)
llama.llama_backend_init()
model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
chosen = llama.llama_context_default_params()
chosen.n_ctx = chosen.n_batch = chosen.n_ubatch = tokens
chosen.n_seq_max, chosen.embeddings, chosen.kv_unified = texts, True, True
chosen.n_threads = chosen.n_threads_batch = threads
context = llama.llama_init_from_model(model, chosen)
vocab, width = llama.llama_model_get_vocab(model), llama.llama_model_n_embd(model)
rows, room, batch = np.empty((len(lines), width), np.float32), (llama.llama_token * tokens)(), []
filled = llama.llama_batch_init(tokens, 0, 1)
def flush():
    if not batch:
        return
    at = 0
    for number, (_, ids) in enumerate(batch):
        for position, token in enumerate(ids):
            filled.token[at], filled.pos[at], filled.logits[at] = token, position, 1
            filled.n_seq_id[at], filled.seq_id[at][0] = 1, number
            at += 1
    filled.n_tokens = at
    if llama.llama_encode(context, filled):
        sys.exit("llama.cpp does not compute it")
    for number, (line, _) in enumerate(batch):
        row = np.ctypeslib.as_array(llama.llama_get_embeddings_seq(context, number), (width,))
        rows[line] = row / np.sqrt((row * row).sum())
    batch.clear()
count = 0
for line, text in enumerate(lines):
    data = text.encode()
    length = llama.llama_tokenize(vocab, data, len(data), room, tokens, True, False)
    if count + length > tokens or len(batch) == texts:
        flush()
        count = 0
    batch.append((line, room[:length]))
    count += length
flush()
np.save(out, rows)
"""

TORCH = """
import sys
import numpy as np
import torch
from sentence_transformers import SentenceTransformer
path, given, out, threads = *sys.argv[1:4], int(sys.argv[4])
torch.set_num_threads(threads)
lines = open(given, encoding="utf-8").read().splitlines()
np.save(out, SentenceTransformer(path, device="cpu").encode(lines, normalize_embeddings=True))
"""


class Measured:
    """Programs to compare, by name, and what was found of them: seconds and MB of every round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, list[float]] = {}

    def add(self, name: str, command: list[str]) -> None:
        """Run a command once."""
        seconds, peak, _ = run_process(command)
        self.seconds.setdefault(name, []).append(seconds)
        self.peaks.setdefault(name, []).append(peak)

    def row(self, model: str, name: str, ours: str) -> list[str]:
        """Return a line of the table: seconds, sentences/s, time relative to ours of the same round, MB."""
        taken = self.seconds[name]
        ratios = [mine / theirs for mine, theirs in zip(taken, self.seconds[ours], strict=True)]
        speed, ratio = f"{SENTENCES / median(taken):.0f}", f"{median(ratios):.2f}"
        return [model, name, f"{median(taken):.2f}", speed, ratio, f"{median(self.peaks[name]):.0f}"]


def best_batch(python: str, model: str, given: Path, out: Path, threads: int) -> tuple[int, int]:
    """Return the fastest of BATCHES."""
    taken = {
        batch: run_process([python, "-c", LLAMA_CPP, model, str(given), str(out), *map(str, (*batch, threads))])[0]
        for batch in BATCHES
    }
    for batch, seconds in taken.items():
        print(f"llama.cpp, {batch[0]} tokens, {batch[1]} texts: {seconds:.2f} s", file=sys.stderr, flush=True)
    return min(taken, key=taken.__getitem__)


def compared(options: argparse.Namespace, model: str, folder: Path) -> tuple[list[list[str]], list[str]]:
    """2000 sentences by every program: lines of the table, and what is said of the vectors."""
    given, threads, found = folder / "sentences.txt", str(options.threads), Measured()
    given.write_text("".join(f"{line}\n" for line in draw_passages(PROSE.read_text("utf-8"), SENTENCES, 0)))
    outs = {name: folder / f"{name}.npy" for name in ("localllm", "llama.cpp", "sentence-transformers")}
    batch = best_batch(options.peer_python, model, given, outs["llama.cpp"], options.threads)
    commands = {
        "localllm": localllm_command("embed", model, given, "-o", outs["localllm"], "-t", threads),
        "llama.cpp": [options.peer_python, "-c", LLAMA_CPP, model, str(given), str(outs["llama.cpp"]),
                      *map(str, batch), threads],
        "sentence-transformers": [options.torch_python, "-c", TORCH, options.checkpoint, str(given),
                                  str(outs["sentence-transformers"]), threads],
    }  # fmt: skip
    run_process(commands["localllm"])
    for _ in range(options.rounds):
        for name, command in commands.items():
            found.add(name, command)
    exact, name = np.load(outs["sentence-transformers"]), Path(model).stem
    cosines = [f"{name}, {kind}: {(np.load(outs[kind]) * exact).sum(axis=1).min():.7f}" for kind in list(outs)[:2]]
    named = {"llama.cpp": f"llama.cpp, {batch[0]} tokens, {batch[1]} texts"}
    rows = [found.row(name, kind, "localllm") for kind in commands]
    return [[model, named.get(kind, kind), *more] for model, kind, *more in rows], cosines


def starts(options: argparse.Namespace, model: str, folder: Path) -> list[str]:
    """Return the first vector, and a query over a folder."""
    line, notes = folder / "line.txt", folder / "notes"
    line.write_text("When can I retire?\n")
    notes.mkdir(exist_ok=True)
    for number, text in enumerate(
        draw_passages(PROSE.read_text("utf-8"), FILES, time.time_ns())
    ):  # no vectors are kept of these
        (notes / f"{number}.txt").write_text(text)
    one = localllm_command("embed", model, line)
    near = localllm_command("embed", model, "--files", notes, "--near", "the old king")
    run_process(one)
    first = run_process(near)[0]
    found = [[run_process(one)[0], run_process(near)[0]] for _ in range(options.rounds)]
    vector, second = (median(taken) for taken in zip(*found, strict=True))
    return [Path(model).stem, f"{vector:.3f}", f"{first:.2f}", f"{second:.3f}"]


def main() -> None:
    """Parse, measure, print Markdown tables."""
    parser = make_parser(__doc__, "peer", rounds=3)
    parser.add_argument("--torch-python", required=True, help="a Python that has sentence-transformers")
    parser.add_argument("checkpoint", help="a folder that sentence-transformers opens")
    parser.add_argument("models", nargs="+")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, table, cosines = Path(name), list[list[str]](), list[str]()
        for model in options.models:
            rows, told = compared(options, model, folder)
            table, cosines = table + rows, cosines + told
        print_header(["model", "program", "seconds", "sentences/s", "times as long", "peak MB"])
        for row in table:
            print_row(row)
        print_header(["model", "first vector, s", "--near, s", "--near again, s"])
        for model in options.models:
            print_row(starts(options, model, folder))
        print("Smallest cosine with sentence-transformers:\n" + "\n".join(cosines))
