"""Rewrite the command line for Typer.

This replaces llama.cpp's spellings, removes options that localllm ignores, separates short options after one dash, and
explains unknown options.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from localllm.cli.compat import (
    EQUIVALENT_VALUES,
    EQUIVALENTS,
    explain_unsupported,
    find_ignored,
    is_llama_option,
    is_switch,
)
from localllm.cli.parameters import Argument, Parameter, SourcedValue, get_own_name
from localllm.errors import UsageError

TOO_MANY = {
    "map": "give the prompt with -p TEXT; for the lines of several files, use `cat FILE... | localllm map MODEL`; for "
    "whole files, give their folder and use the fields {file} and {text}",
    "chat": "put quotes around a prompt of several words",
}
COMPLAINTS = " must be ", " cannot be combined ", " is not available "  # in a message, after an option's name


@dataclass
class ParsedArgs:
    """The arguments and options that were typed after a command.

    Attributes:
        texts: values by parameter name: a string, a list of strings if it takes several, True for a switch.
        names: the options as typed, by parameter name.  ignored: other programs' options without an effect, with the
            reason.  words: for Typer: options by localllm's names, then arguments.
    """

    texts: dict[str, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def is_set(self, name: str) -> bool:
        return name in self.texts

    def take(self, param: Parameter, value: object) -> None:
        """Set a parameter's value, or append to it if the parameter takes several."""
        if param.takes_several:
            values = self.texts.setdefault(get_own_name(param), [])
            assert isinstance(values, list)
            values.append(value)
        else:
            self.texts[get_own_name(param)] = value

    def set_option(self, param: Parameter, name: str, value: str | bool) -> None:
        self.names[get_own_name(param)] = name
        self.take(param, value)
        self.words += [name] if isinstance(value, bool) else [name, value]


def parse_words(words: Sequence[str], params: Sequence[Parameter], command: str) -> ParsedArgs:
    """Parse the words after `command` into options and arguments. Raises UsageError."""
    by_name = {name: param for param in params for name in param.names}
    parsed, remaining, arguments = ParsedArgs(), list(words), list[str]()
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        name = normalize_dashes(name, by_name)
        if word == "--":
            arguments += remaining
            break
        if word == "-" or not word.startswith("-"):
            arguments.append(word)
        elif (param := by_name.get(name)) and not (equals and param.is_switch):
            if param.is_switch:
                parsed.set_option(param, name, name in param.opts)
            else:
                is_optional = (param.metavar or "").startswith("[")
                takes_next = not is_optional or (bool(remaining) and not remaining[0].startswith("-"))
                option_value = value if equals else take_value(name, remaining) if takes_next else ""
                if " " in (param.metavar or "") and not equals:  # two values
                    option_value += f" {take_value(name, remaining)}"
                parsed.set_option(param, name, EQUIVALENT_VALUES.get(param.name, {}).get(option_value, option_value))
        elif (equivalent := EQUIVALENTS.get(name)) and equivalent[0] in by_name:
            remaining[:0] = [
                part.format(value or take_value(name, remaining)) if "{}" in part else part for part in equivalent
            ]
        elif foreign := find_ignored(name, command):
            parsed.ignored.append((name, foreign.reason))
            takes_next = foreign.values == 1 or (foreign.values < 0 and bool(remaining) and is_switch(remaining[0]))
            if not equals and takes_next:
                skip_value(name, remaining)
        elif is_llama_option(name) or (letters := split_short_options(word, by_name)) is None:
            raise UsageError(describe_unknown_option(name, [*by_name], command))
        else:
            remaining[:0] = letters
    assign_arguments(arguments, params, parsed, command)
    return parsed


def normalize_dashes(name: str, by_name: Mapping[str, Parameter]) -> str:
    """Replace the underscores of an option such as --ctx_size, as llama.cpp does, if the result exists."""
    with_hyphens = f"--{name[2:].replace('_', '-')}"
    return (
        with_hyphens if name.startswith("--") and (with_hyphens in by_name or is_llama_option(with_hyphens)) else name
    )


def assign_arguments(values: list[str], params: Sequence[Parameter], parsed: ParsedArgs, command: str) -> None:
    """Assign the positional words to the command's arguments. Raises UsageError if there are too many.

    An argument already set by its option takes no word, unless it takes several values; then words are added.
    """
    assigned: list[str] = []
    for param in params:
        if not isinstance(param, Argument) or not values:
            continue
        if param.takes_several and param.also and parsed.is_set(param.name):
            for value in values:
                parsed.set_option(param.also, param.also.opts[0], value)
            values = []
        elif param.takes_several or not parsed.is_set(param.name):
            used, values = (values, []) if param.takes_several else (values[:1], values[1:])
            assigned += used
            for value in used:
                parsed.take(param, value)
    if values:
        hint = f": {hint}" if (hint := TOO_MANY.get(command, "")) else ""
        raise UsageError(f"unexpected argument {values[0]!r}{hint}")
    if assigned:
        parsed.words += ["--", *assigned]


