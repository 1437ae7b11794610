"""A placeholder for the engine of a model that makes embeddings only."""

from typing import NoReturn

from localllm.arch.hyperparameters import Hyperparameters
from localllm.engine.forks import lock_for
from localllm.engine.options import EngineOptions
from localllm.engine.run import Runs
from localllm.errors import UnsupportedError


class EmbeddingOnlyEngine:
    """An engine of a model that cannot generate text: every run raises. Attributes: see Engine."""

    device, warning, bytes_per_token, runs, draft_head_path = "CPU", None, 0, Runs(), None

    def __init__(self, path: str, hyperparameters: Hyperparameters, options: EngineOptions):
        self._path, self.hyperparameters = path, hyperparameters
        self.context, self.vocab_size = options.context or hyperparameters.context, hyperparameters.vocab_size
        self.thread_count, self.kv_type, self.lock = options.thread_count, options.kv_cache_type, lock_for(self)

    def cache_usage(self) -> tuple[int, int]:
        """Return zeros: there is no cache."""
        return 0, 0

    def sequence(self) -> NoReturn:
        """Raise UnsupportedError."""
        kind = f"{self.hyperparameters.arch} models make embeddings and cannot generate text"
        raise UnsupportedError(f"{self._path}: {kind}: use localllm embed or localllm rerank")

    def step(self, *requests: object) -> NoReturn:
        """Raise UnsupportedError."""
        self.sequence()

    def prepare_all(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
