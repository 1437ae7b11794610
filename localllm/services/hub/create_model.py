"""Create, copy and remove names of models. Implements `localllm create` and `localllm cp`."""

import os
import re
from pathlib import Path

from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.models_folder import LATEST, get_created_path, get_models_folder, is_path, list_created_names
from localllm.files.safe_file import SafeFile
from localllm.services.hub.catalogue import (
    find_model,
    list_models_on_disk,
    load_registry,
    resolve_alias,
    resolve_model,
)
from localllm.services.hub.created_names import find_created
from localllm.services.hub.go_templates import recognize_template
from localllm.services.hub.modelfile import Modelfile, parse_modelfile

NAME = re.compile(r"[a-z0-9][\w.-]{0,79}(?:/[a-z0-9][\w.-]{0,79})?(?::[a-z0-9][\w.-]{0,79})?", re.ASCII)


def create_model(name: str, content: Modelfile, folder: str | None, where: str) -> list[str]:
    """Create a name, or replace the one created before; return warnings.

    folder: where relative paths in the Modelfile begin; None: paths are not allowed.  where: begins error messages.
    Raises UsageError for an invalid name or Modelfile, and the errors of find_model and SafeFile.
    """
    name = require_new_name(name)
    content = Modelfile(**{**vars(content), **resolve_paths(content, folder, where)})
    if get_created_path(name) == get_created_path(content.base):
        raise UsageError(f"{where}: FROM {content.base} is the name itself: choose another name")
    warnings = [f"{unused}: ignored (no effect)" for unused in [", ".join(content.list_unused())] if unused]
    path = find_model(content.base).path
    if content.template is not None:
        template, difference = recognize_template(content.template, read_own_template(path), where)
        if difference:
            other = "the model's own" if template is None else f"the built-in {template!r}"
            warnings.append(f"TEMPLATE is replaced by {other}, {difference}")
        content = Modelfile(**{**vars(content), "template": template})
    require_valid_options(content, where)
    write_created(name, content)
    return warnings


def require_new_name(name: str) -> str:
    """Return a new name in lower case, without ":latest". Raises UsageError for one that is invalid or taken."""
    name = name.removesuffix(LATEST).lower()
    if not NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is not a valid name: use letters, digits and . _ - such as mario or mario:v2")
    if name in load_registry() or name == "localllm-guide":
        raise UsageError(f"{name} is the name of a known model: choose another")
    if resolve_alias(name) != name:
        raise UsageError(f"{name} is an alias in config.toml: choose another name")
    if any(model.name.lower() == name for model in list_models_on_disk()):
        raise UsageError(f"{name} is the name of a file in the models folder: choose another")
    return name


def require_no_path(text: str, where: str) -> str:
    """Return a model's name unchanged. Raises UsageError for a path outside the models folder."""
    looks_so = is_path(text) or text.startswith(("/", ".", "~")) or "\\" in text or "\0" in text
    if looks_so and ("\0" in text or not Path(os.path.realpath(text)).is_relative_to(get_models_folder().resolve())):
        raise UsageError(
            f"{where} must name a model, not a path such as {text[:80]!r}: `localllm list` shows the names"
        )
    return text


def resolve_paths(content: Modelfile, folder: str | None, where: str) -> dict[str, object]:
    """Return the fields of a Modelfile that name files, with absolute paths. Raises UsageError."""

    def locate(text: str) -> str:
        expanded = os.path.expanduser(text)
        if folder is None:
            return require_no_path(text, where)
        path = os.path.join(folder, expanded)
        is_path = text.startswith((".", "/", "~")) or text.endswith(".gguf") or os.path.isfile(path)
        if is_path and not os.path.exists(path):
            raise UsageError(
                f"{where}: the file {path} does not exist: correct its path, which is relative to the Modelfile"
            )
        return os.path.abspath(path) if is_path else text

    base = locate(content.base)
    if os.path.isdir(base):
        raise UsageError(
            f"{where}: FROM {content.base} is a folder: "
            f"make a file of it with `localllm quantize {base} NAME.gguf Q4_K_M`"
        )
    projector = locate(content.projector) if content.projector else ""
    return {"base": base, "projector": projector, "adapters": tuple(map(locate, content.adapters))}


def read_own_template(path: str) -> str | None:
    from localllm.files.gguf.file import GGUFFile

    with GGUFFile.open(path, needed=()) as file:
        template = file.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None


def require_valid_options(content: Modelfile, where: str) -> None:
    """Raise UsageError for an invalid value of a parameter."""
    from localllm.services.hub.name_values import RENAMED, convert_option

    for key, value in content.to_options().items():
        name = key.replace("-", "_")
        try:
            convert_option(RENAMED.get(name, name), value)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None


def write_created(name: str, content: Modelfile) -> None:
    """Write a name's Modelfile. Raises UsageError for a value that cannot be quoted, LocalllmError if writing fails."""
    path, text = get_created_path(name), content.format()
    if parse_modelfile(text, name) != content:
        raise UsageError(
            f"{name}: a value cannot be written into a Modelfile: remove control characters and triple quotes from it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalllmError(f"{path.parent}: cannot be created: {error.strerror}") from None
    with SafeFile(path) as file:
        file.write(text.encode())


def copy_name(source: str, name: str) -> None:
    """Give a model a second name, with the settings of the first. Raises UsageError, ModelError, LocalllmError."""
    name = require_new_name(name)
    if os.path.isfile(get_created_path(name)):
        raise UsageError(f"{name} exists already; remove it first with `localllm rm {name}`")
    created = find_created(resolve_alias(source))
    located = find_model(source)
    base = os.path.abspath(source) if is_path(source) else source
    if not os.path.lexists(located.path):
        raise ModelError(f"{source}: no such file")
    write_created(name, created.content if created else Modelfile(base))


def remove_name(name: str) -> bool:
    """Remove a created name; its model stays. Return whether there was one. Raises LocalllmError."""
    path = get_created_path(name)
    if not os.path.isfile(path):
        return False
    try:
        path.unlink()
    except OSError as error:
        raise LocalllmError(f"{path}: cannot be removed: {error.strerror or error}") from None
    return True


def format_modelfile(name: str) -> str:
    """Return the Modelfile of a name: as it was created, or FROM and the path of its file."""
    created = find_created(resolve_alias(name))
    return created.content.format() if created else f"FROM {resolve_model(name)}\n"


def list_dependents(path: Path) -> list[str]:
    """List the created names whose model is this file."""
    dependents = []
    for name in list_created_names():
        try:
            if os.path.realpath(find_model(name).path) == os.path.realpath(path):
                dependents.append(name)
        except LocalllmError:
            continue
    return dependents
