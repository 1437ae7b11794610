"""Load a draft head (the model's own MTP layer, or one of another file) and run it for speculation."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.arch.decoder import MtpOutput, get_mtp_state
from localllm.arch.families import eagle3
from localllm.arch.family import DraftingFamily
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import RecurrentLayerState, State
from localllm.arch.metadata import HyperparameterReader, require_general, require_supported_values, require_types
from localllm.arch.verbs import Activation
from localllm.arch.weights import Weights
from localllm.engine.cpu.backend import CpuBackend
from localllm.engine.forks import create_lock
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.lower.tape import compute_row_bytes
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.operations.operation import Operation
from localllm.engine.operations.tokens import HiddenStateTap
from localllm.engine.options import EngineOptions
from localllm.engine.runs import BATCH, LATER_RUN, RunPlan
from localllm.engine.sequence import Sequence
from localllm.engine.trace.recorder import Recorder
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.table import PAGE

if TYPE_CHECKING:
    from localllm.engine.adapters import Adapter

HEAD_ARCHITECTURES = ("eagle3",)  # architectures that are draft heads
TOKENS_TENSOR = "d2t"  # maps the head's logits to the model's tokens


class DraftHeadSource(NamedTuple):
    """A draft head that is not compiled yet.

    Attributes:
        path: path of its file.  hyperparameters, weights: its own.  state: the cache of its keys and values.
        columns: length of the model's hidden states that it takes as input.
        layers: the model's layers whose inputs are these hidden states; empty: its last one (HiddenStateTap).
        draft: traces the head from (builder, weights, hyperparameters, hidden states).
        fuse: preprocesses hidden states, with the same arguments; None without preprocessing.
        names: tensors that the head must use, so that none is ignored.
        tokens: the token of each logit, int64; None for the whole vocabulary.
    """

    path: str
    hyperparameters: Hyperparameters
    state: State
    columns: int
    layers: tuple[int, ...]
    weights: Weights | eagle3.HeadAndTarget
    draft: Callable[..., MtpOutput]
    fuse: Callable[..., Activation] | None
    names: Collection[str]
    tokens: np.ndarray | None = None


def select_mtp_layer(file: GGUFFile, model: DraftingFamily, h: Hyperparameters) -> DraftHeadSource:
    """Return the first multi-token prediction layer of a model's file as a draft head."""
    weights = Weights(file.tensors)
    names = [weight.name for weight in weights.get_layer(h.layers).list_weights()]
    return DraftHeadSource(file.path, h, get_mtp_state(h), h.width, (), weights, model.draft, None, names)


def is_draft_head(file: GGUFFile) -> bool:
    return file.metadata.get("general.architecture") in HEAD_ARCHITECTURES


def parse_draft_head(file: GGUFFile, model: GGUFFile, of_model: Hyperparameters) -> DraftHeadSource:
    """Read a draft head's file. Raises ModelError if it is invalid, UsageError if it is for another model."""
    require_general(file)
    fields = HyperparameterReader.from_file(file)
    require_types(fields)
    fields.asked.clear()  # ensured by the checks
    h = eagle3.read(fields)
    require_supported_values(fields)
    if h.target_width != of_model.width or max(h.target_layers) > of_model.layers:
        required = f"at least {max(h.target_layers)} layers and a width of {h.target_width}"
        ours = f"{model.path} has {of_model.layers} layers and a width of {of_model.width}"
        raise UsageError(f"{file.path} is a draft head for a model with {required}; {ours}")
    if h.vocab_size != of_model.vocab_size:
        raise UsageError(
            f"{file.path} is a draft head for {h.vocab_size} tokens; {model.path} has {of_model.vocab_size}"
        )
    weights, columns = (
        eagle3.HeadAndTarget(Weights(file.tensors), Weights(model.tensors)),
        eagle3.COUNT * h.target_width,
    )
    names, tokens = [name for name in file.tensors if name != TOKENS_TENSOR], read_head_tokens(file, h.vocab_size)
    layers, (state,) = h.target_layers, h.list_states()
    return DraftHeadSource(file.path, h, state, columns, layers, weights, eagle3.draft, eagle3.fuse, names, tokens)


def read_head_tokens(file: GGUFFile, vocab_size: int) -> np.ndarray | None:
    """Return the model's token for each logit of the head, int64; None for the whole vocabulary.

    Raises ModelError.
    """
    tensor = file.tensors.get(TOKENS_TENSOR)
    if tensor is None:
        return None
    if tensor.format.name != "I64" or len(tensor.shape) != 1:
        raise ModelError(
            f"{file.path}: tensor {TOKENS_TENSOR} must be a vector of I64 (found {tensor.format.name} {tensor.shape})"
        )
    tokens = tensor.data.reshape(-1).view(np.int64)
    if tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < len(tokens):
        raise ModelError(f"{file.path}: tensor {TOKENS_TENSOR} must have different tokens from 0 to {vocab_size - 1}")
    return tokens


