"""Prompt templates: files with options of `localllm run` and a prompt, built-in or the user's own.

    ---
    description: a translation
    temp: 0.2
    field: language=English
    ---
    Translate this text into {language}.

The input replaces {input}, or is placed before the prompt.
"""

import json
import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.services.records.lines import BRACES
from localllm.system.files import get_user_folder

NAME = re.compile(r"\w[\w.-]*")
ENDING, INPUT, DESCRIPTION = ".md", "input", "description"


@frozen
class PromptTemplate:
    """A prompt template.

    Attributes:
        path: path of its file.  options: (name, value), in the file's order.  body: the prompt.
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
        return self.path.parent == get_own_folder()

    def list_arguments(self, excluded: Container[str] = ()) -> list[str]:
        """Return the template's options as command-line arguments, except those in `excluded`."""
        arguments = list[str]()
        for name, value in self.options:
            if name == DESCRIPTION or name in excluded or value == "false":
                continue
            for each in split_values(value):
                arguments += [f"--{name}"] if each == "true" else [f"--{name}={self._resolve_file(name, each)}"]
        return arguments

    def _resolve_file(self, name: str, value: str) -> str:
        """Return an option's value; if it takes a file and that file is next to the template, return its path."""
        neighbour = self.path.parent / value
        takes_file = name.endswith("file") or name in ("json-schema", "grammar")
        return str(neighbour) if takes_file and _is_file(neighbour) else value

    def fill(self, input: str, fields: Mapping[str, str]) -> str:
        """Return the prompt with its fields filled in. Raises UsageError for a field without a value."""

        def get_value(match: re.Match[str]) -> str:
            name = match[1]
            if name == INPUT:
                return input
            if name not in fields and re.fullmatch(r"[\w-]+", name):
                raise UsageError(f"template {self.name} needs a value for {name}: add --field {name}=TEXT")
            return fields.get(name, match[0])

        return BRACES.sub(get_value, self.body)

    @property
    def has_input(self) -> bool:
        return f"{{{INPUT}}}" in self.body


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def split_values(value: str) -> list[str]:
    """Return the values of an option: the items of a JSON list of strings, or the value itself."""
    if value.startswith('["'):
        try:
            return [str(each) for each in json.loads(value)]
        except ValueError:
            pass
    return [value]


def get_own_folder() -> Path:
    return get_user_folder("config") / "templates"


def get_builtin_folder() -> Path:
    return Path(__file__).parent.parent / "data" / "templates"


def list_names() -> list[str]:
    stems = set[str]()
    for folder in (get_own_folder(), get_builtin_folder()):
        if folder.is_dir():
            stems |= {each.stem for each in folder.iterdir() if each.suffix == ENDING and NAME.fullmatch(each.stem)}
    return sorted(stems)


def load_template(name: str) -> PromptTemplate:
    """Read a template by name, or by the path of its file. Raises UsageError."""
    path = find_path(name)
    try:
        return parse_template(path.stem, path, path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the template {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        ) from None


def find_path(name: str) -> Path:
    """Return a template's path; the user's templates take precedence. Raises UsageError for an unknown name."""
    if os.sep in name or name.endswith(ENDING):
        return Path(name)
    if NAME.fullmatch(name):
        for folder in (get_own_folder(), get_builtin_folder()):
            if (path := folder / f"{name}{ENDING}").is_file():
                return path
    raise UsageError(f"unknown template {name!r}; `localllm templates` lists the available ones")


def parse_template(name: str, path: Path, text: str) -> PromptTemplate:
    """Parse a template file's content. Raises UsageError for an invalid header."""
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
            raise UsageError(f"{path}, line {number}: an option must be NAME: VALUE, not {line[:60]!r}")
        options.append((key.strip().replace("_", "-"), unquote(value.strip())))
    raise UsageError(f"{path}: the options at the top must be followed by a line ---")


def unquote(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def parse_fields(settings: Sequence[str]) -> dict[str, str]:
    """Parse the values of --field, NAME=TEXT; the last value of a name has priority. Raises UsageError."""
    fields = dict[str, str]()
    for each in settings:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise UsageError(f"field must be NAME=TEXT, not {each!r}")
        fields[name] = value
    return fields
