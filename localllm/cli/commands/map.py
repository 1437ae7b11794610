"""localllm map: many prompts, each answered."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli import open_model as opening
from localllm.cli.groups import Also
from localllm.cli.options import generation as asking
from localllm.cli.options import shared as options
from localllm.cli.options.choices import Choices, require_plain, texts_of
from localllm.cli.options.endpoint import EndpointGroup, opened
from localllm.cli.options.images import Projector
from localllm.cli.options.offers import offer_models
from localllm.cli.prompt_input import Encoding, text_of, warn_of_template
from localllm.cli.resolve_model import located
from localllm.cli.terminal.eta import duration
from localllm.cli.terminal.output import ProgressLine, dim, is_terminal, say, stdin, write
from localllm.cli.terminal.render import counted
from localllm.errors import RecordsError, UsageError

if TYPE_CHECKING:
    from localllm.files.jsonl_file import JsonlFile
    from localllm.services.map import ChoiceMapping, MapJob, Mapping, Result
    from localllm.services.map_ray import RayMapping
    from localllm.services.records import Record
    from localllm.services.remote.mapping import RemoteMapping
    from localllm.services.remote.model import RemoteModel


Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", autocompletion=offer_models, help=options.A_MODEL), Also(*options.NAMED)
]


def map(
    model: Model = None,
    input: Annotated[
        str | None, typer.Argument(metavar="[INPUT]", help="File of records, one per line.  [default: stdin]")
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Output file; records that it already answers are skipped."
        ),
    ] = None,
    redo: Annotated[
        bool, typer.Option("--redo", help="Answer the records that OUTPUT already answers again, and replace them.")
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="TEXT",
            help='Prompt template: {text} is the field "text", {line} a plain-text record; or Jinja: {{ text }}.',
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="File with the prompt template, as of -p.")
    ] = None,
    system: options.System = None,
    system_file: options.SystemFile = None,
    chat_template: options.ChatTemplate = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts as plain text, without the chat template.")
    ] = False,
    encoding: Encoding = None,
    n: Annotated[
        int,
        typer.Option(
            "--n",
            metavar="N",
            help="Sample N answers for each record, most likely first; -n is the length in tokens.  [default: 1]",
        ),
    ] = 1,
    choices_given: Choices = None,
    as_finished: Annotated[
        bool, typer.Option("--as-finished", help="Write answers as they finish, not in input order.")
    ] = False,
    shortest_first: Annotated[bool, typer.Option("--shortest-first", help="Answer short prompts first.")] = False,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Faster prefill with 8-bit activations; answers may differ from those of `run`."),
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print counts, time and speed to stderr.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="[ADDRESS]", help="Run on the Ray cluster at ADDRESS; without ADDRESS, start one here."
        ),
    ] = None,
    engine: options.EngineGroup,
    choices: options.Answers,
    endpoint: EndpointGroup,
    mmproj: Projector = None,
) -> None:
    """Answer many prompts, in parallel.

    INPUT has one record per line: plain text, or a JSON object with "prompt", "messages" or the fields that the
    template of -p or -f uses, and optionally "image", a path. Without INPUT, records are read from stdin. The output
    has one line of JSON per record: "id" (the record's, or its line number), "output", "thinking" if there is any,
    "finish_reason", "prompt_tokens", "completion_tokens" and "input"; or "id", "error" and "input". To resume an
    interrupted command, run it again with the same -o.

    Examples:
      localllm map model.gguf questions.jsonl -o answers.jsonl
      localllm map model.gguf reviews.txt -p "Is this friendly? {line}" -n 5 -o friendly.jsonl
      localllm map --endpoint http://127.0.0.1:8000 questions.jsonl -o answers.jsonl
      localllm map model.gguf reviews.txt -p "Is this friendly? {line}" --choices yes,no
      jq -c "{prompt: .title}" books.json | localllm map model.gguf --fast > books.jsonl
    """
    from localllm.files.gguf.file import open_part
    from localllm.files.jsonl_file import JsonlFile
    from localllm.files.text_file import require_encoding
    from localllm.services.map import MapJob, belonging, unfinished
    from localllm.services.map import shortest_first as sorted_by_length
    from localllm.services.records import Prompts, read_records

    if raw and chat_template is not None:
        raise UsageError("--raw turns off the chat template: leave out --chat-template")
    if raw and not choices.thoughts.are_usual:
        raise UsageError("--raw turns off the chat template: leave out the options for thinking and template variables")
    system = asking.system_message(system, system_file)
    if redo and output is None:
        raise UsageError("--redo replaces the answers in the output file: give it with -o FILE")
    require_encoding(encoding)
    template = None if file is None else text_of(content(file), file, encoding, whole=True)
    prompts = Prompts(prompt, template, system, raw)
    chosen = asking.generation_options(None, choices)
    place = endpoint.place()
    if place is None and model is None:
        raise UsageError(f"MODEL is missing: {options.A_MODEL}")
    if place is not None and input is None and model is not None and os.path.isfile(model):
        model, input = None, model
    held = engine.context, engine.threads, engine.cache.types()
    path = "" if place is not None else located(model or "")
    job = MapJob(
        os.path.abspath(path), prompts, chosen, n, not fast, *held, chat_template, mmproj and os.path.abspath(mmproj),
        texts_of(choices_given) if choices_given is not None else (),
    )  # fmt: skip
    if job.choices:
        require_plain(
            n=n > 1, ray=ray is not None, endpoint=place is not None,
            a_schema_grammar_or_regex=chosen.constraint is not None,
        )  # fmt: skip
    inputs = tuple(name for name in (path, input, file) if name)
    data, name = read(input)
    data = text_of(data, name or "stdin", encoding, whole=True).encode()
    records = read_records(data, name)
    if not records and place is None:
        open_part(path)  # a file that is no model is told even if nothing is asked
    keep = bool if redo else belonging(records, output or "")
    written = JsonlFile(output, inputs, keep=keep) if output else nullcontext()
    by = job.digests(path if place is None else f"{place.url} {model}")
    if place is not None and model is None:
        del by["model"]  # whichever the server has
    with of_input(output, data, name, by, redo) as remember, written as out:
        left = records if out is None or redo else unfinished(records, out.records)
        progress = Progress(len(left), len(records) - len(left))
        if progress.before:
            say(f"localllm: {output} answers {progress.before} of {counted(len(records), 'record')} already")
        left = sorted_by_length(left, prompts) if shortest_first else left
        if left:
            there = None
            if place is not None:
                refused = {"ray": ray is not None, "fast": fast, "chat_template": chat_template, "mmproj": mmproj}
                there = opened(place, model, choices, engine, **refused)
            with begun(job, engine, left, ray, progress, raw, there) as mapping:
                if redo and out is not None:
                    out.clear()
                remember()
                answer(mapping, left, out, progress, as_finished)
    progress.end(stats)


@contextmanager
def of_input(
    output: str | None, data: bytes, name: str, by: dict[str, str], redo: bool
) -> Iterator[Callable[[], None]]:
    """Yield a function that records in the output which input it is for, and what answers it.

    by: hashes of what the answers depend on besides.  redo: whether the output may be of another input, or by another
    model. Raises UsageError if it is, and may not.
    """
    from localllm.files import provenance as origin

    now = origin.Provenance.of(data, name, by)
    if output is None:
        yield lambda: None
        return
    if not redo:
        origin.require_same_input(output, data, now)
    try:
        yield lambda: origin.write_record(output, now)
    finally:
        origin.remove_record(output)


@contextmanager
def begun(
    job: "MapJob",
    engine: options.EngineGroup,
    records: "list[Record]",
    ray: str | None,
    progress: "Progress",
    raw: bool,
    there: "RemoteModel | None" = None,
) -> "Iterator[Mapping | ChoiceMapping | RayMapping | RemoteMapping]":
    """Start the job on this computer, on a Ray cluster or with a server."""
    if there is not None:
        from localllm.services.remote.mapping import RemoteMapping

        yield RemoteMapping(there, job.prompts, job.options, records, job.n)
        return
    if ray is not None:
        from localllm.services.map_ray import RayMapping

        yield RayMapping(job, records, ray)
        return
    from localllm.services.map import ChoiceMapping, Mapping

    with opening.open_model(job.path, engine, job.chat_template, mmproj=job.mmproj) as here:
        if not raw:
            warn_of_template(here)
        kind = ChoiceMapping if job.choices else Mapping
        mapping: ChoiceMapping | Mapping = kind(here, job, records, lambda: progress.show(mapping))
        yield mapping


def answer(
    mapping: "Mapping | ChoiceMapping | RayMapping | RemoteMapping",
    records: "list[Record]",
    out: "JsonlFile | None",
    progress: "Progress",
    as_finished: bool,
) -> None:
    """Write what comes."""
    from localllm.services.map import in_order

    with finishing(mapping.stop), progress:
        for _, result in mapping if as_finished else in_order(mapping, records):
            progress.count(result)
            put(result, out)
            progress.show(mapping)


def content(path: str) -> bytes:
    """Read a file's bytes. Raises UsageError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def read(path: str | None) -> tuple[bytes, str]:
    """Read the input and return it with its name, "" for stdin. Raises UsageError if there is none."""
    if path not in (None, "-"):
        assert path is not None
        return content(path), path
    if sys.stdin is None or (path is None and is_terminal(sys.stdin)):
        raise UsageError("INPUT is missing: give a file, or pipe records to stdin")
    return stdin().read(), ""


def put(result: "Result", out: "JsonlFile | None") -> None:
    """Write one line to the file or to stdout."""
    from localllm.files.jsonl_file import json_line

    if out:
        out.write(json_line(result))
    else:
        write(json_line(result).decode())


@contextmanager
def finishing(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C lets what has begun go on to its end; a second one interrupts."""

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # not `say`, which may be what was interrupted
            os.write(
                2,
                b"\n" * is_terminal(sys.stderr) + b"localllm: finishing what has begun; Ctrl-C again leaves at once\n",
            )
        stop()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Progress:
    """How far it is, on stderr, and what to say in the end."""

    def __init__(self, total: int, before: int):
        """total: records to answer.  before: those that an earlier start has answered."""
        self._line, self._total, self.before = ProgressLine(), total, before
        self._written = self._failed = self._tokens = 0
        self._start = perf_counter()

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._line.clear()

    def count(self, result: "Result") -> None:
        """Count a written result."""
        self._line.clear()
        self._written += 1
        self._failed += "error" in result

    def show(self, mapping: "Mapping | ChoiceMapping | RayMapping | RemoteMapping") -> None:
        """After every step."""
        self._tokens, seconds = mapping.written, perf_counter() - self._start
        text = f"{self.before + mapping.done} of {self.before + self._total} answered, {self._speed(seconds)}"
        if mapping.done:
            text += f", {duration(seconds / mapping.done * (self._total - mapping.done))} left"
        self._line.show(text)

    def _speed(self, seconds: float) -> str:
        return f"{self._tokens / max(seconds, 1e-9):.1f} tokens/s"

    def end(self, stats: bool) -> None:
        """Tell what was done, on a terminal or if `stats` are wanted.

        Raises KeyboardInterrupt if something was left undone, and RecordsError if something failed.
        """
        seconds = perf_counter() - self._start
        records, tokens = counted(self._written, "record"), counted(self._tokens, "token")
        written = f"{tokens} written, " if stats else ""
        (say if stats else dim)(
            f"{records} in {duration(seconds)}, {written}{self._speed(seconds)}, {self._failed} failed"
        )
        if self._written < self._total:
            raise KeyboardInterrupt
        if self._failed:
            raise RecordsError(
                f"{self._failed} of {self._total} records failed; see the error field of their output lines"
            )
