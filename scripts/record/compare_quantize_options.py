"""Compare quantize's command line with that of llama-quantize, whose path is the argument.

Prints the options and types of its usage that `localllm quantize` does not take, and ends with 1 if there are any. Run
it with each new release of llama.cpp.
"""

import re
import subprocess
import sys

from localllm.cli.compat import find_ignored
from localllm.cli.registry import list_params
from localllm.quantizing.quantize import find_type


def options_of(usage: str) -> list[str]:
    """Return the options that a usage text explains, each once, in its order."""
    return list(dict.fromkeys(re.findall(r"^ {1,4}(--[a-z-]+)", usage, re.MULTILINE)))


def types_of(usage: str) -> list[tuple[str, str]]:
    """Return the types that it lists: number ("" for COPY) and name."""
    return re.findall(r"^ +(?:(\d+)  or  |  +)([A-Z][A-Z0-9_]+) +:", usage, re.MULTILINE)


def missing(usage: str) -> list[str]:
    """Return the options and types that `localllm quantize` does not take."""
    known = {name for parameter in list_params("quantize") for name in parameter.opts}
    options = [name for name in options_of(usage) if name not in known and find_ignored(name, "quantize") is None]
    types = [name for _, name in types_of(usage) if find_type(name) is None]
    numbers = [
        f"{number} ({name})"
        for number, name in types_of(usage)
        if number and find_type(number) is None and not name.startswith("F32")
    ]
    return [*options, *types, *numbers]


def main(program: str) -> int:
    """Compare with a program; returns the exit code."""
    usage = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    if not options_of(usage) or not types_of(usage):
        print(f"{program}: no usage of llama-quantize", file=sys.stderr)
        return 2
    lines = missing(usage)
    print(
        "\n".join(lines)
        if lines
        else f"all {len(options_of(usage))} options and {len(types_of(usage))} types are taken"
    )
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
