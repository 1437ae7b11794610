"""localllm inspect: show a model file's content, and the memory that it needs."""

from typing import TYPE_CHECKING, Any

from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.parameters import option
from localllm.cli.terminal.output import say, to_json_line, write
from localllm.cli.terminal.render import format_count, format_facts, format_size, format_table, to_one_line

if TYPE_CHECKING:
    from localllm.services.inspection.inspect import MemoryRow, ProjectorFile


def inspect(
    model: options.ModelName,
    as_json: options.AsJson = False,
    check: bool = option("--check", "Also check every weight and the chat template."),
    template: bool = option("--template", "Print only the chat template."),
    modelfile: bool = option("--modelfile", "Print only the name's Modelfile, see `localllm create`."),
) -> None:
    """Show what is in a model file.

    Prints the architecture, sizes, formats, vocabulary and memory needed; with --json, also all metadata and every
    tensor. Of an adapter (LoRA) or a control vector, it prints what they change. An invalid file ends with exit code 3;
    a valid file of an unsupported model does not.

    Examples:
      localllm inspect model.gguf
      localllm inspect model.gguf --json | jq -r ".tensors[].name"
      localllm inspect downloaded.gguf --check
    """
    from localllm.errors import ModelError
    from localllm.services.inspection.inspect import inspect_model

    path = resolve_model_path(model)
    if modelfile:
        from localllm.services.hub.create_model import format_modelfile  # seldom needed

        return write(format_modelfile(model))
    if template:
        return write(read_chat_template(path) + "\n")
    if check:
        from localllm.kernels.build.faults import end_on_bus_error  # slow to import

        end_on_bus_error(path)
    facts = inspect_model(path, check, with_metadata=as_json)
    opening.warn(facts["warnings"])
    if as_json:
        write(to_json_line(facts))
    else:
        write(
            "\n".join([*format_summary(facts), "", *format_formats(facts["formats"]), *format_memory(facts["memory"])])
            + "\n"
        )
    if check and facts["valid"]:
        kind = "its chat template" if facts["chat_template"] else "no chat template"
        say(
            f"checked: all {len(facts['tensors'])} tensors,"
            f" {format_count(facts['parameters'])} weights, metadata, and {kind}"
        )
    if not facts["valid"]:
        raise ModelError(f"{facts['path']}: {facts['reason']}")


def read_chat_template(path: str) -> str:
    from localllm.errors import ModelError
    from localllm.files.gguf.file import GGUFFile

    with GGUFFile.open(path, needed=()) as file:
        template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        raise ModelError(f"{path}: the file has no chat template; `run` takes one with --chat-template NAME")
    return template


def format_summary(facts: dict[str, Any]) -> list[str]:
    """Format one fact per line; omit unknown ones."""
    vocabulary, supported, adapter = facts["vocabulary"], facts["supported"], facts["adapter"]
    template = "yes" if facts["chat_template"] else "no"
    shape = [f"{facts[name]} {label}" for name, label in SHAPE if facts[name] is not None]
    lines = [
        ("file", facts["path"]),
        ("name", facts["name"]),
        *(format_adapter(adapter) if adapter else []),
        (
            "architecture",
            "" if adapter else facts["architecture"] + ("" if supported else f" (not usable: {facts['reason']})"),
        ),
        ("parameters", f"{format_count(facts['parameters'])} in {len(facts['tensors'])} tensors"),
        ("weights", f"{format_size(facts['weight_bytes'])}, {facts['bits_per_weight']:.2f} bits per weight"),
        ("made with", facts["made_with"] and to_one_line(facts["made_with"])),
        ("shape", ", ".join(shape)),
        ("context", facts["context"] and f"{facts['context']} tokens"),
        ("vocabulary", vocabulary["size"] and f"{vocabulary['size']} tokens, {vocabulary['kind']}"),
        ("makes", facts["reads"]),
        ("guesses", format_mtp(facts["guessing"])),
        ("sees", format_vision(facts["sees"], facts["projector"])),
        ("chat template", "" if facts["sees"] or adapter else template),
        ("sampling", ", ".join(f"{name} {format_recommended(value)}" for name, value in facts["sampling"].items())),
    ]
    return format_facts((label, str(value)) for label, value in lines if value)


def format_adapter(adapter: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe an adapter or a control vector, and what it changes."""
    models = f"for {to_one_line(adapter['architecture'])} models" if adapter["architecture"] else ""
    if adapter["type"] != "lora":
        layers, widths = adapter["layers"], " and ".join(map(str, adapter["widths"]))
        changes = f"the outputs of {len(layers)} layers, {layers[0]} to {layers[-1]}, {widths} wide"
        return [("adapter", f"control vector {models}".rstrip()), ("changes", changes)]
    ranks = adapter["ranks"]
    rank = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    matrices = ", ".join(f"{count} {to_one_line(name)}" for name, count in adapter["matrices"].items())
    tokens = " ".join(map(str, adapter["invocation_tokens"]))
    return [
        ("adapter", f"LoRA {models}".rstrip()), ("rank", f"{rank}, alpha {adapter['alpha']:g}"),
        ("changes", f"{sum(adapter['matrices'].values())} matrices: {matrices}"),
        ("active", tokens and f"from the tokens {tokens} on"),
    ]  # fmt: skip


def format_mtp(mtp: dict[str, int]) -> str:
    """Describe the MTP layers, or return ""."""
    layers, nbytes = mtp["layers"], format_size(mtp["bytes"])
    if not layers:
        return ""
    use = "one is used" if layers > 1 else "used"
    return f"{layers} layer{'s' if layers > 1 else ''}, {nbytes}, {use if mtp['used'] else 'not used'}"


def format_vision(encoder: dict[str, object] | None, projector: "ProjectorFile | None") -> str:
    """Describe a projector's image encoder, or the projector of a model; return "" for other files."""
    if encoder:
        side, patch, width = encoder["side"], encoder["patch"], encoder["width"]
        produced = f"vectors of {width} elements" if encoder["type"] == "clip" else f"for models {width} wide"
        return f"{encoder['type']}: pictures of {side} x {side} in patches of {patch}, {produced}"
    return f"images, by {projector['path']} ({format_size(projector['bytes'])})" if projector else ""


def format_recommended(value: object) -> str:
    """Format a sampling value that the model's author recommends."""
    return ";".join(value) if isinstance(value, tuple) else str(value)


SHAPE = [("layers", "layers"), ("width", "wide"), ("heads", "heads"), ("kv_heads", "key-value heads")]


def format_formats(rows: dict[str, dict[str, int]]) -> list[str]:
    cells = [
        (name, str(row["tensors"]), format_count(row["parameters"]), format_size(row["bytes"]))
        for name, row in rows.items()
    ]
    return format_table(("format", "tensors", "weights", "size"), cells)


def format_memory(rows: "list[MemoryRow]") -> list[str]:
    cells = [(str(row["context"]), format_size(row["cache_bytes"]), format_size(row["total_bytes"])) for row in rows]
    return ["", *format_table(("context", "cache (f16)", "with weights"), cells)] if cells else []
