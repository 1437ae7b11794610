"""Record what a new user sees in the first five minutes.

    python scripts/record/first_five_minutes.py qwen2.5-coder-1.5b-instruct-q4_k_m.gguf > docs/first-five-minutes.md

Installs the project into a fresh environment and does six things with a model that it pulls from a server on this
computer, which speaks the hub's protocol and has the file under the model's name. The page has what a terminal of 100
columns shows; a command that ends unexpectedly ends the script with 1.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from hub_server import Hub  # noqa: E402
from terminal import Terminal, drawn  # noqa: E402

FENCE = "````"  # answers have blocks of three
is_in_block = False
NAME = "qwen2.5-coder-1.5b"
REPOSITORY, FILE = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"


FERRY = """\
The ferry Aurora leaves Holm every day at 7:40 and returns from Skarnes at 16:15. The crossing takes 55 minutes.
A ticket costs 12 crowns, a bicycle 4 more. From November to March there is no ferry on Tuesdays.
"""
FACTS = {"ship": {"type": "string"}, "leaves": {"type": "string"}, "price": {"type": "integer"}}
SCHEMA = json.dumps({"type": "object", "properties": FACTS, "required": list(FACTS)})
PROGRAM = f"""
import localllm

with localllm.open("{NAME}") as model:
    print(model.chat([{{"role": "user", "content": "What is 12 * 12?"}}], temperature=0).text)
"""

TEXTS = {
    "beginning": """\
What a terminal shows, recorded by `scripts/record/first_five_minutes.py`. You need Python 3.11 and a clone of the
repository.""",
    "install": "## 1. Install",
    "choose": """\
## 2. Choose a model

`fit` reads the header of a file on the hub, and says what it needs on this computer and how fast it will be.
[which-model.md](which-model.md) helps to choose.""",
    "talk": """\
## 3. Talk

The first start compiles kernels for the CPU. `/help` lists the commands, `bye` leaves; more in [chat.md](chat.md).""",
    "shell": """\
## 4. Use it in the shell

Only the answer goes to stdout. [shell.md](shell.md) has forty recipes.""",
    "json": """\
## 5. Get JSON

A finished answer always matches its schema ([constrained.md](constrained.md)).""",
    "program": """\
## 6. Use it in a program

In Python ([python.md](python.md)); `localllm serve` answers the clients of OpenAI, Anthropic and Ollama
([serve.md](serve.md)).""",
    "next": "If something does not work: [troubleshooting.md](troubleshooting.md). All pages: [README.md](README.md).",
}


class User:
    """A user with an empty home folder."""

    def __init__(self, home: str, hub: str, columns: int):
        self._columns = columns
        self._home, self._program = home, f"{home}/venv/bin/localllm"
        kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
        self._environment = {**kept, "HOME": home, "HF_ENDPOINT": hub, "PATH": f"{home}/venv/bin:{os.environ['PATH']}"}

    def show(self, text: str) -> None:
        """Print what a terminal shows, in a block of its own; blocks without text between them are joined."""
        global is_in_block
        text = text.replace(self._home, "~")
        print(*([] if is_in_block else [f"{FENCE}console"]), *map(str.rstrip, text.rstrip("\n").split("\n")), sep="\n")
        is_in_block = True

    def install(self) -> None:
        """Install into a new environment, and show the time that it takes."""
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", f"{self._home}/venv"], check=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([f"{self._home}/venv/bin/pip", "install", *quiet, str(ROOT)], check=True)
        self.show("$ python3 -m venv venv && . venv/bin/activate && pip install .")
        self.show(f"({time.monotonic() - started:.0f} s)")

    def run(self, *arguments: str, most: int = 12, code: int = 0) -> None:
        """Run a command, show the beginning of its output, and check its exit code."""
        screen = self._terminal(*arguments)
        found = screen.end()
        lines = drawn(screen.seen).rstrip("\n").split("\n")
        more = [] if len(lines) <= most else ["..."]
        self.show("\n".join([f"$ localllm {shlex.join(arguments)}", *lines[:most], *more]))
        if found != code:
            sys.exit(f"localllm {shlex.join(arguments)}: exit code {found}")

    def shell(self, command: str) -> None:
        """Run a line of the shell and show what it prints."""
        environment = self._environment | {"COLUMNS": str(self._columns)}
        done = subprocess.run(["bash", "-c", command], cwd=self._home, env=environment, capture_output=True, text=True)
        self.show(f"$ {command}\n{done.stdout}")
        if done.returncode:
            sys.exit(f"{command}: exit code {done.returncode}\n{done.stderr}")

    def chat(self, *arguments: str, lines: list[str]) -> None:
        """Show a conversation."""
        chat = self._terminal("chat", *arguments)
        beginning = drawn(chat.prompt()).rsplit(">", 1)[0]
        self.show(f"$ localllm chat {shlex.join(arguments)}\n{beginning.rstrip()}")
        for line in lines:
            chat.say(line)
            self.show(f"> {line}\n{drawn(chat.drawn).rsplit('>', 1)[0].rstrip()}\n")
        chat.type("bye\r")
        if chat.end():
            sys.exit("the chat has failed")
        self.show("> bye")

    def _terminal(self, *arguments: str) -> Terminal:
        os.chdir(self._home)
        return Terminal(
            *arguments, columns=self._columns, program=[self._program], alone=True, timeout=300, **self._environment
        )


def tell(text: str) -> None:
    """Print a paragraph or a heading of the page."""
    global is_in_block
    print(f"{FENCE}\n" if is_in_block else "", f"{text}\n", sep="\n", flush=True)
    is_in_block = False


def main(model: str, columns: int = 100) -> None:
    hub = Hub()
    hub.repositories[REPOSITORY] = {FILE: Path(model).read_bytes()}
    with hub.serving(), tempfile.TemporaryDirectory(prefix="first-") as home:
        user = User(home, hub.url, columns)
        print("# The first five minutes")
        tell(TEXTS["beginning"])
        tell(TEXTS["install"])
        user.install()
        tell(TEXTS["choose"])
        user.run("fit", NAME, most=11)
        user.run("pull", NAME)
        tell(TEXTS["talk"])
        questions = ["Write a Python function that reverses a string. Code only.", "Now as a lambda.", "/undo"]
        user.chat(NAME, "--temp", "0", lines=questions)
        tell(TEXTS["shell"])
        Path(home, "ferry.txt").write_text(FERRY)
        user.shell(f"cat ferry.txt | localllm run {NAME} -p 'Summarize in one sentence.' --temp 0")
        tell(TEXTS["json"])
        user.shell(f"localllm run {NAME} -f ferry.txt -p 'Extract the facts.' --temp 0 -j '{SCHEMA}' | tee facts.json")
        tell(TEXTS["program"])
        user.shell(f"python -c '{PROGRAM}'")
        tell(TEXTS["next"])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
