"""Fuzz with damaged files, for hours: python scripts/fuzz/fuzz.py [--count N] [--first SEED] [--kind KIND].

Each file is made from a seed, by changes that respect its format, and goes through everything that a command does with
it (scripts/fuzz/fuzz_kinds.py). Batches run in processes with limits on memory and time. A finding is a process that
dies, an exception that is not of localllm.errors, or one that takes too long. Findings are printed at once; `--first
SEED --count 1` reproduces one. The last line names the seed to continue with.
"""

import argparse
import ctypes
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import numpy as np  # noqa: E402

from localllm.engine import runs  # noqa: E402

runs.BATCH = 8  # tokens of a run, before others take it over: buffers are no larger than their guard pages allow

from fuzz_kinds import KINDS, Kind, read_model  # noqa: E402

from localllm.engine.engine import Engine  # noqa: E402
from localllm.engine.options import EngineOptions  # noqa: E402
from localllm.errors import LocalllmError  # noqa: E402
from localllm.files.gguf.file import GGUFFile  # noqa: E402
from localllm.files.gguf.writer import write_gguf  # noqa: E402
from localllm.system.files import get_cache_folder  # noqa: E402

BATCH, SECONDS, BYTES = 500, 10, 1 << 30  # files in a process, and what one file may take
PATIENCE = 1000  # seconds of the clock without news, on a computer that does other things
MOST_SEED = 3_000_000  # bytes
NEWS = 10_000  # files between two lines that say how far it is


def outcome(kind: Kind, path: Path, draw: random.Random) -> str:
    """Return the outcome of a file: "accepted", "refused", or the unexpected exception."""
    try:
        kind.read(path, draw)
    except LocalllmError as error:
        return "refused" if str(error).isprintable() else f"not one line: {error!r:.200}"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.200}"
    return "accepted"


def batch(first: int, count: int, kinds: dict[str, Kind], seeds: list[Path], folder: Path, results: int) -> None:
    """Write a line "seed kind outcome" for each seed (runs in a process of its own)."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = folder / "fuzz.gguf"
    np.seterr(all="ignore")
    for seed in range(first, first + count):
        draw = random.Random(seed)
        (name,) = draw.choices(list(kinds), [kind.weight for kind in kinds.values()])
        os.write(results, f"{seed} {name} started\n".encode())
        kinds[name].make(draw, seeds, path)
        start, state = time.perf_counter(), draw.getstate()
        told = outcome(kinds[name], path, draw)
        if time.perf_counter() - start > SECONDS:  # perhaps others had the processor
            draw.setstate(state)
            start = time.process_time()
            told = outcome(kinds[name], path, draw)
            if (taken := time.process_time() - start) > SECONDS:
                told = f"took {taken:.1f} s ({told})"
        os.write(results, f"{seed} {name} {told}\n".encode())


def run_batch(first: int, count: int, *given: object) -> tuple[dict[int, tuple[str, str]], str]:
    """Run a batch in a process; return kind and outcome by seed, and how the process died, if it did."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            batch(first, count, *given, writer)  # type: ignore[arg-type]
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error!s:.300}\n".encode())
            os._exit(1)
    os.close(writer)
    text, last_news = b"", time.monotonic()
    os.set_blocking(reader, False)
    ended = ""
    while True:
        try:
            piece = os.read(reader, 1 << 16)
        except BlockingIOError:
            if time.monotonic() - last_news > PATIENCE:
                os.kill(child, 9)
                ended = "hangs"
            time.sleep(0.01)
            continue
        if not piece:
            break
        text, last_news = text + piece, time.monotonic()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    told = {}
    for line in text.decode(errors="replace").splitlines():
        seed, name, result = line.split(" ", 2)
        told[int(seed)] = name, result
    if not ended and (status or len(told) < count):
        ended = f"ended by {os.waitstatus_to_exitcode(status)}"
    return told, ended


def seeds_in(folder: Path | None, made: Path) -> list[Path]:
    """Return small models with each type of vocabulary, projectors of each family, and the files of the folder."""
    from invalid_models import Wrong
    from models.projectors import PROJECTORS, projector, write_projector

    from tests.fuzz.test_malformed_models import sentence_piece
    from tests.unit.text.test_unigram import GIVEN, charsmap

    wrong = Wrong(made)
    seeds = [wrong.valid, wrong.write(sentence_piece()).rename(made / "sentence_piece.gguf")]
    unigram = {"model": "t5", "tokens": GIVEN["pieces"], "scores": np.array(GIVEN["scores"], np.float32)}
    unigram |= {"token_type": np.array(GIVEN["types"], np.int32), "precompiled_charsmap": charsmap()}
    keys = {f"tokenizer.ggml.{key}": value for key, value in unigram.items()}
    write_gguf(made / "unigram.gguf", {"general.architecture": "t5", **keys}, [])
    seeds += [write_projector(projector(name), made / f"mmproj-{name}.gguf") for name in PROJECTORS]
    if folder:
        seeds += sorted(path for path in folder.rglob("*.gguf") if path.stat().st_size < MOST_SEED)
    return seeds


def warm_up(seeds: list[Path]) -> None:
    """Import modules and compile kernels before batches are forked, so that each finds them ready."""
    for seed in seeds:
        file = GGUFFile.open(seed)
        if "token_embd.weight" in file.tensors:
            engine = Engine(file, EngineOptions(threads=1, context=64))
            engine.sequence().append([0, 1])
            engine.close()
    for seed in seeds[:2]:
        read_model(seed, random.Random(1))


def keep_memory() -> None:
    """Make the C library keep freed memory for the next file: returning it took a third of the time."""
    for option, size in ((-1, 300 << 20), (-3, 100 << 20)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        with suppress(AttributeError):  # no glibc
            ctypes.CDLL(None).mallopt(option, size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="GGUF files to change, beside tiny ones of its own")
    parser.add_argument("--kind", choices=KINDS, help="only files of this kind; they have other seeds then")
    chosen = parser.parse_args()
    kinds = {chosen.kind: KINDS[chosen.kind]} if chosen.kind else KINDS
    counts, news = Counter[tuple[str, str]](), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:  # files are synced
        folder = Path(name)
        kernels = get_cache_folder() / "kernels"
        kernels.mkdir(0o700, parents=True, exist_ok=True)
        (folder / "cache").mkdir(0o700)
        (folder / "cache" / "kernels").symlink_to(kernels)
        (folder / "cache" / "known").touch()  # no folder: nothing is remembered, everything is looked at
        os.environ["LOCALLLM_CACHE"] = str(folder / "cache")
        keep_memory()
        seeds = seeds_in(chosen.folder, folder)
        warm_up(seeds)
        at, end = chosen.first, chosen.first + chosen.count
        while at < end:
            told, ended = run_batch(at, min(BATCH, end - at), kinds, seeds, folder)
            last = max(told, default=at)
            if ended:
                told[last] = told[last][0] if told else "", ended
            for seed, (kind, result) in told.items():
                known = result in ("accepted", "refused")
                counts[kind, result if known else "finding"] += 1
                if not known:
                    print(f"seed {seed}, {kind}: {result}", flush=True)
            at = last + 1
            if at >= chosen.first + news + NEWS:
                news = at - chosen.first
                print(f"{time.strftime('%H:%M:%S')} {news} files, next is {at}", flush=True)
    for (kind, result), count in sorted(counts.items()):
        print(f"{kind}: {count} {result}")
    print(f"{counts.total()} files; go on with --first {end}")
    return any(result == "finding" for _, result in counts)


if __name__ == "__main__":
    sys.exit(main())
