"""localllm edit: change the metadata of a model file."""

from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.options.quantizing import MetadataFlags
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import ProgressLine, exit_on_signals, say, write
from localllm.cli.terminal.quantize_progress import copy_files
from localllm.cli.terminal.render import to_one_line
from localllm.errors import UsageError


def edit(
    model: str = argument("MODEL", "GGUF file or model name.", offer_models),
    out: str | None = argument("[OUT]", "Output file.  [default: MODEL itself]"),
    *,
    changes: MetadataFlags,
    restore: str | None = option("--restore", "Write a stored header back to MODEL.", "FILE"),
    strict: bool = option("--strict", "Fail if a removed key is missing or the template is broken."),
    dry_run: bool = option("--dry-run", "Print the changes without writing anything."),
    force: options.Force = False,
) -> None:
    """Change the metadata of a GGUF file.

    With OUT, a new file gets the changed metadata and a copy of all tensors. Without it, MODEL is changed: if the new
    header is as long as the old one, it is written in place and the old one is saved as MODEL.header; otherwise a new
    file is written, which replaces MODEL when it is complete. The result is checked before anything is written.

    Examples:
      localllm edit model.gguf --set-metadata general.name="My Model"
      localllm edit model.gguf new.gguf --set-metadata 'general.languages=["en", "de"]' --remove-metadata "general.url"
      localllm edit model.gguf --set-metadata general.sampling.temp=f32:0.6 --chat-template-file template.jinja
      localllm edit model.gguf --restore model.gguf.header
    """
    from localllm.files.gguf.file import GGUFFile
    from localllm.quantizing.quantize import require_valid_edits
    from localllm.quantizing.rewrite import edit_in_place, get_packed_metadata, plan_edit, restore_header

    exit_on_signals()
    path = resolve_model_path(model)
    if restore is not None:
        if out is not None or not changes.is_empty:
            raise UsageError("--restore cannot be combined with OUT or other changes")
        write(
            f"{to_one_line(path)}: header restored;"
            f" the previous one is in {to_one_line(restore_header(path, restore))}\n"
        )
        return
    source = GGUFFile.open(path)
    edits = changes.edits(get_packed_metadata(source))
    if edits.warnings and strict:
        raise UsageError(f"--strict: {'; '.join(edits.warnings)}")
    for line in edits.warnings:
        say(f"localllm: warning: {line}")
    if not edits.values and not edits.removed:
        raise UsageError("nothing to change: add --set-metadata, --remove-metadata or --chat-template-file")
    require_valid_edits(source, (), edits)
    if dry_run:
        write("".join(f"{to_one_line(line)}\n" for line in edits.format_lines(source.packed)))
    elif out is not None:
        copy_files(source, plan_edit(source, out, edits), force)
    else:
        progress = ProgressLine()
        try:
            copy = edit_in_place(source, edits, lambda done, name: progress.show(f"copying: {to_one_line(name)}"))
        finally:
            progress.clear()
        note = f"; the old header is in {to_one_line(copy)}" if copy else ""
        write(f"{to_one_line(path)}: {len(edits.values) + len(edits.removed)} keys changed{note}\n")
