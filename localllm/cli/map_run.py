"""Runs a job of `localllm map` or `eval`: checks the output's provenance, writes answers, handles Ctrl-C."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from localllm.cli import open_model as opening
from localllm.cli.options import shared as options
from localllm.cli.prompt_input import warn_of_template
from localllm.cli.terminal.output import is_terminal

if TYPE_CHECKING:
    from localllm.cli.map_io import Progress, Writer
    from localllm.services.records.lines import Record
    from localllm.services.records.map import ChoiceMapping, MapJob, Mapping
    from localllm.services.records.map_ray import RayMapping
    from localllm.services.records.stream import RecordStream
    from localllm.services.remote.mapping import RemoteMapping
    from localllm.services.remote.model import RemoteModel


@contextmanager
def of_input(
    output: str | None, data: bytes | None, name: str, by: dict[str, str], redo: bool, any_model: bool = False
) -> Iterator[Callable[[], None]]:
    """Check an output's provenance; yield a function that records it, the input and the job, in the output.

    data: None for a stream, whose records are compared as they come.  by: hashes of everything else that the answers
    depend on. redo: accept an output from another input or by another model. any_model: accept one by another model.
    Raises UsageError for an output that is not accepted.
    """
    from localllm.files import provenance as origin

    current = origin.Provenance.of(data or b"", name, by)
    if output is None:
        yield lambda: None
        return
    if not redo:
        origin.require_same_input(output, data, current, any_model)
    try:
        yield lambda: origin.write_record(output, current)
    finally:
        origin.remove_record(output)


@contextmanager
def open_mapping(
    job: "MapJob",
    engine: options.EngineGroup,
    records: "list[Record] | RecordStream",
    ray: str | None,
    progress: "Progress",
    warns: bool,
    name: str,
    remote: "RemoteModel | None" = None,
) -> "Iterator[Mapping | ChoiceMapping | RayMapping | RemoteMapping]":
    """Start the job on this computer, on a Ray cluster or with a server.

    warns: whether to warn of a missing chat template.  name: of the model, as the user typed it.
    """
    if remote is not None:
        from localllm.services.remote.mapping import RemoteMapping

        yield RemoteMapping(remote, job.prompts, job.options, records, job.n, job.json_as_text)
        return
    if ray is not None:
        from localllm.services.records.map_ray import RayMapping

        assert isinstance(records, list)
        yield RayMapping(job, records, ray)
        return
    from localllm.services.records.map import ChoiceMapping, Mapping

    with opening.open_model(job.path, engine, job.chat_template, mmproj=job.mmproj, name=name) as model:
        if warns:
            warn_of_template(model)
            opening.can_choose_thinking(model, job.options.think)
        kind = ChoiceMapping if job.choices else Mapping
        mapping: ChoiceMapping | Mapping = kind(model, job, records, lambda: progress.show(mapping))
        yield mapping


def answer(
    mapping: "Mapping | ChoiceMapping | RayMapping | RemoteMapping",
    records: "list[Record] | RecordStream",
    writer: "Writer",
    progress: "Progress",
    as_finished: bool,
) -> None:
    """Write results as they come, or in the records' order."""
    from localllm.services.records.map import in_order

    order = records if isinstance(records, list) else records.pending
    with finishing(mapping.stop), progress:
        for _, result in mapping if as_finished else in_order(mapping, order):
            progress.count(result)
            writer(result)
            progress.show(mapping)


@contextmanager
def finishing(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C finish the running records first; a second one interrupts."""

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # not `say`, which may have been interrupted
            os.write(
                2,
                b"\n" * is_terminal(sys.stderr) + b"localllm: finishing what has begun; Ctrl-C again leaves at once\n",
            )
        stop()

    previous = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
