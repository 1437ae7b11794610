"""Rewrites the command line for Typer.

Replaces llama.cpp's spellings, removes options that have no effect here, separates short options after one dash,
and explains unknown options.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from localllm.cli.compat import SAME, SAME_VALUES, IgnoredOption, find_ignored, is_foreign, is_switch, refusal
from localllm.cli.parameters import Argument, Chosen, Parameter, own_name
from localllm.errors import UsageError

TOO_MANY = {
    "map": "the prompt is given by -p TEXT; `cat FILE... | localllm map MODEL` answers the lines of several files, and "
    "the name of a folder stands for its files, with the fields {file} and {text}",
    "chat": "quote a text of several words",
}
COMPLAINTS = " should be ", " cannot be combined ", " is not available "  # after the name of an option


@dataclass
class ParsedArgs:
    """The words after a command, parsed.

    Attributes:
        texts: values by the parameter's name: a text, a list of texts if it takes several, True for a switch.
        names: the options as typed, by the parameter's name.  ignored: other programs' options that have no effect
            here, with the reason.  words: for Typer: options by localllm's names, then arguments.
    """

    texts: dict[str, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def is_set(self, name: str) -> bool:
        return name in self.texts

    def take(self, param: Parameter, value: object) -> None:
        """Set a parameter's value, or append it if the parameter takes several."""
        if param.many:
            values = self.texts.setdefault(own_name(param), [])
            assert isinstance(values, list)
            values.append(value)
        else:
            self.texts[own_name(param)] = value

    def take_option(self, param: Parameter, name: str, value: str | bool) -> None:
        self.names[own_name(param)] = name
        self.take(param, value)
        self.words += [name] if isinstance(value, bool) else [name, value]


def read_words(words: Sequence[str], params: Sequence[Parameter], command: str) -> ParsedArgs:
    """Sort the words after `command` into options and arguments. Raises UsageError."""
    known = {name: param for param in params for name in param.names}
    parsed, rest, arguments = ParsedArgs(), list(words), list[str]()
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = with_dashes(name, known)
        if word == "--":
            arguments += rest
            break
        if word == "-" or not word.startswith("-"):
            arguments.append(word)
        elif (param := known.get(name)) and not (equals and param.is_switch):
            if param.is_switch:
                parsed.take_option(param, name, name in param.opts)
            else:
                given = value if equals else next_value(name, rest) if needs_value(param, rest) else ""
                parsed.take_option(param, name, SAME_VALUES.get(param.name, {}).get(given, given))
        elif (same := SAME.get(name)) and same[0] in known:
            rest[:0] = [part.format(value or next_value(name, rest)) if "{}" in part else part for part in same]
        elif foreign := find_ignored(name, command):
            parsed.ignored.append((name, foreign.reason))
            if not equals and takes_word(foreign, rest):
                skip_value(name, rest)
        elif is_foreign(name) or (letters := split_short_options(word, known)) is None:
            raise UsageError(no_such_option(name, [*known], command))
        else:
            rest[:0] = letters
    assign_arguments(arguments, params, parsed, command)
    return parsed


def with_dashes(name: str, known: Mapping[str, Parameter]) -> str:
    """Return an option such as --ctx_size with dashes, if there is one: llama.cpp accepts either."""
    other = f"--{name[2:].replace('_', '-')}"
    return other if name.startswith("--") and (other in known or is_foreign(other)) else name


def assign_arguments(values: list[str], params: Sequence[Parameter], parsed: ParsedArgs, command: str) -> None:
    """Assign the words that are not options to arguments. Raises UsageError if there are too many.

    An argument that was set by its option takes no word, unless it takes several values: words are then added.
    """
    assigned: list[str] = []
    for param in params:
        if not isinstance(param, Argument) or not values:
            continue
        if param.many and param.also and parsed.is_set(param.name):
            for value in values:
                parsed.take_option(param.also, param.also.opts[0], value)
            values = []
        elif param.many or not parsed.is_set(param.name):
            taken, values = (values, []) if param.many else (values[:1], values[1:])
            assigned += taken
            for value in taken:
                parsed.take(param, value)
    if values:
        hint = f": {hint}" if (hint := TOO_MANY.get(command, "")) else ""
        raise UsageError(f"{values[0]!r} is one argument too many{hint}")
    if assigned:
        parsed.words += ["--", *assigned]


