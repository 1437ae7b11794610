"""Score multiple-choice tasks as llama-perplexity does: HellaSwag, Winogrande, ARC, MMLU, TruthfulQA.

The answer with the highest mean log probability per token is chosen. Task selection, scored tokens and averages follow
llama.cpp's tools/perplexity/perplexity.cpp (2026), so that the results are comparable with published ones.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from math import sqrt
from typing import NamedTuple

import numpy as np

from localllm.api import Model
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.choice_tasks import ChoiceTask
from localllm.frozen import frozen
from localllm.generation.choices import PARALLEL, BatchScorer, TokenTrie
from localllm.generation.logprobs import TokenLogprob
from localllm.services.evaluation.scores import compute_wilson_interval
from localllm.text.tokenizer import Tokenizer

TRAILING = 3  # Winogrande: names are not scored if each answer has more tokens than this after the common prefix


# ---- selection of tasks


def select_tasks(kind: str, tasks: Sequence[ChoiceTask], limit: int) -> list[tuple[int, ChoiceTask]]:
    """Return the tasks that llama-perplexity would score, at most `limit` (0: all), with their index in the file.

    llama-perplexity draws with mt19937, seed 1: HellaSwag's tasks always, with libstdc++'s distribution of integers;
    other tasks only if there are more than `limit`, in float32 arithmetic.
    """
    random = np.random.RandomState(1)

    def draw() -> int:
        return int(random.randint(0, 1 << 32, dtype=np.uint32))

    remaining = [*range(len(tasks))]
    if kind == "hellaswag":
        count = min(limit, len(tasks)) if limit else len(tasks)
        numbers = [remaining.pop(draw_below(draw, len(remaining))) for _ in range(count)]
    elif not 0 < limit < len(tasks):
        return [*enumerate(tasks)]
    else:
        numbers = []
        for _ in range(limit):
            index = int(np.float32(draw()) * np.float32(2.0**-32) * np.float32(len(remaining)))
            index = min(index, len(remaining) - 1)
            numbers.append(remaining[index])
            remaining[index] = remaining[-1]
            remaining.pop()
    return [(number, tasks[number]) for number in numbers]


def draw_below(draw: Callable[[], int], count: int) -> int:
    """Return a random integer below `count` (Lemire, arXiv:1805.10941); draw: returns 32 random bits."""
    product = draw() * count
    while product % (1 << 32) < (1 << 32) % count:
        product = draw() * count
    return int(product >> 32)


# ---- scores


class TaskPlan(NamedTuple):
    """A task as token ids, and the tokens whose log probabilities count.

    Attributes:
        prompts: pairs of a prefix and the token lists that follow it: one pair for all answers, or one for each.
        counted: for each answer, the tokens that count.  extra: whether there is one more token list, for Winogrande;
        the score of its last token replaces that of the second answer's first token.
    """

    prompts: list[tuple[list[int], list[list[int]]]]
    counted: list[slice]
    extra: bool = False


def plan_task(task: ChoiceTask, tokenizer: Tokenizer) -> TaskPlan:
    """Split a task's answers into a common prefix, read once, and the scored rests. Raises UsageError."""
    texts = [tokenizer.encode(text, bos=True, eos=True) for text in task.texts]
    shortest = min(map(len, texts))
    prefix = next((at for at in range(shortest) if len({ids[at] for ids in texts}) > 1), shortest)
    prefix = min(prefix, shortest - 1)
    rests = [ids[prefix:] for ids in texts]
    scored, extra = [slice(None)] * len(texts), False
    if task.stems:
        skips = all(len(rest) > TRAILING for rest in rests)
        stems = [len(tokenizer.encode(stem, bos=True, eos=True)) if skips else prefix for stem in task.stems]
        starts = [max(0, stem - prefix) for stem in stems]
        scored = [slice(at, -1 if len(rest) - at > 1 else None) for at, rest in zip(starts, rests, strict=True)]
        extra = not skips and prefix > 0
    if prefix == 0:  # nothing predicts the first token
        if shortest == 1:
            text = next(text for text, ids in zip(task.texts, texts, strict=True) if len(ids) == 1)
            hint = "remove that task, or use a model with a BOS token"
            raise UsageError(f"{text!r} has only one token, which a model without a BOS token cannot score: {hint}")
        scored = [slice(max(0, (each.start or 0) - 1), each.stop) for each in scored]
        return TaskPlan([(ids[:1], [ids[1:]]) for ids in texts], scored)
    return TaskPlan([(texts[0][:prefix], [*rests, *([[*rests[0], rests[1][0]]] if extra else [])])], scored, extra)


