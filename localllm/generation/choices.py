"""Exact log probabilities of given texts behind a prompt, read together: which of a few answers is the likeliest.

The prompt is read once, and every text in a fork of the sequence that holds it, all in one run of the model.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from localllm.errors import ContextError, UsageError
from localllm.generation.chunked_prefill import read_prompt
from localllm.generation.logprobs import TokenLogprob
from localllm.generation.request import Request
from localllm.generation.sampling.sampler import log_total
from localllm.generation.sequence_pool import SequencePool

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence as Tokens

FORKS = 64  # texts in one run
Path = tuple[int, ...]  # tokens behind a prompt


class Choice(NamedTuple):
    """One of several texts.

    Attributes:
        logprob: the natural logarithm of its probability behind the prompt.  probability: among the texts given.
    """

    text: str
    logprob: float
    probability: float


class Score(NamedTuple):
    """A text's log probability behind a prompt: the sum of those of its tokens."""

    logprob: float
    tokens: list[TokenLogprob]


def choices_of(texts: Sequence[str], logprobs: Sequence[float]) -> list[Choice]:
    """Return texts with probabilities that add up to 1, the likeliest first."""
    most = max(logprobs)
    weights = [math.exp(logprob - most) if most > -math.inf else 1.0 for logprob in logprobs]
    total = sum(weights)
    made = [Choice(text, one, weight / total) for text, one, weight in zip(texts, logprobs, weights, strict=True)]
    return sorted(made, key=lambda choice: -choice.logprob)


def require_texts(texts: Sequence[str]) -> list[str]:
    """Return several texts, each once. Raises UsageError."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UsageError("choices should be a list of texts")
    if not texts or not all(texts) or len(set(texts)) < len(texts):
        raise UsageError("choices should be texts that are not empty, each given once")
    return [*texts]


def text_logprobs(
    sequences: SequencePool, request: Request, texts: Sequence[list[int]], end_ids: Collection[int] = ()
) -> list[list[TokenLogprob]]:
    """Return the log probability of each token of texts, given as ids, behind a request's prompt.

    end_ids: tokens that end an answer: then that one of them follows counts as one more token, the likeliest one.
    Raises ContextError for a text that does not fit, UsageError, MemoryLimitError.
    """
    engine, prompt = sequences.engine, request.prompt
    if engine.hyperparameters.fills:
        raise UsageError("a diffusion model does not give probabilities of texts")
    request.task.require_room(engine.context)
    longest = max(map(len, texts))
    if len(prompt) + longest > engine.context:
        raise ContextError(
            f"the prompt has {len(prompt)} tokens and the longest text {longest}, the context {engine.context}"
        )
    with sequences.beginning_with(prompt) as begun:
        sequence, logits = cast("Tokens", begun.sequence), begun.logits
        cached = len(sequence.tokens)
        if logits is None:
            logits = read_prompt(sequence, prompt, None)
            sequences.was_read(sequence, cached, logits)
        request.cached = cached
        paths = {tuple(ids[:place]) for ids in texts for place in range(len(ids) + bool(end_ids))}
        following = {path: {*end_ids} for path in paths}  # the tokens whose log probabilities are wanted
        for ids in texts:
            for place, token in enumerate(ids):
                following[tuple(ids[:place])].add(token)
        known: dict[Path, dict[int, float]] = {(): logprobs_of(logits[-1], following[()])}
        longest_paths = maximal(paths)
        for start in range(0, len(longest_paths), FORKS):
            known |= read_paths(sequences, sequence, longest_paths[start : start + FORKS], following)
    return [scored(ids, known, end_ids) for ids in texts]


def maximal(paths: Collection[Path]) -> list[Path]:
    """Return the paths that are not the beginning of another one: reading these reads all."""
    ordered = sorted(path for path in paths if path)
    following = [*ordered[1:], ()]
    return [path for path, other in zip(ordered, following, strict=False) if other[: len(path)] != path]


def read_paths(
    sequences: SequencePool, sequence: "Tokens", paths: Sequence[Path], following: Mapping[Path, Collection[int]]
) -> dict[Path, dict[int, float]]:
    """Read paths behind a sequence, each in a fork, in one run; log probabilities behind every beginning of them."""
    with ExitStack() as stack:
        forks = [stack.enter_context(closing(sequence.fork())) for _ in paths]
        rows = sequences.engine.run([(fork, [*path]) for fork, path in zip(forks, paths, strict=True)], "all", True)
    return {
        path[: place + 1]: logprobs_of(row, following[path[: place + 1]])
        for path, of_path in zip(paths, rows, strict=True)
        for place, row in enumerate(of_path)
    }


def logprobs_of(row: np.ndarray, tokens: Collection[int]) -> dict[int, float]:
    """Return log probabilities by token; row: logits, float32 [vocab]."""
    total = log_total(row)
    return {token: float(row[token]) - total for token in tokens if token < len(row)}


def scored(ids: list[int], known: Mapping[Path, Mapping[int, float]], end_ids: Collection[int]) -> list[TokenLogprob]:
    """Return the log probability of each token, and of an end by any of `end_ids`, named by the likeliest one."""
    found = [TokenLogprob(token, known[tuple(ids[:place])][token]) for place, token in enumerate(ids)]
    ends = {token: known[tuple(ids)][token] for token in end_ids if token in known[tuple(ids)]} if end_ids else {}
    if ends:
        found.append(TokenLogprob(max(ends, key=ends.__getitem__), math.log(math.fsum(map(math.exp, ends.values())))))
    return found
