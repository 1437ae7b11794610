"""Write docs/commands.md, docs/commands/, docs/coming-from.md, docs/llama-cpp-options.md, parts of docs/sampling.md.

Also docs/localllm.1, see write_man.py.

They are made of `localllm help` at 80 columns, of localllm/cli/compat.py, and of the declared options. Tests compare.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill

from write_man import MAN_PAGE, format_man_page

from localllm.cli import compat
from localllm.cli import compat as llama_names
from localllm.cli.app import make_context
from localllm.cli.parameters import NAMED
from localllm.cli.registry import COMMANDS, list_params
from localllm.generation.sampling.options import OPTIONS, ORDER

WIDTH = 80
DOCS = Path(__file__).resolve().parent.parent / "docs"
COMING, SAMPLING = DOCS / "coming-from.md", DOCS / "sampling.md"
LLAMA_CPP_OPTIONS = DOCS / "llama-cpp-options.md"
BEGINNING = """\
# All commands

What `localllm help` shows; each page has what `localllm help COMMAND` shows. `man localllm` has all of them, on Linux
and macOS. scripts/write_help.py writes them.
"""
COMING_BEGINNING = """\
# Coming from llama.cpp

Put `localllm run`, `localllm chat` or `localllm serve` in front of a command line's options: they have the same names,
values and defaults.

```bash
localllm run -m model.gguf -p "Hi" -n 64 --temp 0 -ngl 99 --mlock     # was: llama-completion -m model.gguf ...
localllm chat -m model.gguf -c 8192 -ctk q8_0 -ctv q8_0               # was: llama-cli -m model.gguf ...
localllm serve -m model.gguf -np 2 --jinja --metrics                  # was: llama-server -m model.gguf ...
```

An option without a meaning here is ignored, and one line on stderr says why. An option that would change the answer and
is not supported is refused, and the error says what to use instead. [Which ones](llama-cpp-options.md).

Models are GGUF files, or [names](models.md). Nothing is downloaded unless you ask for it: `localllm pull` downloads,
and on a terminal other commands offer it. From Ollama: [coming-from-ollama.md](coming-from-ollama.md).
"""
OPTIONS_BEGINNING = """\
# llama.cpp's options: ignored and refused

Options that are not listed here work, or [have another name](coming-from.md#which-options-have-another-name).

```console
$ localllm run model.gguf -p Hi --mlock
localllm: --mlock is ignored: the model file is always memory-mapped
```

`python scripts/write_help.py` writes this page from the program's own tables, which
`scripts/record/compare_llama_options.py` compares with llama.cpp's source.
"""


def documents() -> dict[Path, str]:
    """Return the pages about commands by their paths: the index, and a page for each."""
    pages = {DOCS / "commands" / f"{name}.md": f"# localllm {name}\n\n{help_block(name)}" for name in COMMANDS}
    rows = [(f"[{name}](commands/{name}.md)", make_context(name).command.get_short_help_str(100)) for name in COMMANDS]
    index = f"{BEGINNING}\n" + "\n".join(table(("command", "what it does"), rows)) + f"\n\n{help_block(None)}"
    return {DOCS / "commands.md": index, **pages}


def help_block(name: str | None) -> str:
    context = make_context(name)
    return f"```text\n{context.command.format_plain_help(context, WIDTH)}\n```\n"


def coming_from() -> str:
    """Return the whole of docs/coming-from.md."""
    parts = [
        COMING_BEGINNING,
        "## Which command does what?\n",
        *commands(compat.LLAMA_CPP),
        "\n## Which options have another name?\n",
        "The names in the first column work, too.\n",
        *table(("llama.cpp", "localllm"), other_names()),
    ]
    return "\n".join(parts) + "\n"


def llama_cpp_options() -> str:
    """Return the whole of docs/llama-cpp-options.md."""
    valued = [*llama_names.SWITCHES.items(), *llama_names.VALUED.items()]
    parts = [
        OPTIONS_BEGINNING,
        "## Which options are ignored?\n",
        "They are accepted and change nothing.\n",
        *table(("llama.cpp", "why"), reasons([*llama_names.FLAGS.items(), *valued])),
        "\nIn one command only:\n",
        *table(
            ("command", "llama.cpp", "why"),
            [(f"`{name}`", *row) for name, groups in llama_names.IGNORED_IN.items() for row in reasons(groups.items())],
        ),
        "\n## Which options are refused?\n",
        "They would change the answer, or mean something else.\n",
        *table(("llama.cpp", "instead"), reasons(llama_names.UNSUPPORTED.items())),
        "\nIn one command only:\n",
        *table(
            ("command", "llama.cpp", "instead"),
            [
                (f"`{name}`", *row)
                for name, groups in llama_names.UNSUPPORTED_IN.items()
                for row in reasons(groups.items())
            ],
        ),
    ]
    return "\n".join(parts) + "\n"


def sampling(page: str) -> str:
    """Return the page about sampling with its chain of steps and its table of options written anew."""
    header = ("option", "flag", "default", "what it does", "key in a file", "source")
    rows = [
        (f"`{name}`", ", ".join(f"`{flag}`" for flag in option.flags.split()), option.default_text, option.help,
         option.key and f"`{option.key}`", option.source)
        for name, option in OPTIONS.items()
    ]  # fmt: skip
    before, _, rest = page.partition("| option |")
    page = before + "\n".join(table(header, rows)) + "\n\n" + rest.partition("\n\n")[2]
    before, _, rest = page.partition("    logit_bias -> ")
    chain = fill(" -> ".join(("logit_bias", *ORDER, "draw")), 110, initial_indent="    ", subsequent_indent="        ")
    return before + chain + "\n\n" + rest.partition("\n\n")[2]


def commands(rows: tuple[compat.CommandAlias, ...]) -> Iterator[str]:
    return table(
        ("there", "here", "what differs"),
        [(f"`{row.there}`", f"`{row.here}`" if row.here else "", row.differs) for row in rows],
    )


def other_names() -> Iterator[tuple[str, str]]:
    """Options by which localllm knows llama.cpp's: its own one last."""
    for param in list_params("run"):
        names = [name for name in param.opts if name.startswith("-")]
        if len(names) > 1 and not param.name.endswith(NAMED):
            yield ", ".join(f"`{name}`" for name in names), f"`{max(names, key=len)}`"
    for name, words in llama_names.EQUIVALENTS.items():
        yield f"`{name}`", f"`{' '.join(words).replace('{}', 'VALUE')}`"


def reasons(groups: "Mapping[str, str] | Iterator[tuple[str, str]] | list[tuple[str, str]]") -> list[tuple[str, str]]:
    """Names and a reason, a row for each reason."""
    found: dict[str, list[str]] = {}
    for reason, names in groups:
        found.setdefault(reason, []).extend(names.split())
    return [(", ".join(f"`{name}`" for name in names), reason) for reason, names in found.items()]


def table(header: tuple[str, ...], rows: "Iterator[tuple[str, ...]] | list[tuple[str, ...]]") -> Iterator[str]:
    for row in (header, ("---",) * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    (DOCS / "commands").mkdir(exist_ok=True)
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
    MAN_PAGE.write_text(format_man_page(), encoding="utf-8")
    COMING.write_text(coming_from(), encoding="utf-8")
    LLAMA_CPP_OPTIONS.write_text(llama_cpp_options(), encoding="utf-8")
    SAMPLING.write_text(sampling(SAMPLING.read_text(encoding="utf-8")), encoding="utf-8")
