"""Settings of a model's name: its tables in config.toml, and its layers in Ollama's store.

An alias has the settings of the name that it stands for, and its own, which win. A path is a name of its own: it has
none of the settings of aliases for it. Most commands import this module, so it imports no slow ones.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localllm.errors import ModelError, UsageError
from localllm.files.settings import Settings
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.services.hub.ollama_store import StoredModel
    from localllm.text.messages import Message


@frozen
class NameSetting:
    """A setting of a name: the option's long name, its value, and where it is from.

    Attributes:
        table: the name of its table in config.toml, "" for one of Ollama's store.  written: the key as in the file.
    """

    written: str
    value: object
    source: str
    table: str = ""

    @property
    def key(self) -> str:
        return self.written.replace("_", "-")


def settings_of(settings: Settings, model: str, stored: "StoredModel | None" = None) -> Iterator[NameSetting]:
    """Yield the settings of a name, the most specific last. Raises ModelError for a damaged layer of Ollama's store."""
    if stored:
        for key, value in stored.options().items():
            yield NameSetting(key, value, f"{stored.shown_name} in Ollama's store")
    for table in tables_of(settings, model):
        for key, value in settings.model[table].items():
            source = f"{settings.path.name}, line {settings.line('model', table, key)}"
            yield NameSetting(key, value, source, table)


def tables_of(settings: Settings, model: str) -> list[str]:
    """List the [model.NAME] tables of a name: of what it is an alias for, and its own."""
    served, model = split_served(model)
    names = dict.fromkeys(map(shortest, (settings.aliases.get(model, model), model, *filter(None, [served]))))
    tables = {table: (shortest(table), os.path.expanduser(table)) for table in settings.model}
    return [table for name in names for table, spellings in tables.items() if name in spellings]


def shortest(name: str) -> str:
    """Return a name without what Ollama's names may omit."""
    return name.removeprefix("ollama:").removesuffix(":latest")


def split_served(text: str) -> tuple[str, str]:
    """Split NAME=MODEL, by which `serve` gives a model another name; the name is "" for a model under its own."""
    name, equals, model = text.partition("=")
    return ("", text) if not equals or "/" in name or os.path.lexists(text) else (name, model)


def stored_model(model: str) -> "StoredModel | None":
    """Return what Ollama's store has of a name; None for other models, and for names that are unknown."""
    _, model = split_served(model)
    if os.path.lexists(model):
        return None
    from localllm.services.hub.catalogue import locate

    try:
        return locate(model).stored
    except (ModelError, UsageError):
        return None


def unused_parts(model: str, path: str, template: str | None, is_chosen: bool) -> list[str]:
    """List what belongs to a name and is not used, each as a line for the user. Raises ModelError.

    path, template: the model's file, and its chat template.  is_chosen: whether the user chose another template.
    """
    if os.path.lexists(model):
        return []
    if stored := stored_model(model):
        return stored.unused(template, is_chosen)
    from localllm.services.hub.found_models import unused_files

    return [f"{model}: {line}" for line in unused_files(path, None if is_chosen else template or "")]


def messages_of(model: str) -> "list[Message]":
    """Return the messages that conversations with a model of this name begin with. Raises ModelError."""
    stored = stored_model(model)
    return stored.messages() if stored else []
