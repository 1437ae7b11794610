"""Read the user's config.toml: defaults of options, aliases of models, the size of the prefix cache.

    cache_gb = 2                    # size of the prefix cache, in GB

    [aliases]
    small = "~/models/small.gguf"   # a path, or any other name of a model

    [defaults]                      # options by their long names, for every command that has them
    threads = 4

    [command.run]                   # for one command; overrides [defaults]
    temp = 0.2

    [model.small]                   # for one model, as it is named on the command line; overrides both
    context = 8192

The file is $XDG_CONFIG_HOME/localllm/config.toml. If the variable is missing or relative, ~/.config takes its place, on
Windows %APPDATA%. This module imports nothing slow: the TOML parser only if the file exists.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.system.files import get_user_folder

TABLES = ("aliases", "defaults", "command", "model")
CACHE_SIZE = "cache_gb"


@frozen
class Settings:
    """The content of config.toml, whose option names and values are checked later by the commands.

    Attributes:
        text: the file itself.  aliases: models by alias.  cache_gb: None if the file has no such key.
        defaults: options by their long names without dashes.
        command, model: options as in `defaults`, by the name of a command or a model.
    """

    path: Path
    text: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    cache_gb: float | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)
    command: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    model: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def make_error(self, message: str, *keys: str) -> UsageError:
        """Build an error about a key that names the file and the line."""
        return UsageError(f"{self.path}, line {self.find_line(*keys)}: {message}")

    def follow_alias(self, name: str) -> list[str]:
        """Return a name, what it is an alias of, and so on. Raises UsageError for aliases in a circle."""
        names = [name]
        while (target := self.aliases.get(names[-1], names[-1])) != names[-1]:
            if target in names:
                circle = " = ".join([*names[names.index(target) :], target])
                raise self.make_error(f"aliases must not form a circle: {circle}", "aliases", target)
            names.append(target)
        return names

    def find_line(self, *keys: str) -> int:
        """Return the line of a key, counted from 1."""
        return find_line(self.text, keys)


def get_config_path() -> Path:
    """Return the path of config.toml, which may not exist."""
    return get_user_folder("config") / "config.toml"


def load_settings() -> Settings:
    """Read config.toml; empty settings if it does not exist. Raises UsageError if it is invalid or cannot be read."""
    path = get_config_path()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return Settings(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line}: the file must be UTF-8") from None
    return parse_settings(path, text)


def parse_settings(path: Path, text: str) -> Settings:
    """Parse and validate the content of config.toml. Raises UsageError."""
    import tomllib

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, line = str(error), text.count("\n") + 1
        if place := re.fullmatch(r"(.*) \(at line (\d+), column \d+\)", reason):
            reason, line = place[1], int(place[2])
        raise UsageError(f"{path}, line {line}: {reason[:1].lower()}{reason[1:]}") from None
    bare = Settings(path, text)
    for key, value in content.items():
        if key == CACHE_SIZE:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
                raise bare.make_error(f"{CACHE_SIZE} must be a number, 0 or greater", key)
        elif key not in TABLES:
            raise bare.make_error(f"unknown key {key!r}; available: {CACHE_SIZE}, [{'], ['.join(TABLES)}]", key)
        elif not isinstance(value, dict):
            raise bare.make_error(f"{key} must be a table: [{key}]", key)
    for table in ("command", "model"):
        for name, value in content.get(table, {}).items():
            if not isinstance(value, dict):
                raise bare.make_error(f"{table} must contain tables, such as [{table}.{name}]", table, name)
    for name, value in content.get("aliases", {}).items():
        if not isinstance(value, str) or not value:
            raise bare.make_error("an alias must be a path or a name, in quotes", "aliases", name)
    aliases = {name: os.path.expanduser(value) for name, value in content.get("aliases", {}).items()}
    return Settings(path, text, **(content | {"aliases": aliases}))


def find_line(text: str, keys: tuple[str, ...]) -> int:
    """Return the line of a key, counted from 1; if it is not found, that of its innermost table.

    keys: names of the tables and the key, from the outside in.
    """
    table: list[str] = []
    best = 1
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = split_key(header[1])
            path = table
        elif "=" in line:
            path = [*table, *split_key(line.partition("=")[0])]
        else:
            continue
        if path == list(keys):
            return number
        if path == list(keys)[: len(path)]:
            best = number
    return best


def split_key(text: str) -> list[str]:
    """Split a dotted key into its names; a quoted name may contain dots."""
    return [quoted or literal or bare for quoted, literal, bare in re.findall(r"\"([^\"]*)\"|'([^']*)'|([\w-]+)", text)]
