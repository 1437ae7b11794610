"""localllm split: split a model file into several."""

from localllm.cli.open_model import resolve_model_path
from localllm.cli.options.offers import offer_models
from localllm.cli.options.quantizing import SplitFlags
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import say, write
from localllm.cli.terminal.quantize_progress import copy_files, describe_plan


def split(
    model: str = argument("MODEL", "GGUF file or model name.", offer_models),
    out: str | None = argument("[OUT]", "Prefix of the new files' names.  [default: MODEL's]"),
    *,
    limits: SplitFlags,
    dry_run: bool = option("--dry-run", "Print the plan without writing anything."),
) -> None:
    """Split a GGUF file into several, as llama-gguf-split does.

    The files are OUT-00001-of-00003.gguf and so on; every program opens the first. Without a limit a file has at most
    128 tensors. `localllm merge` joins the files. `quantize` splits its output with the same options.

    Examples:
      localllm split big.gguf --split-max-size 45G
      localllm split big.gguf parts/big --split-max-tensors 100
    """
    from localllm.files.gguf.file import GGUFFile
    from localllm.quantizing.rewrite import plan_split
    from localllm.quantizing.splitting import DEFAULT_MAX_TENSORS, SplitLimits

    path = resolve_model_path(model)
    split_limits = limits.limits() or SplitLimits(DEFAULT_MAX_TENSORS)
    source = GGUFFile.open(path, needed=())
    files, warnings = plan_split(source, path if out is None else out, split_limits)
    for line in warnings:
        say(f"localllm: warning: {line}")
    if dry_run:
        write(describe_plan(source, files))
        return
    copy_files(source, files, force=False)
