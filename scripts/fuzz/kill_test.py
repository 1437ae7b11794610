#!/usr/bin/env python3
"""Kill localllm at random moments while it writes, many times.

    python scripts/fuzz/kill_test.py quantize|ladder|calibrate|cache [--times N]

Each process is forked from this one, which has imported everything (on Windows it is started), and killed at a random
moment. Afterwards the old file must be there, or the whole new one; after a process that was not killed there must be
no further file. The cache is deleted now and then, so that processes write it anew; answers must stay the same.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from tiny_model import write_tiny_model  # noqa: E402

from localllm.cli import main as program  # noqa: E402
from localllm.cli.commands import quantize, run  # noqa: E402, F401  what the children need
from localllm.files.cache.array_log import DIGEST, LENGTHS, MAGIC  # noqa: E402
from localllm.quantizing import quantize_set  # noqa: E402
from localllm.system.files import get_cache_folder  # noqa: E402


class Started:
    """A process that runs a command, on systems without fork."""

    def __init__(self, arguments: tuple[object, ...], out: Path | None):
        with open(out or os.devnull, "wb") as answer:
            command = [sys.executable, "-m", "localllm", *map(str, arguments)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=answer)

    def wait(self) -> int:
        """Wait for the process; return its exit code."""
        return self._process.wait()

    def until_writing(self, folder: Path, before: set[str]) -> None:
        """Wait until the process has written a new file or has ended: starting takes most of its time."""
        while self._process.poll() is None and before.issuperset(os.listdir(folder)):
            time.sleep(0.005)

    def kill(self) -> bool:
        """Kill the process; return whether it was still at work."""
        was_at_work = self._process.poll() is None
        self._process.kill()
        return self._process.wait() != 0 and was_at_work


class Forked(Started):
    """A forked process that runs a command."""

    def __init__(self, arguments: tuple[object, ...], out: Path | None):
        self._child = forked(arguments, out)

    def until_writing(self, folder: Path, before: set[str]) -> None:
        """Return at once: a forked process has started."""

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])

    def kill(self) -> bool:
        os.kill(self._child, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(self._child, 0)[1])


def start(*arguments: object, out: Path | None = None) -> Started:
    """Start a process that runs a command, with its stdout in a file."""
    return (Forked if hasattr(os, "fork") else Started)(arguments, out)


def forked(arguments: tuple[object, ...], out: Path | None) -> int:
    """Fork a process that runs a command; return its id."""
    if child := os.fork():
        return child
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if out else null, 1)
    sys.argv = ["localllm", *map(str, arguments)]
    try:
        program.main()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    os._exit(0)


def finished(child: Started) -> None:
    """Wait for a process to end. Raises SystemExit if it failed."""
    if code := child.wait():
        raise SystemExit(f"a command that nobody killed ended with {code}")


def seconds(*arguments: object, out: Path | None = None) -> float:
    """Return the seconds of a whole run."""
    return seconds_left(start(*arguments, out=out))


def seconds_left(child: Started) -> float:
    """Wait until a process ends by itself; return the seconds that took."""
    began = time.monotonic()
    finished(child)
    return time.monotonic() - began


def killed(wait: float, *arguments: object) -> bool:
    """Kill a process after some seconds; return whether it was still at work."""
    child = start(*arguments)
    time.sleep(wait)
    return child.kill()


def writing(folder: Path, *arguments: object) -> Started:
    """Start a process, and wait until it writes to a folder or is about to."""
    before = set(os.listdir(folder))
    child = start(*arguments)
    child.until_writing(folder, before)
    return child


def kill_quantize(folder: Path, times: int) -> int:
    """Kill `quantize`; return how many were at work. The old file is another model, so that both can be told apart."""
    model, out = write_tiny_model(folder / "m.gguf"), folder / "out"
    out.mkdir()
    command = ["quantize", model, out / "x.gguf", "Q8_0"]
    took = min(seconds_left(writing(out, *command)) for _ in range(3))
    new, old = (out / "x.gguf").read_bytes(), model.read_bytes()
    hit = 0
    for number in range(times):
        (out / "x.gguf").write_bytes(old)
        child = writing(out, *command)
        time.sleep(random.random() * took)
        hit += child.kill()
        require((out / "x.gguf").read_bytes() in (old, new), f"kill {number}: the file is neither old nor new")
    seconds(*command)
    require([file.name for file in out.iterdir()] == ["x.gguf"], "something was left over")
    return hit


def kill_ladder(folder: Path, times: int) -> int:
    """Kill ladders: no file has its name before all are whole, and later processes resume."""
    model, out = write_tiny_model(folder / "ladder.gguf"), folder / "ladder"
    out.mkdir()
    command = ["quantize", model, out / "{type}.gguf", "--types", "Q8_0,Q5_0,Q4_0", "--pure", "--force"]
    saved, quantize_set.SAVE_EVERY = quantize_set.SAVE_EVERY, 0.0
    took = min(seconds_left(writing(out, *command)) for _ in range(2))
    new = {path.name: path.read_bytes() for path in out.iterdir()}
    hit = went_on = 0
    for number in range(times):
        is_begun = bool(list(out.glob("*.ladder")))
        for path in [] if is_begun else [*out.iterdir()]:
            path.unlink()
        hit += killed(random.random() * took, *command)
        for path in out.glob("*.gguf"):
            require(path.read_bytes() == new[path.name], f"kill {number}: {path.name} is not whole")
        went_on += is_begun
    seconds(*command)
    quantize_set.SAVE_EVERY = saved
    require({path.name: path.read_bytes() for path in out.iterdir()} == new, "other files after all")
    print(f"{went_on} found what another one had begun")
    return hit


def kill_calibrate(folder: Path, times: int) -> int:
    """Kill calibrations: encoded tensors survive, and later processes resume after them."""
    model, text, out = write_tiny_model(folder / "m.gguf", context=128), folder / "text.txt", folder / "out" / "x.gguf"
    text.write_text("hello world, " * 60 + "".join(chr(97 + n * n % 26) for n in range(700)))
    out.parent.mkdir()
    records, command = Path(f"{out}.calibration"), ["quantize", model, out, "Q4_0", "--calibrate", text]
    took = [seconds(*command) for _ in range(3)][-1]
    new, old = out.read_bytes(), model.read_bytes()
    out.write_bytes(old)
    hit = ended = went_on = 0
    for number in range(times):
        before = whole_records(records)
        hit += killed(random.random() * took, *command)
        after, found = whole_records(records), out.read_bytes()
        require(found in (old, new), f"kill {number}: the file is neither old nor new")
        if found == new:
            ended += 1
            out.write_bytes(old)
        else:
            require(after.startswith(before), f"kill {number}: what was encoded is lost")
            went_on += bool(before) and len(after) > len(before)
    seconds(*command)
    require(out.read_bytes() == new, "other bytes after all")
    require([file.name for file in out.parent.iterdir()] == [out.name], "something was left over")
    print(f"{ended} ended with the whole file, {went_on} went on behind what another one had encoded")
    return hit


def whole_records(path: Path) -> bytes:
    """Return the complete records of a file."""
    data = path.read_bytes() if path.exists() else b""
    end = following = len(MAGIC) + DIGEST
    while following <= len(data):
        end = following
        if end + LENGTHS.size > len(data):
            break
        following = end + LENGTHS.size + sum(LENGTHS.unpack_from(data, end)) + DIGEST
    return data[:end] if end <= len(data) else b""


def kill_cache(folder: Path, times: int) -> int:
    """Kill processes that write prefix files, which happens after the answer."""
    os.environ["LOCALLLM_PREFIX_GB"] = "1"
    model, said, kept = (
        write_tiny_model(folder / "m.gguf", context=2000),
        folder / "said",
        folder / "cache" / "prefixes",
    )
    command = ["run", model, "--raw", "-p", "abcdefgh" * 150, "-n", "8", "--temp", "0"]
    seconds(*command, "--no-cache", out=said)
    expected = said.read_bytes()
    took = [seconds(*command) + 0 * bool(shutil.rmtree(kept)) for _ in range(3)][-1]
    hit = 0
    for number in range(times):
        if random.random() < 0.5:
            shutil.rmtree(kept, ignore_errors=True)
        hit += killed(random.random() * took, *command)
        seconds(*command, out=said)
        require(said.read_bytes() == expected, f"kill {number}: another answer")
    require(not list(kept.glob(".*")), "something was left over")
    return hit


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise SystemExit(otherwise)


def main() -> None:
    """Run the tests that the arguments name, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["quantize", "ladder", "calibrate", "cache"])
    parser.add_argument("--times", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "cache").mkdir()
        if (get_cache_folder() / "kernels").exists():
            kernels = Path(name) / "cache" / "kernels"
            shutil.copytree(get_cache_folder() / "kernels", kernels, copy_function=shutil.copyfile)  # wine has no other
        os.environ["LOCALLLM_CACHE"] = str(Path(name) / "cache")
        runs = {"quantize": kill_quantize, "ladder": kill_ladder, "calibrate": kill_calibrate, "cache": kill_cache}
        hit = runs[options.what](Path(name), options.times)
    print(f"{options.times} times, {hit} killed at work: nothing lost, nothing left over")


if __name__ == "__main__":
    main()
