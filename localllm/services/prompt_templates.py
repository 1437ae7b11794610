"""Named prompts: files with options of `localllm run` in front, the user's own and those that come with it.

    ---
    description: a translation
    temp: 0.2
    field: language=English
    ---
    Translate this text into {language}.

The input comes before the text, or in place of {input}.
"""

import json
import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.services.records import BRACES
from localllm.system.files import folder_of

NAME = re.compile(r"\w[\w.-]*")
ENDING, INPUT, DESCRIPTION = ".md", "input", "description"


@frozen
class PromptTemplate:
    """A named prompt.

    Attributes:
        path: its file's.  options: what is in front of it, by name, in order.  body: the prompt.
    """

    name: str
    path: Path
    options: Sequence[tuple[str, str]]
    body: str

    @property
    def description(self) -> str:
        return next((value for name, value in self.options if name == DESCRIPTION), "")

    @property
    def is_own(self) -> bool:
        """Return whether it is the user's."""
        return self.path.parent == own_folder()

    def words(self, left_out: Container[str] = ()) -> list[str]:
        """Return its options as one would type them, without some of them."""
        found = list[str]()
        for name, value in self.options:
            if name == DESCRIPTION or name in left_out or value == "false":
                continue
            for each in values_of(value):
                found += [f"--{name}"] if each == "true" else [f"--{name}={self._located(name, each)}"]
        return found

    def _located(self, name: str, value: str) -> str:
        """Return the path of a file next to the template, for options that take one."""
        beside = self.path.parent / value
        takes_file = name.endswith("file") or name in ("json-schema", "grammar")
        return str(beside) if takes_file and _is_file(beside) else value

    def fill(self, input: str, fields: Mapping[str, str]) -> str:
        """Return the prompt with its fields. Raises UsageError for one without a value."""

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name == INPUT:
                return input
            if name not in fields and re.fullmatch(r"[\w-]+", name):
                raise UsageError(f"the template {self.name} needs --field {name}=TEXT")
            return fields.get(name, found[0])

        return BRACES.sub(value, self.body)

    @property
    def has_input(self) -> bool:
        return f"{{{INPUT}}}" in self.body


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long a name
        return False


def values_of(value: str) -> list[str]:
    """Return the values of a line: of a JSON list of texts its items."""
    if value.startswith('["'):
        try:
            return [str(each) for each in json.loads(value)]
        except ValueError:
            pass
    return [value]


def own_folder() -> Path:
    return folder_of("config") / "templates"


def builtin_folder() -> Path:
    return Path(__file__).parent.parent / "data" / "templates"


def names() -> list[str]:
    """Return the names of all templates, sorted."""
    found = set[str]()
    for folder in (own_folder(), builtin_folder()):
        if folder.is_dir():
            found |= {each.stem for each in folder.iterdir() if each.suffix == ENDING and NAME.fullmatch(each.stem)}
    return sorted(found)


def load(name: str) -> PromptTemplate:
    """Read a template by its name, or by the path of its file. Raises UsageError."""
    path = path_of(name)
    try:
        return parse(path.stem, path, path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the template {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        ) from None


def path_of(name: str) -> Path:
    """Return the path of a template, the user's before others. Raises UsageError if there is none."""
    if os.sep in name or name.endswith(ENDING):
        return Path(name)
    if NAME.fullmatch(name):
        for folder in (own_folder(), builtin_folder()):
            if (path := folder / f"{name}{ENDING}").is_file():
                return path
    raise UsageError(f"there is no template {name!r}; `localllm templates` lists them")


def parse(name: str, path: Path, text: str) -> PromptTemplate:
    """Parse a file. Raises UsageError for a line in front that is none of NAME: VALUE."""
    lines, options = text.splitlines(), list[tuple[str, str]]()
    if not lines or lines[0].rstrip() != "---":
        return PromptTemplate(name, path, (), text.strip("\n"))
    for number, line in enumerate(lines[1:], 2):
        if line.rstrip() == "---":
            return PromptTemplate(name, path, options, "\n".join(lines[number:]).strip("\n"))
        key, colon, value = line.partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not colon or not re.fullmatch(r"[\w-]+", key.strip()):
            raise UsageError(f"{path}, line {number}: this should be NAME: VALUE")
        options.append((key.strip().replace("_", "-"), unquoted(value.strip())))
    raise UsageError(f"{path}: the options in front have no end: a line ---")


def unquoted(value: str) -> str:
    """Return a value without quotes around it."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def fields_of(given: Sequence[str]) -> dict[str, str]:
    """Return the values of --field; the last of a name counts. Raises UsageError."""
    found = dict[str, str]()
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise UsageError(f"field should be NAME=TEXT, not {each!r}")
        found[name] = value
    return found
