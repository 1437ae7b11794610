"""Generate several answers to one prompt: n sampled ones, or the likeliest ones of a beam search.

The prompt is prefilled once. Every beam continues in a fork of its sequence, and one step of the scheduler extends all
beams by one token.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from operator import attrgetter
from typing import TypeVar

import numpy as np

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.options import CALLABLES
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.request import Completion, PromptTask, Request
from localllm.generation.sampling.candidates import Candidates
from localllm.generation.sampling.sampler import log_sum_exp
from localllm.generation.sampling.steps import keep_allowed, top_k
from localllm.generation.scheduler import Scheduler
from localllm.text.tokenizer import Tokenizer
from localllm.values import require_integer


@frozen
class Answer:
    """One of several answers to a prompt.

    Attributes:
        text, tokens, thinking: as in Generation.
        logprob: natural logarithm of the answer's probability by the model's logits, before sampling options and
            including the token that ended it.
        finish_reason: "stop" or "length".
        seed: reproduces the answer with a Generation; None for beam search.
    """

    text: str
    tokens: list[int]
    logprob: float
    finish_reason: str
    seed: int | None = None
    thinking: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the answer as values of JSON."""
        return asdict(self)

    def _repr_markdown_(self) -> str:
        return self.text


Found = TypeVar("Found", bound=Answer | Completion)


def require_counts(n: int, beams: int) -> None:
    """Raise UsageError for invalid numbers of answers and beams."""
    require_integer("n", n, 1)
    require_integer("beams", beams)
    if beams and n > beams:
        raise UsageError(f"{n} answers need at least as many beams (found {beams}): raise beams, or lower n")


def generate_answers(
    cache: PrefixCache, tokenizer: Tokenizer, task: PromptTask, n: int = 1, beams: int = 0, length_penalty: float = 0.0
) -> list[Answer]:
    """Return n answers, best first: sampled ones, or, with `beams`, the n likeliest of a beam search.

    Sampled answers are compared by log probability per token, those of a beam search by log probability, divided by
    the number of tokens to the power of length_penalty. Raises UsageError for options that beam search does not have,
    and ContextError.
    """
    require_counts(n, beams)
    require_penalty(beams, length_penalty)
    for name in ("logit_bias", "ignore_eos"):
        if beams and getattr(task.options.sampling, name):
            raise UsageError(f"{name} cannot be combined with beams: beam search does not sample")
    for name in ("ban", *CALLABLES):
        if beams and getattr(task.options, name):
            raise UsageError(f"{name} cannot be combined with beams: beam search does not sample")
    if beams:
        task = replace(task, options=replace(task.options, speculate="off"))
    search = BeamSearch(beams, tokenizer, length_penalty) if beams else None
    request = Request(task, 1 if beams else n, is_scored=True, search=search)
    request.create_answers(cache.engine, tokenizer)
    with closing(Scheduler(cache.engine, tokenizer, [request], n, cache=cache)) as scheduler:
        for _ in scheduler:
            pass
    if request.error:
        raise request.error
    return [
        Answer(
            answer.text,
            answer.tokens,
            answer.logprob,
            answer.finish_reason,
            None if beams else answer.seed,
            answer.thinking,
        )
        for answer in request.answers[:n]
    ]


def require_penalty(beams: int, length_penalty: object) -> None:
    """Raise UsageError for a length penalty that is no finite number, or without beams."""
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, int | float):
        raise UsageError(f"length_penalty must be a number, not {length_penalty!r}")
    if not math.isfinite(length_penalty):
        raise UsageError(f"length_penalty must be finite, not {length_penalty}")
    if length_penalty and not beams:
        raise UsageError("length_penalty needs beams: sampled answers are ranked by their log probability per token")


