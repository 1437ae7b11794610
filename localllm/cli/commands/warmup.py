"""localllm warmup: compile a model's kernels ahead of time."""

import localllm
from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.terminal.output import ProgressLine, say_dim


def warmup(model: options.OptionalModelName = None) -> None:
    """Compile the kernels ahead of time.

    Compiles the kernels that MODEL needs. Otherwise the first start compiles them, once per computer.

    Examples:
      localllm warmup
      localllm warmup model.gguf
    """
    path = str(localllm.builtin_model()) if model is None else resolve_model_path(model)
    from localllm.services.warmup import compile_kernels as compile_kernels

    with ProgressLine() as line:
        compile_kernels(path, opening.make_compile_progress(line))
    say_dim("the kernels are ready")
