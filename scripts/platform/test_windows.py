#!/usr/bin/env python3
"""Run localllm's wheel on Windows, as wine provides it. Usage: scripts/platform/test_windows [--quick] [TESTS].

Makes the environment once (wine_environment.py): Debian's wine and MinGW by apt-get (as root), Python for Windows
and all wheels from the Python registry. Then: commands, answers, the tokens of a real model for prompts of 5, 70 and
300 tokens, the bytes that quantize writes, refusals and their codes, a server, `map` that is killed and goes on, a chat
on a console, demo.cmd and test.cmd; tests; kills. Results must equal those of this computer where it has the same.
--quick runs what fits into three minutes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from wine_environment import BED, PYTHON, ROOT, environment, install, make_bed, named, running, say, words_there

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from windows_console import compare_console  # noqa: E402  tests' terminal is part of it

REAL = ROOT.parent / "shared" / "models" / "smollm2-135m-instruct-q4_1.gguf"
GUIDE = ROOT / "localllm" / "data" / "guide.gguf"
QUESTION = "What is localllm?"
GREEDY = ("--temp", "0", "--no-cache")
PROMPTS = (5, 70, 300)  # tokens
# Greedy tokens behind prompts of so many tokens, as JSON: run by both Pythons.
TOKENS = """
import json, sys
import localllm
found = []
with localllm.open(sys.argv[1], threads=2) as model:
    text = open(sys.argv[2], encoding="utf-8").read()
    ids = model.tokenize(text)
    for count in map(int, sys.argv[3:]):
        generation = model.generate(ids[:count], 40, temperature=0)
        answer = "".join(generation)
        found.append([generation.tokens, answer])
print(json.dumps(found))
"""
RECORDS = 60  # of a `map` that is killed
# What is left out listens to calls of POSIX (pwrite), needs its terminals, or waits for the end of stdout, which comes
# with the program's where wine makes it a console.
LEFT_OUT = (
    "on_the_disk", "take_the_others", "fills_up", "terminal_offers", "ctrl_c_keeps_what_has_come", "reads_the_answer",
)  # fmt: skip
TESTS = (
    ("tests/unit/kernels/simd/test_simd.py",),
    ("tests/unit/kernels/cpu/test_kernels.py", "-k", "Q8_0 or Q4_K or Q6_K or IQ4_XS or Q5_1 or F16 or MXFP4"),
    ("tests/unit/kernels/cpu/attention/test_attend.py", "-k", "F16 or Q8_0"),
    ("tests/goldens/test_logits.py", "-k", "test_architectures and vectors"),
    ("tests/unit/engine/cpu/test_weight_stream.py",),
    (
        "tests/unit/engine/memory/test_page_table.py",
        "tests/unit/quant/test_encode.py",
        "tests/unit/services/test_receipts.py",
    ),
    (
        "tests/unit/system/test_platforms.py",
        "tests/unit/system/test_open_files.py",
        "tests/unit/kernels/build/test_machine_code.py",
    ),
    (
        "tests/integration/test_cli.py",
        "tests/fuzz/test_wrong_models.py",
        "tests/unit/services/test_bench.py",
        "tests/unit/arch/test_verbs.py",
    ),
    (
        "tests/unit/cli/test_command.py",
        "tests/fuzz/test_malformed_models.py",
        "tests/unit/services/tools/test_tools.py",
        "-m",
        "not slow",
    ),
    ("tests/integration/test_images.py", "tests/unit/quantizing/test_calibrate.py", "-m", "not slow"),
    *(
        (f"tests/{name}.py", "-m", "not slow", "-k", f"not ({' or '.join(LEFT_OUT)})")
        for name in (
            "unit/services/records/test_map",
            "unit/services/hub/test_pull",
            "integration/test_serve",
            "unit/engine/test_prefix_store",
            "unit/services/test_sessions",
        )
    ),
)
QUICK = (("tests/unit/kernels/simd/test_simd.py",),)
KILLS = {
    "sessions": ("kill_sessions.py", "200"),
    "quantize": ("kill_test.py", "quantize", "--times", "200"),
    "calibrate": ("kill_test.py", "calibrate", "--times", "50"),
    "cache": ("kill_test.py", "cache", "--times", "50"),
}


# ---- both Pythons


def there(*words: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Return the command that runs Python for Windows with these arguments."""
    return subprocess.run(words_there(*words), env=environment(), cwd=ROOT, input=stdin, capture_output=True)


