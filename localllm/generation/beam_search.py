"""Several answers to one prompt: n that are sampled, or the likeliest that beam search finds.

The prompt is read once, as for an only answer. Every answer in the making goes on in a fork of the sequence that holds
it, and one step of the engine takes all of them one token further.
"""

import math
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, cast

import numpy as np

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.chunked_prefill import read_prompt
from localllm.generation.constraints.token_mask import AnswerState
from localllm.generation.request import Completion, Request, Task
from localllm.generation.sampling.candidates import Candidates
from localllm.generation.sampling.sampler import log_total
from localllm.generation.sampling.steps import only, top_k
from localllm.generation.scheduler import Scheduler
from localllm.generation.sequence_sources import PoolSource
from localllm.text.tokenizer import Tokenizer
from localllm.values import whole_number

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence
    from localllm.generation.sequence_pool import SequencePool


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


def require_counts(n: int, beams: int) -> None:
    """Raises UsageError for numbers of answers and beams that make no sense."""
    whole_number("n", n, 1)
    whole_number("beams", beams)
    if beams and n > beams:
        raise UsageError(f"{n} answers need at least as many beams, not {beams}")


def answers(sequences: "SequencePool", tokenizer: Tokenizer, task: Task, n: int = 1, beams: int = 0) -> list[Answer]:
    """Return the n best of several answers, best first: n sampled ones, or with `beams` what beam search finds.

    Of sampled ones, the best has the highest log probability per token; of beams, the highest log probability. Raises
    UsageError and ContextError.
    """
    require_counts(n, beams)
    for name in ("logit_bias", "ignore_eos"):
        if beams and getattr(task.options.sampling, name):
            raise UsageError(f"{name} cannot be combined with beams: beam search does not sample")
    request = Request(task, 1 if beams else n, is_scored=True)
    first = request.begin(sequences.engine, tokenizer)[0]
    if beams:
        with sequences.beginning_with(task.prompt) as begun, BeamSearch(first, tokenizer) as search, search:
            sequence, logits = begun
            if logits is None:
                cached = len(sequence.tokens)
                logits = read_prompt(sequence, task.prompt, task.options.on_progress)
                sequences.was_read(sequence, cached, logits)
            return search.run(cast("Sequence", sequence), logits, beams)[:n]
    with closing(Scheduler(sequences.engine, tokenizer, [request], n, source=PoolSource(sequences))) as scheduler:
        for _ in scheduler:
            pass
    if request.error:
        raise request.error
    return [
        Answer(one.text, one.tokens, one.logprob, one.finish_reason, one.seed, one.thinking) for one in request.answers
    ]


@dataclass
class Hypothesis:
    """An answer in the making, or made. `tokens` does not have the one that ended it."""

    sequence: "Sequence"  # holds the prompt and all tokens but the last, until BeamSearch.advance
    logits: np.ndarray  # float32 [vocab], after what the sequence holds; good until the engine runs again
    guide: AnswerState
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    finished: bool = False

    def then(self, token: int, logprob: float, end_ids: frozenset[int]) -> "Hypothesis":
        """Return this one with a token more, which may finish it."""
        twin = replace(self, guide=self.guide.copy())
        twin.logprob = self.logprob + logprob
        if token in end_ids:
            twin.finished = True
            return twin
        twin.tokens = [*self.tokens, token]
        twin.guide.accept(token)
        twin.finished = twin.guide.has_ended
        return twin

    def answer(self) -> Answer:
        """Return what has become of it, with the text that was held back."""
        said = self.guide.transcript
        said.flush(self.finished)
        return Answer(said.text, self.tokens, self.logprob, "stop" if self.finished else "length", None, said.thinking)


class BeamSearch:
    """The forks of one prompt. Use it as `with BeamSearch(...) as search, search:`; at its end they are all closed.

    Twice, because Ctrl-C may strike just before or in the middle of the first `__exit__`: then the second has the rest.
    """

    def __init__(self, completion: Completion, tokenizer: Tokenizer):
        """completion: begins like all answers, and says how long they may be."""
        self._guide, self._limit, self._vocab = completion.guide, completion.left, completion.sampler.vocab
        self._end_ids, self._tokenizer = completion.end_ids, tokenizer
        self._held: list[Sequence] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close(self._held)

    def run(self, sequence: "Sequence", logits: np.ndarray, beams: int) -> list[Answer]:
        """Return at most `beams` answers with different texts, the likeliest first. Nothing is drawn.

        From token to token the likeliest continuations stay, of those that say the same the best. The search ends when
        `beams` have finished and no open one is likelier than the worst of them, since none gets likelier; and with
        max_tokens or the context, where open ones are answers too.

        sequence: has read the prompt; logits: behind it, float32 [1, vocab].
        """
        self._held.append(sequence.fork())
        going, finished = [Hypothesis(self._held[0], logits[-1, : self._vocab], self._guide)], list[Answer]()
        for length in range(self._limit):
            if length:
                self._advance(going)
            going, ended = self._grow(going, beams)
            finished = best([*finished, *(one.answer() for one in ended)], beams)
            if not going or (len(finished) == beams and finished[-1].logprob >= going[0].logprob):
                break
        return best([*finished, *(one.answer() for one in going)], beams)

    def _advance(self, hypotheses: list[Hypothesis]) -> None:
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
        work = [(hypothesis.sequence, hypothesis.tokens[-1:]) for hypothesis in hypotheses]
        rows = hypotheses[0].sequence.engine.run(work, "last", True)
        for hypothesis, row in zip(hypotheses, rows, strict=True):
            hypothesis.logits = row[-1, : self._vocab]

    def _grow(self, hypotheses: list[Hypothesis], beams: int) -> tuple[list[Hypothesis], list[Hypothesis]]:
        """Return the at most `beams` likeliest that go on with a token more, likeliest first, and the finished ones.

        To finish, a continuation must be among the `beams` likeliest of all, or bad endings would crowd out what is
        still being said. So many are looked at that, whatever end tokens there are, enough others are among them,
        even if many say the same.
        """
        going, finished = dict[bytes, Hypothesis](), list[Hypothesis]()
        for rank, (logprob, token, parent) in enumerate(continuations(hypotheses, beams * (2 + len(self._end_ids)))):
            child = parent.then(token, logprob, self._end_ids)
            if not child.finished:
                going.setdefault(self._text_bytes(child), child)
            elif rank < beams:
                finished.append(child)
            if len(going) == beams:
                break
        return [*going.values()], finished

    def _text_bytes(self, hypothesis: Hypothesis) -> bytes:
        return b"".join(self._tokenizer.token_bytes(token, True) for token in hypothesis.tokens)

    def _close(self, sequences: list["Sequence"]) -> None:
        for sequence in list(sequences):
            sequence.close()
            self._held.remove(sequence)


def best(answers: list[Answer], count: int) -> list[Answer]:
    """Return the `count` likeliest, likeliest first, without those whose text a better one has."""
    found: dict[str, Answer] = {}
    for answer in sorted(answers, key=lambda answer: -answer.logprob):
        found.setdefault(answer.text, answer)
    return [*found.values()][:count]


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
