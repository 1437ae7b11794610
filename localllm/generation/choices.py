"""Compute exact log probabilities of texts after a prompt, to choose the likeliest text.

A prompt is prefilled once. The logits after it score the first token of every text, so texts of one token cost nothing
more. Longer texts are read in forks of the prompt's sequence, those of several prompts in one run of the model.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from localllm.engine.runs import PRECISE_TOKENS
from localllm.errors import ContextError, LocalllmError, UsageError
from localllm.generation.logprobs import TokenLogprob
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.request import Completion, Request
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.sampling.sampler import log_sum_exp
from localllm.generation.scheduler import Scheduler
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.sequence import Sequence as Tokens
    from localllm.generation.reasoning import TextPart

GREEDY = SamplingOptions(temperature=0)
PARALLEL = 64  # prompts that are read at once
STEM = 16  # a common prefix of texts is read once if that saves at least this many tokens
Path = tuple[int, ...]  # tokens after a prompt


class Choice(NamedTuple):
    """One of several texts, with its probability.

    Attributes:
        logprob: natural logarithm of its probability after the prompt.
        probability: its share of the sum of the probabilities of all choices, 0 to 1.
    """

    text: str
    logprob: float
    probability: float

    def to_dict(self) -> dict[str, str | float]:
        """Return the choice as values of JSON."""
        return self._asdict()


class Score(NamedTuple):
    """The log probability of a text after a prompt.

    Attributes:
        logprob: sum over the tokens.  tokens: the log probability of each token.
    """

    logprob: float
    tokens: list[TokenLogprob]

    def to_dict(self) -> dict[str, object]:
        """Return the score as values of JSON."""
        return {"logprob": self.logprob, "tokens": [token._asdict() for token in self.tokens]}


def rank_choices(texts: Sequence[str], tokens: Sequence[Sequence[TokenLogprob]]) -> list[Choice]:
    """Return texts with probabilities that add up to 1, the likeliest first.

    tokens: log probabilities of the tokens of each text.
    """
    logprobs = [math.fsum(token.logprob for token in of_text) for of_text in tokens]
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) if highest > -math.inf else 1.0 for logprob in logprobs]
    total = sum(weights)
    choices = [
        Choice(text, text_logprob, weight / total)
        for text, text_logprob, weight in zip(texts, logprobs, weights, strict=True)
    ]
    return sorted(choices, key=lambda choice: -choice.logprob)


def require_choices(texts: Sequence[str]) -> list[str]:
    """Return the texts as a list. Raises UsageError unless they are different, non-empty strings."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"choices must be a list of strings, not {texts!r:.80}")
    if not texts or not all(texts) or len(set(texts)) < len(texts):
        raise UsageError("choices must be different, non-empty strings")
    return [*texts]


class TokenTrie:
    """The texts to score after a prompt, as a trie of tokens.

    Attributes:
        texts: token ids of each text.
        end_ids: end tokens, one of which must follow a text; empty if anything may follow.
        longest: number of tokens of the longest text.
        paths: prefixes of texts that the model must read, none of which is a prefix of another.
    """

    def __init__(self, texts: Sequence[list[int]], end_ids: Collection[int] = ()):
        self.texts, self.end_ids, self.longest = texts, end_ids, max(map(len, texts))
        self._following = collect_wanted_tokens(texts, end_ids)
        self.paths = drop_prefixes(self._following)

    def compute_logprobs(self, path: Path, row: np.ndarray) -> dict[int, float]:
        """Return the log probabilities of the tokens that may follow a path, by token id.

        row: logits after the path, float32 [vocab].
        """
        following = self._following.get(path)
        total = log_sum_exp(row) if following else 0
        return {token: float(row[token]) - total for token in following or () if token < len(row)}

    def require_fit(self, request: Request, engine: "Engine") -> None:
        """Raise ContextError if the prompt and the longest text together exceed the context.

        Raises UsageError for a diffusion model, which has no probabilities of texts.
        """
        if engine.hyperparameters.is_diffusion:
            raise UsageError("a diffusion model has no probabilities of texts: use another model to choose or score")
        request.task.require_room(engine.context)
        if (length := len(request.prompt)) + self.longest > engine.context:
            texts = f"the longest text {self.longest}, but the context holds only {engine.context}"
            raise ContextError(f"the prompt has {length} tokens and {texts}")