def here(*words: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Return the same by this Python."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environment_here(), cwd=ROOT, input=stdin, capture_output=True)


@cache
def environment_here() -> dict[str, str]:
    """Return an environment in which this computer's kernels are those of Windows, where processes get no AMX tiles."""
    from localllm.kernels.machine import detect_processor

    cpu, features = detect_processor()
    without = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features.replace("+amx", "-amx")}
    return os.environ | (without if "+amx" in features else {})


def same(what: str, *words: object, stdin: bytes = b"") -> None:
    """Check that a Python command has the same exit code and output here and there. Raises SystemExit."""
    began = time.monotonic()
    found, expected = there(*words, stdin=stdin), here(*words, stdin=stdin)
    if found.returncode != expected.returncode or lines(found.stdout) != lines(expected.stdout):
        raise SystemExit(f"{what}: not as here\n  {expected}\n  {found}")
    say(f"{what}: as here, exit code {found.returncode} ({time.monotonic() - began:.0f} s)")


def same_program(what: str, *words: object, stdin: bytes = b"") -> None:
    """Check that localllm with these arguments has the same exit code and output here and there."""
    same(what, "-m", "localllm", *words, stdin=stdin)


def lines(data: bytes) -> list[bytes]:
    return data.replace(b"\r\n", b"\n").split(b"\n")


def same_file(what: str, out: Path, *words: object) -> None:
    """Run localllm here and on Windows; the bytes in the file `out` must be the same. Raises SystemExit."""
    made = []
    for run in (there, here):
        out.unlink(missing_ok=True)
        done = run("-m", "localllm", *words)
        if done.returncode:
            raise SystemExit(f"{what} failed: {done.stderr.decode(errors='replace')}")
        made.append(out.read_bytes())
    if made[0] != made[1]:
        raise SystemExit(f"{what}: other bytes than here")
    say(f"{what}: the same {len(made[0])} bytes as here")


# ---- what is compared


def compare_quickly(work: Path) -> None:
    """Compare what takes seconds: an answer, tokens, refusals, a file."""
    work.mkdir(exist_ok=True)
    (work / "tokens.py").write_text(TOKENS)
    (work / "text").write_text((ROOT / "tests" / "support" / "prose.txt").read_text("utf-8")[:20000], "utf-8")
    (work / "wrong.gguf").write_bytes(b"GGUF" + bytes(100))
    same_program("--version", "--version")
    same_program("The guide's answer", "run", GUIDE, "-p", QUESTION, *GREEDY)
    same("The guide's tokens", work / "tokens.py", GUIDE, work / "text", *PROMPTS)
    same_program("No such file", "run", work / "none.gguf", "-p", "x")
    same_program("A wrong file", "run", work / "wrong.gguf", "-p", "x")
    out = work / "out.gguf"
    same_file("quantize to Q4_0", out, "quantize", "--allow-requantize", GUIDE, out, "Q4_0")


def compare(work: Path) -> None:
    """Compare more commands, and tokens of a real model."""
    if REAL.exists():
        same(f"Tokens of {REAL.name}", work / "tokens.py", REAL, work / "text", *PROMPTS)
    same_program("chat, from a pipe", "chat", GUIDE, *GREEDY, stdin="Grüße! What is localllm?\n".encode())
    for shell in ("powershell", "bash"):
        same_program(f"The completion of {shell}", "completion", shell)
    same_program("tokenize", "tokenize", GUIDE, "Grüße, 狐!")
    same_program("The help of config", "help", "config")
    same_program("A prompt that does not fit", "run", GUIDE, "-c", "20", "-f", work / "text")
    same_program("An option that is none", "run", GUIDE, "--no-such-option")


