"""Answer many prompts with a model: records in, results out. Implements `localllm map`."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from localllm.errors import CutError, LocalllmError, UsageError
from localllm.files.provenance import BEGINNING, hash_beginning
from localllm.frozen import frozen
from localllm.services.records.lines import PromptBuilder, PromptInput, Record
from localllm.services.records.stream import RecordStream

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.choices import Choice
    from localllm.generation.options import GenerationOptions
    from localllm.generation.request import Completion, Request
    from localllm.generation.scheduler import Scheduler

Result = dict[str, object]  # a line of the output
T = TypeVar("T")
LORA = "lora"  # the field


@frozen
class MapJob:
    """A job: the model, how to open it (see api.open_model), and the requests' options.

    Attributes:
        choices: each record gets the likeliest of these answers; (): generate an answer.
        scored: ids of records whose own choices are scored, by `eval`.
        json_as_text: keep answers with a schema as strings, not as parsed JSON.
        n: answers per record.  precise: see Model.map.  mmproj: the vision projector; None: the one next to the model.
        lora, control_vectors: the paths of adapters and of control vectors, with their scales.
        control_layers: the first and the last layer that control vectors change; None: all.
    """

    path: str
    prompts: PromptBuilder
    options: "GenerationOptions"
    n: int = 1
    precise: bool = True
    context: int | None = None
    threads: int | None = None
    kv_type: str = "f16"
    chat_template: str | None = None
    mmproj: str | None = None
    choices: Sequence[str] = ()
    json_as_text: bool = False
    lora: tuple[tuple[str, float], ...] = ()
    control_vectors: tuple[tuple[str, float], ...] = ()
    control_layers: tuple[int, int] | None = None
    scored: frozenset[str | int] = frozenset()

    def __post_init__(self) -> None:
        """Raise UsageError for invalid options."""
        if self.n < 1:
            raise UsageError(f"n must be 1 or greater, not {self.n}")

    def compute_digests(self, model: str) -> dict[str, str]:
        """Return hashes, by name, of everything that determines the answers; model: a path or a server's URL.

        A file is identified by its name, size and first bytes.
        """
        beginning, size = b"", 0
        if os.path.isfile(model):
            with open(model, "rb") as file:
                beginning, size = file.read(BEGINNING), os.fstat(file.fileno()).st_size
        options = replace(self.options, on_progress=None, speculate="auto")  # they do not change answers
        parts = {
            "model": (
                os.path.basename(model),
                size,
                hash_beginning(beginning),
                self.chat_template,
                self.mmproj,
                *self.lora,
                *([self.control_vectors, self.control_layers] if self.control_vectors else []),
            ),
            "prompt": (self.prompts, self.choices, *sorted(map(repr, self.scored))),
            "set of options": (options, self.n, self.precise, *(["text"] if self.json_as_text else [])),
        }
        return {name: hash_beginning(repr(part).encode()) for name, part in parts.items()}


class RecordMapping:
    """Answers records with a model; iterate over it for the results in order of completion.

    Attributes:
        written: count of tokens generated so far.  done: count of finished records.
    """

    def __init__(
        self, model: "Model", job: MapJob, records: Iterable[Record], on_turn: Callable[[], None] | None = None
    ):
        """Prepare the requests.

        model: the job's model, opened.  on_turn: called after every step.
        """
        self._model, self._job, self._records, self._on_turn = model, job, records, on_turn or (lambda: None)
        self._failed: list[tuple[Record, LocalllmError]] = []
        self.done = 0
        model.session.validate_combination(job.options)
        requests = filter(None, map(self._make_request, records))  # not a generator, since records may stop and resume
        self._batch: Scheduler = model.batch(requests, precise=job.precise)
        if isinstance(records, RecordStream):
            records.may_wait = lambda: not (self._batch.running or self._failed)

    @property
    def written(self) -> int:
        return self._batch.written

    def _make_request(self, record: Record) -> "Request | None":
        """Convert a record to a request; return None on failure."""
        job = self._job
        try:
            options = select_options(record, job.prompts, job.options)
            return self._model.session.request(job.prompts(record), options, job.n, record)
        except LocalllmError as error:
            self._failed.append((record, error))
            return None

    def __iter__(self) -> Iterator[tuple[Record, Result]]:
        with closing(self._batch):
            while True:
                for finished in self._batch:
                    results = self._collect_results(finished)
                    self.done += len(results)
                    self._on_turn()
                    yield from results
                yield from self._collect_results([])
                if not (isinstance(self._records, RecordStream) and self._records.is_open):
                    return

    def _collect_results(self, finished: "list[Request]") -> list[tuple[Record, Result]]:
        """Return the results of finished requests, and of records that failed before they became requests."""
        failed, self._failed = self._failed, []
        results = [(request.key, make_result(request, self._job.json_as_text)) for request in finished]
        return results + [(record, make_failure(record, error)) for record, error in failed]

    def stop(self) -> None:
        """Start no new requests; running ones complete."""
        self._batch.stop()
        if isinstance(self._records, RecordStream):
            self._records.stop()


def select_options(record: Record, prompts: PromptBuilder, options: "GenerationOptions") -> "GenerationOptions":
    """Return the options of a record, with the adapters of its field `lora`. Raises UsageError.

    The field is data like any other if the prompt's template names it; a table's cell has it as JSON.
    """
    value = record.input.get(LORA) if isinstance(record.input, dict) else None
    if value in (None, "") or prompts.names_field(LORA):
        return options
    from localllm.generation.adapters import parse_scales  # seldom needed

    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return replace(options, lora=parse_scales(value))


class ChoiceMapping:
    """Answers records with the likeliest of the job's choices, in batches.

    Attributes:
        written: 0, since no tokens are generated.  done: count of finished records.
    """

    written = 0

    def __init__(
        self, model: "Model", job: MapJob, records: Iterable[Record], on_turn: Callable[[], None] | None = None
    ):
        """Prepare the records; parameters as in Mapping."""
        self._model, self._job, self._records, self._on_turn = model, job, records, on_turn or (lambda: None)
        self._is_stopped, self.done = False, 0
        self._asked, self._failed = deque[Record](), deque[tuple[Record, LocalllmError]]()

    def __iter__(self) -> Iterator[tuple[Record, Result]]:
        answers = self._model.choose_adapted(self._iter_prompts(), self._job.choices, self._job.precise)
        while (choices := next(answers, None)) is not None:
            while self._failed:
                yield self._report(*self._failed.popleft())
            yield self._report(self._asked.popleft(), choices)
        while self._failed:
            yield self._report(*self._failed.popleft())

    def _iter_prompts(self) -> "Iterator[tuple[PromptInput, Mapping[str, float] | None]]":
        job = self._job
        for record in self._records:
            if self._is_stopped:
                return
            try:
                prompt = job.prompts(record), select_options(record, job.prompts, job.options).lora
            except LocalllmError as error:
                self._failed.append((record, error))
            else:
                self._asked.append(record)
                yield prompt

    def _report(self, record: Record, choices: "list[Choice] | LocalllmError") -> tuple[Record, Result]:
        self.done += 1
        self._on_turn()
        return record, make_failure(record, choices) if isinstance(choices, LocalllmError) else make_choice_result(
            record, choices
        )

    def stop(self) -> None:
        self._is_stopped = True


def make_choice_result(record: Record, choices: "list[Choice]") -> Result:
    """Build a record's result: its likeliest choice, and the probabilities of all."""
    return {
        "id": record.id,
        "output": choices[0].text,
        "probabilities": {choice.text: choice.probability for choice in choices},
        "logprobs": {choice.text: choice.logprob for choice in choices},
        "input": record.input,
    }


