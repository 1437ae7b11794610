"""Addresses as clients write them: with a slash too many, without /v1 or with two of them, by other servers' names."""

import re
from collections.abc import Collection
from difflib import get_close_matches

OTHER_NAMES = {"/reranking": "/rerank", "/v1/reranking": "/v1/rerank", "/v2/rerank": "/v1/rerank"}
PREFIX = "/v1"


def canonical(path: str, known: Collection[str]) -> str:
    """The one of the known addresses that is meant, or the path without slashes too many.

    known: as routes have them; {name} or {name:path} stands for something.
    """
    path = re.sub("/{2,}", "/", path)
    path = re.sub(rf"^(?:{PREFIX})+(?={PREFIX}(/|$))", "", path).rstrip("/") or "/"
    path = OTHER_NAMES.get(path, path)
    for other in (path, PREFIX + path, path.removeprefix(PREFIX)):
        if any(matches(other, each) for each in known):
            return other
    return path


def matches(path: str, known: str) -> bool:
    """Whether a route leads there."""
    begin, name, _ = known.partition("{")
    return path.startswith(begin) and len(path) > len(begin) if name else path == known


def nothing_at(path: str, known: Collection[str]) -> str:
    """What is told of an address that there is not."""
    close = get_close_matches(path, known, n=1, cutoff=0.75)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"there is nothing at this address, {path[:100]!r}; {meant}there are {', '.join(known)}"
