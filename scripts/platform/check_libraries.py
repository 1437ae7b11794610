#!/usr/bin/env python3
"""Test libraries that use llama-cpp-python on localllm instead: one task each, whose answer is checked.

    python scripts/real_models.py qwen-0.5b
    python scripts/platform/check_libraries.py MODEL.gguf                   # all tasks of library_tasks.py
    python scripts/platform/check_libraries.py MODEL.gguf outlines_llama_cpp

On first use the libraries are installed in an environment of their own, outside of the repository (--environment);
those that depend on llama-cpp-python, or on an older llguidance, without that dependency. Tests pass an existing
environment. Prints a line for each task; the exit code is 1 if one fails.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from own_environment import python_with, run_task

ROOT = Path(__file__).resolve().parent.parent.parent
TASKS = Path(__file__).with_name("library_tasks.py")
PACKAGES = ["langchain-community", "llama-index-core", "outlines", "instructor", "llm", "requests", "psutil"]
ALONE = ["guidance", "guidance-stitch", "llama-index-llms-llama-cpp"]
SECONDS = 600  # of one task


def python_of(folder: Path) -> Path:
    """Return the environment's Python, which is made with localllm and all packages if it is not there."""
    is_new = not folder.exists()
    python = python_with([*PACKAGES, str(ROOT)], folder)
    if is_new:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *ALONE], check=True)
    return python


def main() -> int:
    """Run the tasks one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "localllm" / "libraries")
    arguments = parser.parse_args()
    python = python_of(arguments.environment)
    known = re.findall(r"^def (\w+)\(model", TASKS.read_text(encoding="utf-8"), re.MULTILINE)
    model, path = os.path.abspath(arguments.model), {"PYTHONPATH": str(ROOT)}
    right = [run_task([python, TASKS, task, model], task, path, SECONDS) for task in arguments.tasks or known]
    return not all(right)


if __name__ == "__main__":
    sys.exit(main())
