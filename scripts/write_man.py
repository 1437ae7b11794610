"""Format docs/localllm.1, the manual page, from the source of `localllm help`; scripts/write_help.py writes it.

A section of options that several commands share is printed with the first of them; the others refer to it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from localllm import __version__
from localllm.cli.app import make_context
from localllm.cli.help_text import collect_sections
from localllm.cli.parameters import Argument
from localllm.cli.registry import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
MAN_PAGE = ROOT / "docs" / "localllm.1"
Rows = tuple[tuple[str, str], ...]
DESCRIPTION = (
    "localllm answers prompts, holds conversations, serves models to other programs, searches files and quantizes "
    "models. A model is a GGUF file or a name that `localllm list` shows.\n\n"
    "`localllm help COMMAND` prints a part of this page."
)
ENVIRONMENT = (
    ("LOCALLLM_OPTION", "The default of an option by its long name: LOCALLLM_THREADS=4, LOCALLLM_MODEL."),
    ("LOCALLLM_PLAIN=1", "Print for screen readers and simple terminals, in every command."),
    ("LOCALLLM_DEBUG=1", "Print Python's traceback with an error."),
    ("NO_COLOR", "Print no colours."),
)  # fmt: skip
FILES = (
    ("~/.config/localllm/config.toml", "Defaults of options, and names of models."),
    ("~/.local/share/localllm/sessions", "Saved conversations."),
    ("~/.local/state/localllm/history", "What was typed in chats."),
    ("~/.cache/localllm", "Compiled kernels and the prefix cache."),
)


def format_man_page() -> str:
    """Return the manual page in the macros of man(7)."""
    program, shared = make_context(), dict[tuple[str, Rows], str]()
    version_line = re.search(rf"## \[{re.escape(__version__)}\] - (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert version_line, "the changelog has the version and its date"
    doc, _, examples = (program.command.help or "").partition("\n\nExamples:\n")
    summary, _, rest = doc.partition("\n\n")
    lines = [
        ".\\\" Written by scripts/write_help.py.",
        f'.TH LOCALLLM 1 "{version_line[1]}" "localllm {__version__}"',
        ".SH NAME", f"localllm \\- {escape(summary[:1].lower() + summary[1:].removesuffix('.'))}",
        ".SH SYNOPSIS", ".B localllm", ".I COMMAND", "[OPTIONS] [ARGUMENTS]",
        ".SH DESCRIPTION", *format_paragraphs(DESCRIPTION),
        ".SH EXIT STATUS", *format_paragraphs(rest),
        ".SH COMMANDS",
    ]  # fmt: skip
    for name in COMMANDS:
        lines += format_command(name, shared)
    lines += [".SH ENVIRONMENT", *format_rows(ENVIRONMENT), ".SH FILES", *format_rows(FILES)]
    return "\n".join([*lines, ".SH EXAMPLES", *format_examples(examples)]) + "\n"


def format_command(name: str, shared: dict[tuple[str, Rows], str]) -> Iterator[str]:
    """Yield a command's lines; shared: the sections printed so far, with their commands."""
    context = make_context(name)
    command = context.command
    params = [*command.params, *filter(None, [command.get_help_option(context)])]
    doc, _, examples = (command.help or "").partition("\n\nExamples:\n")
    metavars = " ".join(each.metavar or "" for each in params if isinstance(each, Argument))
    yield f'.SS "{escape(f"localllm {name} [OPTIONS] {metavars}".rstrip())}"'
    yield from format_paragraphs(doc)
    for title, rows in collect_sections(params).items():
        first = shared.setdefault((title, tuple(rows)), name)
        yield from (".PP", f"\\fI{escape(title)}\\fR:")
        if first == name:
            yield from format_rows(rows)
        else:
            yield f"as in \\fBlocalllm {escape(first)}\\fR."
    if examples:
        yield from (".PP", "\\fIExamples\\fR:", ".PP", *format_examples(examples))


def format_paragraphs(text: str) -> Iterator[str]:
    r"""Yield the paragraphs of a docstring; one after a backspace (\b) is joined, too."""
    for index, paragraph in enumerate(text.split("\n\n")):
        if index:
            yield ".PP"
        yield from fill_lines(paragraph.removeprefix("\b"))


def format_rows(rows: "list[tuple[str, str]] | Rows") -> Iterator[str]:
    for names, meaning in rows:
        yield from (".TP", f"\\fB{escape(names)}\\fR", *fill_lines(meaning))


def format_examples(text: str) -> Iterator[str]:
    yield from (".RS 4", ".nf", *(escape(line.strip()) for line in text.splitlines()), ".fi", ".RE")


def fill_lines(text: str) -> Iterator[str]:
    """Yield a text in lines of at most 79 characters; "" is a line without output."""
    for line in wrap(escape(" ".join(text.split())), 79, break_long_words=False, break_on_hyphens=False) or [""]:
        yield escape_start(line) or "\\&"


def escape(text: str) -> str:
    """Escape what roff would interpret: backslashes, hyphens, and control characters that begin a line."""
    return escape_start(text.replace("\\", "\\e").replace("-", "\\-"))


def escape_start(line: str) -> str:
    return f"\\&{line}" if line.startswith((".", "'")) else line
