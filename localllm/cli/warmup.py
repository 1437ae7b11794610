"""localllm warmup: make the first start as fast as later ones."""

import localllm
from localllm.cli import options
from localllm.cli.terminal import ProgressLine, dim


def warmup(model: options.OptionalModelPath = None) -> None:
    """Compile the kernels that a model needs for this computer, ahead of its first use."""
    from localllm.api import warmup as compile_kernels

    line = ProgressLine()
    try:
        compile_kernels(model or localllm.builtin_model(), options.compiling(line))
    finally:
        line.clear()
    dim("the kernels are ready")
