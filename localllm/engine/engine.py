"""Compute logits with a model's weights, architecture and backend, planning the runs of each call."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from contextlib import nullcontext
from functools import cache, partial
from operator import index
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from localllm.arch import load_architecture
from localllm.arch.decoder import has_mtp_layer
from localllm.arch.family import DraftingFamily, Family
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.weights import Weights, count_table_bytes
from localllm.engine import image_tokens
from localllm.engine.adapter_scales import strip_trailing_zeros
from localllm.engine.backend import Backend, TracedModel, build_backend
from localllm.engine.cpu.backend import CpuBackend
from localllm.engine.cpu.lowering import rounds_activations
from localllm.engine.draft_head import (
    DraftHead,
    DraftHeadSource,
    DraftSequence,
    create_hidden_state_tap,
    parse_draft_head,
    select_mtp_layer,
)
from localllm.engine.forks import calling_hooks, create_lock, was_forked
from localllm.engine.image_tokens import ImageEmbedding, cuts_image, find_image, select_images, split_images
from localllm.engine.lower.header import SAME_TOKEN_TYPE, SequenceSpan
from localllm.engine.memory.sequence_state import SequenceState
from localllm.engine.operations.experts import Route
from localllm.engine.operations.tokens import ExportHidden
from localllm.engine.options import EngineOptions
from localllm.engine.runs import BATCH, EXACT_TOKENS, FIRST_RUN, LATER_RUN, PRECISE_TOKENS, SINGLE_RUN, RunPlan
from localllm.engine.sequence import Sequence, require_capacity
from localllm.engine.trace.recorder import trace_image_rows, trace_model
from localllm.engine.trace.rope_shift import find_key_rotations
from localllm.errors import ContextError, LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.table import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from localllm.arch.verbs import Activation
    from localllm.engine.adapters import Adapter
    from localllm.engine.hooks import HookedOperations, LayerHook

WITHOUT_HOOKS = nullcontext()
MAX_MERGED_RECOMPUTE = 16  # at most this many tokens are recomputed together with new ones; more get a separate run


class TokenSlice(NamedTuple):
    """Consecutive tokens of a request that are processed together."""

    request: int  # its index
    begin: int  # position of the first token
    ids: np.ndarray  # int64
    wanted: int = 0  # logits are returned for this many tokens at the end
    kernel_tokens: int = 0  # see localllm.engine.runs; 0: the number of tokens
    kernel_wanted: int = 1

    def slice(self, first: int, end: int) -> "TokenSlice":
        wanted = max(0, end - max(first, len(self.ids) - self.wanted))
        return self._replace(begin=self.begin + first, ids=self.ids[first:end], wanted=wanted)


def plan_runs(
    requests: Ids[tuple[Sequence, Ids[int]]], tokens: Ids[np.ndarray], logits: str, precise: bool,
    kernel_tokens: Ids[int], runs: RunPlan,
) -> Iterable[list[TokenSlice]]:  # fmt: skip
    """Yield the runs of some requests, each of at most BATCH tokens.

    A request's tokens are those that its sequence's state lacks, usually none, then the new ones; a few tokens in gaps
    before copies share the run of the new ones. tokens: of each request, int64. logits, kernel_tokens: see Engine.run.
    """
    reread, readings, total, has_images = list[TokenSlice](), list[TokenSlice](), 0, False
    gaps = list[TokenSlice]()
    counts = kernel_tokens or [0] * len(tokens)
    for number, ((sequence, _), new, count) in enumerate(zip(requests, tokens, counts, strict=True)):
        length = len(sequence.tokens)
        begin, ids = sequence.store.truncate(length), new
        if begin < length:
            lacking = np.array(sequence.tokens[begin:], np.int64)
            if length - begin > MAX_MERGED_RECOMPUTE:
                reread.append(TokenSlice(number, begin, lacking))
                begin = length
            else:
                ids = np.concatenate((lacking, new))
        for first, end in sequence.gaps:
            if end <= begin:
                gaps.append(TokenSlice(number, first, np.array(sequence.tokens[first:end], np.int64), 0, count))
                total += end - first
        wanted = len(new) if logits == "all" else int(logits == "last")
        kernel_wanted = (count or len(new)) if logits == "all" else 1
        readings.append(TokenSlice(number, begin, ids, wanted, count, kernel_wanted))
        total, has_images = total + len(ids), has_images or bool(ids.min() < 0)
    if total <= min(PRECISE_TOKENS, BATCH) and not reread and not has_images:  # as in decode
        return [[*gaps, *readings]]
    return divide_into_runs([*gaps, *reread], readings, tokens, precise, logits == "last", runs)


def divide_into_runs(
    reread: list[TokenSlice],
    readings: list[TokenSlice],
    tokens: Ids[np.ndarray],
    precise: bool,
    only_last: bool,
    runs: RunPlan,
) -> Iterator[list[TokenSlice]]:
    """Yield the slices of each run.

    With 16-bit activations, a few tokens at both ends of a long prompt get separate runs. reread: tokens that are
    recomputed before all others. only_last: only the logits of the last token are requested.
    """
    tails = list[TokenSlice]()
    for reading, new in zip(readings, tokens, strict=True):
        tail = count_exact_tail(new, runs) if precise and only_last and not reading.kernel_tokens else 0
        tails.append(reading.slice(len(reading.ids) - (tail or len(new)), len(reading.ids)))
    rounds = [reread, readings]
    if any(len(tail.ids) < len(new) for tail, new in zip(tails, tokens, strict=True)):
        pairs = zip(readings, tails, strict=True)
        heads = [reading.slice(0, len(reading.ids) - len(tail.ids)) for reading, tail in pairs]
        rounds[1:] = [head._replace(kernel_tokens=0, kernel_wanted=1) for head in heads], tails
    for each_round in rounds:
        starts = [count_exact_head(reading, runs) if precise else 0 for reading in each_round]
        if any(starts):
            yield from split_runs([reading.slice(0, start) for reading, start in zip(each_round, starts, strict=True)])
        rest = zip(each_round, starts, strict=True)
        yield from split_runs([reading.slice(start, len(reading.ids)) if start else reading for reading, start in rest])


def count_exact_tail(ids: np.ndarray, runs: RunPlan) -> int:
    """Return how many tokens at the end get a separate run with 16-bit activations."""
    if len(ids) == 1:  # a decode step
        return 0
    *_, last = split_images(ids)
    return 0 if last.key is not None else runs.count_exact_tokens((last.end - last.first - 1) % BATCH + 1)


def count_exact_head(reading: TokenSlice, runs: RunPlan) -> int:
    """Return how many tokens at the beginning get a separate run with 16-bit activations."""
    if reading.begin or reading.kernel_tokens:
        return 0
    first = next(split_images(reading.ids))
    return 0 if first.key is not None else runs.count_exact_tokens(min(first.end, BATCH))


def split_runs(readings: Ids[TokenSlice]) -> Iterator[list[TokenSlice]]:
    """Divide slices into runs of at most BATCH tokens. Image rows and text never share a run."""
    run, room = list[TokenSlice](), BATCH
    for reading in readings:
        for first, last, key in split_images(reading.ids):
            while first < last:
                if key is not None and run:
                    yield run
                    run, room = [], BATCH
                end = min(last, first + room)
                run.append(reading.slice(first, end))
                room -= end - first
                first = end
                if not room or key is not None:
                    yield run
                    run, room = [], BATCH
    if run:
        yield run


Request = tuple[Sequence, Ids[int]]


class Engine:
    """A model and any number of sequences. Calls from several threads are serialized.

    Attributes:
        hyperparameters: the model's.  context: maximum number of tokens in a sequence.
        vocab_size: length of a row of logits.  operations: the traced model.
        kv_type: storage type of keys and values.
        rope: RoPE scaling that replaces the file's, or None.
        runs: how prompts are divided into runs.  thread_count: compute threads.
        lock: held while the model runs or its sequences change.  device: the backend's name for users.
        limits: bytes and operations per second of a GPU that has all layers; None otherwise.
        orphaned: states of sequences that were garbage-collected without being closed.
        warning: one line for the user, or None.
        adapters: the low-rank adapters that sequences can use.  adapter_scales: those of new sequences.
        control_vectors, control_layers: as in EngineOptions.
    """

    def __init__(
        self, file: GGUFFile, options: EngineOptions | None = None,
        found: tuple[Family, Hyperparameters] | None = None,
    ):  # fmt: skip
        """Trace the model and build its backend. Raises ModelError, MemoryLimitError, UsageError.

        found: the family and hyperparameters of the file, if they are known already.
        """
        options = options or EngineOptions()
        options.require_valid()
        model, self.hyperparameters = found or load_architecture(file)
        if self.hyperparameters.bidirectional and not self.hyperparameters.is_diffusion:
            kind = f"{self.hyperparameters.arch} models make embeddings and cannot generate text"
            raise UnsupportedError(f"{file.path}: {kind}: use localllm embed or localllm rerank")
        self.context, self.vocab_size = options.context or self.hyperparameters.context, self.hyperparameters.vocab_size
        self.lock, self.orphaned, self._path = create_lock(self), list[SequenceState](), file.path
        self._weight_bytes = file.nbytes - count_table_bytes(file.tensors)
        weights, forward = Weights(file.tensors), model.forward
        self.adapters: tuple[Adapter, ...] = ()
        self.adapter_scales = strip_trailing_zeros([scale for _, scale in options.lora])
        self.control_vectors, self.control_layers = options.control_vectors, options.control_layers
        if options.lora or options.control_vectors:
            from localllm.engine.adapter_file import sum_control_vectors  # seldom needed
            from localllm.engine.adapters import add_adapters_to_forward, require_opened

            control = sum_control_vectors(options.control_vectors, options.control_layers, self.hyperparameters)
            self.adapters = require_opened(options.lora)
            forward = add_adapters_to_forward(forward, self.adapters, control, file.tensors, self.hyperparameters.arch)
        self._record = partial(trace_model, file, forward, weights, self.hyperparameters, self.context)
        self._head_source: DraftHeadSource | None = None
        drafts = options.backend == "cpu" and has_mtp_layer(weights, self.hyperparameters)
        if drafts and isinstance(model, DraftingFamily):
            self._head_source = select_mtp_layer(file, model, self.hyperparameters)
        self._tap = create_hidden_state_tap(self._head_source) if self._head_source else None
        recorder = self._record(self._tap)
        rows = partial(trace_image_rows, forward, weights, self.hyperparameters, self.context)
        self._images, self._accepts_images = WeakValueDictionary[int, ImageEmbedding](), recorder.begins
        self.operations, self.kv_type, self.rope = recorder.operations, options.kv_cache_type, options.rope
        self._file, self._options = file, options
        self._head: DraftHead | None = None  # built on first use
        self._start, self.thread_count = self.hyperparameters.start_token, options.thread_count
        traced = TracedModel(
            file, self.operations, forward, self.hyperparameters, self.context, recorder.encoding, rows,
            partial(self._trace_hooks, forward, weights),
        )  # fmt: skip
        backend, self.device, note, self.limits = build_backend(traced, options)
        self._backend: Backend | None = backend
        later = FIRST_RUN if any(isinstance(operation, Route) for operation in self.operations) else LATER_RUN
        exact = EXACT_TOKENS if isinstance(backend, CpuBackend) and rounds_activations(self.operations) else 0
        runs = RunPlan(later, exact=exact, kernel_limits=tuple(backend.kernel_limits))
        self.runs = SINGLE_RUN if self._start is not None else runs
        self._find_rotations, self._shifts = cache(partial(find_key_rotations, self.operations, traced.states)), False
        self.warning = backend.warning or note

    def _trace_hooks(
        self, forward: "Callable[..., Activation]", weights: Weights, with_attention: bool
    ) -> "HookedOperations":
        """Trace the model with hook points; see localllm.engine.hooks."""
        from localllm.engine.hooks import trace_hooks  # seldom needed

        return trace_hooks(forward, weights, self.hyperparameters, self.context, with_attention)

    def sequence(self, hook: "LayerHook | None" = None) -> Sequence:
        """Create an empty sequence; hook: sees and changes hidden states of its tokens.

        Raises UnsupportedError for a model that does not generate text, and the errors of `require_hook`.
        """
        if hook:
            self.require_hook(hook)
        if self.hyperparameters.is_diffusion:
            kind = f"{self.hyperparameters.arch} models fill masked tokens and cannot continue a sequence"
            raise UnsupportedError(f"{self._path}: {kind}: use localllm run")
        sequence = self._create_sequence()
        sequence.hook = hook
        return sequence

    def require_hook(self, hook: "LayerHook") -> None:
        """Raise UsageError for a layer that does not exist, UnsupportedError if the model cannot have the hook."""
        from localllm.engine.hooks import require_layers  # seldom needed

        h, with_attention = self.hyperparameters, hook.attention_layer is not None
        if beyond := [layer for layer in hook.layers if not 0 <= layer <= h.layers]:
            raise UsageError(f"layers must be from 0 to {h.layers}, the output of the last layer, not {beyond[0]}")
        if hook.attention_layer is not None and not 0 <= hook.attention_layer < h.layers:
            raise UsageError(f"a layer with attention must be from 0 to {h.layers - 1}, not {hook.attention_layer}")
        with self.lock:
            if self._start is not None:
                raise UnsupportedError(f"{self._path}: hidden states of {h.arch} models cannot be read")
            if isinstance(self.backend, CpuBackend):
                require_layers(self.backend.get_hook_points(with_attention), hook, h.arch)
            elif self._options.backend != "reference" or with_attention:
                raise UnsupportedError(f"hidden states are read on the CPU only, not on {self.device}: use device cpu")

    def forward_full(self, ids: Ids[int]) -> np.ndarray:
        """Compute the logits of all tokens with bidirectional attention, float32 [tokens, vocab].

        Raises UsageError, ContextError if the tokens exceed a run, MemoryLimitError, ModelError.
        """
        if len(ids) > BATCH:
            raise ContextError(f"bidirectional attention is limited to {BATCH} tokens (found {len(ids)})")
        sequence = self._create_sequence()
        try:
            return sequence.append(ids, "all")
        finally:
            sequence.close()

    def _create_sequence(self) -> Sequence:
        return Sequence(self, self.backend.create_state())

    def get_cache_usage(self) -> tuple[int, int]:
        """Return how many token slots of the cache are in use, and how many there are.

        Whole pages count; a page that several sequences share counts once.
        """
        with self.lock:
            self._free_orphaned()
            return self.backend.get_cache_usage()

    def get_disk_statistics(self) -> dict[str, float]:
        """Return read_bytes and waited_s of weights larger than memory, and hits of experts; empty if all fit."""
        return self._backend.get_disk_statistics() if isinstance(self._backend, CpuBackend) else {}

    @property
    def streamed_bytes(self) -> int:
        """Size of the weights that have no place in memory and are read from the disk, in bytes."""
        storage = self._backend.storage if isinstance(self._backend, CpuBackend) else None
        return 0 if storage is None or storage.plan is None else max(self._weight_bytes - storage.budget, 0)

    @property
    def bytes_per_token(self) -> int:
        """The cache memory of a token in all layers, in bytes."""
        return self.backend.bytes_per_token

    @property
    def backend(self) -> Backend:
        """The backend. Raises LocalllmError if the engine is closed."""
        if self._backend is None:
            raise LocalllmError("the model is closed: open it again")
        return self._backend

    def step(self, requests: Ids[Request], precise: bool = True) -> list[np.ndarray]:
        """Process tokens of several sequences in one run; return the last logits of each, float32 [1, vocab].

        A run can have each sequence only once. Raises the errors of Sequence.append.
        """
        return self.run(requests, "last", precise)

    def run(self, requests: Ids[Request], logits: str, precise: bool, kernel_tokens: Ids[int] = ()) -> list[np.ndarray]:
        """Process the tokens of all requests, BATCH at a time; return each one's logits, float32 [wanted, vocab].

        kernel_tokens: for each request, see localllm.engine.runs; 0 or empty for its number of tokens. Raises the
        errors of Sequence.append before anything has changed. After a later failure (memory, NaN) each sequence holds
        the tokens of the runs that succeeded.
        """
        if logits not in ("last", "all", "none"):
            raise UsageError(f"logits must be last, all or none (found {logits!r})")
        tokens = self._validate_tokens(requests)
        with self.lock:
            if self.orphaned:
                self._free_orphaned()
            require_capacity(self, requests, tokens)
            if self._start is not None:
                pairs = zip(requests, tokens, strict=True)
                tokens = [self._run_encoder(sequence, ids, precise) for (sequence, _), ids in pairs]
            rows: list[list[np.ndarray]] = [[] for _ in requests]
            for readings in plan_runs(requests, tokens, logits, precise, kernel_tokens, self.runs):
                self._run_batch(requests, readings, precise, rows)
        return [some[0] if len(some) == 1 else np.concatenate(some) for some in rows]

    def attach_draft_head(self, sequence: Sequence) -> DraftSequence:
        """Attach the draft head to a sequence, whose tokens it follows from now on.

        Raises UsageError if the model has no draft head, MemoryLimitError, ModelError, LocalllmError.
        """
        with self.lock:
            if self._head_source is None:
                raise UsageError(f"{self._path} has no MTP layer, or {self.device} does not support it")
            if self._head is None:
                self._head = DraftHead(self._head_source, self.context, self._options)
            follower = sequence.listener
            if not isinstance(follower, DraftSequence) or follower.engine is not self._head:
                sequence.listener = follower = self._head.create_draft_sequence(len(sequence.tokens))
            return follower

    @property
    def has_draft_head(self) -> bool:
        """Return whether the model or another file provides a draft head."""
        return self._head_source is not None

    @property
    def draft_head_path(self) -> str | None:
        """The path of a separate draft head file; None for the model's own head or without one."""
        return self._head_source.path if self._head_source and self._head_source.layers else None

    def load_draft_head(self, file: GGUFFile) -> None:
        """Replace the model's draft head by the one in this file, before any sequence runs.

        Raises UsageError if it is for another model, UnsupportedError if this model exposes no hidden states,
        ModelError, MemoryLimitError, LocalllmError.
        """
        with self.lock:
            backend = self.backend
            if not isinstance(backend, CpuBackend):
                raise UsageError(f"{file.path}: draft heads run on the CPU only, not on {self.device}")
            head_source = parse_draft_head(file, self._file, self.hyperparameters)
            tap = create_hidden_state_tap(head_source)
            operations = self._record(tap).operations
            if not any(isinstance(operation, ExportHidden) for operation in operations):
                kind = f"{self.hyperparameters.arch} models do not expose the hidden states that a draft head needs"
                raise UnsupportedError(f"{self._path}: {kind}")
            new_head = DraftHead(head_source, self.context, self._options)
            backend.replace_operations(operations)
            old_head, self._head, self._head_source, self._tap = self._head, new_head, head_source, tap
        if old_head:
            old_head.close()

    def prepare_all(self) -> None:
        """Wait until all kernels are compiled. Raises LocalllmError."""
        with self.lock:
            self.backend.prepare_all()

    def require_shift(self) -> None:
        """Raise UsageError or UnsupportedError if tokens cannot be moved to other positions."""
        if self._start is not None:
            raise UsageError("context shift is not supported for encoder models")
        if not self.backend.rotates_keys:
            raise UnsupportedError("context shift is not supported on a GPU: use --on-overflow drop-turns")
        self._find_rotations()

    def prepare_shift(self) -> None:
        """Compile the kernels of Sequence.shift, once. Raises the errors of `require_shift`, and LocalllmError."""
        self.require_shift()
        if not self._shifts:
            self.backend.prepare_shift(self._find_rotations())
            self._shifts = True

    def shift(self, sequence: Sequence, keep: int, count: int) -> None:
        """Shift a sequence (Sequence.shift). After a failure, the next run recomputes the tokens after `keep`."""
        if keep < 0 or count < 0 or count % PAGE or keep + count > len(sequence.tokens):
            raise UsageError(f"cannot drop {count} of {len(sequence.tokens)} tokens after the first {keep}")
        with self.lock:
            self.prepare_shift()
            if any(cuts_image(sequence.tokens, place) for place in (keep, keep + count)):
                raise UsageError(f"cannot drop {count} tokens after the first {keep}: an image would be cut")
            positions = count - image_tokens.compute_position_offset(
                select_images(sequence.images, keep, keep + count), keep + count
            )
            store = sequence.store
            cached = store.truncate(sequence.drop_gaps())
            try:
                length = store.shift(keep, count) if cached >= keep + count else store.truncate(min(cached, keep))
                if length > keep:
                    self.backend.rotate_keys(store, keep, length, positions)
            except BaseException:
                store.truncate(keep)
                raise
            sequence.drop_range(keep, count)

    def append_copies(
        self, sequence: Sequence, source: Sequence, first: int, count: int, skipped: Ids[int] = ()
    ) -> bool:
        """Append `count` tokens of another sequence, from position `first` on, by copying their cache.

        Keys are rotated to their new positions. The copies still depend on the text before them in the source: keys and
        values of deeper layers were computed with it. skipped: tokens before the copies, which the next run computes.
        Returns False and changes nothing if either sequence's state is incomplete or has images, or if tokens cannot be
        skipped. Raises UsageError if the model's keys cannot be moved; MemoryLimitError.
        """
        with self.lock:
            self.prepare_shift()
            length = len(sequence.tokens)
            place = length + len(skipped)
            is_whole = all(each.store.truncate(len(each.tokens)) == len(each.tokens) for each in (sequence, source))
            if not is_whole or source.gaps or sequence.images or source.images or place + count > self.context:
                return False
            try:
                if not sequence.store.append_copies(source.store, first, length, count, len(skipped)):
                    return False
                if first != place:
                    self.backend.rotate_keys(sequence.store, place, place + count, first - place)
            except BaseException:
                sequence.store.truncate(length)
                raise
            sequence.commit_copies(source.tokens[first : first + count], skipped)
            return True

    @property
    def can_shift(self) -> bool:
        """Return whether tokens can be moved to other positions."""
        try:
            self.require_shift()
        except (UsageError, UnsupportedError):
            return False
        return True

    def _validate_tokens(self, requests: Ids[Request]) -> list[np.ndarray]:
        """Convert the token ids of requests to arrays. Raises UsageError."""
        tokens = list[np.ndarray]()
        for _, ids in requests:
            try:
                is_valid = len(ids) > 0
                for token in ids:
                    is_valid = is_valid and (
                        0 <= index(token) < self.vocab_size or bool(find_image(self._images, token))
                    )
            except TypeError:
                is_valid = False
            if not is_valid:
                raise UsageError(f"token ids must be a list of integers from 0 to {self.vocab_size - 1}")
            tokens.append(np.asarray(ids, np.int64))
        return tokens

    def register_image(self, image: ImageEmbedding) -> None:
        """Make an image's token ids known, as long as the image or a sequence that contains it exists.

        Raises UnsupportedError for a model without image input, UsageError for rows of another model.
        """
        if not self._accepts_images or self._start is not None or self.device != "CPU":
            where = f"{self.hyperparameters.arch} models" if self.device == "CPU" else f"models on {self.device}"
            raise UnsupportedError(f"{self._path}: images are not supported by {where}")
        if image.rows.shape[1] != (width := self.hyperparameters.row_width):
            raise UsageError(
                f"an image's rows must have {width} columns, like the model's embeddings (found {image.rows.shape[1]})"
            )
        if image.is_whole and len(image.rows) > BATCH:
            raise UsageError(
                f"an image of {len(image.rows)} rows exceeds the limit of {BATCH} for bidirectional attention"
            )
        self._images[image.key] = image

    def find_images(self, tokens: Ids[int]) -> list[tuple[int, ImageEmbedding]]:
        """Return the images among the tokens: (index of the first row, image). No image may be cut off."""
        runs_of_ids = split_images(np.asarray(tokens, np.int64))
        return [(each.first, self._images[each.key]) for each in runs_of_ids if each.key is not None]

    def _free_orphaned(self) -> None:
        """Free the states of garbage-collected sequences."""
        while self.orphaned:
            self.orphaned.pop().close()

    def _run_encoder(self, sequence: Sequence, ids: np.ndarray, precise: bool) -> np.ndarray:
        """Run the encoder over a new sequence's text; return the decoder's tokens, from the start token on.

        Raises UsageError if there is no text, or no start token after it.
        """
        if sequence.encoded:
            return ids
        starts = np.flatnonzero(ids == self._start)
        if not len(starts) or not starts[0]:
            kind = f"{self.hyperparameters.arch} models have an encoder"
            raise UsageError(f"{kind}: pass its text's tokens, the start token {self._start}, and the answer's tokens")
        text = ids[: starts[0]]
        try:
            sequence.store.prepare(0, len(text))
            self.backend.encode([SequenceSpan(sequence.store, 0, text, 0)], precise)
        except BaseException:
            sequence.store.truncate(0)
            raise
        sequence.tokens, sequence.encoded = text.tolist(), len(text)
        return ids[starts[0] :]

    def _run_batch(
        self, requests: Ids[Request], readings: Ids[TokenSlice], precise: bool, rows: list[list[np.ndarray]]
    ) -> None:
        """Run slices of several requests together, and append their logits to the requests' rows."""
        spans, is_hooked = [], False
        for number, begin, ids, wanted, kernel_tokens, kernel_wanted in readings:
            sequence, image, offset = requests[number][0], None, 0
            is_hooked = is_hooked or sequence.hook is not None
            if ids[0] < 0 or sequence.images:
                image = find_image(self._images, int(ids[0]))
                offset = image_tokens.compute_position_offset(sequence.images, begin)
            part = sequence.store, begin, ids, wanted
            scales = sequence.adapter_scales.expand(begin, len(ids)) if self.adapters else None
            spans.append(
                SequenceSpan(
                    *part,
                    SAME_TOKEN_TYPE,
                    sequence.encoded,
                    image,
                    offset,
                    kernel_tokens,
                    kernel_wanted,
                    scales,
                    sequence.hook,
                )
            )
        try:
            for span in spans:
                span.store.prepare(span.position, len(span.ids))
            with calling_hooks(self) if is_hooked else WITHOUT_HOOKS:
                result = self.backend.run(spans, precise)
        except BaseException as error:
            for span in spans:  # a sequence's `tokens` may list tokens that its state lacks: the next run computes them
                span.store.truncate(span.position)
            if isinstance(error, ModelError):
                raise ModelError(f"{self._path}: {error}") from None
            raise
        row = 0
        for (number, *_), span in zip(readings, spans, strict=True):
            sequence = requests[number][0]
            sequence.commit_tokens(span.position, span.ids, span.seen)
            if self._tap and self._head_source:
                states, row = self._tap.memory[row : row + len(span.ids)], row + len(span.ids)
                if sequence.listener and sequence.listener.engine is self._head:
                    sequence.listener.on_hidden_states(span.position, span.ids, states[:, : self._head_source.columns])
            rows[number].append(result[: span.wanted])
            result = result[span.wanted :]

    def close(self) -> None:
        """Stop the engine's threads. Idempotent; does nothing in a forked process."""
        if was_forked(self):
            return
        with self.lock:
            backend, self._backend = self._backend, None
            head, self._head = self._head, None
        for resource in (backend, head):
            if resource is not None:
                resource.close()
