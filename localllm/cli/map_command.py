"""Implement `localllm map`, from its options to the answers."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.cli import open_model as opening
from localllm.cli.map_run import (
    MapProgress,
    RecordsInput,
    ResultWriter,
    check_provenance,
    list_properties,
    open_mapping,
    read_file,
    read_input,
    write_answers,
)
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.options.choices import split_choices
from localllm.cli.options.conflicts import FORM, THOUGHTS, require_compatible
from localllm.cli.options.mapping import MapOutputFlags, MapPromptFlags, TableFlags
from localllm.cli.options.one_shot import EndpointFlags, open_remote
from localllm.cli.parameters import find_explicit_options
from localllm.cli.prompt_input import decode_file
from localllm.cli.terminal.output import say
from localllm.cli.terminal.render import count_noun
from localllm.errors import UsageError
from localllm.files.jsonl_file import JsonlFile
from localllm.services.records.stream import RecordStream
from localllm.services.records.tables import detect_table_type

if TYPE_CHECKING:
    from localllm.generation.options import GenerationOptions
    from localllm.services.records.lines import PromptBuilder, Record
    from localllm.services.records.map import MapJob
    from localllm.services.remote.model import RemoteModel

    Left = list[Record] | RecordStream


@dataclass(repr=False, eq=False)
class MapCommand:
    """A run of `localllm map`: its options by group, and its steps."""

    model: str | None
    input: str | None
    ask: MapPromptFlags
    output: MapOutputFlags
    tables: TableFlags
    engine: options.EngineFlags
    choices: options.AnswerFlags
    endpoint: EndpointFlags

    def run(self) -> None:
        """Answer the unanswered records. Raises LocalllmError, and KeyboardInterrupt on Ctrl-C."""
        template, generation = self.read_options()
        self.sort_arguments()
        self.records_input = self.read()
        job = self.make_job(template, generation)
        target = self.require_files(job)
        with self.check_provenance(job, target) as remember, self.open_output(target) as out, ExitStack() as stack:
            remaining = self.select_records(job.prompts, out)
            progress = MapProgress(
                remaining, self.records_input.size - len(remaining) if isinstance(remaining, list) else 0
            )
            if progress.before:
                of_all = f"{progress.before} of {count_noun(self.records_input.size, 'record')}"
                say(f"localllm: {self.output.output} already answers {of_all}")
            if out is not None:
                self.write_table(out, stack)
            if not isinstance(remaining, list) or remaining:
                self.answer(job, remaining, out, progress, remember)
        progress.end(self.output.stats)

    def read_options(self) -> "tuple[str | None, GenerationOptions]":
        """Return the prompt template of -f, and the options of answers. Raises UsageError."""
        from localllm.files.text_file import require_encoding

        ask, output = self.ask, self.output
        require_compatible({
            "--raw": ask.raw, "--chat-template": ask.chat_template is not None,
            THOUGHTS: find_explicit_options(self.choices.thoughts), FORM: self.choices.shape.forms,
            "--redo": output.redo, "--redo-errors": output.redo_errors, "--choices": output.choices_given is not None,
            "--n": output.n > 1, "--ray": output.ray is not None, "--endpoint": self.endpoint.endpoint is not None,
        })  # fmt: skip
        self.system = options.read_system_message(ask.system, ask.system_file)
        self.output.validate_combination()
        require_encoding(ask.encoding)
        template = None if ask.file is None else decode_file(read_file(ask.file), ask.file, ask.encoding, whole=True)
        return template, options.build_generation_options(None, self.choices)

    def sort_arguments(self) -> None:
        """Resolve the model, and tell the model from the input among the arguments. Raises UsageError."""
        self.place = self.endpoint.parse_endpoint()
        if self.place is None and self.model is None:
            raise UsageError(f"MODEL is missing: {options.A_MODEL}")
        if self.place is not None and self.input is None and self.model is not None and os.path.isfile(self.model):
            self.model, self.input = None, self.model

    @property
    def is_table(self) -> bool:
        return bool(detect_table_type(self.output.output))

    def read(self) -> RecordsInput:
        """Read the records, or start to stream them from stdin. Raises UsageError."""
        output = self.output
        waits = self.is_table or output.shortest_first or output.choices_given or self.ask.encoding
        streams = not waits and output.ray is None
        return read_input(self.input, self.ask.encoding, self.tables.as_csv, streams, output.output)

    def make_job(self, template: str | None, generation: "GenerationOptions") -> "MapJob":
        from localllm.services.records.lines import PromptBuilder, require_line_field
        from localllm.services.records.map import MapJob

        ask, output, table, records = self.ask, self.output, self.records_input.table, self.records_input.records
        if isinstance(records, list):
            require_line_field(ask.prompt or template, records)
        first = opening.get_first_messages(self.model, self.place is not None or ask.raw)
        prompts = PromptBuilder(
            ask.prompt, template, self.system, ask.raw, () if table is None else table.columns, first
        )
        path = self.path = "" if self.place is not None else resolve_model_path(self.model or "")
        engine_options = self.engine.context, self.engine.threads, self.engine.cache.format_types()
        self.inputs = tuple(name for name in (path, self.input, ask.file) if name)
        job = MapJob(
            os.path.abspath(path), prompts, generation, output.n, not output.fast, *engine_options, ask.chat_template,
            ask.mmproj and os.path.abspath(ask.mmproj),
            split_choices(output.choices_given) if output.choices_given is not None else (), self.tables.json_as_text,
            **self.engine.adapters.make_absolute_fields(),
        )  # fmt: skip
        return job

    def require_files(self, job: "MapJob") -> str | None:
        """Return the file to which answers are appended, None for stdout. Raises UsageError, ModelError."""
        from localllm.files.gguf.file import map_split
        from localllm.services.records.tables import get_answers_path, require_writable_table

        output = self.output.output
        if not self.records_input.size and self.place is None:
            map_split(self.path)  # report an invalid model even if there are no records
        if not (output and self.is_table):
            return output
        require_writable_table(output, self.inputs, self.output.redo)
        return get_answers_path(output)

    def check_provenance(self, job: "MapJob", target: str | None) -> AbstractContextManager[Callable[[], None]]:
        """Compare the output's provenance with this input and job; see map_run.of_input."""
        by = job.compute_digests(self.path if self.place is None else f"{self.place.url} {self.model}")
        if self.place is not None and self.model is None:
            del by["model"]  # the server's first model, whose name is not known yet
        data = None if isinstance(self.records_input.records, RecordStream) else self.records_input.data
        return check_provenance(target, data, self.records_input.name, by, self.output.redo, self.output.redo_errors)

    def open_output(self, target: str | None) -> AbstractContextManager[JsonlFile | None]:
        """Open the file of answers; keep only answers to these records. Raises UsageError."""
        from localllm.services.records.map import make_result_filter

        records = self.records_input.records
        other_ids = make_result_filter(None if isinstance(records, RecordStream) else records, self.output.output or "")
        keep: Callable[[dict[str, object]], bool] = bool if self.output.redo else other_ids
        return JsonlFile(target, self.inputs, keep=keep) if target else nullcontext()

    def select_records(self, prompts: "PromptBuilder", out: JsonlFile | None) -> "Left":
        """Return the records that the output does not answer yet."""
        from localllm.services.records.map import select_unfinished, sort_by_length

        records, output = self.records_input.records, self.output
        if isinstance(records, RecordStream):
            if out is not None and out.records and not output.redo:
                records.skip(out.records, output.output or "")
                say(f"localllm: {output.output} already has {count_noun(len(out.records), 'answer')}")
            return records
        remaining = records if out is None or output.redo else select_unfinished(records, out.records)
        return sort_by_length(remaining, prompts) if output.shortest_first else remaining

    def write_table(self, out: JsonlFile, stack: ExitStack) -> None:
        """Write the answers as a table at the end, if the output is one."""
        from localllm.services.records.tables import write_table_at_end

        output, records = self.output.output, self.records_input.records
        if output and self.is_table and isinstance(records, list):
            stack.enter_context(
                write_table_at_end(output, out, self.records_input.table, records, list_properties(self.choices))
            )

    def answer(
        self,
        job: "MapJob",
        remaining: "Left",
        out: JsonlFile | None,
        progress: MapProgress,
        remember: Callable[[], None],
    ) -> None:
        """Answer the records and write the results; remember: records the output's provenance."""
        remote, output = self.open_remote(), self.output
        warns, name = not self.ask.raw, self.model or ""
        with open_mapping(job, self.engine, remaining, output.ray, progress, warns, name, remote) as mapping:
            if output.redo and out is not None:
                out.clear()
            remember()
            writer = ResultWriter(
                out, self.tables.stdout_format, self.records_input.table, list_properties(self.choices)
            )
            write_answers(mapping, remaining, writer, progress, output.as_finished)

    def open_remote(self) -> "RemoteModel | None":
        """Return the model of --endpoint, or None. Raises UsageError."""
        if self.place is None:
            return None
        output = self.output
        refused = {
            "ray": output.ray is not None, "fast": output.fast, "chat_template": self.ask.chat_template,
            "mmproj": self.ask.mmproj,
        }  # fmt: skip
        remote: RemoteModel = open_remote(self.place, self.model, self.choices, self.engine, **refused)
        return remote
