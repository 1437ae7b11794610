#!/usr/bin/env python3
"""Compare llama.cpp's options, from its common/arg.cpp, with what localllm's commands make of them.

    python scripts/record/compare_llama_options.py llama.cpp/common/arg.cpp
    python scripts/record/compare_llama_options.py llama.cpp/common/arg.cpp --record tests/goldens/llama_options.txt

Prints how many spellings are taken, translated, left out or refused with a reason, and each that a command does not
know; ends with 1 if there are any. Run it with each new release of llama.cpp: --record writes the list that a test
reads.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

from localllm.cli.compat import EQUIVALENTS, explain_unsupported, find_ignored
from localllm.cli.registry import list_params

# The commands in which somebody types the options of each of llama.cpp's programs; () where localllm has none.
COMMANDS: dict[str, tuple[str, ...]] = {
    "COMMON": ("run", "chat", "serve"),
    "COMPLETION": ("run",),
    "CLI": ("chat",),
    "SERVER": ("serve",),
    "MTMD": ("run",),
    "DIFFUSION": ("run",),
    "SPECULATIVE": ("run",),
    "LOOKUP": ("run",),
    "EMBEDDING": ("embed",),
    "PERPLEXITY": ("perplexity",),
    "IMATRIX": ("imatrix",),
    "CVECTOR_GENERATOR": ("control-vector",),
    "BENCH": ("bench",),
    "TOKENIZE": ("tokenize",),
    "DOWNLOAD": ("pull",),
    "FIT_PARAMS": ("fit",),
}
DECLARATION = re.compile(r'common_arg\(\s*((?:\{\s*"-[^{}]*\}\s*,\s*)+)(.*?)(?=common_arg\(|\Z)', re.DOTALL)
Declared = tuple[tuple[str, ...], tuple[str, ...]]  # the spellings of an option, and the programs that have it


def read_declarations(source: str) -> list[Declared]:
    """Return all options that the source declares, in its order."""
    found = []
    for names, rest in DECLARATION.findall(source):
        programs = re.search(r"set_examples\(\s*(\{[^}]*\}|\w+)", rest)
        told = re.findall(r"LLAMA_EXAMPLE_(\w+)", programs[1]) if programs else ["COMMON"]
        found.append((tuple(re.findall(r'"(-[^"]*)"', names)), tuple(told or ["MTMD", "SERVER"])))
    return found


def outcome(name: str, command: str) -> str:
    """Return what a command makes of a spelling: taken, translated, left out, refused, or "" if it is unknown."""
    known = {each for parameter in list_params(command) for each in parameter.names}
    if name in known:
        return "taken"
    if name in EQUIVALENTS and (EQUIVALENTS[name][0] in known or EQUIVALENTS[name][0] == "--help"):
        return "translated"
    if find_ignored(name, command):
        return "left out"
    return "refused" if explain_unsupported(name, command) else ""


def compare(options: list[Declared]) -> tuple[Counter[str], list[str]]:
    """Count spellings by outcome, in the first command that has them; and describe those that are unknown."""
    counts, unknown = Counter[str](), []
    for names, programs in options:
        commands = list(dict.fromkeys(command for each in programs for command in COMMANDS.get(each, ())))
        for name in names:
            outcomes = [outcome(name, command) for command in commands or ["run"]]
            counts[outcomes[0] or "unknown"] += 1
            unknown += [
                f"{name} in localllm {command}"
                for command, each in zip(commands or ["run"], outcomes, strict=True)
                if not each
            ]
    return counts, unknown


def write_record(options: list[Declared]) -> str:
    """Return the list as a text, a line for each option."""
    return "".join(f"{' '.join(names)} | {' '.join(programs)}\n" for names, programs in options)


def read_record(text: str) -> list[Declared]:
    """Read what `write_record` has made."""
    lines = (line.partition(" | ") for line in text.splitlines())
    return [(tuple(names.split()), tuple(programs.split())) for names, _, programs in lines]


def main() -> int:
    """Compare; the exit code is 1 if an option is unknown, and 2 if the file declares none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    options = read_declarations(arguments.source.read_text(encoding="utf-8"))
    if not options:
        print(f"{arguments.source}: declares no options", file=sys.stderr)
        return 2
    counts, unknown = compare(options)
    print(f"{counts.total()} spellings: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    print("\n".join(unknown), end="\n" if unknown else "")
    if arguments.record:
        arguments.record.write_text(write_record(options), encoding="utf-8")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
