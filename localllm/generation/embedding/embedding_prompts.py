"""The prompts that embedding models expect in front of queries and documents, from the file or by the model's name.

Files that localllm converts have them under `localllm.prompt.query` and `localllm.prompt.document`, from
sentence-transformers' prompts. Those of other files come from the models' cards.
"""

import re
from collections.abc import Mapping

from localllm.errors import UsageError

PROMPT = "localllm.prompt."
INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
# By what the name of a model has in it: in front of queries, and of documents.
KNOWN = {
    r"nomic": ("search_query: ", "search_document: "),
    r"\be5\b": ("query: ", "passage: "),
    r"bge.*(small|base|large).*en": ("Represent this sentence for searching relevant passages: ", ""),
    r"arctic.*embed.*v2": ("query: ", ""),
    r"arctic.*embed": ("Represent this sentence for searching relevant passages: ", ""),
    r"embedding.?gemma": ("task: search result | query: ", "title: none | text: "),
    r"qwen3.*embedding": (INSTRUCTION, ""),
    r"(all.)?minilm|bge.*m3|gte|jina": ("", ""),
}


def prompt_of(metadata: Mapping[str, object], role: str, path: str) -> str:
    """Return the model's prompt for a query or a document. Raises UsageError if the file has none."""
    given = metadata.get(PROMPT + role)
    if isinstance(given, str):
        return given
    if any(isinstance(metadata.get(PROMPT + other), str) for other in ("query", "document")):
        return ""
    names = [metadata.get(f"general.{key}") for key in ("name", "basename")]
    name = " ".join(text for text in names if isinstance(text, str)).lower().replace("_", "-")
    for pattern, prompts in KNOWN.items():
        if re.search(pattern, name):
            return prompts[role == "document"]
    raise UsageError(f"{path}: the model has no prompt for a {role}; add one to the texts yourself")