def needs_value(param: Parameter, rest: Sequence[str]) -> bool:
    """Return whether the next word is the option's value.

    It is not if the value is optional and the next word is an option.
    """
    return not (param.metavar or "").startswith("[") or (bool(rest) and not rest[0].startswith("-"))


def takes_word(foreign: IgnoredOption, rest: Sequence[str]) -> bool:
    """Return whether the next word is the value of an ignored option."""
    return foreign.values == 1 or (foreign.values < 0 and bool(rest) and is_switch(rest[0]))


def next_value(name: str, rest: list[str]) -> str:
    """Take the value of an option, the next word, even if it begins with a dash."""
    if not rest:
        raise UsageError(f"{name} needs a value")
    return rest.pop(0)


def skip_value(name: str, rest: list[str]) -> None:
    """Remove the value of an ignored option. Raises UsageError if an option follows instead."""
    if not rest or (rest[0].startswith("-") and not is_number(rest[0])):
        hint = "; to follow up on the last answer, use --continue" if name == "-C" else ""
        raise UsageError(f"{name} needs a value{hint}")
    rest.pop(0)


def split_short_options(word: str, known: Mapping[str, Parameter]) -> list[str] | None:
    """Separate options of one letter after one dash, as in -n5; return None for other words.

    The value of a numeric option must be a number, so that -temp is not -t with the value emp.
    """
    if word.startswith("--") or f"-{word}" in known:
        return None
    parts: list[str] = []
    for at, letter in enumerate(word[1:], 2):
        param = known.get(f"-{letter}")
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


def no_such_option(name: str, known: Sequence[str], command: str) -> str:
    """Return the error about an unknown option: why there is none, or a similar one."""
    if reason := refusal(name, command):
        return f"{name}: {reason}"
    if (double := f"-{name}") in known:
        return f"there is no option {name}; did you mean {double}?"
    return f"there is no option {name}; {did_you_mean(name, known) or f'localllm {command} --help lists them'}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return "did you mean ...?" with the most similar name, "" if none is similar."""
    from difflib import get_close_matches  # seldom needed

    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def as_typed(message: str, params: Sequence[Parameter], words: ParsedArgs, elsewhere: Mapping[str, Chosen]) -> str:
    """Replace Python names of options in a message by the options as the user typed them.

    Replaced are the first word of the message, and other whole words with a "_". An option that was not typed gets its
    longest name and the source of its value. A name within a value, such as a file called "keys", is not replaced.

    elsewhere: the values that were not typed, by name.
    """
    names = {own_name(param): param.opts for param in params if own_name(param) == param.name and param.names}
    values = places_of(message, [*words.texts.values(), *(chosen.value for chosen in elsewhere.values())])

    def typed(found: re.Match[str]) -> str:
        name, rest = found[0], message[found.end() :]
        if name not in names or not (found.start() == 0 or "_" in name):
            return name
        is_about = rest.startswith(COMPLAINTS) and (name in words.names or name in elsewhere)
        if any(begin <= found.start() and found.end() <= end for begin, end in values) and not is_about:
            return name
        source = f" ({elsewhere[name].source})" if name in elsewhere else ""
        return words.names.get(name) or max(names[name], key=len) + source

    return re.sub(r"(?<![\w./;('-])\w+(?![\w./;)'-])", typed, message)


def places_of(message: str, values: Iterable[object]) -> list[tuple[int, int]]:
    """Return the spans of a message that repeat values, texts or lists of them."""
    texts = {str(each) for value in values for each in (value if isinstance(value, list | tuple) else [value])}
    return [found.span() for text in texts if text for found in re.finditer(re.escape(text), message)]
