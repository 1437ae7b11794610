"""Record terminal sessions of a real model as SVG in docs/assets.

    python scripts/record/record_screens.py MODEL.gguf

The pictures in README.md and docs/ are made from Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, which scripts/real_models.py
downloads. Nothing is typed into them by hand: the program runs on a pseudo-terminal, and Rich draws what it printed.
"""

import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from terminal import PROGRAM, Terminal  # noqa: E402

ASSETS = ROOT / "docs" / "assets"
MODEL = "qwen2.5-coder-1.5b.gguf"  # the name that the file has in the pictures
COLUMNS = 92
PROMPT, TYPED = "\x1b[0;36;1m> \x1b[0m", "\x1b[1m{}\x1b[0m"
OTHER_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[A-Za-ln-z@~]|[()][A-Z0-9]|[=>])")  # all but colours, which end in m
OVERWRITTEN = re.compile("[^\n]*\r\x1b\\[2?K")
SCHEMA = """{"type": "object", "required": ["city", "river", "inhabitants"],
 "properties": {"city": {"type": "string"}, "river": {"type": "string"}, "inhabitants": {"type": "integer"}}}"""


def visible(output: str) -> str:
    """Return what stays on the screen of a program's output, with its colours."""
    return OTHER_ESCAPES.sub("", OVERWRITTEN.sub("", output)).replace("\r\n", "\n").replace("\r", "").rstrip("\n ")


def run(command: str) -> str:
    """Run a shell command line in the current folder and return it and its output, with colours."""
    name = "localllm"
    shell = Terminal("-c", f'{name}() {{ {shlex.join(PROGRAM)} "$@"; }}\n{command}', columns=COLUMNS, program=["bash"])
    if shell.end():
        sys.exit(f"{command}: {visible(shell.seen)}")
    return "\x1b[32m$\x1b[0m " + TYPED.format(command) + "\n" + visible(shell.seen) + "\n"


def chat(arguments: str, *lines: str) -> str:
    """Talk with the model and return the conversation, with colours."""
    terminal = Terminal("chat", *shlex.split(arguments), columns=COLUMNS, timeout=300)
    shown = "\x1b[32m$\x1b[0m " + TYPED.format(f"localllm chat {arguments}") + "\n"
    shown += visible(terminal.prompt()).rpartition("\n")[0] + "\n"
    for line in lines:
        terminal.say(line)
        shown += PROMPT + line + "\n" + visible(terminal.drawn).rpartition("\n")[0] + "\n"
    terminal.type("bye\r")
    if terminal.end():
        sys.exit("the chat failed")
    return shown


def write(name: str, title: str, screen: str) -> None:
    """Draw a screen as docs/assets/NAME.svg. No font is loaded from another host."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.rstrip("\n")))
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, monospace")
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=template, unique_id=name)
    (ASSETS / f"{name}.svg").write_text(svg, encoding="utf-8")


def main(model: str) -> None:
    """Record every screen."""
    model = os.path.abspath(model)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.symlink(model, MODEL)
        Path("city.json").write_text(SCHEMA, encoding="utf-8")
        shutil.copy(ROOT / "LICENSE", "LICENSE")
        write(
            "chat",
            "localllm chat",
            chat(f"{MODEL} --temp 0", "Write a Python function that reverses a string. Code only.", "Now as a lambda."),
        )
        write(
            "run",
            "localllm run",
            run(f'localllm run {MODEL} -p "Name three colors." --temp 0')
            + run(f'cat LICENSE | localllm run {MODEL} -p "What does this license allow? One sentence." --temp 0'),
        )
        text = "Paris, on the Seine, has 2102650 inhabitants."
        write(
            "schema",
            "localllm run --json-schema",
            run("cat city.json")
            + run(f'localllm run {MODEL} -p "{text}" --json-schema city.json --temp 0')
            + run(f"localllm run {MODEL} -p 'A date:' --regex '[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}' --temp 0"),
        )
        write("inspect", "localllm inspect", run(f"localllm inspect {MODEL}"))


if __name__ == "__main__":
    main(sys.argv[1])
