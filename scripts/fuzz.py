"""Wrong files for hours: python scripts/fuzz.py [--count N] [--first SEED] [--folder FOLDER WITH SEEDS].

Each file is made from a seed, by changes that know what a GGUF file is made of, and goes through everything that a
command does with it before it runs the model, and, if it is accepted, through one token of the reference. It happens
in batches, in processes with limits on memory and time: what ends one is a finding, and so is an exception that is not
of localllm.errors. The last line names the seed to go on with.
"""

import argparse
import os
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from localllm.errors import LocalllmError  # noqa: E402
from localllm.files.gguf_file import GGUFFile  # noqa: E402
from localllm.files.gguf_writer import Output, Packed, write_gguf  # noqa: E402
from localllm.files.imatrix_file import read_imatrix  # noqa: E402
from localllm.services.validity import validity  # noqa: E402
from localllm.text.sandbox import compile_template, render_template  # noqa: E402
from localllm.text.tokenizer import Tokenizer  # noqa: E402

BATCH, SECONDS, BYTES = 200, 10, 1 << 30  # files in a process, and what one file may take
NUMBERS = [
    0,
    1,
    2,
    7,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 33,
    1 << 62,
    (1 << 64) - 1,
    -1,
    -(1 << 31),
]
FLOATS = [0.0, -0.0, -1.0, 1e-45, 1e-38, 1e38, float("inf"), float("-inf"), float("nan"), 0.5, 1e9]
TEXTS = ["", "a", "\x1b[2J", "x" * 70000, "\u202e", "llama", "gpt2", "yarn", "{{ 1 }}", "\0"]
PIECES = [
    *["{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ range(9)|list }}", "{% if x %}", "{% endif %}"],
    *["{% set x = 'a' * 999 %}", "{{x ~ x}}", "|map('upper')", "{{ '%9d' % 1 }}", "{% macro f() %}", "{% endmacro %}"],
    *["{{ f() }}", "{{ x.replace('a', x) }}", "(", ")", "[", "]", "{{", "}}", "{%", "%}", "x", "'", "|tojson", "~"],
]  # fmt: skip


def value(draw: random.Random) -> object:
    """Any metadata value."""
    kind = draw.randrange(9)
    if kind < 2:
        return draw.choice([n for n in NUMBERS if n >= 0] if kind else [-1, -5, 3])
    if kind < 4:
        return np.float32(draw.choice(FLOATS))
    if kind == 4:
        return draw.choice(TEXTS)
    if kind == 5:
        return draw.random() < 0.5
    if kind == 6:
        return np.array([draw.choice(FLOATS) for _ in range(draw.randrange(1, 9))], np.float32)
    if kind == 7:
        return np.array([draw.randrange(-9, 99) for _ in range(draw.randrange(1, 400))], np.int32)
    return [draw.choice(TEXTS) for _ in range(draw.randrange(1, 9))]


