"""Measure how often `localllm search docs` finds the passage of an answer, on tests/goldens/docs_questions*.jsonl.

    python scripts/measure search                     # by words alone
    python scripts/measure search minilm.gguf [...]   # by words and these embedding models

A question counts if one of the five best passages has the words that the question's line names, or those that answer it
elsewhere ("or"). Settings were chosen by the first file's questions; the second's were written later, and helped
with one of them.
"""

import json
import sys
from pathlib import Path

from common import ROOT

from localllm.engine.options import EngineOptions
from localllm.services.search.files import FileFilter
from localllm.services.search.ranking import PassageSearch, SearchModels

TOP = 5
FILES = ("docs_questions.jsonl", "docs_questions_second.jsonl")


def questions(name: str) -> list[dict[str, str]]:
    """Return the questions of a file, each with some words of the passage that answers it."""
    text = (ROOT / "tests" / "goldens" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def missed(search: PassageSearch, asked: list[dict[str, str]]) -> list[str]:
    """Return the questions whose passage is not among the best."""
    found = []
    for each in asked:
        wanted = [" ".join(each[key].split()) for key in ("text", "or") if key in each]
        hits = [" ".join(hit.passage.text.split()) for hit in search.find(each["question"], TOP)]
        if not any(words in hit for words in wanted for hit in hits):
            found.append(each["question"])
    return found


def main() -> None:
    docs = str(ROOT / "docs")
    for path in sys.argv[1:] or [None]:
        with PassageSearch([docs], FileFilter(include=["*.md"]), SearchModels(EngineOptions(), path)) as search:
            name = "words alone" if path is None else Path(path).name
            print(f"{name}: {search.index.count} passages")
            for file in FILES:
                asked = questions(file)
                failures = missed(search, asked)
                print(f"{file}: {len(asked) - len(failures)} of {len(asked)}; not found:")
                print("".join(f"    {question}\n" for question in failures), end="")