class ScoredPrompt:
    """A prefilled prompt, and the log probabilities computed so far for the tokens after it.

    Attributes:
        tree: the texts to score.
        sequence: the KV cache of the prompt; None if the logits after it suffice.
    """

    def __init__(self, tree: TokenTrie, sequence: "Tokens | None", row: np.ndarray):
        """Score the first token of each text.

        row: logits after the prompt, float32 [vocab].
        """
        self.tree, self.sequence = tree, sequence
        self._logprobs: dict[Path, dict[int, float]] = {(): tree.compute_logprobs((), row)}
        self._forks: list[Tokens] = []

    def fork(self, sequence: "Tokens") -> "Tokens":
        """Return a fork of a sequence, which `close` closes."""
        self._forks.append(sequence.fork())
        return self._forks[-1]

    def record_logprobs(self, begin: Path, ids: Path, rows: np.ndarray) -> None:
        """Record the log probabilities after each token of `ids`, which follow the path `begin`.

        rows: logits, float32 [len(ids), vocab].
        """
        for place, row in enumerate(rows):
            path = (*begin, *ids[: place + 1])
            self._logprobs[path] = self.tree.compute_logprobs(path, row)

    def compute_logprobs(self) -> list[list[TokenLogprob]]:
        """Return the log probability of each token of each text."""
        return [score_tokens(ids, self._logprobs, self.tree.end_ids) for ids in self.tree.texts]

    def close(self) -> None:
        """Close all forks."""
        for fork in self._forks:
            fork.close()
        self._forks = []


class TrieBranch(NamedTuple):
    """Tokens to read after a prompt and a path, shared by several longer paths.

    Attributes:
        sequence: the KV cache of the prompt and `begin`.  begin: the path before.
        ids: tokens to read.  paths: the paths that begin with `begin` and `ids`.
    """

    prompt: ScoredPrompt
    sequence: "Tokens"
    begin: Path
    ids: Path
    paths: list[Path]


def split_branches(prompt: ScoredPrompt, sequence: "Tokens", begin: Path, paths: list[Path]) -> Iterator[TrieBranch]:
    """Split sorted paths that begin with `begin` into branches.

    Paths share a branch where reading their common tokens once pays, see STEM.
    """
    groups: dict[int, list[Path]] = {}
    for path in paths:
        if len(path) > len(begin):
            groups.setdefault(path[len(begin)], []).append(path)
    for group in groups.values():
        first, last = group[0], group[-1]
        stem = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, group)))
        if (len(group) - 1) * (stem - len(begin)) >= STEM:
            yield TrieBranch(prompt, prompt.fork(sequence), begin, first[len(begin) : stem], group)
        else:
            yield from (TrieBranch(prompt, prompt.fork(sequence), begin, path[len(begin) :], [path]) for path in group)


def score_texts(engine: "Engine", prompts: Sequence[ScoredPrompt], precise: bool) -> None:
    """Read the texts of several prompts, in runs of at most PRECISE_TOKENS tokens, and record their log probabilities.

    precise: use 16-bit activations and the kernels of a full run.
    """
    waiting = [
        each_branch
        for each in prompts
        if each.sequence
        for each_branch in split_branches(each, each.sequence, (), each.tree.paths)
    ]
    while waiting:
        tokens = np.cumsum([len(branch.ids) for branch in waiting])
        count = max(1, int(np.searchsorted(tokens, PRECISE_TOKENS, "right")))
        batch, waiting = waiting[:count], waiting[count:]
        spans = [(branch.sequence, [*branch.ids]) for branch in batch]
        rows = engine.run(spans, "all", precise, [PRECISE_TOKENS] * len(spans) if precise else ())
        for (prompt, sequence, begin, ids, paths), of_branch in zip(batch, rows, strict=True):
            prompt.record_logprobs(begin, ids, of_branch)
            waiting += split_branches(prompt, sequence, (*begin, *ids), paths)


T = TypeVar("T")


