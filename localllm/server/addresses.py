"""Normalize paths of requests: extra slashes, a missing or doubled /v1, and other servers' names."""

import re
from collections.abc import Collection
from difflib import get_close_matches

ALIASES = {"/reranking": "/rerank", "/v1/reranking": "/v1/rerank", "/v2/rerank": "/v1/rerank"}
PREFIX = "/v1"
OUTER = ("/api", "/openai")  # prefixes of /v1 at other providers


def normalize_path(path: str, routes: Collection[str]) -> str:
    """Return the known route for a path, or the path without extra slashes.

    routes: of the app; {name} or {name:path} is a parameter.
    """
    path = re.sub("/{2,}", "/", path)
    path = re.sub(rf"^(?:{'|'.join(OUTER)})+(?={PREFIX}(/|$))", "", path)
    path = re.sub(rf"^(?:{PREFIX})+(?={PREFIX}(/|$))", "", path).rstrip("/") or "/"
    path = ALIASES.get(path, path)
    for candidate in (path, PREFIX + path, path.removeprefix(PREFIX)):
        if any(matches_route(candidate, route) for route in routes):
            return candidate
    return path


def matches_route(path: str, route: str) -> bool:
    """Return whether a route matches a path."""
    begin, name, _ = route.partition("{")
    return path.startswith(begin) and len(path) > len(begin) if name else path == route


def describe_unknown(path: str, routes: Collection[str]) -> str:
    """Describe an unknown address, with the closest known one."""
    similar = get_close_matches(path, routes, n=1, cutoff=0.75)
    suggestion = f"did you mean {similar[0]}? " if similar else ""
    return f"unknown address {path[:100]!r}; {suggestion}available: {', '.join(routes)}"
