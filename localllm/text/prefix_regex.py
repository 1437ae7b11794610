"""A regular expression for where one of many strings may begin: after their first characters."""

import re
from collections.abc import Collection, Iterable

# So many first characters tell a marker: enough for <think> and <|im_end|>, and thousands of <unused...> are but one.
LENGTH = 8


def build_prefix_regex(strings: Iterable[str]) -> str:
    """Build the expression; it may match where a string only seems to begin, and never without strings.

    Single characters at the end of a text, with no position after them, are found too.
    """
    first_ones = {string[:LENGTH] for string in strings}
    return "|".join(f"(?<={re.escape(first)})(?={_tree(rest)})" for first, rest in _by_first(first_ones)) or "(?!)"


def _tree(strings: Collection[str]) -> str:
    """Build an expression for any of the strings that looks at each character of a text once."""
    if "" in strings:
        return ""
    return "(?:" + "|".join(re.escape(first) + _tree(rest) for first, rest in _by_first(strings)) + ")"


def _by_first(strings: Collection[str]) -> list[tuple[str, set[str]]]:
    """Group the strings by their first character: (the character, what follows it)."""
    rests: dict[str, set[str]] = {}
    for string in strings:
        rests.setdefault(string[0], set()).add(string[1:])
    return sorted(rests.items())