class BeamSearch:
    """Search for the likeliest answers with different texts, without sampling.

    Each step keeps the likeliest continuations, and only the best of several with the same text. The search ends when
    `beams` answers have finished and no unfinished one has a better score than the worst of them, since log
    probabilities only fall. (With a length penalty a longer answer may still overtake; as in transformers, scores at
    the current length are compared.) It also ends at max_tokens or when the context is full; unfinished answers then
    count as results.

    Attributes:
        results: at most `beams` finished answers, the best first.
    """

    def __init__(self, beams: int, tokenizer: Tokenizer, length_penalty: float = 0.0):
        """Set up a search; length_penalty: above 0 favors long answers, below 0 short ones."""
        self._beams, self._tokenizer, self.results = beams, tokenizer, list[Completion]()
        self._penalty = length_penalty

    def _score(self, answer: Completion) -> float:
        """Return an answer's log probability, divided by its length to the power of the penalty."""
        length = max(len(answer.tokens) + answer.has_ended, 1)
        return answer.logprob / math.pow(length, self._penalty)

    def expand(self, answers: list[Completion], rows: list[np.ndarray]) -> list[tuple[Completion, Completion]]:
        """Extend the answers by a token; see AnswerSearch.expand."""
        going, ended = self._extend_beams(answers, rows)
        self._add(ended)
        first = going[0][0] if going else None
        is_full = len(self.results) == self._beams
        if (
            first
            and first.remaining_tokens
            and not (is_full and self._score(self.results[-1]) >= max(self._score(child) for child, _ in going))
        ):
            return going
        self._add([child for child, _ in going])
        return []

    def _add(self, answers: list[Completion]) -> None:
        """Finish answers and add them to the results."""
        for answer in answers:
            answer.finish()
        self.results = select_best([*self.results, *answers], self._beams, self._score)

    def _extend_beams(
        self, answers: list[Completion], rows: list[np.ndarray]
    ) -> tuple[list[tuple[Completion, Completion]], list[Completion]]:
        """Extend answers by a token; return at most `beams` unfinished ones, likeliest first, and the finished ones.

        An answer finishes only if it is among the `beams` likeliest continuations; otherwise unlikely endings would
        crowd out unfinished answers. Enough candidates are ranked that `beams` remain without end tokens and
        duplicates.
        """
        going, finished = dict[bytes, tuple[Completion, Completion]](), list[Completion]()
        count = self._beams * (2 + len(answers[0].end_ids))
        for rank, (logprob, token, parent) in enumerate(rank_continuations(answers, rows, count)):
            child = parent.copy_with_token(token, logprob)
            if not child.has_ended:
                text = b"".join(self._tokenizer.token_bytes(each, True) for each in child.tokens)
                going.setdefault(text, (child, parent))
            elif rank < self._beams:
                finished.append(child)
            if len(going) == self._beams:
                break
        return [*going.values()], finished


def select_best(
    answers: Sequence[Found], count: int, score: Callable[[Found], float] = attrgetter("logprob")
) -> list[Found]:
    """Return the `count` best answers, best first, with only the best of several that have the same text.

    score: by default the log probability.
    """
    by_text: dict[str, Found] = {}
    for answer in sorted(answers, key=score, reverse=True):
        by_text.setdefault(answer.text, answer)
    return [*by_text.values()][:count]


def rank_continuations(
    answers: list[Completion], rows: list[np.ndarray], count: int
) -> list[tuple[float, int, Completion]]:
    """Return the `count` likeliest continuations, best first: (log probability, token, answer).

    rows: logits after each answer, float32 [vocab]. Of equally likely ones, the lower token id comes first, then the
    better answer. Raises LocalllmError for logits that contain NaN.
    """
    extended = list[tuple[float, int, int, float]]()
    ids = np.arange(len(rows[0]))
    for number, (answer, row) in enumerate(zip(answers, rows, strict=True)):
        candidates, allowed = Candidates(ids, row), answer.guide.compute_allowed_mask(len(ids))
        candidates = top_k(candidates if allowed is None else keep_allowed(candidates, allowed), count)
        total = log_sum_exp(row)
        for token, logit in zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True):
            if logit > -math.inf:
                extended.append((-(answer.logprob + (logit - total)), token, number, logit - total))
    return [(logprob, token, answers[number]) for _, token, number, logprob in sorted(extended)[:count]]