def make_result(request: "Request", json_as_text: bool = False) -> Result:
    """Build the result of an answered record; an answer cut off within its required format is an error.

    An error includes the text generated so far.  json_as_text: do not parse an answer with a schema.
    """
    constraint, texts = request.task.options.constraint, [answer.text for answer in request.answers]
    if request.error:
        return make_failure(request.key, request.error, texts)
    if constraint and any(answer.finish_reason == "length" for answer in request.answers):
        problem = f"the answer was cut off before it {constraint.promise}; raise -n or the context"
        return make_failure(request.key, CutError(problem), texts)
    return make_success(request, json_as_text)


def parse_output(text: str, options: "GenerationOptions", json_as_text: bool) -> object:
    """Return an answer with a schema as parsed JSON unless json_as_text, and any other answer as a string."""
    if json_as_text or options.constraint is None or options.constraint.kind != "schema":
        return text
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def make_success(request: "Request", json_as_text: bool = False) -> Result:
    """Build the result of a record; with several answers, its values are lists, best first."""

    def unwrap_single(value: "Callable[[Completion], T]") -> T | list[T]:
        values = [value(answer) for answer in request.answers]
        return values if request.n > 1 else values[0]

    has_thoughts = any(each.thinking for each in request.answers)
    return {
        "id": request.key.id,
        "output": unwrap_single(lambda answer: parse_output(answer.text, request.task.options, json_as_text)),
        **({"thinking": unwrap_single(lambda answer: answer.thinking)} if has_thoughts else {}),
        "finish_reason": unwrap_single(lambda answer: answer.finish_reason),
        "prompt_tokens": len(request.prompt),
        "completion_tokens": unwrap_single(lambda answer: len(answer.tokens)),
        "input": request.key.input,
    }


