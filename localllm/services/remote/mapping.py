"""Answer many prompts by a server, with several requests at once, each in a thread."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from localllm.errors import CutError, LocalllmError
from localllm.generation.generate import GenerationOptions
from localllm.services.map import Result, failure
from localllm.services.records import Prompts, Record
from localllm.services.remote.answer import RemoteAnswer
from localllm.services.remote.model import RemoteModel

AT_ONCE = 16


class RemoteMapping:
    """Answers records; iterate over it for the results in order of completion.

    Attributes:
        written: tokens of answers so far.  done: records that are finished.
    """

    def __init__(
        self, model: RemoteModel, prompts: Prompts, options: GenerationOptions, records: list[Record], n: int = 1
    ):
        """Prepare the requests. Raises UsageError for options that the server does not support."""
        model.fields(options)
        self._model, self._prompts, self._options, self._n = model, prompts, options, n
        self._records, self._stopped = iter(records), False
        self.written = self.done = 0

    def __iter__(self) -> Iterator[tuple[Record, Result]]:
        pool = ThreadPoolExecutor(AT_ONCE, "asking")
        running = dict[Future[Result], Record]()
        try:
            while True:
                while len(running) < AT_ONCE and not self._stopped and (record := next(self._records, None)):
                    running[pool.submit(self._answer, record)] = record
                if not running:
                    return
                for finished in wait(running, return_when=FIRST_COMPLETED).done:
                    record, result = running.pop(finished), finished.result()
                    self.done += 1
                    self.written += result.get("completion_tokens", 0)
                    yield record, result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, record: Record) -> Result:
        try:
            asked = self._prompts(record)
            answers = self._model.session.candidates(asked, self._options, self._n)
            constraint = self._options.constraint
            if constraint and any(answer.finish_reason == "length" for answer in answers):
                raise CutError(f"the answer was cut off before it was {constraint.promise}; raise max_tokens")
        except LocalllmError as error:
            return failure(record, error)
        return success(record, answers)

    def stop(self) -> None:
        """Start no new requests; running ones complete."""
        self._stopped = True


def success(record: Record, answers: list[RemoteAnswer]) -> Result:
    """Build the result of a record, as services.map does; token counts cover all choices together."""

    def collect(name: str) -> Any:
        values = [getattr(answer, name) for answer in answers]
        return values if len(values) > 1 else values[0]

    return {
        "id": record.id,
        "output": collect("text"),
        **({"thinking": collect("thinking")} if any(answer.thinking for answer in answers) else {}),
        "finish_reason": collect("finish_reason"),
        "completion_tokens": answers[0].completion_tokens,
        "input": record.input,
    }
