"""localllm merge: merge the files of a split model."""

from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import argument
from localllm.cli.terminal.quantize_progress import copy_files
from localllm.errors import UsageError


def merge(
    model: str = argument("MODEL", "A file of the split model.", offer_models),
    out: str | None = argument("[OUT]", "Output file.  [default: MODEL without -NNNNN-of-NNNNN]"),
    *,
    force: options.Force = False,
) -> None:
    """Merge the files of a split model into one.

    Examples:
      localllm merge big-00001-of-00003.gguf
      localllm merge big-00001-of-00003.gguf whole.gguf
    """
    from localllm.files.gguf.file import GGUFFile
    from localllm.files.models_folder import SPLIT
    from localllm.quantizing.rewrite import plan_merge

    path = resolve_model_path(model)
    source = GGUFFile.open(path, needed=())
    match = SPLIT.fullmatch(path)
    if "split.count" not in source.metadata or match is None:
        raise UsageError(f"{path}: expected a file of a split model, NAME-00001-of-0000N.gguf")
    copy_files(source, [plan_merge(source, f"{match['stem']}.gguf" if out is None else out)], force)