def make_failure(record: Record, error: LocalllmError, texts: Sequence[str] = ()) -> Result:
    """Build the result of a record without an answer, or with the text of incomplete answers."""
    output = {"output": texts[0] if len(texts) == 1 else [*texts]} if any(texts) else {}
    return {"id": record.id, "error": str(error), **output, "input": record.input}


def iter_in_order(
    results: Iterable[tuple[Record, Result]], records: "Sequence[Record] | deque[Record]"
) -> Iterator[tuple[Record, Result]]:
    """Yield results in the order of the records: each waits for the results of all earlier records.

    On an exception, the waiting results are yielded before it is raised again. records: a deque is emptied on the way,
    and
    may be extended meanwhile.
    """
    waiting: dict[int, tuple[Record, Result]] = {}
    order = records if isinstance(records, deque) else deque(records)
    try:
        for record, result in results:
            waiting[id(record)] = record, result
            while order and id(order[0]) in waiting:
                yield waiting.pop(id(order.popleft()))
    except (Exception, KeyboardInterrupt):
        yield from waiting.values()
        raise
    yield from waiting.values()


def make_result_filter(records: list[Record] | None, name: str) -> Callable[[Result], bool]:
    """Return a predicate that tells whether to keep a result of an existing output; errors are tried again.

    records: None if they are not known yet.  name: the output's. The predicate raises UsageError for a result that
    belongs to no record: the output was made from another input, and must not be overwritten.
    """
    inputs = {record.id: record.input for record in records or ()}

    def is_reusable(result: Result) -> bool:
        if records is None:
            return "error" not in result
        if result["id"] not in inputs:
            raise UsageError(
                f"{name}: record {result['id']!r} of this file is not in the input; give another output file"
            )
        if inputs[result["id"]] != result.get("input"):
            raise UsageError(
                f"{name}: record {result['id']!r} was answered for another input; give another output file"
            )
        return "error" not in result

    return is_reusable


def select_unfinished(records: list[Record], results: Iterable[Result]) -> list[Record]:
    finished = {result["id"] for result in results}
    return [record for record in records if record.error or record.id not in finished]


def sort_by_length(records: list[Record], prompts: PromptBuilder) -> list[Record]:
    """Sort records by prompt length; those without a valid prompt come first."""

    def get_length(record: Record) -> int:
        try:
            prompt = prompts(record)
        except LocalllmError:
            return -1
        texts = [prompt] if isinstance(prompt, str) else [str(message.get("content", "")) for message in prompt]
        return sum(map(len, texts))

    return sorted(records, key=get_length)
