"""Draw docstrings, help texts and messages at random, for a reader who does not know the code.

python scripts/tools/sample_texts.py 7          fifty docstrings, thirty help texts and twenty messages of seed 7
python scripts/tools/sample_texts.py 7 --all messages    every message
"""

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("localllm", "quant")
TELLING = ("say", "dim", "warn")  # functions that print a line to the user


def python_files() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the product's files, parsed."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def docstrings() -> Iterator[str]:
    """Yield each docstring with its place and the line it is about."""
    for path, tree in python_files():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and not (
                    isinstance(node, ast.FunctionDef) and path.parent.name == "commands" and len(text) > 400
                ):
                    yield f"{path}:{getattr(node, 'lineno', 1)} {signature(node)}\n{text}"


def signature(node: ast.AST) -> str:
    """Return a function's or a class's first line, "" for a module."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"def {node.name}({ast.unparse(node.args)}){returned}"
    return ""


def help_texts() -> Iterator[str]:
    """Yield each paragraph and option of docs/commands/, once."""
    found = dict[str, None]()
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/commands").glob("*.md")))
    for block in re.findall(r"```text\n(.*?)```", pages, re.DOTALL):
        usage = " ".join(block.split("\n")[0].split()[1:3])
        for part in re.split(r"\n\n|\n  (?=\S)", block.partition("\n\n")[2].partition("\n\nExamples:")[0]):
            text = " ".join(part.split())
            is_option = re.match(r"[-\[A-Z]", text) is not None
            if text and not text.endswith(":"):
                found[text if is_option and "--" in text else f"({usage}) {text}"] = None
    yield from found


def messages() -> Iterator[str]:
    """Yield what errors and warnings say, with its place; values are shown as the expressions that make them."""
    for path, tree in python_files():
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = getattr(call.func, "id", "") or getattr(call.func, "attr", "")
            is_told = name in TELLING or (name == "append" and "warning" in ast.unparse(call.func))
            if (isinstance(node, ast.Raise) and name.endswith("Error")) or is_told:
                text = " + ".join(readable(each) for each in call.args)
                if " " in text:
                    yield f"{path}:{call.lineno} {name}: {text}"


def readable(node: ast.expr) -> str:
    """Return a text with its expressions in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else readable(part)
            for part in node.values
        )
    return "{" + ast.unparse(node) + "}"


KINDS = {"docstrings": (docstrings, 50), "help": (help_texts, 30), "messages": (messages, 20)}


def main() -> None:
    """Print the sample of a seed, or all texts of a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--all", choices=KINDS, help="print every text of this kind")
    chosen = parser.parse_args()
    draw = random.Random(chosen.seed)
    for kind, (texts, count) in KINDS.items():
        every = list(texts())
        if chosen.all:
            sys.stdout.write("".join(f"{text}\n" for text in every) if kind == chosen.all else "")
            continue
        sys.stdout.write(f"== {count} of {len(every)} {kind}\n\n")
        for number, text in enumerate(draw.sample(every, min(count, len(every))), start=1):
            sys.stdout.write(f"{number}. {text}\n\n")


if __name__ == "__main__":
    main()
