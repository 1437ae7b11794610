"""Options of an answer: limits, sampling, reasoning, tools and constraints."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.context_overflow import require_choice
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.speculation.drafter import Drafter
from localllm.generation.thinking_options import require_choice as require_thinking
from localllm.values import require_text, whole_number

if TYPE_CHECKING:
    import numpy as np

    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.tools.tool_grammar import ToolUse

CALLABLES = ("logits_processor", "stopping_criteria")  # options that are functions, only for Python programs
SPECULATE = ("auto", "mtp", "ngram", "off")


@frozen
class GenerationOptions:
    """Options of an answer."""

    max_tokens: int | None = None  # None: until the model ends or the context is full
    stop: Sequence[str] = ()  # strings that end an answer without constraint; not part of it
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    on_progress: Callable[[int, int], None] | None = None  # called with (tokens read, tokens to read) during prefill
    # Source of drafts: the text ("ngram"), also the model's MTP layer ("mtp", or "auto" if it has one), also a smaller
    # model (a Drafter), or none ("off").
    speculate: str | Drafter = "auto"
    # See generation.context_overflow; None: drop-turns in a Session's conversation, else error.
    on_overflow: str | None = None
    keep: int | None = None  # first tokens that stay with "shift"; None: the system message, at least 4
    # In batches: fewest tokens of a chunk that may be reused from the middle of another prompt, see
    # generation.chunk_reuse. 0 or None: no such reuse.
    cache_reuse: int | None = None
    think: str = "auto"  # whether, or with which effort, the model reasons: see generation.reasoning
    think_budget: int | None = None  # most tokens of reasoning, which is closed then; None: no limit
    template_variables: Mapping[str, object] = field(default_factory=dict)  # for the chat template
    # Whether the answer continues the last message, an assistant's; None: if that has no tool calls.
    continue_final: bool | None = None
    constraint: "Constraint | None" = None  # on the answer's text
    tools: "ToolUse | None" = None  # that the model may call
    top_logprobs: int | None = None  # alternatives to report for each token, None for no log probabilities
    # Called before each token is drawn, with the ids of prompt and answer and a copy of the logits, float32 [vocab]:
    # the first returns the logits to draw from, before all sampling steps; the second whether the answer ends.
    logits_processor: "Callable[[list[int], np.ndarray], np.ndarray] | None" = None
    stopping_criteria: "Callable[[list[int], np.ndarray], bool] | None" = None
    ban: Sequence[str] = ()  # texts that must not occur in the answer: see generation.banned
    result_type: object = None  # the Python type that was given as the schema, or None

    def __post_init__(self) -> None:
        """Raise UsageError for invalid values."""
        if self.max_tokens is not None:
            whole_number("max_tokens", self.max_tokens)
        if self.cache_reuse is not None:
            whole_number("cache_reuse", self.cache_reuse)
        if not isinstance(self.speculate, Drafter) and self.speculate not in SPECULATE:
            raise UsageError(f"speculate should be {' or '.join(SPECULATE)}, not {self.speculate!r}")
        if self.speculate == "mtp" and self.on_overflow == "shift":
            raise UsageError("MTP (mtp) cannot be combined with on_overflow=shift")
        if self.top_logprobs is not None:
            whole_number("top_logprobs", self.top_logprobs)
        for name in CALLABLES:
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise UsageError(f"{name} should be a function, not {getattr(self, name)!r:.60}")
        if self.stopping_criteria and (self.constraint or self.tools):
            raise UsageError(f"stopping_criteria cannot be combined with {'tools' if self.tools else 'a constraint'}")
        require_choice(self.on_overflow, self.keep)
        require_thinking(self.think, self.think_budget)
        for name in ("stop", "ban"):
            self._require_texts(name)

    def _require_texts(self, name: str) -> None:
        """Replace a single text by a tuple. Raises UsageError for other values than texts, and empty texts."""
        texts = getattr(self, name)
        if isinstance(texts, str | bytes):
            texts = (texts,)
            object.__setattr__(self, name, texts)
        if not isinstance(texts, Iterable):
            raise UsageError(f"{name} should be a list of texts, not {texts!r}")
        for text in texts:
            if not require_text(name, text):
                raise UsageError(f"{name} should not be empty")

    @property
    def is_compact(self) -> bool:
        """Return whether an answer is JSON whose white space is removed."""
        return self.constraint is not None and self.constraint.is_compact

    def ends_answer(self, ids: list[int], row: "np.ndarray") -> bool:
        """Return whether stopping_criteria, if given, ends an answer after these tokens.

        ids: ids of the prompt and the answer.  row: logits after them, float32 [vocab]. It is called once for each
        token, in order, also with speculative decoding.
        """
        criterion = self.stopping_criteria
        return criterion is not None and bool(criterion([*ids], row.copy()))

    def processed_logits(self, ids: list[int], row: "np.ndarray") -> "np.ndarray":
        """Return the logits to draw from, float32 [vocab]: those that logits_processor returns, if given.

        It is called like stopping_criteria. Raises UsageError for invalid logits.
        """
        if self.logits_processor is None:
            return row
        import numpy as np

        processed = np.asarray(self.logits_processor([*ids], row.copy()))
        if processed.shape != row.shape or processed.dtype.kind != "f":
            raise UsageError(f"logits_processor should return logits of the shape {row.shape}, not {processed.shape}")
        if not np.isfinite(processed.max()):
            message = "logits_processor should leave a finite logit to one token at least, and no other infinity"
            raise UsageError(message)
        return processed.astype(np.float32, copy=False)

    def limit(self, room: int) -> int:
        """Return the most tokens of an answer if the context has `room` free positions."""
        room = sys.maxsize if self.on_overflow == "shift" else room
        return room if self.max_tokens is None else min(room, self.max_tokens)
