"""Format help: wrapped to the terminal's width, in columns if there is room, with colours on a terminal."""

import re
import sys
from collections.abc import Iterable, Iterator
from textwrap import wrap

from localllm.cli.parameters import NAMED, Argument, Parameter
from localllm.cli.terminal.output import is_terminal

NARROW = 60  # columns; on narrower terminals, names are above their descriptions
WIDEST = 100  # maximum columns of a line, for readability
MOST_NAME = 28  # columns; the descriptions of longer names begin on the next line


def help_width() -> int:
    """Return the terminal's width from COLUMNS or the terminal; 80 if unknown."""
    from shutil import get_terminal_size

    return max(20, min(get_terminal_size().columns, WIDEST))


def colour_help(text: str) -> str:
    return add_colours(text) if is_terminal(sys.stdout) else text


def add_colours(text: str) -> str:
    from rich.console import Console  # slow to import
    from rich.text import Text

    rich_text, console = Text(text), Console()
    rich_text.highlight_regex(r"(?m)^(\S[^\n]*:$|Usage:)", "bold")
    rich_text.highlight_regex(r"(?<![\w\-/])--?[a-zA-Z][\w\-]*", "cyan")
    rich_text.highlight_regex(r"\[(default|also|repeatable)\b[^\]]*\]", "dim")
    with console.capture() as capture:
        console.print(rich_text, soft_wrap=True, end="")
    return capture.get()


def collect_sections(params: Iterable[Parameter]) -> dict[str, list[tuple[str, str]]]:
    """Return the rows of arguments and options, names and descriptions, by the titles of their sections."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in params:
        if isinstance(param, Argument):
            also = param.also.names if param.also else ()
            sections["Arguments"].append((param.metavar or "", append_names(param.help or "", also)))
        elif not param.name.endswith(NAMED):
            sections.setdefault(param.rich_help_panel or "Options", []).append(format_option(param))
    if len(sections["Options"]) == 1:  # --help alone
        sections["Options"] = sections.pop("Options")
    return {title: rows for title, rows in sections.items() if rows}


def format_help(usage: str, doc: str, params: Iterable[Parameter], commands: list[tuple[str, str]], width: int) -> str:
    """Render a command's help; commands: its subcommands with their summaries."""
    sections = collect_sections(params)
    text, examples = doc.partition("\n\nExamples:\n")[::2]
    usage_lines = wrap(f"Usage: {usage}", width, subsequent_indent="       ", break_on_hyphens=False)
    lines = [*usage_lines, "", *wrap_paragraphs(text, width)]
    indent = compute_indent([row for rows in sections.values() for row in rows], width)
    for title, rows in sections.items():
        lines += ["", *wrap(f"{title}:", width), *format_rows(rows, width, indent)]
    if commands:
        lines += ["", "Commands:", *format_rows(commands, width, compute_indent(commands, width))]
    if examples:
        lines += ["", "Examples:", *(line for row in examples.splitlines() for line in wrap_example(row, width))]
    return "\n".join(lines)


def format_option(param: Parameter) -> tuple[str, str]:
    """Return an option's short and long name with its metavar, and its description with other names."""
    names = [next((name for name in param.names if name.startswith("--") == long), "") for long in (False, True)]
    value = "" if param.is_switch else " " + (param.metavar or "|".join(param.choices))
    other_names = [name for name in param.names if name not in names]
    return ", ".join(filter(None, names)) + value, append_names(param.help or "", other_names)


def append_names(help: str, also: Iterable[str]) -> str:
    names = ", ".join(also)
    return f"{help}  [also: {names}]" if names else help


def wrap_paragraphs(text: str, width: int) -> Iterator[str]:
    r"""Wrap a docstring's paragraphs; a paragraph after a backspace (\\b) keeps its line breaks."""
    for index, paragraph in enumerate(text.split("\n\n")):
        if index:
            yield ""
        if paragraph.startswith("\b\n"):
            for line in paragraph.splitlines()[1:]:
                yield from wrap(line, width, subsequent_indent="    ", break_on_hyphens=False)
        else:
            yield from wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)


def compute_indent(rows: list[tuple[str, str]], width: int) -> int:
    """Return the column where descriptions begin, past all but the longest names."""
    if width < NARROW:
        return 6
    return 4 + max((len(name) for name, _ in rows if len(name) <= MOST_NAME), default=0)


def format_rows(rows: list[tuple[str, str]], width: int, columns: int) -> Iterator[str]:
    """Render names and descriptions, which begin at column `columns` or below the name."""
    indent = " " * columns
    for name, meaning in rows:
        first = f"  {name}"
        lines = wrap(meaning, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        if lines and len(first) + 2 <= columns:
            lines[0] = first.ljust(len(indent)) + lines[0].lstrip()
        else:
            yield from wrap(name, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        yield from lines


def wrap_example(text: str, width: int) -> list[str]:
    """Wrap an example outside quotes, with a backslash at the end of each line, as the shell needs."""
    lines = [" "]
    for word in re.findall(r"""(?:"[^"]*"|'[^']*'|\S)+""", text):
        if len(lines[-1]) + 1 + len(word) + 2 > width and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("     ")
        lines[-1] += f" {word}"
    return lines