def compute_mean_logprobs(plan: TaskPlan, results: Sequence[Sequence[Sequence[TokenLogprob]]]) -> list[float]:
    """Return each answer's mean log probability.

    results: the log probabilities for each prompt's token lists.
    """
    tokens = [[token.logprob for token in text] for result in results for text in result]
    if plan.extra:
        # llama.cpp (2026) predicts the second text's first token from the end of the first text. Its source calls that
        # wrong, but published figures include it. Texts with more than TRAILING tokens after the name are not affected.
        tokens[1][0] = tokens.pop()[-1]
    scored = [text[each] for text, each in zip(tokens, plan.counted, strict=True)]
    return [float(np.mean(text)) for text in scored]


class TaskResult(NamedTuple):
    """A scored task.

    Attributes:
        task: its index in the file.  scores: the mean log probability of each answer's tokens.
    """

    task: int
    scores: list[float]
    chosen: int
    is_correct: bool


def score_tasks(model: Model, tasks: Sequence[tuple[int, ChoiceTask]]) -> Iterator[TaskResult]:
    """Score tasks in batches; yield their results. Raises ContextError for a task that exceeds the context."""
    plans = [plan_task(task, model.tokenizer) for _, task in tasks]
    prompts = [prompt for plan in plans for prompt in plan.prompts]
    scores = BatchScorer[tuple[list[int], list[list[int]]]](
        model.engine, lambda prompt: (model.session.request(prompt[0]), TokenTrie(prompt[1])), precise=True
    )
    with closing(model.batch(scores.create_requests(prompts), PARALLEL, precise=True)) as batch:
        results = raise_first_error(scores.collect_results(batch))
        for (number, task), plan in zip(tasks, plans, strict=True):
            means = compute_mean_logprobs(plan, [next(results) for _ in plan.prompts])
            if not np.isfinite(means).all():
                raise ModelError(f"{model.path}: the logits are not finite; check the weights with `localllm verify`")
            choice = 1 if task.stems and not means[0] > means[1] else int(np.argmax(means))
            yield TaskResult(number, means, choice, choice in task.correct)


def raise_first_error(
    results: Iterator[list[list[TokenLogprob]] | LocalllmError],
) -> Iterator[list[list[TokenLogprob]]]:
    """Yield results; raise the first error among them."""
    for result in results:
        if isinstance(result, LocalllmError):
            raise result
        yield result


# ---- statistics


@frozen
class ChoiceScore:
    """The accuracy on a benchmark's tasks so far."""

    kind: str
    results: tuple[TaskResult, ...] = ()

    @property
    def tasks(self) -> int:
        return len(self.results)

    @property
    def correct(self) -> int:
        return sum(result.is_correct for result in self.results)

    @property
    def accuracy(self) -> float:
        return self.correct / self.tasks

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's 95 % confidence interval (Wilson)."""
        return compute_wilson_interval(self.correct, self.tasks)

    @property
    def chance(self) -> float:
        """The expected accuracy of random guesses."""
        return self.tasks / sum(len(result.scores) for result in self.results)

    def estimate_error(self, share: float) -> float:
        return sqrt(share * (1 - share) / max(self.tasks - 1, 1))

    def to_dict(self) -> dict[str, object]:
        return {
            "benchmark": self.kind, "tasks": self.tasks, "correct": self.correct, "accuracy": self.accuracy,
            "error": self.estimate_error(self.accuracy), "interval": self.interval, "chance": self.chance,
            "results": [result._asdict() for result in self.results],
        }  # fmt: skip