class BatchScorer(Generic[T]):
    """Scores texts after many prompts, which a scheduler prefills in batches.

    Pass `create_requests` to the scheduler, and iterate over `collect_results`, which follows the order of the prompts.
    """

    def __init__(self, engine: "Engine", prepare: Callable[[T], tuple[Request, TokenTrie]], precise: bool):
        """Store the engine and the options of scoring.

        prepare: converts a prompt to a request and the texts to score, or raises LocalllmError. precise: see
        score_request.
        """
        self._engine, self._prepare, self._precise = engine, prepare, precise
        self._results = dict[int, list[list[TokenLogprob]] | LocalllmError]()
        self._read = dict[int, ScoredPrompt]()
        self._trees = dict[int, TokenTrie]()

    def create_requests(self, prompts: Iterable[T]) -> Iterator[Request]:
        """Yield a request for each prompt; an error of `prepare` becomes the result of its prompt."""
        for number, prompt in enumerate(prompts):
            try:
                request, self._trees[number] = self._prepare(prompt)
                self._trees[number].require_fit(request, self._engine)
            except LocalllmError as error:
                self._results[number] = error
                continue
            options = replace(request.task.options, max_tokens=1, sampling=GREEDY, speculate="off")
            task = replace(request.task, options=options)
            yield Request(task, key=number, listener=self._record_prompt, is_measured=self._precise)

    def _record_prompt(self, answer: Completion, token: int | None, parts: "list[TextPart]", row: np.ndarray) -> None:
        """Record the logits after a prompt, and fork its sequence if texts remain to be read."""
        tree = self._trees.pop(answer.request.key)
        fork = answer.sequence.fork() if tree.paths and answer.sequence else None
        self._read[answer.request.key] = ScoredPrompt(tree, fork, row)

    def collect_results(self, scheduler: Scheduler) -> Iterator[list[list[TokenLogprob]] | LocalllmError]:
        """Yield the log probabilities of each prompt's texts, or its error.

        scheduler: the scheduler that runs the requests.
        """
        next_number = 0
        for finished in scheduler:
            self._results |= {request.key: request.error for request in finished if request.error}
            self._finish()
            while (result := self._results.pop(next_number, None)) is not None:
                yield result
                next_number += 1
        yield from (self._results[number] for number in sorted(self._results))

    def _finish(self) -> None:
        """Score the prompts that have been prefilled."""
        read, self._read = self._read, {}
        with ExitStack() as stack:
            for each in read.values():
                stack.enter_context(closing(each))
                if each.sequence:
                    stack.enter_context(closing(each.sequence))
            try:
                score_texts(self._engine, [*read.values()], self._precise)
                self._results |= {number: each.compute_logprobs() for number, each in read.items()}
            except LocalllmError as error:
                self._results |= dict.fromkeys(read, error)


def score_request(
    cache: PrefixCache, tokenizer: Tokenizer, request: Request, tree: TokenTrie, precise: bool = True
) -> list[list[TokenLogprob]]:
    """Return the log probability of each token of each text after a prompt.

    precise: use 16-bit activations however long the prompt is; otherwise prefill it as for an answer. Raises
    ContextError for a text that does not fit, UsageError and MemoryLimitError.
    """
    scores = BatchScorer(cache.engine, lambda prompt: (prompt, tree), precise)
    requests = scores.create_requests([request])
    with closing(Scheduler(cache.engine, tokenizer, requests, cache=cache)) as scheduler:
        (result,) = scores.collect_results(scheduler)
    cache.collect()
    if isinstance(result, LocalllmError):
        raise result
    return result


def collect_wanted_tokens(texts: Sequence[list[int]], end_ids: Collection[int]) -> dict[Path, set[int]]:
    """Return the tokens to score after each prefix of a text."""
    following = {tuple(ids[:place]): set(end_ids) for ids in texts for place in range(max(1, len(ids) + bool(end_ids)))}
    for ids in texts:
        for place, token in enumerate(ids):
            following[tuple(ids[:place])].add(token)
    return following


def drop_prefixes(paths: Collection[Path]) -> list[Path]:
    """Return the paths that are not a prefix of another path; reading these reads all."""
    ordered = sorted(path for path in paths if path)
    following = [*ordered[1:], ()]
    return [
        path for path, following_path in zip(ordered, following, strict=False) if following_path[: len(path)] != path
    ]


def score_tokens(
    ids: list[int], logprobs_by_path: Mapping[Path, Mapping[int, float]], end_ids: Collection[int]
) -> list[TokenLogprob]:
    """Return the log probability of each token of a text.

    With `end_ids`, the likeliest end token is added, with the probability that any of them follows.
    """
    scores = [TokenLogprob(token, logprobs_by_path[tuple(ids[:place])][token]) for place, token in enumerate(ids)]
    at_end = logprobs_by_path[tuple(ids)] if end_ids else {}
    ends = {token: at_end[token] for token in end_ids if token in at_end}
    if ends:
        scores.append(TokenLogprob(max(ends, key=ends.__getitem__), math.log(math.fsum(map(math.exp, ends.values())))))
    return scores
