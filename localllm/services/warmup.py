"""Compile the kernels of a model ahead of time."""

import os
from collections.abc import Callable
from contextlib import closing

from localllm import api


def compile_kernels(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> None:
    """Compile all kernels that a model needs, so that its first start is as fast as later ones."""
    with api.open_model(path, progress=progress) as model:
        model.engine.prepare_all()
        if (h := model.engine.hyperparameters).bidirectional and not h.is_diffusion:
            from localllm.engine.embedding_runner import EmbeddingRunner
            from localllm.engine.options import EngineOptions

            with closing(EmbeddingRunner(model.file, str(h.pooling), EngineOptions(progress=progress))) as reader:
                reader.prepare_all()
