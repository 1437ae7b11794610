"""Score the choices of questions by their log probability after the prompt, as lm-evaluation-harness does.

A prompt that is no conversation is continued without the chat template, and a choice follows after a space. Prompt and
choice are tokenized together, and the choice's score is the sum over its tokens; no end token is expected.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from math import fsum
from typing import TYPE_CHECKING

from localllm.generation.choices import PARALLEL, BatchScorer, TokenTrie
from localllm.generation.logprobs import TokenLogprob
from localllm.generation.options import GenerationOptions
from localllm.services.records.lines import PromptInput, Record
from localllm.services.records.map import MapJob, RecordMapping, Result, make_failure, select_options

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.request import Request
    from localllm.text.tokenizer import Tokenizer

LETTERS = "A", "B", "C", "D"  # the choices of a question that names none
OPTIONS = GenerationOptions(think="off")


class QuestionMapping:
    """Answers the questions of `eval`, and scores the choices of those in the job's `scored`.

    Attributes:
        written: count of tokens generated so far.  done: count of finished records.
    """

    def __init__(self, model: "Model", job: MapJob, records: Sequence[Record], on_turn: Callable[[], None]):
        """Prepare the records; parameters as in RecordMapping."""
        self._answered = RecordMapping(model, job, [each for each in records if each.id not in job.scored], on_turn)
        self._scored = LikelihoodMapping(model, job, [each for each in records if each.id in job.scored], on_turn)

    @property
    def written(self) -> int:
        return self._answered.written

    @property
    def done(self) -> int:
        return self._answered.done + self._scored.done

    def __iter__(self) -> Iterator[tuple[Record, Result]]:
        return chain(self._answered, self._scored)

    def stop(self) -> None:
        self._answered.stop()
        self._scored.stop()


class LikelihoodMapping:
    """Scores the choices of each record, in batches; iterate over it for the results in order.

    Attributes:
        done: count of finished records.
    """

    def __init__(self, model: "Model", job: MapJob, records: Sequence[Record], on_turn: Callable[[], None]):
        """Prepare the records; parameters as in RecordMapping."""
        self._model, self._job, self._records, self._on_turn = model, job, records, on_turn
        self._is_stopped, self.done = False, 0

    def __iter__(self) -> Iterator[tuple[Record, Result]]:
        precise = self._job.precise
        scorer = BatchScorer[Record](self._model.engine, self._prepare, precise)
        with closing(self._model.batch(scorer.create_requests(self._iter_records()), PARALLEL, precise)) as batch:
            for record, scores in zip(self._records, scorer.collect_results(batch), strict=False):
                self.done += 1
                self._on_turn()
                yield record, make_scores(record, scores) if isinstance(scores, list) else make_failure(record, scores)

    def _iter_records(self) -> Iterator[Record]:
        for record in self._records:
            if self._is_stopped:
                return
            yield record

    def _prepare(self, record: Record) -> "tuple[Request, TokenTrie]":
        """Return the request of a record's prompt, and the choices to score. Raises LocalllmError."""
        session, prompt = self._model.session, unwrap_text(record, self._job.prompts(record))
        options = replace(OPTIONS, lora=select_options(record, self._job.prompts, self._job.options).lora)
        texts = join_choices(record, prompt)
        if not isinstance(prompt, str):
            return session.request(prompt, options), session.build_trie(texts, is_chat=True, with_end=False)
        start = prompt.rstrip()
        choices = [prompt[len(start) :] + text for text in texts]
        return session.request(start, options), TokenTrie(
            [encode_after(start, choice, session.tokenizer) for choice in choices]
        )

    def stop(self) -> None:
        """Start no new records."""
        self._is_stopped = True


def unwrap_text(record: Record, prompt: PromptInput) -> PromptInput:
    """Return the text of a prompt that became a single message; other prompts unchanged."""
    assert isinstance(record.input, dict)  # as QuestionSet has checked
    is_single = not isinstance(prompt, str) and len(prompt) == 1 and "images" not in prompt[0]
    if isinstance(prompt, str) or not is_single or "messages" in record.input:
        return prompt
    return str(prompt[0]["content"])


def get_choices(record: Record) -> list[str]:
    assert isinstance(record.input, dict)
    return [*record.input.get("choices", LETTERS)]


def join_choices(record: Record, prompt: PromptInput) -> list[str]:
    """Return the choices as they follow the prompt: after the record's delimiter, by default a space in a text."""
    assert isinstance(record.input, dict)
    needs_space = isinstance(prompt, str) and not prompt[-1:].isspace()
    delimiter = record.input.get("delimiter")
    usual = " " if needs_space else ""
    return [
        (("" if choice[:1].isspace() else usual) if delimiter is None else delimiter) + choice
        for choice in get_choices(record)
    ]


def encode_after(prompt: str, text: str, tokenizer: "Tokenizer") -> list[int]:
    """Return the tokens of a text after a prompt, tokenized together with it."""
    head, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    is_separate = whole[: len(head)] == head and len(whole) > len(head)
    return whole[len(head) :] if is_separate else tokenizer.encode_inside(text)


def make_scores(record: Record, scores: Sequence[Sequence[TokenLogprob]]) -> Result:
    """Build a record's result: the likeliest choice, and for each its log probability, in all and per byte of UTF-8."""
    choices = list[dict[str, object]]()
    for text, tokens in zip(get_choices(record), scores, strict=True):
        logprob, size = fsum(token.logprob for token in tokens), len(text.encode())
        choices.append({"text": text, "logprob": logprob, "bytes": size, "logprob_per_byte": logprob / size})
    return {"id": record.id, "output": select_likeliest(choices, "logprob"), "choices": choices, "input": record.input}


def select_likeliest(choices: "Sequence[dict[str, object]]", key: str) -> str:
    """Return the text of the choice with the highest score; key: "logprob" or "logprob_per_byte"."""
    return str(max(choices, key=lambda choice: float(str(choice[key])))["text"])
