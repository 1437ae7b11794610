"""Build prompts for answers from passages (RAG), and read the citations of an answer."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localllm.errors import ContextError
from localllm.services.search.passages import Passage

if TYPE_CHECKING:
    from localllm.api import Model

# With this wording Qwen2.5-Coder 1.5B answers 17 of 18 short questions about a book of 300 pages. Another wording ("put
# the numbers behind what they say") made it answer 8 of 10 with only a number, and copy an example sentence.
INSTRUCTION = (
    "Read the passages above, then answer in complete sentences: {question}\n\nAdd the number of the passage that you "
    "take a sentence from at its end, in square brackets. If the passages do not answer the question, say so."
)
PASSAGES = 6  # passages added to a question in a chat
ANSWER = 4  # the answer gets 1/ANSWER of the context


def build_prompt(passages: Sequence[Passage], question: str, model: "Model") -> tuple[str, list[Passage]]:
    """Return a prompt with as many leading passages as fit the model's context, and these passages.

    Raises ContextError if the first passage does not fit.
    """
    instruction = INSTRUCTION.format(question=question)
    passages_used, parts = list[Passage](), list[str]()
    room = model.context - model.context // ANSWER - model.session.count(instruction) - 64 if model.context else None
    for number, each in enumerate(passages, 1):
        part = f"[{number}] {each.place}{f' ({each.heading})' if each.heading else ''}\n{each.text}"
        if room is not None and (room := room - model.session.count(part) - 2) < 0:
            break
        passages_used.append(each)
        parts.append(part)
    if not passages_used:
        raise ContextError(f"no passage fits a context of {model.context} tokens; set a larger one with -c N")
    return "\n\n".join([*parts, instruction]), passages_used


def list_citations(answer: str, passages: Sequence[Passage]) -> list[str]:
    """Return the locations of the passages that an answer cites by number; if it cites none, of all."""
    numbers = {int(each) for group in re.findall(r"\[([\d,; ]+)\]", answer) for each in re.findall(r"\d+", group)}
    cited = [number for number in range(1, len(passages) + 1) if number in numbers] or range(1, len(passages) + 1)
    return [f"[{number}] {passages[number - 1].place}" for number in cited]


def search_folder(folder: str, question: str) -> str:
    """Return the passages of a folder that match a question, each below its location, or ""."""
    from localllm.engine.options import EngineOptions
    from localllm.services.search.files import FileFilter
    from localllm.services.search.ranking import PassageSearch, SearchModels

    with PassageSearch([folder], FileFilter(), SearchModels(EngineOptions())) as search:
        hits = search.find(question, PASSAGES)
    return "\n\n".join(f"==> {hit.passage.place} <==\n{hit.passage.text}" for hit in hits)
