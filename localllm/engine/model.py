"""The engine: weights, architecture and verbs become something that turns tokens into logits."""

from collections.abc import Sequence
from operator import index

import numpy as np

from localllm.arch import architecture
from localllm.arch.config import Config
from localllm.arch.weights import Weights
from localllm.engine.cpu_builder import BATCH, PRECISE_TOKENS, CpuBuilder
from localllm.engine.kv_cache import KV_TYPES, KVCache
from localllm.engine.threads import Threads, usable_cores
from localllm.errors import ContextError, ModelError, UsageError
from localllm.files.gguf_file import GGUFFile
from localllm.kernels.library import Library, Progress
from localllm.kernels.reference import Reference


class CpuBackend:
    """A model as a tape for the CPU."""

    def __init__(
        self,
        file: GGUFFile,
        config: Config,
        threads: int,
        context: int,
        kv_type: str,
        progress: Progress | None,
        collect: bool,
    ):
        model = architecture(config, file.path)
        cache = KVCache(config.layers, config.kv_heads, config.head_dim, context, kv_type)
        self._builder = CpuBuilder(config, cache, kv_type, model.INTERLEAVED_ROPE, threads, collect)
        self._logits = model.forward(self._builder, Weights(file.tensors))
        if self._logits.columns != config.vocab_size:
            raise ModelError(f"{file.path}: logits for {self._logits.columns} tokens of {config.vocab_size}")
        names = {step.kernel for step in self._builder.tape.steps} | {"run", "work"}
        library = Library(names, progress)
        tape = self._builder.finish(library.addresses)
        self._threads = Threads(threads, library.addresses, tape, keep=(library, self._builder))

    def run(self, tokens: np.ndarray, positions: np.ndarray, outputs: np.ndarray, verify: bool) -> np.ndarray:
        """Logits of the tokens with the indices `outputs`: float32 [len(outputs), vocab]."""
        header, logits = self._builder.header, self._logits
        header.counts[:] = len(tokens), len(outputs)
        header.precise[0] = 1 if verify else PRECISE_TOKENS
        for target, values in ((header.tokens, tokens), (header.positions, positions), (header.outputs, outputs)):
            target[: len(values)] = values
        self._threads.run()
        rows = self._builder.read(logits, len(outputs))
        return rows[:, : logits.columns].copy()

    def squares(self) -> dict[str, np.ndarray]:
        """As Engine.squares."""
        squares = {name: sums.copy() for name, sums in self._builder.squares.items()}
        for sums in self._builder.squares.values():
            sums[:] = 0
        return squares

    def close(self) -> None:
        self._threads.close()


class ReferenceBackend:
    """A model in plain NumPy."""

    def __init__(self, file: GGUFFile, config: Config, context: int, kv_type: str, collect: bool):
        self._model = architecture(config, file.path)
        self._weights = Weights(file.tensors)
        self._builder = Reference(config, context, kv_type, self._model.INTERLEAVED_ROPE, collect)

    def run(self, tokens: np.ndarray, positions: np.ndarray, outputs: np.ndarray, verify: bool) -> np.ndarray:
        """As CpuBackend.run, in full precision always."""
        self._builder.tokens, self._builder.positions, self._builder.outputs = tokens, positions, outputs
        return self._model.forward(self._builder, self._weights)

    def squares(self) -> dict[str, np.ndarray]:
        """As Engine.squares."""
        squares = self._builder.squares or {}
        self._builder.squares = {}
        return {name: sums.astype(np.float32) for name, sums in squares.items()}

    def close(self) -> None:
        """Nothing to end."""


class Engine:
    """One model with one sequence's cache."""

    def __init__(
        self,
        file: GGUFFile,
        config: Config,
        threads: int | None = None,
        context: int | None = None,
        kv_type: str = "f16",
        backend: str = "cpu",
        progress: Progress | None = None,
        collect: bool = False,
    ):
        """context: the most tokens (None: as trained); kv_type: f16, f32 or q8_0; backend: cpu or reference.

        progress(done, total) is called while kernels are compiled; collect: sum up what the matrices meet, for
        `squares`. Raises ModelError, MemoryLimitError, UsageError.
        """
        if kv_type not in KV_TYPES:
            raise UsageError(f"unknown type of KV cache {kv_type!r}: use {', '.join(KV_TYPES)}")
        if context is not None and context < 1:
            raise UsageError(f"the context should be at least 1 token, not {context}")
        self.config, self.context = config, config.context if context is None else context
        self.vocab_size = config.vocab_size
        count = usable_cores() if threads is None else threads
        if not 1 <= count <= 1024:
            raise UsageError(f"threads should be from 1 to 1024, not {count}")
        self._backend: CpuBackend | ReferenceBackend
        if backend == "cpu":
            self._backend = CpuBackend(file, config, count, self.context, kv_type, progress, collect)
        elif backend == "reference":
            self._backend = ReferenceBackend(file, config, self.context, kv_type, collect)
        else:
            raise UsageError(f"unknown backend {backend!r}: use cpu or reference")

    def forward(self, ids: Sequence[int], position: int, logits: str = "last", verify: bool = False) -> np.ndarray:
        """Process tokens at positions `position` and up; what the cache holds before `position` stays.

        logits: "last", "all" or "none" of the tokens. verify: the tokens are guesses, of which some will be wrong; the
        activations are rounded to 8 bits, so that a few tokens cost little more than one. Returns float32 [tokens asked
        for, vocab]. Raises UsageError for an id outside of the vocabulary and ContextError if the tokens do not fit.
        """
        if logits not in ("last", "all", "none"):
            raise UsageError(f"logits should be last, all or none, not {logits!r}")
        try:
            valid = len(ids) > 0 and all(0 <= index(token) < self.vocab_size for token in ids)
        except TypeError:
            valid = False
        if not valid:
            raise UsageError(f"token ids should be a list of numbers from 0 to {self.vocab_size - 1}")
        tokens = np.asarray(ids, np.int64)
        if position < 0 or position + len(tokens) > self.context:
            raise ContextError(f"{position + len(tokens)} tokens do not fit the context of {self.context}")
        rows = []
        for start in range(0, len(tokens), BATCH):
            batch = tokens[start : start + BATCH]
            wanted = {"all": len(batch), "last": int(start + BATCH >= len(tokens)), "none": 0}[logits]
            outputs = np.arange(len(batch) - wanted, len(batch))
            rows.append(self._backend.run(batch, position + start + np.arange(len(batch)), outputs, verify))
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def squares(self) -> dict[str, np.ndarray]:
        """Sums of the squares that every matrix met in its columns since the last call, for an engine that collects.

        By the matrix's name: float32 [columns]. The output matrix meets only tokens whose logits were asked for.
        """
        return self._backend.squares()

    def close(self) -> None:
        """End the engine's threads."""
        self._backend.close()
