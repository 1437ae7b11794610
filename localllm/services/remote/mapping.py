"""Answer many prompts on a server, with concurrent requests in threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from localllm.errors import CutError, LocalllmError
from localllm.generation.options import GenerationOptions
from localllm.services.records.lines import PromptBuilder, Record
from localllm.services.records.map import Result, make_failure, parse_output, select_options
from localllm.services.records.stream import RecordStream
from localllm.services.remote.http import as_count
from localllm.services.remote.model import RemoteAnswer, RemoteModel

AT_ONCE = 16  # concurrent requests
T = TypeVar("T")
LOOK = 0.1  # seconds between checks for more records in a pipe


class RemoteMapping:
    """Answers records; iterate over it for the results in order of completion.

    Attributes:
        written: count of tokens generated so far.  done: count of finished records.
    """

    def __init__(
        self,
        model: RemoteModel,
        prompts: PromptBuilder,
        options: GenerationOptions,
        records: "list[Record] | RecordStream",
        n: int = 1,
        json_as_text: bool = False,
    ):
        """Prepare the requests. Raises UsageError for options that the server does not support."""
        model.build_fields(options)
        self._model, self._prompts, self._options, self._n = model, prompts, options, n
        self._records, self._stopped, self._json_as_text = iter(records), False, json_as_text
        self.written = self.done = 0

    def __iter__(self) -> Iterator[tuple[Record, Result]]:
        pool = ThreadPoolExecutor(AT_ONCE, "asking")
        running = dict[Future[Result], Record]()
        if isinstance(self._records, RecordStream):
            self._records.may_wait = lambda: not running
        try:
            while True:
                while len(running) < AT_ONCE and not self._stopped and (record := next(self._records, None)):
                    running[pool.submit(self._answer, record)] = record
                if not running:
                    return
                patience = LOOK if isinstance(self._records, RecordStream) else None
                for finished in wait(running, patience, return_when=FIRST_COMPLETED).done:
                    record, result = running.pop(finished), finished.result()
                    self.done += 1
                    self.written += as_count(result.get("completion_tokens"))
                    yield record, result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, record: Record) -> Result:
        answers: list[RemoteAnswer] = []
        try:
            prompt = self._prompts(record)
            options = select_options(record, self._prompts, self._options)
            answers = self._model.session.candidates(prompt, options, self._n)
            constraint = self._options.constraint
            if constraint and any(answer.finish_reason == "length" for answer in answers):
                raise CutError(f"the answer was cut off before it {constraint.promise}; raise max_tokens")
        except LocalllmError as error:
            return make_failure(record, error, [answer.text for answer in answers])
        return make_success(record, answers, lambda text: parse_output(text, self._options, self._json_as_text))

    def stop(self) -> None:
        """Start no new requests; running ones complete."""
        self._stopped = True
        if isinstance(self._records, RecordStream):
            self._records.stop()


def make_success(record: Record, answers: list[RemoteAnswer], parsed: Callable[[str], object] = str) -> Result:
    """Build the result of a record, as records.map does; token counts cover all answers together.

    parsed: converts an answer to the output.
    """

    def unwrap_single(values: list[T]) -> T | list[T]:
        return values if len(values) > 1 else values[0]

    return {
        "id": record.id,
        "output": unwrap_single([parsed(answer.text) for answer in answers]),
        **({"thinking": unwrap_single([a.thinking for a in answers])} if any(a.thinking for a in answers) else {}),
        "finish_reason": unwrap_single([answer.finish_reason for answer in answers]),
        "completion_tokens": answers[0].completion_tokens,
        "input": record.input,
    }
