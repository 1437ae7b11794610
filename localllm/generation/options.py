"""Declare the options of an answer: limits, sampling, reasoning, tools and constraints."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.sampling.options import COUNT, SamplingOptions, collect_options, declare_setting
from localllm.values import require_integer, require_string

if TYPE_CHECKING:
    import numpy as np

    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.speculation.acceptance import Drafter
    from localllm.generation.tools.tool_grammar import ToolUse

CALLABLES = ("logits_processor", "stopping_criteria")  # options that are functions, only for Python programs
SPECULATE = ("auto", "mtp", "ngram", "off")
EFFORTS = ("low", "medium", "high")
THINK = ("auto", "on", "off", *EFFORTS)
ON_OVERFLOW = ("error", "drop-turns", "shift")


@frozen
class GenerationOptions:
    """Options of an answer: its length, sampling, reasoning, tools and constraint."""

    # fmt: off
    # None: until the model ends or the context is full
    max_tokens: int | None = declare_setting(
        None, COUNT, "-n --max-tokens --n-predict --predict", "Maximum number of tokens to generate; -1: no limit.",
        "chat name llm ollama:num_predict", shown="-1",
    )
    # Ignored in answers with a constraint.
    stop: Sequence[str] = declare_setting(
        (), None, "-r --stop --reverse-prompt", "Stop generating at this text; it is not printed.", "chat name ollama",
        metavar="TEXT", is_repeatable=True,
    )
    # fmt: on
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    on_progress: Callable[[int, int], None] | None = None  # called with (tokens read, tokens to read) during prefill
    # Source of drafts: the text ("ngram"), also the model's MTP layer ("mtp", or "auto" if it has one), also a smaller
    # model (a Drafter), or none ("off").
    # fmt: off
    speculate: "str | Drafter" = declare_setting(
        "auto", None, "--speculate",
        "Speculative decoding, which changes the speed, not the answer: ngram (repeated text), mtp (also the "
        "model's own MTP layer), draft:MODEL (also a smaller model or an EAGLE-3 head), off, or auto (mtp if "
        "the model has such a layer, else ngram).", shown="auto", metavar="HOW",
    )
    # See generation.context_overflow; None: drop-turns in a Session's conversation, else error.
    on_overflow: str | None = declare_setting(
        None, None, "--on-overflow",
        "When the context is full: error (stop), drop-turns (drop the oldest turns), or shift (drop tokens "
        "from the middle). In `run`, if files and stdin do not fit: head or tail (read only the first or the last "
        "lines), middle (leave out the lines in the middle), relevant (score all lines and answer from the "
        "relevant ones), or chunks (ask about each part, then about these answers).", "chat",
        shown="error in run, drop-turns in chat", metavar="HOW",
    )
    keep: int | None = declare_setting(
        None, COUNT, "--keep", "With --on-overflow shift: tokens to keep at the start.", "chat",
        shown="the system message, at least 4",
    )
    # fmt: on
    # In batches: minimum length, in tokens, of a chunk to reuse from the middle of another prompt, see
    # generation.chunk_reuse. 0 or None: off.
    cache_reuse: int | None = None
    # fmt: off
    think: str = declare_setting(
        "auto", None, "--think --reasoning -rea",
        "Thinking: on, off, low, medium, high, or auto (the chat template's default).", "chat name llm",
        shown="auto", metavar="HOW",
    )
    think_budget: int | None = declare_setting(
        None, COUNT, "--think-budget --reasoning-budget", "Maximum number of thinking tokens; -1: no limit.",
        "chat name", shown="-1",
    )
    # fmt: on
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
    # fmt: off
    ban: Sequence[str] = declare_setting(
        (), None, "--ban",
        "Never generate this text, in upper or lower case: go back to its beginning and continue differently.",
        "chat name", metavar="TEXT", is_repeatable=True,
    )
    # fmt: on
    # Scales of low-rank adapters by name, those of others are 0; None: those that the model was opened with.
    lora: Mapping[str, float] | None = None
    result_type: object = None  # the Python type that was given as the schema, or None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            require_integer("max_tokens", self.max_tokens)
        if self.cache_reuse is not None:
            require_integer("cache_reuse", self.cache_reuse)
        if not hasattr(self.speculate, "open_proposer") and self.speculate not in SPECULATE:
            raise UsageError(f"speculate must be {' or '.join(SPECULATE)}, not {self.speculate!r}")
        if self.speculate == "mtp" and self.on_overflow == "shift":
            raise UsageError("MTP (mtp) cannot be combined with on_overflow=shift")
        if self.top_logprobs is not None:
            require_integer("top_logprobs", self.top_logprobs)
        for name in CALLABLES:
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise UsageError(f"{name} must be a function, not {getattr(self, name)!r:.60}")
        if self.stopping_criteria and (self.constraint or self.tools):
            raise UsageError(f"stopping_criteria cannot be combined with {'tools' if self.tools else 'a constraint'}")
        self._require_choices()
        for name in ("stop", "ban"):
            self._normalize_strings(name)

    def _require_choices(self) -> None:
        """Raise UsageError for invalid values of on_overflow, keep, think and think_budget."""
        for name, value, choices in (("on_overflow", self.on_overflow, ON_OVERFLOW), ("think", self.think, THINK)):
            if value not in (*choices, getattr(type(self), name)):
                raise UsageError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")
        if self.keep is not None and self.on_overflow != "shift":
            raise UsageError("keep needs on_overflow=shift: it is the number of tokens to keep at the start")
        if self.keep is not None:
            require_integer("keep", self.keep)
        budget = self.think_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise UsageError(f"think_budget must be an integer, 0 or greater, not {budget!r}")

    def _normalize_strings(self, name: str) -> None:
        """Replace a single string by a tuple. Raises UsageError for an empty string or a value of another type."""
        texts = getattr(self, name)
        if isinstance(texts, str | bytes):
            texts = (texts,)
            object.__setattr__(self, name, texts)
        if not isinstance(texts, Iterable):
            raise UsageError(f"{name} must be a list of strings, not {texts!r}")
        for text in texts:
            if not require_string(name, text):
                raise UsageError(f"{name} must not be empty")

    @property
    def is_compact(self) -> bool:
        """Return whether the answer is JSON whose white space is removed."""
        return self.constraint is not None and self.constraint.is_compact

    def ends_answer(self, ids: list[int], row: "np.ndarray") -> bool:
        """Return whether stopping_criteria ends an answer after these tokens.

        ids: token ids of the prompt and the answer. row: logits after them, float32 [vocab]. Call it once for each
        token, in order, also with speculative decoding.
        """
        criterion = self.stopping_criteria
        return criterion is not None and bool(criterion([*ids], row.copy()))

    def process_logits(self, ids: list[int], row: "np.ndarray") -> "np.ndarray":
        """Return the logits to draw from, float32 [vocab]: those of logits_processor, or `row` without one.

        Call it as `ends_answer`. Raises UsageError for invalid logits.
        """
        if self.logits_processor is None:
            return row
        import numpy as np

        processed = np.asarray(self.logits_processor([*ids], row.copy()))
        if processed.shape != row.shape or processed.dtype.kind != "f":
            raise UsageError(f"logits_processor must return logits of the shape {row.shape}, not {processed.shape}")
        if not np.isfinite(processed.max()):
            message = "logits_processor must return at least one finite logit, and no NaN or positive infinity"
            raise UsageError(message)
        return processed.astype(np.float32, copy=False)

    def compute_limit(self, room: int) -> int:
        """Return the maximum number of tokens of an answer.

        room: number of free positions in the context.
        """
        room = sys.maxsize if self.on_overflow == "shift" else room
        return room if self.max_tokens is None else min(room, self.max_tokens)


OPTIONS = collect_options(GenerationOptions)