def changed_model(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """A valid file with some of its metadata and tensors changed."""
    file = GGUFFile.open(draw.choice(seeds))
    keys = {key: Packed(item.tobytes()) for key, item in file.packed.items()}
    tensors = dict(file.tensors)
    for _ in range(draw.randint(1, 3)):
        key, name = draw.choice(list(keys)), draw.choice(list(tensors))
        match draw.randrange(8):
            case 0 | 1 | 2:
                keys[key] = value(draw)
            case 3:
                del keys[key]
            case 4:
                keys[draw.choice(["tokenizer.chat_template", "general.name", f"x{draw.randrange(99)}"])] = value(draw)
            case 5 if len(tensors) > 1:
                del tensors[name]
            case 6:
                tensors[draw.choice([name + "x", "", "blk.9.attn_q.weight", "a\nb"])] = tensors[name]
            case _:
                keys["tokenizer.chat_template"] = "".join(draw.choices(PIECES, k=draw.randrange(1, 30)))
    outputs = [Output(name, t.format, t.shape, (np.ascontiguousarray(t.data),)) for name, t in tensors.items()]
    keys.pop("general.alignment", None)
    write_gguf(path, {key: item for key, item in keys.items() if key}, outputs)
    if draw.random() < 0.3:  # weights that are no numbers, or any
        data = bytearray(path.read_bytes())
        for _ in range(8):
            place = draw.randrange(len(data) // 2, len(data) - 4)
            data[place : place + 4] = struct.pack("<f", draw.choice(FLOATS))
        path.write_bytes(data)


def damaged(draw: random.Random, seeds: list[Path], path: Path) -> None:
    """Bytes of a valid file changed, most of them in its header."""
    data = bytearray(draw.choice(seeds).read_bytes())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(min(len(data), 24000))
        match draw.randrange(5):
            case 0:
                data[place] ^= 1 << draw.randrange(8)
            case 1:
                data[place : place + 8] = struct.pack("<Q", draw.choice(NUMBERS) % (1 << 64))
            case 2:
                data[place : place + 4] = struct.pack("<I", draw.choice(NUMBERS) % (1 << 32))
            case 3:
                del data[place : place + draw.randrange(1, 64)]
            case 4:
                data = data[: max(1, place)] if draw.random() < 0.3 else data
    path.write_bytes(data)


def outcome(path: Path, draw: random.Random) -> str:
    """What becomes of a file: "accepted", "refused", or the exception that should not be."""
    from localllm.engine.model import Engine

    try:
        file = GGUFFile.open(path)
        found = validity(file)
        if found.problem:
            raise found.problem
        tokens = Tokenizer.from_metadata(file.metadata).encode("Hello, world! \n 123")
        source = file.metadata.get("tokenizer.chat_template")
        if isinstance(source, str):
            try:
                render_template(compile_template(source), {"messages": [{"role": "user", "content": "Hi"}]})
            except MemoryError:
                raise
            except Exception:  # a template may fail as it likes
                pass
        if draw.random() < 0.2 and file.nbytes < 4_000_000:
            engine = Engine(file, threads=1, context=64, backend="reference")
            engine.sequence().append(tokens[:4] or [0])
            engine.close()
        if draw.random() < 0.1:
            read_imatrix(path)
    except LocalllmError as error:
        return "refused" if str(error).isprintable() else f"not one line: {error!r:.200}"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.200}"
    return "accepted"


def batch(first: int, count: int, seeds: list[Path], folder: Path, results: int) -> None:
    """In a process of its own: write "seed outcome" lines."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    path = folder / "fuzz.gguf"
    np.seterr(all="ignore")
    for seed in range(first, first + count):
        os.write(results, f"{seed} started\n".encode())
        draw = random.Random(seed)
        (changed_model if draw.random() < 0.5 else damaged)(draw, seeds, path)
        start = time.process_time()
        told = outcome(path, draw)
        if (taken := time.process_time() - start) > SECONDS:
            told = f"took {taken:.1f} s ({told})"
        os.write(results, f"{seed} {told}\n".encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="GGUF files to change; without, a tiny one")
    chosen = parser.parse_args()
    counts, findings = Counter[str](), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:  # files are synced
        folder = Path(name)
        os.environ["LOCALLLM_CACHE"] = str(folder / "cache")  # what it remembers goes with it
        if chosen.folder:
            seeds = sorted(path for path in chosen.folder.rglob("*.gguf") if path.stat().st_size < 3_000_000)
        else:
            from tiny_model import write_tiny_model

            seeds = [write_tiny_model(folder / "tiny.gguf")]
        at, end = chosen.first, chosen.first + chosen.count
        while at < end:
            last, told, ended = run_batch(at, min(BATCH, end - at), seeds, folder)
            for seed, result in told.items():
                counts[result if result in ("accepted", "refused") else "finding"] += 1
                if result not in ("accepted", "refused"):
                    findings += 1
                    print(f"seed {seed}: {result}", flush=True)
            if ended:
                findings, counts["finding"] = findings + 1, counts["finding"] + 1
                print(f"seed {last}: {ended}", flush=True)
            at = last + 1
    print(f"{sum(counts.values())} files: {dict(counts)}; go on with --first {end}")
    return bool(findings)


def run_batch(first: int, count: int, seeds: list[Path], folder: Path) -> tuple[int, dict[int, str], str]:
    """The last seed that was begun, the outcomes, and how the process ended if not by itself."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            batch(first, count, seeds, folder, writer)
        finally:
            os._exit(0)
    os.close(writer)
    text, last_news = b"", time.monotonic()
    os.set_blocking(reader, False)
    ended = ""
    while True:
        try:
            piece = os.read(reader, 1 << 16)
        except BlockingIOError:
            if time.monotonic() - last_news > 6 * SECONDS:
                os.kill(child, 9)
                ended = "hangs"
            time.sleep(0.01)
            continue
        if not piece:
            break
        text, last_news = text + piece, time.monotonic()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    told: dict[int, str] = {}
    last = first
    for line in text.decode(errors="replace").splitlines():
        seed, _, result = line.partition(" ")
        last = int(seed)
        if result != "started":
            told[last] = result
    if not ended and last not in told:
        ended = f"ended by {os.waitstatus_to_exitcode(status)}"
    return last, told, ended


if __name__ == "__main__":
    sys.exit(main())
