"""Rotate cached keys on the CPU: a tape that reads, rotates and writes them back."""

from collections.abc import Mapping, Sequence

import numpy as np

from localllm.arch.layer_state import Latent, Paged, State
from localllm.engine.cpu.target import CpuTarget
from localllm.engine.cpu.threads import Threads
from localllm.engine.lower.steps import stream_arguments
from localllm.engine.lower.tape import Buffer, Step, Tape, row_bytes
from localllm.engine.memory.cache import KVCache
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.run import BATCH, Header, Span
from localllm.engine.trace.rope_shift import RopeShift
from localllm.kernels.build.library import Library

IDS = np.zeros(BATCH, np.int64)  # any ids: only their number matters
BUFFER_ROWS = CpuTarget(1, False, {}).buffer_rows
NO_LOGITS = np.zeros((0, 0), np.float32)


class KeyRotator:
    """Rotates the cached keys of sequences, on one thread."""

    def __init__(self, cache: KVCache, states: Sequence[Paged | Latent], turns: Mapping[State, RopeShift]):
        """Compile the tape. Raises LocalllmError."""
        self._header, self._tape = Header(), Tape()
        self._distances = np.zeros(BATCH, np.int64)
        for state in states:
            if state in turns:
                self._add(cache, state, turns[state])
        library = Library({step.kernel for step in self._tape.steps} | {"run", "work"})
        tape = self._tape.finish(library.addresses)
        self._walker = Threads(1, library.addresses, tape, keep=(library, self._header, self._tape.memory, cache))

    def _add(self, cache: KVCache, state: Paged | Latent, turn: RopeShift) -> None:
        """Append the steps for one layer."""
        side, block = cache.sides(state)[0], state.rotations(cache.kv_type)[0]
        columns = side.heads * state.key_dim
        x = Buffer(BUFFER_ROWS, row_bytes(columns))
        heads = {"x": x, "stride": x.stride, "head_dim": state.key_dim}
        in_cache = heads | stream_arguments(cache, side, self._header)
        hadamard = {"x": x, "y": x, "stride": x.stride, "columns": columns, "block": block}
        pairs, table = len(turn.frequencies), Buffer(BATCH, len(turn.frequencies) * 8)
        angles = {"positions": self._distances, "before": 0, "frequencies": turn.frequencies, "pairs": pairs}
        rope = heads | {"y": x, "heads": side.heads, "table": table, "pairs": pairs}
        self._step(f"recall-{side.kind.upper()}", in_cache, [], [x])
        if block > 1:
            self._step("hadamard", hadamard, [x], [x])
        self._step("angles", angles | {"table": table, "factor": 1.0}, [], [table])
        self._step("rope", rope | {"step": turn.step, "apart": turn.apart}, [x, table], [x])
        if block > 1:
            self._step("hadamard", dict(hadamard), [x], [x])
        self._step(f"store-{side.kind.upper()}", dict(in_cache), [x], [])

    def _step(self, kernel: str, arguments: dict[str, object], reads: list[Buffer], writes: list[Buffer]) -> None:
        count = self._header.token_count
        self._tape.append(Step(kernel, {"count": count, **arguments}, 1, None, reads, writes))

    def rotate_keys(self, store: SequenceState, first: int, end: int, distance: int) -> None:
        """Rotate the keys at positions [first, end), which were cached for positions `distance` later."""
        self._distances[:] = -distance
        for position in range(first, end, BATCH):
            count = min(BATCH, end - position)
            self._header.fill([Span(store, position, IDS[:count], 0)], True, NO_LOGITS)
            self._walker.run()
