"""Answers the questions of `localllm eval`, as `localllm map` does."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from localllm.cli.map_io import Progress, Writer
from localllm.cli.map_run import answer, of_input, open_mapping
from localllm.cli.terminal.output import say
from localllm.cli.terminal.render import count_noun
from localllm.errors import RecordsError
from localllm.files.jsonl_file import JsonlFile
from localllm.services.records.map import MapJob, result_filter, select_unfinished

if TYPE_CHECKING:
    from localllm.cli.options.shared import EngineGroup
    from localllm.services.records.lines import Record
    from localllm.services.records.map import Result


class Collector(Writer):
    """Collects results, and writes them to a file if there is one."""

    def __init__(self, out: JsonlFile | None):
        super().__init__(out, "jsonl", None, ())
        self.results: list[Result] = [] if out is None else [*out.records]

    def __call__(self, result: "Result") -> None:
        self.results.append(result)
        if self._out:
            super().__call__(result)


def answer_questions(
    model: str,
    job: MapJob,
    engine: "EngineGroup",
    records: "Sequence[Record]",
    input: tuple[bytes, str],
    output: str | None,
    redo: bool,
) -> "list[Result]":
    """Return a model's results for all records, failed ones included, in the records' order.

    input: the file's bytes and its name.  output: a file that keeps answers, and may have some, or None. Raises
    KeyboardInterrupt if some are left after Ctrl-C, and UsageError as `map` does.
    """
    all_records, (data, name) = list(records), input
    inputs = (job.path, name)
    keep = bool if redo else result_filter(all_records, output or "")
    writer = JsonlFile(output, inputs, keep=keep) if output else nullcontext()
    with of_input(output, data, name, job.digests(job.path), redo) as remember, writer as out:
        if redo and out is not None:
            out.clear()
        collector = Collector(out)
        remaining = select_unfinished(all_records, collector.results)
        progress = Progress(remaining, len(all_records) - len(remaining))
        if progress.before:
            say(f"localllm: {output} answers {progress.before} of {count_noun(len(all_records), 'question')} already")
        if remaining:
            with open_mapping(job, engine, remaining, None, progress, warns=False, name=model) as mapping:
                remember()
                answer(mapping, remaining, collector, progress, as_finished=False)
            with suppress(RecordsError):  # the caller counts them
                progress.end(stats=False)
    order: dict[object, int] = {record.id: index for index, record in enumerate(all_records)}
    return sorted(collector.results, key=lambda result: order[result["id"]])
