#!/usr/bin/env python3
"""Test client libraries with `localllm serve` and a real model: one task each, whose answer is checked.

    python scripts/real_models.py qwen-0.5b
    python scripts/platform/check_clients.py MODEL.gguf                 # all tasks of client_tasks.py
    python scripts/platform/check_clients.py MODEL.gguf openai_chat     # some

On first use the libraries are installed in an environment of their own, outside of the repository (--environment);
those of npm need Node.js. Prints a line for each task; the exit code is 1 if one fails.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from own_environment import python_with, run_task

ROOT = Path(__file__).resolve().parent.parent.parent
TASKS = Path(__file__).with_name("client_tasks.py")
PACKAGES = ["openai", "anthropic", "instructor", "smolagents[openai]", "pydantic-ai-slim[openai]", "langchain-openai",
            "llama-index-llms-openai-like", "litellm", "ollama", "langchain-ollama", "llm", "llm-ollama"]  # fmt: skip
SECONDS = 300  # of one task


def python_of(folder: Path) -> Path:
    """Return the environment's Python, which is made with all packages if it is not there, those of npm too."""
    python = python_with(PACKAGES, folder)
    if not (folder / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), "ollama"], check=True)
    return python


def main() -> int:
    """Run the tasks one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "localllm" / "clients")
    arguments = parser.parse_args()
    python = python_of(arguments.environment)
    known = re.findall(r"^def (\w+)\(url", TASKS.read_text(encoding="utf-8"), re.MULTILINE)
    command = [sys.executable, "-m", "localllm", "serve", arguments.model, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr
            line = server.stderr.readline()
            if not (found := re.search(r"http://\S+\d", line)):
                raise SystemExit(line)
            failed = [task for task in arguments.tasks or known if not check(python, task, found[0])]
        finally:
            server.terminate()
    return bool(failed)


def check(python: Path, task: str, url: str) -> bool:
    """Run a task; whether its answer is right."""
    variables = {
        "NODE_MODULES": str(python.parent.parent / "node_modules"),
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return run_task([python, TASKS, task, url], task, variables, SECONDS)


if __name__ == "__main__":
    sys.exit(main())
