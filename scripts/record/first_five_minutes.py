"""Record what a new user sees in the first five minutes.

    python scripts/record/first_five_minutes.py MODEL.gguf [COLUMNS]

The output is docs/first-five-minutes.md.

Installs the project into a fresh environment, lists models, pulls one by its name from a server on this computer that
speaks the hub's protocol (and has MODEL.gguf under that name), talks with it, quantizes it and talks with the result;
then types commands of llama.cpp and Ollama. The screen of a terminal of 100 columns goes to stdout, with commands after
a dollar sign; a command that ends unexpectedly ends the script with 1.
"""

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

REPOSITORY, FILE, NAME = "bartowski/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct-Q4_1.gguf", "smollm2-135m:Q4_1"


class User:
    """A user with an empty home folder."""

    def __init__(self, home: str, hub: str, columns: int):
        self._columns = columns
        self._home, self._program = home, f"{home}/venv/bin/localllm"
        kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
        self._environment = {**kept, "HOME": home, "HF_ENDPOINT": hub, "PATH": f"{home}/venv/bin:{os.environ['PATH']}"}

    def show(self, text: str) -> None:
        text = text.replace(self._home, "~")
        print("\n".join(f"    {line}".rstrip() for line in text.rstrip("\n").split("\n")), flush=True)

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


def main(model: str, columns: int = 100) -> None:
    hub = Hub()
    hub.repositories[REPOSITORY] = {FILE: Path(model).read_bytes()}
    with hub.serving(), tempfile.TemporaryDirectory(prefix="first-") as home:
        user = User(home, hub.url, columns)
        print("# The first five minutes\n\nWhat scripts/record/first_five_minutes.py recorded on a terminal.\n")
        user.install()
        user.run("list", "--all", most=8)
        user.run("pull", NAME)
        user.chat(
            NAME, "--temp", "0", "--session", "sky", lines=["Why is the sky blue?", "/undo", "Name three colors."]
        )
        user.run("sessions")
        user.run("quantize", NAME, "small.gguf", "Q4_0", "--allow-requantize", most=6)
        user.run("run", "small.gguf", "-p", "Name three colors.", "--temp", "0")
        print("\n## Habits from elsewhere\n")
        copied = ["-m", "small.gguf", "-p", "Name three colors.", "--temp", "0", "-ngl", "0", "-fa", "on", "-b", "512"]
        user.run("run", *copied, "--no-warmup", "-no-cnv", "--mlock")
        user.run("run", "small.gguf", "Name three colors.", "--temp", "0", "-fa")
        user.run("run", "-p", "How do I make a file smaller?", "--temp", "0")
        user.run("run", "small.gguf", "A date:", "--temp", "0", "--regex", "\\d{4}-\\d\\d-\\d\\d")
        user.run("run", "small.gguf", "A number:", "-n", "3", "--regex", "[0-9]{8}", code=7)
        user.run("run", "gemma3:3b", "Hi", code=3)
        user.run("pull", "gemma3:3b", "small.gguf", code=3)
        user.run("run", "small.gguf", "Hi", "--tmep", "0", code=2)
        user.run("run", "small.gguf", "Hi", "--lora", "x", code=2)
        for word in ("remove", "show", "rum"):
            user.run(word, "small.gguf", code=2)
        user.run("quantize", "small.gguf", "Q5_KM", code=2)
        user.run("quantize", "small.gguf", "F16", "--allow-requantize", code=2)
        user.run("tokenize", "small.gguf", "Hello", "--ids")
        user.run("inspect", "small.gguf", "--check", most=4)
        user.run("fit", "small.gguf", "-c", "2048", most=9)
        user.chat("small.gguf", "-p", "Hi", "-n", "8", "--temp", "0", lines=["/hlep", "/set tempp 1", "/undo 2"])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
