"""Write docs/commands.md: what `localllm help` tells of every command, at 80 columns. A test compares."""

from pathlib import Path

from localllm.cli.app import COMMANDS, context_of

WIDTH = 80
FILE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
BEGINNING = """\
# All commands

What `localllm help` and `localllm help COMMAND` show; scripts/write_help.py writes this file.
"""


def document() -> str:
    """The whole file."""
    parts = [BEGINNING]
    for name in (None, *COMMANDS):
        context = context_of(name)
        title = f"localllm {name}" if name else "localllm"
        parts.append(f"## {title}\n\n```text\n{context.command.plain_help(context, WIDTH)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
