"""Options of an answer: its length, the choice of its tokens, and its form."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.context_overflow import require_choice
from localllm.generation.reasoning import require_choice as require_thinking
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.speculation.drafter import Drafter
from localllm.values import require_text, whole_number

if TYPE_CHECKING:
    import numpy as np

    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.tools.tool_grammar import ToolUse

CALLABLES = ("logits_processor", "stopping_criteria")  # options that are functions, which only programs have
SPECULATE = ("auto", "mtp", "ngram", "off")


@frozen
class GenerationOptions:
    """Limits of an answer and the choice of its tokens."""

    max_tokens: int | None = None  # None: until the model ends or the context is full
    stop: Sequence[str] = ()  # strings that end a free answer and are not part of it; a constraint has its own end
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    on_progress: Callable[[int, int], None] | None = None  # called with (tokens read, tokens to read) during prefill
    # Where guesses come from: the text ("ngram"), the model's own layer besides ("mtp", or "auto" if it has one), a
    # smaller model besides, nowhere ("off").
    speculate: str | Drafter = "auto"
    on_overflow: str | None = None  # see generation.overflow; None: drop-turns where a Session asks, else error
    keep: int | None = None  # the first tokens that stay with "shift"; None: the system message, 4 at least
    # In batches: the fewest tokens of a chunk that may come from the middle of another prompt, computed with what was
    # before it there: see generation.chunk_reuse. 0 or None: all is computed as alone.
    cache_reuse: int | None = None
    think: str = "auto"  # whether the model thinks before it answers, or with which effort: see generation.thinking
    think_budget: int | None = None  # the most tokens of a thought, which is closed then; None: as many as it takes
    template_variables: Mapping[str, object] = field(default_factory=dict)  # for the chat template
    # Whether the answer goes on with the last message, an assistant's; None: if that has no calls. False: a new one.
    continue_final: bool | None = None
    constraint: "Constraint | None" = None  # what an answer must look like
    tools: "ToolUse | None" = None  # that an answer may call
    top_logprobs: int | None = None  # alternatives to report for each token, None for no log probabilities
    # Called before each token is drawn, with the ids of prompt and answer and a copy of the logits float32 [vocab]:
    # returns those to draw from, before all other steps; says whether the answer ends here.
    logits_processor: "Callable[[list[int], np.ndarray], np.ndarray] | None" = None
    stopping_criteria: "Callable[[list[int], np.ndarray], bool] | None" = None
    ban: Sequence[str] = ()  # texts that are not in an answer, in upper or lower case: see generation.banned
    result_type: object = None  # the Python type that a schema came from, None if it was JSON

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
        """Make a tuple of one text. Raises UsageError for what is no list of texts that have characters."""
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
        """Return whether an answer is JSON whose white space is left out."""
        return self.constraint is not None and self.constraint.is_compact

    def ends_answer(self, ids: list[int], row: "np.ndarray") -> bool:
        """Return whether the stopping criterion, if there is one, ends an answer after these tokens.

        ids: of the prompt and the answer.  row: logits after them, float32 [vocab]. Called once for each token, in
        order, also in speculative decoding: a guess counts only if it is what is drawn then.
        """
        criterion = self.stopping_criteria
        return criterion is not None and bool(criterion([*ids], row.copy()))

    def processed_logits(self, ids: list[int], row: "np.ndarray") -> "np.ndarray":
        """Return the logits that a token is drawn from, float32 [vocab]: those of the processor, if there is one.

        Called as ends_answer. Raises UsageError for others than it can be drawn from.
        """
        if self.logits_processor is None:
            return row
        import numpy as np

        made = np.asarray(self.logits_processor([*ids], row.copy()))
        if made.shape != row.shape or made.dtype.kind != "f":
            raise UsageError(f"logits_processor should return logits of the shape {row.shape}, not {made.shape}")
        if not np.isfinite(made.max()):
            message = "logits_processor should leave a finite logit to one token at least, and no other infinity"
            raise UsageError(message)
        return made.astype(np.float32, copy=False)

    def limit(self, room: int) -> int:
        """Return the maximum number of tokens if the context has this much room."""
        room = sys.maxsize if self.on_overflow == "shift" else room
        return room if self.max_tokens is None else min(room, self.max_tokens)
