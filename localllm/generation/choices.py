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
from localllm.generation.prefix_match import common
from localllm.generation.request import Request
from localllm.generation.sampling.sampler import log_total
from localllm.generation.sequence_pool import SequencePool

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence as Tokens

FORKS = 64  # texts in one run
TOGETHER = 16  # prompts that are read in one run
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
    sequences: SequencePool, requests: Sequence[Request], texts: Sequence[list[int]], end_ids: Collection[int] = ()
) -> list[list[list[TokenLogprob]]]:
    """Return, of each request, the log probability of each token of texts, given as ids, behind its prompt.

    end_ids: tokens that end an answer: then that one of them follows counts as one more token, the likeliest one.
    Raises ContextError for a text that does not fit, UsageError, MemoryLimitError.
    """
    require_fit(sequences, requests, texts)
    following = wanted_tokens(texts, end_ids)
    with ExitStack() as stack:
        prompts = read_prompts(sequences, requests, stack)
        known: list[dict[Path, dict[int, float]]] = [{(): logprobs_of(row, following[()])} for _, row in prompts]
        spans = [(number, path) for number in range(len(prompts)) for path in maximal(following)]
        for start in range(0, len(spans), FORKS):
            chunk = spans[start : start + FORKS]
            with ExitStack() as forks:
                runs = [(forks.enter_context(closing(prompts[number][0].fork())), [*path]) for number, path in chunk]
                rows = sequences.engine.run(runs, "all", True)
            for (number, path), of_path in zip(chunk, rows, strict=True):
                for place, row in enumerate(of_path):
                    known[number][path[: place + 1]] = logprobs_of(row, following[path[: place + 1]])
    return [[scored(ids, of_prompt, end_ids) for ids in texts] for of_prompt in known]


def require_fit(sequences: SequencePool, requests: Sequence[Request], texts: Sequence[list[int]]) -> None:
    """Raise ContextError for a prompt whose texts do not fit, and UsageError."""
    context, longest = sequences.engine.context, max(map(len, texts))
    if sequences.engine.hyperparameters.fills:
        raise UsageError("a diffusion model does not give probabilities of texts")
    for request in requests:
        request.task.require_room(context)
        if (length := len(request.prompt)) + longest > context:
            raise ContextError(f"the prompt has {length} tokens and the longest text {longest}, the context {context}")


def wanted_tokens(texts: Sequence[list[int]], end_ids: Collection[int]) -> dict[Path, set[int]]:
    """Return, behind each beginning of a text, the tokens whose log probabilities are wanted."""
    following = {tuple(ids[:place]): set(end_ids) for ids in texts for place in range(max(1, len(ids) + bool(end_ids)))}
    for ids in texts:
        for place, token in enumerate(ids):
            following[tuple(ids[:place])].add(token)
    return following


def read_prompts(
    sequences: SequencePool, requests: Sequence[Request], stack: ExitStack
) -> list[tuple["Tokens", np.ndarray]]:
    """Read prompts, together what several do not share; sequences that hold them, good for as long as the stack is
    open, and the logits behind each, float32 [vocab].
    """
    if len(requests) == 1:
        prompt = requests[0].prompt
        begun = stack.enter_context(sequences.beginning_with(prompt))
        cached, logits = len(begun.sequence.tokens), begun.logits
        if logits is None:
            logits = read_prompt(begun.sequence, prompt, None)
            sequences.was_read(begun.sequence, cached, logits)
        return [(cast("Tokens", begun.sequence), logits[-1].copy())]
    prompts = [request.prompt for request in requests]
    same = min(min(common(prompts[0], prompt), len(prompt) - 1) for prompt in prompts)
    if same == 0 or any(request.task.seen for request in requests):
        return [read for request in requests for read in read_prompts(sequences, [request], stack)]
    begun = stack.enter_context(sequences.beginning_with(prompts[0][:same]))
    if begun.logits is None:
        read_prompt(begun.sequence, prompts[0][:same], None)
    forks = [cast("Tokens", stack.enter_context(closing(begun.sequence.fork()))) for _ in prompts]
    rows = sequences.engine.run(
        [(fork, prompt[same:]) for fork, prompt in zip(forks, prompts, strict=True)], "last", True
    )
    return [(fork, row[-1].copy()) for fork, row in zip(forks, rows, strict=True)]


def maximal(paths: Collection[Path]) -> list[Path]:
    """Return the paths that are not the beginning of another one: reading these reads all."""
    ordered = sorted(path for path in paths if path)
    following = [*ordered[1:], ()]
    return [path for path, other in zip(ordered, following, strict=False) if other[: len(path)] != path]


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
