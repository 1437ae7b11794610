#!/usr/bin/env python3
"""Make the project's Python environment, .venv, and run the demo or the tests in it, on every system.

    environment.py prepare [EXTRA]    localllm, installed in place: edits take effect at once; dev: tools to work on it
    environment.py demo               asks the built-in model a question; only the answer goes to stdout
    environment.py test [ARGUMENTS]   pytest, one test more at once than there are cores; --real: brings real models,
                                      and runs their tests one by one

Needs only Python 3.11. An environment is made again only if its folder or pyproject.toml has changed since, of which
each kind of installation keeps a note.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv"
PYTHON = FOLDER / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LEAST = (3, 11)
QUESTION = "What is localllm?"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def is_suitable(python: Path) -> bool:
    """Return whether this is a Python that is new enough."""
    check = f"import sys; sys.exit(sys.version_info < {LEAST})"
    return python.exists() and subprocess.run([python, "-c", check], capture_output=True).returncode == 0


def prepare(extra: str = "") -> None:
    """Make the environment if it is missing or outdated; extra: of pyproject.toml. Raises SystemExit."""
    made_from = f"{ROOT}\n{(ROOT / 'pyproject.toml').read_text('utf-8')}\n"
    if not is_suitable(PYTHON):
        import venv  # which Pythons that are part of another program lack

        say(f"Creating the environment .venv with Python {sys.version.split()[0]} ...")
        venv.create(FOLDER, clear=True, with_pip=True, symlinks=os.name != "nt")
    note = FOLDER / f"installed-{extra}"
    if not note.exists() or note.read_text("utf-8") != made_from:
        say("Installing localllm and what it needs (once; takes about a minute) ...")
        what = f".[{extra}]" if extra else "."
        # Python compiles what it imports: a tenth of what pip would compile, for 7 seconds.
        quick = ["--disable-pip-version-check", "--no-compile"]
        words = [PYTHON, "-m", "pip", "install", *quick, "--editable", what]
        done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            say(done.stdout + done.stderr)
            raise SystemExit(done.returncode)
        if sys.dont_write_bytecode and not extra:
            compile_sources()
        for name in (extra, ""):
            (FOLDER / f"installed-{name}").write_text(made_from, "utf-8")


def compile_sources() -> None:
    """Compile what was installed, on all cores: 4 s. Without it each start takes 0.7 s instead of 0.3.

    Only where Python may not write what it compiles itself (PYTHONDONTWRITEBYTECODE), which tests allow again.
    """
    words = [PYTHON, "-m", "compileall", "-q", "-j", "0", "-x", "[/\\\\]tests?[/\\\\]"]
    subprocess.run([*words, FOLDER, ROOT / "localllm", ROOT / "quant"], stdin=subprocess.DEVNULL, capture_output=True)


def demo() -> int:
    """Return the exit code of localllm."""
    find = "import localllm; print(localllm.builtin_model())"
    found = subprocess.run([PYTHON, "-c", find], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    model = os.path.relpath(found.stdout.strip(), ROOT)
    say(f'> localllm run {model} -p "{QUESTION}"')
    words = [PYTHON, "-m", "localllm", "run", model, "-p", QUESTION, "--temp", "0"]
    return subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL).returncode


def test(arguments: list[str]) -> int:
    """Run pytest; return its exit code.

    It runs one worker more than there are cores: some wait for a server, a terminal, or a kernel that another compiles.
    With more threads the workers' matrix products wait for each other: a third of their time.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process of hundreds compiles what it imports
    at_once = ["-n", str(cores() + 1), "--dist", "worksteal"]
    if "--real" in arguments:
        at_once = []  # a real model takes all cores
        fetch_real_models()
    words = [PYTHON, "-m", "pytest", *at_once, *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment).returncode


def fetch_real_models() -> None:
    """Download missing real models; tests whose model is still missing are skipped, with a reason."""
    if subprocess.run([PYTHON, "scripts/real_models.py"], cwd=ROOT, stdout=sys.stderr).returncode:
        say("Going on without the real models that are not there ...")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(words: list[str]) -> int:
    """Run the command that the first argument names. Raises SystemExit."""
    if sys.version_info < LEAST:
        raise SystemExit("localllm needs Python 3.11 or newer: install it from https://www.python.org/downloads/")
    command, *arguments = words or [""]
    if command == "prepare":
        prepare(*arguments)
        return 0
    if command == "demo":
        prepare()
        return demo()
    if command == "test":
        prepare("dev")
        return test(arguments)
    raise SystemExit((__doc__ or "").strip())


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
