#!/usr/bin/env python3
"""Test coding agents with `localllm serve` and a scripted model: read a file, change a line, run a test.

    npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code
    python scripts/platform/check_agents.py MODEL.gguf --path FOLDER/node_modules/.bin            # all that are there
    python scripts/platform/check_agents.py MODEL.gguf codex --turns 20 --requests FOLDER

Of MODEL only the vocabulary and the chat template are used: the answers are those of agent_scripts.py, a call of the
agent's own tools for each step. Prints a line for each agent: whether the line was changed and the test ran, how many
requests there were, and how many tokens of prompts were prefilled again, by turn. --requests: save the requests.
The exit code is 1 if a task fails.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

from agent_scripts import SCRIPTS, AgentScript, Played  # noqa: E402
from served import Served, serving  # noqa: E402

from localllm.services.agents import AGENTS  # noqa: E402

SECONDS = 240  # of one task
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "check.py": "from calc import add\n\nassert add(2, 3) == 5\nopen('ran', 'w').write('yes')\nprint('passed')\n",
}
TASK = "Read calc.py, fix the wrong line in it, and run python check.py."


def main() -> int:
    """Run the agents one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("agents", nargs="*", choices=[[], *AGENTS])
    parser.add_argument("--path", default="", help="folders with the agents, in front of PATH")
    parser.add_argument("--turns", type=int, default=0, help="further calls, to read the file again")
    parser.add_argument("--real", action="store_true", help="let MODEL itself answer")
    parser.add_argument("--requests", type=Path, help="a folder for the requests")
    arguments = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join(filter(None, [arguments.path, os.environ["PATH"]]))
    names = arguments.agents or [name for name in AGENTS if shutil.which(AGENTS[name].program)]
    return sum(not run_agent(name, arguments) for name in names) > 0


def run_agent(name: str, arguments: Any) -> bool:
    """Run one task; whether the line was changed and the test ran."""
    with tempfile.TemporaryDirectory() as home:
        work = Path(home) / "work"
        work.mkdir()
        for file, text in FILES.items():
            (work / file).write_text(text)
        played = Played(arguments.model, SCRIPTS[name], arguments.turns, work)
        with serving({"scripted": arguments.model if arguments.real else played.open}) as served:
            problem = start(served, name, SCRIPTS[name], work, home)
            counts = served.service.metrics.responses
            refused = [f"{path} {status}" for path, status in counts if status != 200]
        is_done = "a + b" in (work / "calc.py").read_text() and (work / "ran").exists()
    if arguments.requests:
        arguments.requests.mkdir(parents=True, exist_ok=True)
        (arguments.requests / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in played.bodies))
    turns, problem = played.turns_read_again(), " ".join([*refused, problem])
    print(f"{name}: {'done' if is_done else 'NOT DONE'}, {len(played.requests)} requests, prompts of "
          f"{played.prompt_range()} tokens, read again per turn: {turns} {problem}", flush=True)  # fmt: skip
    return is_done


def start(served: Served, name: str, script: AgentScript, work: Path, home: str) -> str:
    """Launch an agent in a folder, without the user's settings; what it complains of if it fails."""
    environment = {**os.environ, **script.environment, "HOME": home, "PWD": str(work), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "localllm", "launch", name, "--url", served.url, "--", *script.arguments, TASK]
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s"
    return f"exit code {done.returncode}: {(done.stdout + done.stderr)[-600:]}" if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
