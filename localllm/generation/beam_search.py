"""Several answers to one prompt: n that are sampled, or the likeliest that beam search finds.

The prompt is read once. Every answer in the making goes on in a fork of the sequence that holds it, and one step of the
engine takes all of them one token further.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from localllm.engine.image_tokens import is_worth_keeping
from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.constraints.token_mask import AnswerState
from localllm.generation.prefill import read_prompt
from localllm.generation.request import Task, seeded
from localllm.generation.sampling.candidates import Candidates
from localllm.generation.sampling.sampler import Sampler, log_total
from localllm.generation.sampling.steps import only, top_k
from localllm.text.tokenizer import Tokenizer
from localllm.values import whole_number

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.memory.prefix_cache import PrefixCache
    from localllm.engine.sequence import Sequence


@frozen
class Answer:
    """One of several answers to a prompt.

    Attributes:
        text, tokens, thinking: as of a Generation, without what ended it.
        logprob: the natural logarithm of its probability by the model's own logits, whatever it was chosen by; the
            token that ended it counts.
        finish_reason: "stop" or "length".
        seed: with which a Generation gives the same answer; None if it was not drawn.
    """

    text: str
    tokens: list[int]
    logprob: float
    finish_reason: str
    seed: int | None = None
    thinking: str = ""


@dataclass
class Hypothesis:
    """An answer in the making, or made. `length` counts the token that ended it, `tokens` does not have it."""

    sequence: "Sequence"  # holds the prompt and all tokens but the last, until Search.advance
    logits: np.ndarray  # float32 [vocab], after what the sequence holds; good until the engine runs again
    guide: AnswerState
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    length: int = 0
    finished: bool = False

    @property
    def score(self) -> float:
        """The log probability per token, by which answers of different lengths are compared."""
        return self.logprob / max(self.length, 1)

    def then(self, token: int, logprob: float, end_ids: frozenset[int]) -> "Hypothesis":
        """This one with a token more, which may finish it."""
        twin = replace(self, guide=self.guide.copy())
        twin.logprob, twin.length = self.logprob + logprob, self.length + 1
        if token in end_ids:
            twin.finished = True
            return twin
        twin.tokens = [*self.tokens, token]
        twin.guide.accept(token)
        twin.finished = twin.guide.has_ended
        return twin

    def answer(self, seed: int | None = None) -> Answer:
        """What has become of it, with the text that was held back."""
        said = self.guide.transcript
        said.flush(self.finished)
        reason = "stop" if self.finished else "length"
        return Answer(said.text, self.tokens, self.logprob, reason, seed, said.thinking)


class BeamSearch:
    """The forks of one prompt. Use it as `with AnswerSearch(...) as search, search:`; at its end they are all closed.

    Twice, because Ctrl-C may strike just before or in the middle of the first `__exit__`: then the second has the rest.

    Attributes:
        task: what is answered, and how.
        tokenizer: the model's.  limit: the most tokens that an answer may have.
        vocab: how many tokens exist.  end_ids: those that end an answer.
    """

    def __init__(
        self,
        engine: "Engine",
        tokenizer: Tokenizer,
        task: Task,
        prefixes: "PrefixCache | None" = None,
    ):
        """Raises UsageError for an empty prompt and ContextError for one that leaves no room for an answer."""
        task.require_room(engine.context)
        self.task, self.tokenizer = task, tokenizer
        self.limit = task.options.limit(engine.context - len(task.prompt))
        self.vocab, self.end_ids = min(engine.vocab_size, tokenizer.vocab_size), tokenizer.end_ids
        self._engine, self._prefixes = engine, prefixes
        self._guide = task.guide(tokenizer, engine.vocab_size)
        self._held: list[Sequence] = []
        self._end: tuple[Sequence, np.ndarray] | None = None  # of a prompt that was read, to be written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        end, self._end = self._end, None
        if end and self._prefixes and kind is None:
            self._prefixes.keep(*end)
        elif end:
            end[0].close()
        self._close(self._held)

    def read(self) -> Hypothesis:
        """Read the prompt (prefill): the hypothesis without tokens, with which all others begin."""
        prompt = self.task.prompt
        found = self._prefixes.find(prompt) if self._prefixes else None
        self._held.append(found.sequence if found else self._engine.sequence())
        logits = found.logits if found else None
        if logits is None:
            logits = read_prompt(self._held[0], prompt, self.task.options.on_progress)
            if self._prefixes and is_worth_keeping(prompt):
                self._end = self._held[0].fork(), logits
        return Hypothesis(self._held[0], logits[-1, : self.vocab], self._guide)

    def advance(self, hypotheses: list[Hypothesis]) -> None:
        """Run the last token of each in a sequence of its own, and close the sequences that none of them needs.

        Of several that share a sequence, the last goes on in it and the others in forks.
        """
        users = Counter(id(hypothesis.sequence) for hypothesis in hypotheses)
        self._close([sequence for sequence in self._held if id(sequence) not in users])
        for hypothesis in hypotheses:
            shared = id(hypothesis.sequence)
            users[shared] -= 1
            if users[shared]:
                self._held.append(hypothesis.sequence.fork())
                hypothesis.sequence = self._held[-1]
        rows = self._engine.step([(hypothesis.sequence, hypothesis.tokens[-1:]) for hypothesis in hypotheses])
        for hypothesis, row in zip(hypotheses, rows, strict=True):
            hypothesis.logits = row[-1, : self.vocab]

    def _close(self, sequences: list["Sequence"]) -> None:
        for sequence in list(sequences):
            sequence.close()
            self._held.remove(sequence)


def require_counts(n: int, beams: int) -> None:
    """Raises UsageError for numbers of answers and beams that make no sense."""
    whole_number("n", n, 1)
    whole_number("beams", beams)
    if beams and n > beams:
        raise UsageError(f"{beams} beams cannot give {n} answers")


def answers(
    engine: "Engine",
    tokenizer: Tokenizer,
    task: Task,
    n: int = 1,
    beams: int = 0,
    prefixes: "PrefixCache | None" = None,
) -> list[Answer]:
    """The n best of several answers, best first: n sampled ones, or with `beams` what beam search finds.

    prefixes: what is kept of prompts, or None. Best is the highest log probability per token. Raises UsageError and
    ContextError.
    """
    require_counts(n, beams)
    for name in ("logit_bias", "ignore_eos"):
        if beams and getattr(task.options.sampling, name):
            raise UsageError(f"beams draw nothing, so {name} makes no sense with them")
    with BeamSearch(engine, tokenizer, task, prefixes) as search, search:
        return beam_search(search, beams)[:n] if beams else n_best(search, n)


def distinct(answers: list[Answer]) -> list[Answer]:
    """Without those whose text a better one has: other tokens may say the same."""
    found: dict[str, Answer] = {}
    for answer in answers:
        found.setdefault(answer.text, answer)
    return [*found.values()]


def n_best(search: BeamSearch, n: int) -> list[Answer]:
    """n sampled answers, best first. Each is what it would be alone: they have the seeds seed, seed + 1, and so on."""
    samplers = seeded(search.task.options.sampling, search.task.prompt, search.vocab, n, search.tokenizer)
    hypotheses = [search.read()] * n
    going = list(range(n))
    for length in range(search.limit):
        if length:
            search.advance([hypotheses[number] for number in going])
        for number in going:
            hypotheses[number] = drawn(hypotheses[number], samplers[number], search.end_ids)
        going = [number for number in going if not hypotheses[number].finished]
        if not going:
            break
    order = sorted(range(n), key=lambda number: -hypotheses[number].score)
    return [hypotheses[number].answer(samplers[number].seed) for number in order]


def drawn(hypothesis: Hypothesis, sampler: Sampler, end_ids: frozenset[int]) -> Hypothesis:
    """The hypothesis with a token more, which the sampler chooses."""
    token = hypothesis.guide.choose(sampler, hypothesis.logits)
    sampler.accept(token)
    return hypothesis.then(token, float(hypothesis.logits[token]) - log_total(hypothesis.logits), end_ids)


def beam_search(search: BeamSearch, beams: int) -> list[Answer]:
    """At most `beams` answers, best first: those that a search of this width finds. Nothing is drawn.

    From token to token the likeliest continuations stay, by the sum of log probabilities. Finished ones are compared by
    that sum divided by length ** alpha (the length penalty of Wu et al. 2016, in the form and with the alpha of 1 that
    Hugging Face's generate has), because a plain sum favours short answers (Murray and Chiang 2018). The search ends
    when `beams` have finished and no open one would be better than the worst of them if it ended where it is; and with
    max_tokens or the context, where open ones are answers too.
    """
    going, finished = [search.read()], list[Hypothesis]()
    for length in range(search.limit):
        if length:
            search.advance(going)
        going, ended = grow(going, beams, search.end_ids)
        finished = best(finished + ended, beams)
        if not going or (len(finished) == beams and finished[-1].score >= going[0].score):
            break
    return [hypothesis.answer() for hypothesis in best(finished + going, beams)]


def best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    """The `count` best, best first; of equals, the one that came first."""
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:count]


def grow(
    hypotheses: list[Hypothesis], beams: int, end_ids: frozenset[int]
) -> tuple[list[Hypothesis], list[Hypothesis]]:
    """One token more: the at most `beams` likeliest that go on, likeliest first, and those that have finished.

    To finish, a continuation must be among the `beams` likeliest of all, or bad endings would crowd out what is still
    being said. So many are looked at that, whatever end tokens there are, enough others are among them.
    """
    going, finished = list[Hypothesis](), list[Hypothesis]()
    for rank, (logprob, token, parent) in enumerate(continuations(hypotheses, beams * (1 + len(end_ids)))):
        child = parent.then(token, logprob, end_ids)
        if not child.finished:
            going.append(child)
        elif rank < beams:
            finished.append(child)
        if len(going) == beams:
            break
    return going, finished


def continuations(hypotheses: list[Hypothesis], count: int) -> list[tuple[float, int, Hypothesis]]:
    """The `count` likeliest ways to go on, likeliest first: the token's log probability, the token, after which one.

    Of equals the lower token comes first, and then the better hypothesis. Raises LocalllmError for logits that are not
    numbers.
    """
    found = list[tuple[float, int, int, float]]()
    ids = np.arange(len(hypotheses[0].logits))
    for number, hypothesis in enumerate(hypotheses):
        candidates, allowed = Candidates(ids, hypothesis.logits), hypothesis.guide.allowed(len(ids))
        candidates = top_k(candidates if allowed is None else only(candidates, allowed), count)
        total = log_total(hypothesis.logits)
        for token, logit in zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True):
            if logit > -math.inf:
                found.append((-(hypothesis.logprob + (logit - total)), token, number, logit - total))
    return [(logprob, token, hypotheses[number]) for _, token, number, logprob in sorted(found)[:count]]
