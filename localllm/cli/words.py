"""What the user typed, word by word, before Typer reads it: names that mean an argument, options that may lack their
value, and better answers to what does not exist.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.cli.llama_names import advice
from localllm.errors import UsageError

NUMBERS = (int, float)


@dataclass
class Words:
    """The words behind a command, sorted.

    options: names, each with its value behind it.  arguments: the others.  named: values of arguments that were given
    by name (-m MODEL), by the argument's place.  given: the parameters that the options are.
    """

    options: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    named: dict[int, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    def placed(self) -> list[str]:
        """The arguments, each in its place."""
        whole = list(self.arguments)
        for place in sorted(self.named):
            whole.insert(place, self.named[place])
        return whole

    def for_typer(self) -> list[str]:
        return [*self.options, "--", *self.placed()]


def read_words(words: Sequence[str], params: Sequence[Any], command: str) -> Words:
    """Sort what was typed behind `command`, which has these parameters of Typer's. Raises UsageError."""
    known = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    places = {name: place for place, param in enumerate(arguments_of(params)) for name in other_names(param)}
    known = {name: param for name, param in known.items() if name.startswith("-")}
    found, rest = Words(), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            found.arguments += rest
            break
        if word == "-" or not word.startswith("-"):
            found.arguments.append(word)
        elif name in places and places[name] not in found.named:
            found.named[places[name]] = value if equals else following(name, rest)
        elif name in known:
            found.options.append(word)
            found.given.add(known[name].name)
            if takes_value(known[name]) and not equals:
                found.options += [following(name, rest)] if needs_value(known[name], rest) else [""]
        elif advice(name) or (last := last_of_letters(word, known)) is None:
            raise UsageError(no_such_option(name, [*known, *places], command))
        else:
            found.options += [word, following(last, rest)] if last else [word]
            found.given |= {known[f"-{letter}"].name for letter in word[1:] if f"-{letter}" in known}
    return found


def arguments_of(params: Sequence[Any]) -> list[Any]:
    return [param for param in params if param.param_type_name == "argument"]


def other_names(param: Any) -> tuple[str, ...]:
    """Options by which an argument can be given, too."""
    return getattr(param.type_descriptor.parameter_info, "also", ())


def takes_value(param: Any) -> bool:
    return not param.is_flag


def needs_value(param: Any, rest: Sequence[str]) -> bool:
    """Whether the next word is the option's value: not if the value may be left out, and the next word is an option."""
    is_optional = (param.metavar or "").startswith("[")
    return not is_optional or (bool(rest) and not rest[0].startswith("-"))


def following(name: str, rest: list[str]) -> str:
    """The value of an option, which is the next word whatever it looks like."""
    if not rest:
        raise UsageError(f"{name} needs a value behind it")
    return rest.pop(0)


def last_of_letters(word: str, known: dict[str, Any]) -> str | None:
    """Of several options of one letter behind one dash (-n5, say), the one whose value is the next word, "" if none
    needs it; None if the word is nothing like that. A number's value is one, so that -temp is no -t with the value emp;
    and -prompt is no -p with the value rompt.
    """
    if word.startswith("--") or f"-{word}" in known:
        return None
    for place, letter in enumerate(word[1:], 2):
        param = known.get(f"-{letter}")
        if param is None:
            return None
        if takes_value(param):
            if place == len(word):
                return f"-{letter}"
            is_text = param.type_descriptor.annotation not in NUMBERS
            return "" if is_text or is_number(word[place:]) else None
    return ""


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def no_such_option(name: str, known: Sequence[str], command: str) -> str:
    """Why not, or what may have been meant."""
    if reason := advice(name):
        return f"{name}: {reason}"
    if (double := f"-{name}") in known:
        return f"there is no option {name}; did you mean {double}?"
    return f"there is no option {name}; {did_you_mean(name, known) or f'localllm {command} --help lists them'}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A question with the name that is most like it, "" if none is."""
    from difflib import get_close_matches  # seldom needed

    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def as_typed(message: str, params: list[Any], words: Sequence[str], sources: Mapping[str, str]) -> str:
    """A message with the options in it as the user has typed them, where it has their names in Python: the word that it
    begins with, and others with a "_". An option that was not typed gets its longest name, and the source of its value.
    """
    names = {param.name: param.opts for param in params if param.param_type_name == "option"}

    def typed(found: re.Match[str]) -> str:
        name = found[0]
        if name not in names or not (found.start() == 0 or "_" in name):
            return name
        given = [opt for opt in names[name] if any(is_option(word, opt) for word in words)]
        source = f" ({sources[name]})" if name in sources else ""
        return given[0] if given else max(names[name], key=len) + source

    return re.sub(r"(?<![\w./-])\w+(?![\w./-])", typed, message)


def is_option(word: str, name: str) -> bool:
    """Whether a word of the command line is this option, perhaps with its value: -n5, --temp=0."""
    return word == name or word.startswith(f"{name}=" if name.startswith("--") else name)