def compare_files(work: Path) -> None:
    """Compare written files: quantized models, sums of activations."""
    from tiny_model import write_tiny_model

    out, tiny = work / "out.gguf", write_tiny_model(work / "tiny.gguf", context=128)
    for kind in ("IQ4_NL", "Q5_1"):
        same_file(f"quantize to {kind}", out, "quantize", "--allow-requantize", GUIDE, out, kind)
    short = work / "short"
    short.write_bytes((work / "text").read_bytes()[:1500])
    text = os.path.relpath(short, ROOT)  # by a name that both systems have: it stands in the files
    same_file("imatrix", work / "out.imatrix", "imatrix", tiny, text, "-o", work / "out.imatrix", "-c", "64")
    # quantize --calibrate is not compared: NumPy inverts matrices with another LAPACK there, which has other last bits.


def compare_images(work: Path) -> None:
    """Compare an answer to a picture."""
    from models import write
    from models.projectors import projector, seeing, write_projector

    from tests.unit.engine.test_vision_encoder import picture

    folder = work / "seeing"
    folder.mkdir(exist_ok=True)
    write(seeing("gemma3", seed=5, context=2048), folder / "tiny.gguf")
    write_projector(projector("gemma3"), folder / "mmproj-tiny-F32.gguf")
    picture((131, 90), 1).save(folder / "one.png")
    picture((60, 200), 2).save(folder / "two.jpg")
    for name in ("one.png", "two.jpg"):
        words = (folder / "tiny.gguf", "-p", "What?", "--image", folder / name, *GREEDY, "-n", "12")
        same_program(f"run --image {name}", "run", *words)


