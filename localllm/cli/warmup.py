"""localllm warmup: make the first start as fast as later ones."""

import localllm
from localllm.cli import options
from localllm.cli.terminal import ProgressLine, dim


def warmup(model: options.OptionalModelName = None) -> None:
    """Compile the kernels ahead of time.

    Those that MODEL needs, or the built-in model. Otherwise the first start does it, once per computer.

    Examples:
      localllm warmup
      localllm warmup model.gguf
    """
    from localllm.api import warmup as compile_kernels

    line = ProgressLine()
    try:
        compile_kernels(localllm.builtin_model() if model is None else model, options.compiling(line))
    finally:
        line.clear()
    dim("the kernels are ready")
