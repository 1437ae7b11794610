"""Write the header of a run: the arguments of kernels that change from run to run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from localllm.engine.runs import BATCH, UNLIMITED
from localllm.kernels.cpu import MIN_ALL_TILES, PRECISE_TOKENS
from localllm.kernels.machine import has_tiles
from localllm.kernels.table import MAX_ADAPTERS, PAGE, SEQUENCE

SAME_TOKEN_TYPE = np.zeros(1, np.int64)  # token type 0 for all
# Minimum of kernel_tokens for a text that is embedded: with AMX short texts are multiplied in tiles, too, so that many
# can share a run.
MIN_TEXT_KERNEL_TOKENS = MIN_ALL_TILES if has_tiles() else 1


class SequenceSpan(NamedTuple):
    """The tokens of one sequence in a run."""

    store: Any  # the sequence's state
    position: int  # position of the first token
    ids: np.ndarray  # int64
    wanted: int  # logits are returned for this many tokens at the end
    kinds: np.ndarray = SAME_TOKEN_TYPE  # token types, see localllm.arch.verbs
    encoded: int = 0  # number of the sequence's first tokens that belong to the encoder
    seen: Any = None  # the ImageEmbedding whose rows the ids are; such a span is alone in its run
    ahead: int = 0  # index in the sequence minus RoPE position; they differ after images
    kernel_tokens: int = 0  # the token count that selects kernels; 0: that of the span
    kernel_wanted: int = 1  # the count that selects kernels for its requested logits
    adapter_scales: np.ndarray | None = None  # float32 [len(ids), MAX_ADAPTERS]; None: the model has no adapters
    hook: Any = None  # the LayerHook of the sequence (localllm.engine.hooks), or None

    def expand_scales(self) -> np.ndarray:
        """Return the scales of adapters for each token, float32 [len(ids), MAX_ADAPTERS]."""
        if self.adapter_scales is None:
            return np.zeros((len(self.ids), MAX_ADAPTERS), np.float32)
        return self.adapter_scales


class TextSpan(NamedTuple):
    """An input, or a pair of inputs, that a run processes whole."""

    ids: np.ndarray  # int64
    second: int  # index of the second text of a pair; the number of tokens for a single text


def allocate_int64(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.int64)


class RunHeader:
    """The arguments of kernels that change from run to run: int64 arrays at fixed addresses."""

    def __init__(self, tokens: int = BATCH, zeros: Callable[[tuple[int, ...]], np.ndarray] = allocate_int64):
        """Allocate the arrays for runs of at most `tokens` tokens.

        zeros: allocates one array.
        """
        # The counts of tokens, requested logits and sequences; the maximum number of tokens that keep 16-bit
        # activations; the address of the logits, and whether one of them is NaN or infinite.
        self.numbers = zeros((6,))
        self.token_count, self.wanted_count, self.sequence_count = (self.numbers[i : i + 1] for i in range(3))
        self.most_precise, self.logits, self.flaws = (self.numbers[i : i + 1] for i in range(3, 6))
        self.ids, self.positions, self.owners, self.wanted, self.kinds = (zeros((tokens,)) for _ in range(5))
        self.rotary_positions = zeros((tokens,))  # RoPE positions
        self.sequences = zeros((tokens, len(SEQUENCE)))
        # The same maximum for keys and values, whose errors affect all later tokens. It must not be the size of a run:
        # kernel_tokens may be larger.
        self.max_precise_stored = zeros((1,)) + UNLIMITED
        self.kernel_tokens = zeros((2,))  # select the kernels for tokens, and for requested logits
        self.few_counts = zeros((2,))  # counts of tokens and of requested logits, each 0 if tile kernels process them
        self.adapter_scales = zeros((tokens, MAX_ADAPTERS // 2)).view(np.float32)
        # Attention windows of an image. Always in main memory: only the CPU encodes images.
        self.windows, self.window_count = allocate_int64((tokens, len(SEQUENCE))), allocate_int64((1,))

    def fill(self, spans: Sequence[SequenceSpan], precise: bool, logits: np.ndarray) -> None:
        """Describe a run over sequences.

        logits: the output, float32 [wanted, vocab].
        """
        first = wanted = most_tokens = most_wanted = 0  # the last two select kernels
        for number, span in enumerate(spans):
            count = len(span.ids)
            kernel_tokens = span.kernel_tokens or count
            most_tokens, most_wanted = max(most_tokens, kernel_tokens), max(most_wanted, span.kernel_wanted)
            end, length = first + count, span.position + count
            self.ids[first:end] = span.ids
            self.positions[first:end] = np.arange(span.position, length)
            self.rotary_positions[first:end] = self.positions[first:end] - span.ahead
            self.owners[first:end] = number
            if span.adapter_scales is not None:
                self.adapter_scales[first:end] = span.adapter_scales
            self.sequences[number] = first, count, length, *span.store.addresses, span.encoded, kernel_tokens
            self.wanted[wanted : wanted + span.wanted] = np.arange(end - span.wanted, end)
            first, wanted = end, wanted + span.wanted
        self.numbers[:] = first, wanted, len(spans), PRECISE_TOKENS if precise else 1, logits.ctypes.data, 0
        if precise:
            self._select_kernels(most_tokens, most_wanted)
        else:
            self._select_kernels(max(most_tokens, first), wanted)

    def describe_texts(self, texts: Sequence[TextSpan], pages: np.ndarray, rows: np.ndarray, precise: bool) -> None:
        """Describe a run over whole inputs.

        pages: of the cache, int64. rows: the output, float32 [inputs, width]. precise: activations keep 16 bits,
        however many tokens there are.
        """
        counts, number = np.array([len(text.ids) for text in texts]), len(texts)
        ends, of_text = np.cumsum(counts), -(-counts // PAGE)
        firsts, tokens = ends - counts, int(ends[-1])
        self.ids[:tokens] = np.concatenate([text.ids for text in texts])
        self.positions[:tokens] = np.arange(tokens) - np.repeat(firsts, counts)
        self.rotary_positions[:tokens] = self.positions[:tokens]
        self.kinds[:tokens] = self.positions[:tokens] >= np.repeat([text.second for text in texts], counts)
        self.owners[:tokens] = np.repeat(np.arange(number), counts)
        tables = pages.ctypes.data + 8 * (np.cumsum(of_text) - of_text)
        zeros = np.zeros(number, np.int64)
        self.sequences[:number] = np.stack([firsts, counts, counts, tables, *[zeros] * 3, counts], axis=1)
        self.wanted[:number] = ends - 1
        most_precise = max(tokens, PRECISE_TOKENS) if precise else PRECISE_TOKENS
        self.numbers[:] = tokens, number, number, most_precise, rows.ctypes.data, 0
        self._select_kernels(max(int(counts.max()), MIN_TEXT_KERNEL_TOKENS), MIN_TEXT_KERNEL_TOKENS)

    def describe_windows(self, ends: np.ndarray) -> None:
        """Divide the only input of a run into attention windows that end after these rows, int64."""
        firsts, zeros = np.concatenate(([0], ends[:-1])), np.zeros_like(ends)
        tables = zeros + self.sequences[0, SEQUENCE.table]
        counts = ends - firsts
        self.windows[: len(ends)] = np.stack([firsts, counts, ends, tables, zeros, zeros, firsts, counts], axis=1)
        self.window_count[0] = len(ends)

    def _select_kernels(self, for_tokens: int, for_wanted: int) -> None:
        self.kernel_tokens[:] = for_tokens, for_wanted
        self.few_counts[:] = np.where(self.kernel_tokens < MIN_ALL_TILES, self.numbers[:2], 0)