MAX_LAG = BATCH  # tokens that a draft sequence may lag behind the model's before it catches up without a draft


def allocate_rows(width: int) -> np.ndarray:
    """Allocate memory for the hidden states of a run, float32 [BATCH, width or more]."""
    return np.zeros((BATCH, compute_row_bytes(width) // 4), np.float32)


def create_hidden_state_tap(head_source: DraftHeadSource) -> HiddenStateTap:
    """Create the tap of the hidden states that a draft head needs, with memory for them."""
    return HiddenStateTap(allocate_rows(head_source.columns), head_source.layers)


class DraftHead:
    """A compiled draft head, which runs one DraftSequence at a time (a SequenceRunner).

    Calls from several threads are serialized.
    """

    def __init__(self, head_source: DraftHeadSource, context: int, options: EngineOptions):
        """Compile the head. Raises ModelError, MemoryLimitError, LocalllmError."""
        h, self.context = head_source.hyperparameters, context
        self.vocab_size, self.width = h.vocab_size, h.width
        self.runs, self.lock, self.orphaned = RunPlan(LATER_RUN), create_lock(self), list[SequenceState]()
        self.adapters: tuple[Adapter, ...] = ()
        self.adapter_scales: tuple[float, ...] = ()
        self._previous_hidden, self._new_hidden = allocate_rows(self.width), allocate_rows(self.width)
        self._columns, self._tokens = head_source.columns, head_source.tokens
        self._tapped = allocate_rows(self._columns)
        if isinstance(head_source.state, RecurrentLayerState):
            raise ModelError(f"{head_source.path}: draft heads without attention are not supported")
        operations, fusing = self._record(head_source)
        self._backend = CpuBackend(operations, [head_source.state], context, options)
        self._fuse = self._backend.compile_second(fusing) if fusing else None

    def _record(self, g: DraftHeadSource) -> tuple[list[Operation], list[Operation]]:
        """Trace the head, and its preprocessing of hidden states (empty without any). Raises ModelError."""
        h = g.hyperparameters
        recorder, fusing = Recorder(h, self.context, HiddenStateTap(self._new_hidden)), Recorder(h, self.context)
        try:
            if g.fuse:
                rows = g.fuse(fusing, g.weights, h, fusing.external_input(self._tapped, g.columns))
                if rows.columns != self.width:
                    raise ModelError(f"rows of {rows.columns} columns; the layer expects {self.width}")
                recorder.use(fusing)
            guessed = g.draft(recorder, g.weights, h, recorder.external_input(self._previous_hidden, self.width))
            recorder.require_all_used(g.names)
            count = h.vocab_size if g.tokens is None else len(g.tokens)
            if guessed.logits.columns != count:
                raise ModelError(f"the draft head must have {count} logits (found {guessed.logits.columns})")
        except ModelError as error:
            raise type(error)(f"{g.path}: {error}") from None
        recorder.export_hidden(guessed.hidden)
        *operations, logits, exported = recorder.operations
        return [*operations, exported, logits], fusing.operations  # logits come last

    def create_draft_sequence(self, place: int) -> "DraftSequence":
        """Create a sequence that follows the model's sequence from this position on."""
        return DraftSequence(self, self._backend.create_state(), place)

    def run(
        self, requests: Ids[tuple[Sequence, Ids[int]]], logits: str, precise: bool, kernel_tokens: Ids[int] = ()
    ) -> list[np.ndarray]:
        """Run the tokens of one sequence; return the logits of the last token, or none."""
        ((follower, ids),) = requests
        assert isinstance(follower, DraftSequence)
        with self.lock:
            while self.orphaned:
                self.orphaned.pop().close()
            rows = np.empty((0, self.vocab_size if self._tokens is None else len(self._tokens)), np.float32)
            for first in range(0, len(ids), BATCH):
                some = np.asarray(ids[first : first + BATCH], np.int64)
                wanted = int(logits == "last" and first + BATCH >= len(ids))
                rows = self._read(follower, some, wanted, precise)
        return [rows if self._tokens is None else self._expand_logits(rows)]

    def _expand_logits(self, rows: np.ndarray) -> np.ndarray:
        """Expand logits of the head's smaller vocabulary to the model's, with -inf for all other tokens."""
        logits = np.full((len(rows), self.vocab_size), -np.inf, np.float32)
        logits[:, self._tokens] = rows
        return logits

    def fuse_hidden_states(self, hidden_states: np.ndarray) -> np.ndarray:
        """Preprocess the model's hidden states, float32 [tokens, columns], to [tokens, width]."""
        if self._fuse is None:
            return hidden_states
        self._tapped[: len(hidden_states), : self._columns] = hidden_states
        return self._fuse.compute_rows(len(hidden_states), np.zeros(-(-BATCH // PAGE), np.int64))

    def _read(self, follower: "DraftSequence", ids: np.ndarray, wanted: int, precise: bool) -> np.ndarray:
        position, store = len(follower.tokens), follower.store
        follower.fill(self._previous_hidden[: len(ids), : self.width])
        store.prepare(position, len(ids))
        rows = self._backend.run([SequenceSpan(store, position, ids, wanted)], precise)
        follower.commit_run(ids.tolist(), self._new_hidden[len(ids) - 1, : self.width].copy())
        return rows

    def shift(self, sequence: Sequence, keep: int, count: int) -> None:
        raise AssertionError

    def close(self) -> None:
        with self.lock:
            self._backend.close()


class DraftSequence(Sequence):
    """The draft head's copy of a sequence: the model's tokens, followed by drafted ones.

    Attributes:
        begin: position in the model's sequence of this one's first token; the head has not processed earlier ones.
    """

    engine: DraftHead

    def __init__(self, head: DraftHead, store: SequenceState, place: int):
        super().__init__(head, store)
        # The range of positions in the model's sequence that this one covers.
        self.begin = self._end = place
        self._hidden_states: dict[int, np.ndarray] = {}  # by position, hidden states that are still needed
        self._ids: dict[int, int] = {}  # by position, tokens that only the model has processed
        self._last = np.zeros(head.width, np.float32)  # the head's output for this sequence's last token
        self._firm = 0  # number of tokens computed from the model's hidden states instead of drafted ones

    def on_hidden_states(self, place: int, ids: np.ndarray, rows: np.ndarray) -> None:
        """Record tokens that the model has processed from this position on, and their hidden states.

        rows: hidden states, float32 [tokens, columns]. The head processes the tokens before its next draft, or when it
        lags by MAX_LAG tokens. Tokens that the model processes again are processed again by the head.
        """
        if not self.begin <= place <= self._end:
            self.begin = self._end = place
        index = place - self.begin
        is_known = index < self._firm and self.tokens[index] == ids[0]
        self.follow_rewind(place + is_known)
        self._hidden_states |= dict(enumerate(rows.copy(), place))
        self._ids |= dict(enumerate(ids.tolist(), place))
        self._end = place + len(ids)
        self._drop_old_states()
        first = self.begin + len(self.tokens)
        if self._end - first > MAX_LAG:
            self.append([self._ids[at] for at in range(first, self._end)], "none")

    def follow_rewind(self, place: int) -> None:
        if place < self._end:
            self._hidden_states = {at: row for at, row in self._hidden_states.items() if at < place}
            self._ids = {at: id for at, id in self._ids.items() if at < place}
        self.begin, self._end = min(self.begin, place), min(self._end, place)
        self.truncate(max(0, place - self.begin))

    def truncate(self, length: int) -> int:
        """Truncate as Sequence does, and drop all drafted tokens."""
        length_left = super().truncate(min(length, self._firm))
        self._firm = length_left
        return length_left

    def fill(self, rows: np.ndarray) -> None:
        """Write the hidden state of the preceding token into each row, zeros where it is unknown."""
        first = self.begin + len(self.tokens) - 1
        rows[:] = 0
        places = [place for place in range(first, first + len(rows)) if place in self._hidden_states]
        if places:
            hidden_states = np.array([self._hidden_states[place] for place in places])
            rows[np.array(places) - first] = self.engine.fuse_hidden_states(hidden_states)
        if first >= max(self._end, self.begin):
            rows[0] = self._last
        self._is_firm = self._firm == len(self.tokens) and first + len(rows) <= self._end

    def commit_run(self, ids: list[int], last: np.ndarray) -> None:
        """Record the tokens that the head has processed, and its output for the last one, float32 [width]."""
        self.tokens += ids
        self._last = last
        if self._is_firm:
            self._firm = len(self.tokens)
        self._drop_old_states()

    def _drop_old_states(self) -> None:
        first = self.begin + self._firm - 1
        if next(iter(self._hidden_states), first) < first:  # positions are in order
            self._hidden_states = {at: row for at, row in self._hidden_states.items() if at >= first}
        if next(iter(self._ids), first + 1) <= first:
            self._ids = {at: id for at, id in self._ids.items() if at > first}
