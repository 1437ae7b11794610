"""localllm list: list local models and known ones."""

import json
from typing import TYPE_CHECKING

from localllm.cli.options import shared as options
from localllm.cli.parameters import option
from localllm.cli.terminal.output import say, say_dim, write
from localllm.cli.terminal.render import count_noun, format_columns, format_size, get_terminal_width, to_one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from localllm.services.hub.catalogue import KnownModel, ModelOnDisk
    from localllm.services.hub.found_models import FoundModel


def list(
    all: bool = option("--all", "Also list models that can be pulled."),
    found: bool = option(
        "--found", "Also list models that Hugging Face's tools, LM Studio and Ollama have downloaded."
    ),
    as_json: options.AsJson = False,
) -> None:
    """List the models on this computer.

    Lists pulled models and other GGUF files in the models folder, aliases, and the names that `localllm create`
    made; every command accepts all of them as MODEL. With --all, also lists the known models that `localllm pull
    NAME` downloads. With --found, also those that other programs have downloaded: every command accepts their
    names, too, and nothing is written there. They are also listed if the models folder is empty.

    Examples:
      localllm list
      localllm list --all
      localllm list --found
      localllm list --json | jq -r ".models[].name"
    """
    from localllm.files.models_folder import get_models_folder, list_readable
    from localllm.services.hub.catalogue import list_models_on_disk, list_other_names, load_registry

    on_this_disk = list_models_on_disk()
    for folder, reason in list_readable(get_models_folder())[1].items():
        say(f"localllm: warning: cannot read the models in {folder}: {reason}")
    registered = [*load_registry().values()] if all else []
    of_others = find_other_models() if found or not (on_this_disk or all or as_json) else []
    other_names = list_other_names()
    if as_json:
        facts: dict[str, object] = {
            "folder": str(get_models_folder()),
            "models": [model.to_dict() for model in on_this_disk],
        }
        facts |= {"names": other_names}
        facts |= {"known": [vars(model) for model in registered]} if all else {}
        write(json.dumps(facts | ({"found": [model.to_dict() for model in of_others]} if found else {})) + "\n")
        return
    tables = [
        text
        for text in (
            format_models_on_disk(on_this_disk, other_names),
            format_found_models(of_others),
            format_known_models(registered),
        )
        if text
    ]
    write("\n".join(tables))
    if on_this_disk:
        size = sum(model.size for model in on_this_disk)
        say_dim(f"{count_noun(len(on_this_disk), 'model')}, {format_size(size)}")
    elif of_others and not found:
        say(f"localllm: there are no models in {get_models_folder()}, but these of other programs")
    elif not (all or of_others):
        say_dim("no models yet; `localllm list --all` lists models that `localllm pull` can download")


def format_models_on_disk(models: "Sequence[ModelOnDisk]", other_names: "Mapping[str, str]") -> str:
    rows = [
        (
            to_one_line(model.name),
            format_size(model.size),
            " ".join(filter(None, reversed(model.read_header()))) if model.is_whole else "incomplete",
            to_one_line(str(model.path)),
        )
        for model in models
    ]
    rows += [(to_one_line(name), "", "name", f"of {to_one_line(base)}") for name, base in other_names.items()]
    return (
        join_lines(format_columns(("name", "size", "format", "path"), rows, "<><<", get_terminal_width()))
        if rows
        else ""
    )


def find_other_models() -> "Sequence[FoundModel]":
    from localllm.services.hub.catalogue import find_shortest_name
    from localllm.services.hub.found_models import find_models

    return find_models(find_shortest_name)


def format_found_models(models: "Sequence[FoundModel]") -> str:
    from localllm.files.gguf.kinds import read_kind_and_format

    rows = [
        (
            to_one_line(model.name),
            format_size(model.size),
            read_kind_and_format(model.path)[1] or model.quantization,
            model.program,
            to_one_line(str(model.path)),
        )
        for model in models
    ]
    header = ("name", "size", "format", "program", "path")
    return join_lines(format_columns(header, rows, "<><<<", get_terminal_width())) if rows else ""


def format_known_models(models: "Sequence[KnownModel]") -> str:
    rows = [
        (
            model.name,
            format_size(10**6 * model.megabytes),
            model.parameters,
            str(model.context),
            model.description,
            model.license,
        )
        for model in models
    ]
    header = ("name", "size", "weights", "context", "good at", "license")
    return join_lines(format_columns(header, rows, "<>>><<", get_terminal_width())) if rows else ""


def join_lines(rows: "Sequence[str]") -> str:
    return "\n".join(rows) + "\n"
