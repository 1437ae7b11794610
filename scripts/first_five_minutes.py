"""A new user's first five minutes: python scripts/first_five_minutes.py MODEL.gguf > docs/first-five-minutes.md

Installs the project into a fresh environment, lists models, pulls one by its name from a server on this computer that
speaks the hub's protocol (and has MODEL.gguf under that name), talks with it, quantizes it and talks with the result.
What a terminal of 100 columns shows goes to stdout, commands behind a dollar sign; anything that fails ends it with 1.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hub_server import Hub  # noqa: E402
from terminal import Terminal, plain  # noqa: E402

REPOSITORY, FILE, NAME = "bartowski/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct-Q4_1.gguf", "smollm2-135m:Q4_1"
COLUMNS = 100


class User:
    """Somebody with an empty home."""

    def __init__(self, home: str, hub: str):
        self._home, self._program = home, f"{home}/venv/bin/localllm"
        kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
        self._environment = {**kept, "HOME": home, "HF_ENDPOINT": hub, "PATH": f"{home}/venv/bin:{os.environ['PATH']}"}

    def show(self, text: str) -> None:
        text = text.replace(self._home, "~")
        print("\n".join(f"    {line}".rstrip() for line in text.rstrip("\n").split("\n")), flush=True)

    def install(self) -> None:
        """Into an environment of its own; the time is part of the picture."""
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", f"{self._home}/venv"], check=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([f"{self._home}/venv/bin/pip", "install", *quiet, str(ROOT)], check=True)
        self.show("$ python3 -m venv venv && . venv/bin/activate && pip install .")
        self.show(f"({time.monotonic() - started:.0f} s)")

    def run(self, *arguments: str, most: int = 12) -> None:
        """A command, and the beginning of what it shows."""
        screen = self._terminal(*arguments)
        code = screen.end()
        lines = drawn(screen.seen).rstrip("\n").split("\n")
        more = [] if len(lines) <= most else ["..."]
        self.show("\n".join([f"$ localllm {shlex.join(arguments)}", *lines[:most], *more]))
        if code:
            sys.exit(f"localllm {shlex.join(arguments)}: exit code {code}")

    def chat(self, *arguments: str, lines: list[str]) -> None:
        """A conversation."""
        chat = self._terminal("chat", *arguments)
        beginning = drawn(chat.prompt()).rsplit(">", 1)[0]
        self.show(f"$ localllm chat {shlex.join(arguments)}\n{beginning.rstrip()}")
        for line in lines:
            self.show(f"> {line}\n{chat.say(line).rsplit('>', 1)[0].rstrip()}\n")
        chat.type("bye\r")
        if chat.end():
            sys.exit("the chat has failed")
        self.show("> bye")

    def _terminal(self, *arguments: str) -> Terminal:
        os.chdir(self._home)
        return Terminal(
            *arguments, columns=COLUMNS, program=[self._program], alone=True, timeout=300, **self._environment
        )


def drawn(text: str) -> str:
    """What is to be seen: lines that were written over are gone."""
    return plain(re.sub("[^\n]*\r\x1b\\[2?K", "", text))


def main(model: str) -> None:
    hub = Hub()
    hub.repositories[REPOSITORY] = {FILE: Path(model).read_bytes()}
    with hub.serving(), tempfile.TemporaryDirectory(prefix="first-") as home:
        user = User(home, hub.url)
        print("# The first five minutes\n\nWhat scripts/first_five_minutes.py has seen on a terminal.\n")
        user.install()
        user.run("list", "--all", most=8)
        user.run("pull", NAME)
        user.chat(
            NAME, "--temp", "0", "--session", "sky", lines=["Why is the sky blue?", "/undo", "Name three colors."]
        )
        user.run("sessions")
        user.run("quantize", NAME, "small.gguf", "Q4_0", "--allow-requantize", most=6)
        user.run("run", "small.gguf", "-p", "Name three colors.", "--temp", "0")


if __name__ == "__main__":
    main(sys.argv[1])
