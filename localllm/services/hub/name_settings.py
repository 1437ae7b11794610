"""Settings of a model's name: its tables in config.toml, its layers in Ollama's store, or what was created.

An alias has the settings of its target, and its own, which take precedence. A path has only its own settings, none of
the aliases for it. Most commands import this module, so it imports no slow ones.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localllm.errors import ModelError, UsageError
from localllm.files.models_folder import is_path
from localllm.files.settings import Settings
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.services.hub.created_names import CreatedModel
    from localllm.services.hub.ollama_store import StoredModel
    from localllm.text.messages import Message


@frozen
class NameSetting:
    """A setting of a name: the option's long name, its value, and its source.

    Attributes:
        table: the name of its table in config.toml, "" for Ollama's store.  written: the key as spelled in the file.
    """

    written: str
    value: object
    source: str
    table: str = ""

    @property
    def key(self) -> str:
        return self.written.replace("_", "-")


def iter_settings(
    settings: Settings, model: str, stored: "StoredModel | CreatedModel | None" = None
) -> Iterator[NameSetting]:
    """Yield the settings of a name, the most specific last.

    A created name has those of the model that it stands for, and its own. Raises ModelError for a damaged layer of
    Ollama's store, and for an invalid Modelfile.
    """
    if stored:
        if stored.base:
            yield from iter_settings(settings, stored.base, find_stored_model(stored.base))
        for key, value in stored.read_options().items():
            yield NameSetting(key, value, stored.source)
    for table in list_tables(settings, model):
        for key, value in settings.model[table].items():
            source = f"{settings.path.name}, line {settings.find_line('model', table, key)}"
            yield NameSetting(key, value, source, table)


def list_tables(settings: Settings, model: str) -> list[str]:
    """List the [model.NAME] tables for a name: those of what it is an alias of first, then its own."""
    served, model = split_served_name(model)
    names = dict.fromkeys(map(strip_optional_parts, (*reversed(settings.follow_alias(model)), *filter(None, [served]))))
    tables = {table: (strip_optional_parts(table), os.path.expanduser(table)) for table in settings.model}
    return [table for name in names for table, spellings in tables.items() if name in spellings]


def strip_optional_parts(name: str) -> str:
    """Strip the parts that Ollama's names may omit."""
    return name.removeprefix("ollama:").removesuffix(":latest")


def split_served_name(text: str) -> tuple[str, str]:
    """Split `serve`'s NAME=MODEL into name and model; the name is "" if none is given."""
    name, equals, model = text.partition("=")
    return ("", text) if not equals or "/" in name or os.path.lexists(text) else (name, model)


def find_stored_model(model: str) -> "StoredModel | CreatedModel | None":
    """Return what was created under this name, or the model that Ollama's store has; None for others, and for paths."""
    _, model = split_served_name(model)
    if is_path(model):
        return None
    from localllm.services.hub.catalogue import find_model

    try:
        return find_model(model).stored
    except (ModelError, UsageError):
        return None


def describe_unused_parts(model: str, path: str, template: str | None, is_chosen: bool) -> list[str]:
    """Return lines for the user about files and layers of a name that are not used. Raises ModelError.

    path, template: the model's file, and its chat template.  is_chosen: whether the user chose another template.
    """
    if is_path(model):
        return []
    if stored := find_stored_model(model):
        if stored.base:
            return describe_unused_parts(stored.base, path, template, is_chosen)
        return stored.describe_unused(template, is_chosen)
    from localllm.services.hub.found_models import list_unused_files

    return [f"{model}: {line}" for line in list_unused_files(path, None if is_chosen else template or "")]


def read_messages(model: str) -> "list[Message]":
    """Return the messages that begin each conversation with a model of this name. Raises ModelError."""
    if (stored := find_stored_model(model)) is None:
        return []
    return stored.read_messages() or (read_messages(stored.base) if stored.base else [])
