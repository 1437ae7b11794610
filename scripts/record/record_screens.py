"""Record terminal sessions of a real model as SVG in docs/assets.

    python scripts/record/record_screens.py MODEL.gguf

The pictures in README.md and docs/ are made from Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, which scripts/real_models.py
downloads. Nothing is typed into them by hand: the program runs on a pseudo-terminal, and Rich draws what it printed.
The chat is animated: each character appears when the program printed it.
"""

import html
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
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
CELL = 12.2  # width of a character in Rich's pictures
KEY_SECONDS, HOLD_SECONDS = 0.035, 5.0
PROMPT, TYPED = "\x1b[0;36;1m> \x1b[0m", "\x1b[1m{}\x1b[0m"
OTHER_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[A-Za-ln-z@~]|[()][A-Z0-9]|[=>])")  # all but colours, which end in m
OVERWRITTEN = re.compile("[^\n]*\r\x1b\\[2?K")
TEXT_OF_RICH = re.compile(
    r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)" textLength="[\d.]+" '
    r'clip-path="url\(#\w+-line-(\d+)\)">([^<]*)</text>'
)
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


class Stream:
    """A screen that grows, with the second at which each of its characters appears."""

    def __init__(self) -> None:
        self.screen, self.times, self.now = "", list[float](), 0.0

    def show(self, text: str, pause: float = 0.0) -> None:
        """Add text at once, then wait."""
        self.screen += text
        self.times += [self.now] * len(Text.from_ansi(text).plain)
        self.now += pause

    def type(self, before: str, text: str, after: str) -> None:
        """Add text that somebody types behind a prompt."""
        self.show(before)
        for character in text:
            self.show(TYPED.format(character), KEY_SECONDS)
        self.show(after + "\n", 0.3)

    def replay(self, chunks: list[tuple[float, str]], end: str) -> None:
        """Add what a program printed, at its pace; end: what follows it on the screen and is left out."""
        output = "".join(chunk for _, chunk in chunks)
        shown = visible(output).rpartition("\n")[0] + "\n" + end
        plain, count, so_far = Text.from_ansi(shown).plain, 0, ""
        for second, chunk in chunks:
            so_far += chunk
            common = count_common(Text.from_ansi(visible(so_far)).plain, plain)
            self.times += [self.now + second] * (common - count)
            count = max(count, common)
        self.now += chunks[-1][0]
        self.times += [self.now] * (len(plain) - count)
        self.screen += shown
        self.now += 1.0


def count_common(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class Clock:
    """Receives what a terminal prints, with the time since it was last reset."""

    def __init__(self) -> None:
        self.chunks, self._start = list[tuple[float, str]](), time.monotonic()

    def write(self, text: str) -> None:
        self.chunks.append((time.monotonic() - self._start, text))

    def flush(self) -> None:
        pass

    def take(self) -> list[tuple[float, str]]:
        """Return the chunks so far and start again."""
        chunks, self.chunks, self._start = self.chunks, [], time.monotonic()
        return chunks


def chat(arguments: str, *lines: str) -> Stream:
    """Talk with the model and return the conversation, with colours and times."""
    terminal, clock, stream = Terminal("chat", *shlex.split(arguments), columns=COLUMNS, timeout=300), Clock(), Stream()
    stream.type("\x1b[32m$\x1b[0m ", f"localllm chat {arguments}", "")
    stream.show(visible(terminal.prompt()).rpartition("\n")[0] + "\n", 1.0)
    terminal.log(clock)
    for line in lines:
        clock.take()
        terminal.say(line)
        chunks = clock.take()
        taken = next(index for index, (_, chunk) in enumerate(chunks) if "\x1b[?2004l" in chunk)
        first = chunks[taken][1].partition("\x1b[?2004l")[2]
        stream.type(PROMPT, line, "")
        stream.replay([(chunks[taken][0], first), *chunks[taken + 1 :]], "")
    terminal.type("bye\r")
    if terminal.end():
        sys.exit("the chat failed")
    return stream


def animate(svg: str, stream: Stream) -> str:
    """Split the texts of a picture by Rich so that each appears at its time; it starts again after some seconds."""
    total, row_starts = stream.now + HOLD_SECONDS, [0]
    plain = Text.from_ansi(stream.screen).plain
    for line in plain.split("\n"):
        row_starts.append(row_starts[-1] + len(line) + 1)
    names: dict[float, str] = {}

    def split(match: re.Match[str]) -> str:
        attributes, x, y, row, text = match[1], float(match[2]), match[3], int(match[4]), html.unescape(match[5])
        column, pieces = round(x / CELL), list[tuple[float, int, str]]()
        for offset, character in enumerate(text):
            at = row_starts[row] + column + offset
            second = round(stream.times[at] * 20) / 20 if at < row_starts[row + 1] - 1 else 0.0
            if pieces and pieces[-1][0] == second:
                pieces[-1] = (second, pieces[-1][1], pieces[-1][2] + character)
            else:
                pieces.append((second, column + offset, character))
        return "".join(
            f'<text class="{attributes} {names.setdefault(second, f"t{len(names)}")}" x="{start * CELL:g}" y="{y}" '
            f'textLength="{len(piece) * CELL:g}">{html.escape(piece).replace(chr(160), "&#160;")}</text>'
            for second, start, piece in pieces
            if piece.strip()
        )

    svg = TEXT_OF_RICH.sub(split, svg)
    svg = re.sub(r'<clipPath id="\w+-line-\d+">\s*<rect [^>]*/>\s*</clipPath>\s*', "", svg)
    rules = [
        f".{name} {{ animation: {name} {total:.1f}s step-end infinite }} "
        f"@keyframes {name} {{ 0% {{ opacity: 0 }} {max(100 * second / total, 0.01):.2f}% {{ opacity: 1 }} }}"
        for second, name in names.items()
    ]
    rules.append("@media (prefers-reduced-motion: reduce) { text { animation: none !important } }")
    return svg.replace("</style>", "\n".join(rules) + "\n    </style>", 1)


def write(name: str, title: str, screen: str | Stream) -> None:
    """Draw a screen as docs/assets/NAME.svg. No font is loaded from another host."""
    stream = screen if isinstance(screen, Stream) else None
    screen = screen.screen if isinstance(screen, Stream) else screen
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.rstrip("\n")))
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, monospace")
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=template, unique_id=name)
    svg = animate(svg, stream) if stream else svg
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
            chat(
                f"{MODEL} --temp 0",
                "Why is the sky blue? One sentence.",
                "Write a Python function that reverses a string. Code only.",
                "Now as a lambda.",
            ),
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