def compare_map(work: Path) -> None:
    """Compare `map`: a killed process and one that resumes make the output of a single one. Raises SystemExit."""
    given, made, expected = (work / f"{name}.jsonl" for name in ("given", "made", "expected"))
    questions = [f"What is the command number {number} of localllm?" for number in range(RECORDS)]
    given.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    made.unlink(missing_ok=True)
    expected.unlink(missing_ok=True)
    words = ("-m", "localllm", "map", GUIDE, given, "--temp", "0", "-n", "30", "-o")
    nowhere = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}
    process = subprocess.Popen(words_there(*words, made), env=environment(), **nowhere)
    while process.poll() is None and (not made.exists() or made.read_bytes().count(b"\n") < RECORDS // 4):
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = made.read_bytes().count(b"\n")
    codes = there(*words, made).returncode, here(*words, expected).returncode
    answers = [sorted(lines(path.read_bytes())) for path in (made, expected)]
    if codes != (0, 0) or answers[0] != answers[1] or not 0 < before < RECORDS:
        raise SystemExit(f"map, killed after {before} of {RECORDS}: {codes}, other answers than here")
    say(f"map, killed after {before} of {RECORDS} and started again: the same answers as here")


def compare_serve() -> None:
    """Compare a server's answers. Raises SystemExit."""
    request = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 60}
    said = []
    for words, more in ((words_there(), environment()), ([sys.executable], environment_here())):
        command = [*words, "-m", "localllm", "serve", words_there(GUIDE)[-1] if words[0] == "wine" else str(GUIDE)]
        process = subprocess.Popen(
            [*command, "--port", "0"], env=more, cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        words_said = process.stderr.readline().decode().split()
        address = next(word.rstrip(";") for word in words_said if word.startswith("http://"))
        body = json.dumps(request).encode()
        asked = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as response:
            said.append(json.load(response)["choices"])
        process.kill()
        process.communicate()
    if said[0] != said[1]:
        raise SystemExit(f"serve: not as here\n  {said}")
    say("serve: answers as here")


def compare_scripts(work: Path) -> None:
    """Run demo.cmd and test.cmd in Windows' shell, in an existing environment (no pip here). Raises SystemExit."""
    tree = work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("scripts", "tests", "localllm", "quant"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / ".venv").mkdir()
    (tree / ".venv" / "Scripts").symlink_to(PYTHON)
    for extra in ("", "dev"):
        made_from = f"{named(tree)}\n{(tree / 'pyproject.toml').read_text('utf-8')}\n"
        (tree / ".venv" / f"installed-{extra}").write_text(made_from, "utf-8")
    path = {"WINEPATH": named(PYTHON)}
    for script, *words in (("demo.cmd",), ("test.cmd", "-q", "tests/unit/engine/memory/test_page_table.py")):
        command = ["wine", "cmd", "/c", named(tree / "scripts" / script), *words]
        done = subprocess.run(command, env=environment() | path, stdin=subprocess.PIPE, capture_output=True)
        expected = here("-m", "localllm", "run", GUIDE, "-p", QUESTION, *GREEDY).stdout if not words else b" passed"
        if done.returncode or expected not in done.stdout.replace(b"\r\n", b"\n"):
            raise SystemExit(f"scripts/{script}: exit code {done.returncode}\n  {done}")
        say(f"scripts/{script}: {lines(done.stdout.strip())[-1].decode(errors='replace')}")


# ---- tests and kills


def test(arguments: list[str]) -> None:
    """Run some of the tests on Windows. Raises SystemExit."""
    began = time.monotonic()
    say(f"> pytest {' '.join(arguments)}")
    done = there("-X", "utf8", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    said = done.stdout.decode(errors="replace")
    say(f"  {''.join(said.strip().splitlines()[-1:])} ({time.monotonic() - began:.0f} s)")
    if done.returncode:
        say(said[-40000:] + done.stderr.decode(errors="replace")[-2000:])
        raise SystemExit(f"pytest {' '.join(arguments)}: exit code {done.returncode}")


def kill(name: str) -> None:
    """Kill processes while they write. Raises SystemExit."""
    began = time.monotonic()
    script, *words = KILLS[name]
    done = there(ROOT / "scripts" / "fuzz" / script, *words)
    if done.returncode:
        raise SystemExit(f"Kills of {name}: {done.stdout.decode()}{done.stderr.decode(errors='replace')[-2000:]}")
    say(f"Kills of {name}: {done.stdout.decode().strip()} ({time.monotonic() - began:.0f} s)")


def run(is_quick: bool, tests: list[str]) -> None:
    """Run all tests, or the named ones; a failure does not stop the others. Raises SystemExit, CalledProcessError."""
    install()
    failed = 0
    with running():
        for part in parts(is_quick, tests):
            try:
                part()
            except (SystemExit, AssertionError) as error:
                say(f"FAILED: {error}")
                failed += 1
    if failed:
        raise SystemExit(f"{failed} of all parts failed: see FAILED above")
    say("All passed.")


def parts(is_quick: bool, tests: list[str]) -> list[Callable[[], None]]:
    """List the tests to run, in order."""
    if tests:
        return [partial(test, tests)]
    work = BED / "work"
    whole = (
        compare,
        compare_files,
        compare_images,
        compare_map,
        partial(compare_console, GUIDE),
        compare_scripts,
    )
    return [
        *(partial(compare, work) for compare in (compare_quickly, *(() if is_quick else whole))),
        *(() if is_quick else (compare_serve,)),
        *(partial(test, [*arguments]) for arguments in (QUICK if is_quick else TESTS)),
        *(() if is_quick else (partial(kill, name) for name in KILLS)),
    ]


def main() -> None:
    """Parse, make the bed, compare, test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="what fits into three minutes")
    parser.add_argument("tests", nargs="*", help="arguments of pytest, instead of all that")
    options = parser.parse_args()
    try:
        make_bed()
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"Skipped: there is no Windows to test on: {error}")
        raise SystemExit(0 if options.quick else 1) from None
    run(options.quick, options.tests)


if __name__ == "__main__":
    main()