def take_value(name: str, following: list[str]) -> str:
    if not following:
        raise UsageError(f"{name} needs a value: put it after {name}")
    return following.pop(0)


def skip_value(name: str, following: list[str]) -> None:
    if not following or (following[0].startswith("-") and not is_number(following[0])):
        hint = "; to follow up on the last answer, use --continue" if name == "-C" else ""
        raise UsageError(f"{name} needs a value{hint}")
    following.pop(0)


def split_short_options(word: str, by_name: Mapping[str, Parameter]) -> list[str] | None:
    """Split single-letter options after one dash, as in -n5; return None for other words.

    The value of a numeric option must be a number, so that -temp is not -t with the value emp.
    """
    if word.startswith("--") or f"-{word}" in by_name:
        return None
    parts: list[str] = []
    for at, letter in enumerate(word[1:], 2):
        param = by_name.get(f"-{letter}")
        if param is None:
            return None
        parts.append(f"-{letter}")
        if not param.is_switch:
            value = word[at:]
            if not value:
                return parts
            return [*parts, value] if param.kind not in (int, float) or is_number(value) else None
    return parts


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def describe_unknown_option(name: str, names: Sequence[str], command: str) -> str:
    """Describe an unknown option: why it does not exist, or a similar one."""
    if reason := explain_unsupported(name, command):
        return f"{name}: {reason}"
    if (double := f"-{name}") in names:
        return f"unknown option {name}; did you mean {double}?"
    return f"unknown option {name}; {suggest_name(name, names) or f'localllm {command} --help lists the options'}"


def suggest_name(name: str, names: Sequence[str]) -> str:
    """Return "did you mean NAME?" with the most similar name, or "" if none is similar enough.

    Similar enough is a name that begins with the typed one, or differs in one character of five (at least in one).
    """
    from difflib import get_close_matches  # seldom needed

    close = get_close_matches(name, names, n=9, cutoff=0.6)
    bare = {each: each.lstrip("-/").replace("_", "-") for each in (name, *close)}
    longer = [each for each in close if each.startswith(name)]
    near = [each for each in close if count_typos(bare[name], bare[each]) <= max(1, len(name) // 5)]
    return f"did you mean {(longer or near)[0]}?" if longer or near else ""


def count_typos(typed: str, name: str) -> int:
    """Count the characters to insert, delete, replace or swap with the next one (optimal string alignment)."""
    before: list[int] = [0] * (len(name) + 1)
    last: list[int] = [*range(len(name) + 1)]
    for row, letter in enumerate(typed, 1):
        current: list[int] = [row]
        for column, other in enumerate(name, 1):
            cost = min(last[column] + 1, current[-1] + 1, last[column - 1] + (letter != other))
            if row > 1 and column > 1 and letter == name[column - 2] and typed[row - 2] == other:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, last = last, current
    return last[-1]


def replace_option_names(
    message: str, params: Sequence[Parameter], words: ParsedArgs, elsewhere: Mapping[str, SourcedValue]
) -> str:
    """Replace Python names of options in a message with the options as the user typed them.

    Only the first word and words with "_" are names: a file called "keys" stays. An option that was not typed is shown
    by its longest name, with the source of its value. elsewhere: the values that were not typed, by name.
    """
    names = {get_own_name(param): param.opts for param in params if get_own_name(param) == param.name and param.names}
    values = find_quoted_values(message, [*words.texts.values(), *(entry.value for entry in elsewhere.values())])

    def replace_name(match: re.Match[str]) -> str:
        name, message_rest = match[0], message[match.end() :]
        if name not in names or not (match.start() == 0 or "_" in name):
            return name
        is_about = message_rest.startswith(COMPLAINTS) and (name in words.names or name in elsewhere)
        if any(begin <= match.start() and match.end() <= end for begin, end in values) and not is_about:
            return name
        source = f" ({elsewhere[name].source})" if name in elsewhere else ""
        return words.names.get(name) or max(names[name], key=len) + source

    return re.sub(r"(?<![\w./;('-])\w+(?![\w./;)'-])", replace_name, message)


def find_quoted_values(message: str, values: Iterable[object]) -> list[tuple[int, int]]:
    """Find where a message quotes option values, as (begin, end); a value may be a list."""
    texts = {str(each) for value in values for each in (value if isinstance(value, list | tuple) else [value])}
    return [match.span() for text in texts if text for match in re.finditer(re.escape(text), message)]
