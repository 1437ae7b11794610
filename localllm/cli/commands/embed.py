"""localllm embed: embed texts, or find the texts nearest to a query."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeVar

from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import ProgressLine, is_terminal, say, write
from localllm.errors import ContextError, RecordsError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from localllm.generation.embedding.embedder import EmbedOptions, ShownImage
    from localllm.services.records.lines import Record
    from localllm.services.search.embed import AnyEmbedder, EmbedJob


class TokenCounter(Protocol):
    """An embedder or a reranker, which counts the tokens that it reads."""

    tokens: int
    warnings: list[str]


E = TypeVar("E", bound=TokenCounter)
Context = Annotated[
    int | None,
    option("-c --context --ctx-size", "Embed at most N tokens per text.  [default: the model's context]", "N"),
]
Field = Annotated[str, option("--field", "Read the text from this field of JSON objects.  [default: text]", "NAME")]


def embed(
    model: options.ModelName,
    input: list[str] | None = argument(
        "[INPUT]", "File of records, one per line; after --files, any number of further paths.  [default: stdin]"
    ),
    *,
    files: list[str] | None = option(
        "--files", "Embed each file, also in folders, as one text; --near searches their passages.", "PATH..."
    ),
    output: str | None = option(
        "-o --output", "Write to this file; records that a JSONL file already has are skipped.", "FILE"
    ),
    format: Literal["jsonl", "npy", "plain"] | None = option(
        "--format", "Write this format: jsonl, npy or plain.  [default: npy for -o FILE.npy, else jsonl]", "FORMAT"
    ),
    dims: int | None = option("--dims", "Truncate vectors to N dimensions (Matryoshka models).", "N"),
    role: Literal["query", "document"] | None = option(
        "--as",
        "Put the model's prompt for queries or for documents before each text.  [default: none; --near uses both]",
        "ROLE",
    ),
    overflow: Literal["refuse", "cut", "split"] = option(
        "--overflow",
        "Refuse, cut, or split (and average) texts longer than the context.  [default: refuse]",
        "HOW",
        default="refuse",
    ),
    raw: bool = option("--no-normalize", "Do not scale vectors to length 1."),
    pooling: Literal["mean", "cls", "last"] | None = option(
        "--pooling", "Pool token vectors by mean, cls or last.  [default: the model's]", "HOW"
    ),
    near: str | None = option("--near", "Print the texts nearest to QUERY instead of vectors.", "QUERY"),
    duplicates: float | None = option(
        "--duplicates", "Print groups of texts with at least this cosine similarity, up to 1, instead of vectors.", "N"
    ),
    top: int = option("--top", "With --near: print the N nearest texts.  [default: 5]", "N", default=5),
    images: list[str] | None = option(
        "--image", "Embed this image, with a model of images and texts (CLIP).  [repeatable]", "FILE"
    ),
    field: Field = "text",
    stats: bool = option("--stats", "Print counts and speed to stderr."),
    context: Context = None,
    threads: options.Threads = None,
    device: options.Device = "auto",
) -> None:
    """Compute embedding vectors, or search texts by meaning.

    INPUT has one record per line: a text, or a JSON object with a field "text". INPUT may also be a text of several
    words, in quotes. Without INPUT, records are read from stdin. The output has one vector per record: a line {"id",
    "embedding"}, a row of a NumPy file, or plain numbers.

    With --near, `embed` prints the texts nearest to QUERY instead, best first, each after its cosine similarity; for
    files it prints passages, each with its file and line. It adds the prompts that the model has for queries and
    documents, and keeps vectors in the cache folder for the next search. A model of images and texts (CLIP) also embeds
    images: files after --image, or the field "image" of a record. To resume an interrupted command, run it again with
    the same -o FILE.jsonl.

    Examples:
      localllm embed minilm.gguf sentences.txt -o vectors.npy
      localllm embed minilm.gguf --files notes --near "when can I retire?" --top 3
      localllm embed minilm.gguf --near "when can I retire?" --files *.md notes
      jq -c "{id, text: .title}" books.json | localllm embed minilm.gguf > vectors.jsonl
      localllm embed clip.gguf --image cat.jpg --image dog.png --near "a cat"
    """
    from localllm.engine.options import EngineOptions
    from localllm.generation.embedding.embedder import EmbedOptions
    from localllm.services.search.embed import EmbedJob, is_image

    makes_vectors = output is not None or format is not None
    validate_combination(duplicates, near is not None, makes_vectors, raw)
    source, files = sort_inputs(input or [], files)
    line = ProgressLine()
    engine = EngineOptions(threads, context or None, backend=device, progress=opening.make_compile_progress(line))
    by_passages = near is not None and files is not None
    records = [] if by_passages else read_inputs(source, files, images)
    has_images = bool(images) or any(map(is_image, records))
    job = EmbedJob(resolve_model_path(model), EmbedOptions(dims, not raw, role, overflow), engine, pooling, has_images)
    start = perf_counter()
    if near is not None:

        def read_texts(model_here: "AnyEmbedder") -> "list[tuple[str, str | ShownImage]]":
            return (
                list_texts(records, field, False) if files is None else list_passages(files, images, model_here.context)
            )

        return show_nearest(job, near, top, read_texts, stats, line)
    if duplicates is not None:
        given_texts = list_texts(records, field, files is not None)
        return show_duplicates(job, duplicates, given_texts, files is not None, line)
    failed, embedder = write_vectors(
        job, records, field, output, choose_format(format, output), files is not None, line
    )
    if stats:
        print_stats(embedder, perf_counter() - start)
    if failed:
        raise RecordsError(f"{failed} records failed; see the error field of their output lines")


def validate_combination(duplicates: float | None, is_near: bool, makes_vectors: bool, raw: bool) -> None:
    """Raise UsageError for options that cannot be combined."""
    if duplicates is not None and not 0 < duplicates <= 1:
        raise UsageError(f"duplicates must be above 0 and up to 1, not {duplicates:g}")
    if duplicates is not None and (makes_vectors or is_near or raw):
        raise UsageError("--duplicates prints texts, not vectors: leave out -o, --format, --near and --no-normalize")
    if is_near and makes_vectors:
        raise UsageError("--near prints texts, not vectors: leave out -o and --format")


def sort_inputs(arguments: list[str], files: list[str] | None) -> tuple[str | None, list[str] | None]:
    """Return the file of records, if any, and the files to embed whole. Raises UsageError for several files."""
    if files is not None or any(map(os.path.isdir, arguments)):
        return None, [*(files or ()), *arguments]
    if len(arguments) > 1:
        raise UsageError(f"unexpected argument {arguments[1]!r}: put --files before several files")
    return (arguments[0] if arguments else None), None


def choose_format(format: str | None, output: str | None) -> str:
    return format or ("npy" if output and output.endswith(".npy") else "jsonl")


def read_inputs(input: str | None, files: list[str] | None, images: list[str] | None = None) -> "list[Record]":
    """Read the records to embed. Raises UsageError."""
    from localllm.cli.map_run import read_named_input
    from localllm.generation.embedding.embedder import ShownImage
    from localllm.services.records.lines import Record, read_records
    from localllm.services.search.embed import list_files, read_text_file

    image_records = [Record(path, ShownImage(path)) for path in images or ()]
    if input is not None and (images or " " in input.strip()) and not os.path.lexists(input):
        return [Record(input, input), *image_records]
    if input is not None and input.isalnum() and not os.path.lexists(input):
        way = f"to embed this word, use `echo {input} | localllm embed MODEL`"
        raise UsageError(f"cannot read {input}: No such file or directory; {way}")
    if images and input is files is None:
        return image_records
    if files is None:
        return [*read_records(*read_named_input(input)), *image_records]
    records_found = list(image_records)
    for path in list_files(files):
        try:
            records_found.append(Record(path, read_text_file(path)))
        except UsageError as error:
            records_found.append(Record(path, "", str(error)))
    return records_found


def list_texts(records: "list[Record]", field: str, by_name: bool) -> "list[tuple[str, str | ShownImage]]":
    """Return each text or image with its label.

    by_name: skip files that cannot be read, with a note. Raises UsageError for other records without a text.
    """
    from localllm.services.search.embed import get_document

    if by_name:
        for record in records:
            if record.error:
                note_skipped(record.error)
        records = [record for record in records if not record.error]
    inputs = [get_document(record, field) for record in records]
    return [
        (" ".join(text.split()) if isinstance(text, str) and not by_name else str(record.id), text)
        for record, text in zip(records, inputs, strict=True)
    ]


def note_skipped(reason: str) -> None:
    """Note on stderr that a file is skipped; reason: begins with its name."""
    say(f"localllm: skipped: {reason}")


def write_vectors(
    job: "EmbedJob",
    records: "list[Record]",
    field: str,
    output: str | None,
    kind: str,
    by_name: bool,
    line: ProgressLine,
) -> "tuple[int, AnyEmbedder]":
    """Write the vectors of all records; return how many failed, and the embedder.

    by_name: the records are files; one that is too long fails alone.
    """
    from localllm.generation.embedding.embedder import ShownImage
    from localllm.services.records.lines import Record
    from localllm.services.search.embed import get_document, open_embedder

    failed = 0
    with open_with_warnings(open_embedder(job), line) as model, open_output(kind, output, job.path, records) as out:
        remaining = out.find_remaining(records)
        for first in range(0, len(remaining), model.chunk):
            some = remaining[first : first + model.chunk]
            good, inputs = list[Record](), list[str | ShownImage]()
            for number, record in enumerate(some, first + 1):
                try:
                    inputs.append(get_document(record, field))
                    model.tokenize(inputs[-1], job.options, str(record.id) if by_name else f"text {number}")
                    good.append(record)
                except (UsageError, ContextError) as error:
                    if isinstance(error, ContextError) and not by_name:
                        raise
                    del inputs[len(good) :]
                    out.fail(record, error)
                    failed += 1
            try:
                rows = model.embed(inputs, job.options, lambda done: line.show(f"{done} texts read"))
            except UsageError as error:
                if not good or model.chunk > 1:
                    raise
                out.fail(good[0], error)
                failed += 1
                continue
            line.clear()
            out.put(good, rows)
    return failed, model


@contextmanager
def open_with_warnings(manager: AbstractContextManager[E], line: ProgressLine) -> Iterator[E]:
    with manager as model:
        line.clear()
        opening.warn(model.warnings)
        yield model
    line.clear()


def show_nearest(
    job: "EmbedJob",
    query: str,
    top: int,
    inputs_for: "Callable[[AnyEmbedder], list[tuple[str, str | ShownImage]]]",
    stats: bool,
    line: ProgressLine,
) -> None:
    """Print the texts nearest to a query, each after its cosine similarity.

    inputs_for: returns the texts for an embedder, each with a label to print.
    """
    from dataclasses import replace

    from localllm.services.search.embed import VectorCache, find_nearest, get_cache_key, open_embedder

    if not job.options.normalize:
        raise UsageError("--near needs vectors of length 1: leave out --no-normalize")
    start = perf_counter()
    with open_with_warnings(open_embedder(job), line) as model:
        query_role, text_role = (
            each if job.options.role else model.get_usual_role(each) for each in ("query", "document")
        )
        of_texts = replace(job, options=replace(job.options, role=text_role))
        cache, texts = VectorCache(of_texts, job.options.dims or model.width), inputs_for(model)
        query_row = model.embed([query], replace(job.options, role=query_role))[0]
        by_key = {get_cache_key(item): item for _, item in texts}
        rows = cache.embed(
            [get_cache_key(item) for _, item in texts],
            lambda new: model.embed(
                [by_key[key] for key in new], of_texts.options, lambda done: line.show(f"{done} texts read")
            ),
        )
        line.clear()
        for number, cosine in find_nearest(query_row, rows, top):
            write(f"{cosine:.4f}\t{texts[number][0]}\n")
        if stats:
            say(f"{cache.found} of {len(texts)} vectors were cached")
            print_stats(model, perf_counter() - start)


def list_passages(files: list[str], images: list[str] | None, context: int) -> "list[tuple[str, str | ShownImage]]":
    """Return the passages of files, each with its location and text as a label, and images with their names.

    Files that cannot be read are skipped with a note.  context: the model's, in tokens.
    """
    from localllm.generation.embedding.embedder import ShownImage
    from localllm.services.search.embed import list_files, read_passages
    from localllm.services.search.passages import compute_passage_size

    items: list[tuple[str, str | ShownImage]] = [(path, ShownImage(path)) for path in images or ()]
    for path in list_files(files):
        try:
            file_parts = read_passages(path, compute_passage_size(context))
        except UsageError as error:
            note_skipped(str(error))
            continue
        items += [(f"{each.place}\t{' '.join(each.text.split())}", each.embedded) for each in file_parts]
    return items


def show_duplicates(
    job: "EmbedJob", threshold: float, items: "list[tuple[str, str | ShownImage]]", by_name: bool, line: ProgressLine
) -> None:
    """Print groups of near-duplicates, the largest first, each text after its cosine with the group's first.

    by_name: the texts are files; one that is too long is skipped with a note.
    """
    from localllm.services.search.embed import group_similar, open_embedder

    with open_with_warnings(open_embedder(job), line) as model:
        if by_name:
            skipped = find_too_long(model, items, job.options)
            items = [(name, item) for name, item in items if name not in skipped]
        rows = model.embed([item for _, item in items], job.options, lambda done: line.show(f"{done} texts read"))
    line.clear()
    groups = group_similar(rows, threshold)
    for group in groups:
        cosines = rows[group] @ rows[group[0]]
        lines = [f"{cosine:.4f}\t{items[each][0]}\n" for each, cosine in zip(group, cosines, strict=True)]
        write("".join(lines) + ("\n" if group is not groups[-1] else ""))


def find_too_long(
    model: "AnyEmbedder", items: "list[tuple[str, str | ShownImage]]", options: "EmbedOptions"
) -> set[str]:
    """Return the names of files that exceed the context, with a note on stderr for each."""
    names = set[str]()
    for name, item in items:
        try:
            model.tokenize(item, options, name)
        except ContextError as error:
            note_skipped(str(error))
            names.add(name)
    return names


def print_stats(model: TokenCounter, seconds: float) -> None:
    say(f"{model.tokens} tokens in {seconds:.2f} s, {model.tokens / max(seconds, 1e-9):.0f} tokens/s")


# ---- outputs of vectors


class VectorWriter(Protocol):
    def write(self, data: bytes, /) -> object: ...


class VectorOutput(Protocol):
    """Where `embed` writes vectors, in the order of their records."""

    def find_remaining(self, records: "list[Record]") -> "list[Record]":
        """Return the records without a vector yet."""
        ...

    def put(self, records: "list[Record]", rows: "np.ndarray") -> None:
        """Store records and their vectors, float32 [records, width]."""
        ...

    def fail(self, record: "Record", error: Exception) -> None:
        """Store a record's error."""
        ...


@contextmanager
def open_output(kind: str, path: str | None, model: str, records: "list[Record]") -> "Iterator[VectorOutput]":
    """Open the output in a format: jsonl, plain or npy. Raises UsageError."""
    if kind == "npy":
        yield from write_npy(path, model)
    elif kind == "jsonl" and path is not None:
        from localllm.files.jsonl_file import JsonlFile

        ids = {record.id for record in records}

        def is_reusable(result: dict[str, object]) -> bool:
            if result["id"] not in ids:
                raise UsageError(
                    f"{path}: record {result['id']!r} of this file is not in the input; give another output file"
                )
            return "error" not in result

        with JsonlFile(path, (model,), keep=is_reusable) as file:
            yield VectorLines(file, plain=False)
    elif path is not None:
        from localllm.files.safe_file import SafeFile, resolve_target

        with SafeFile(resolve_target(path, (model,))) as safe_file:
            yield VectorLines(safe_file, plain=True)
    else:
        yield VectorLines(None, plain=kind == "plain")


class VectorLines:
    """Writes a line for each vector."""

    def __init__(self, file: VectorWriter | None, plain: bool):
        """Store the output: a JsonlFile, another file, or None for stdout."""
        self._file, self._plain = file, plain

    def find_remaining(self, records: "list[Record]") -> "list[Record]":
        finished = {result["id"] for result in getattr(self._file, "records", ())}
        return [record for record in records if record.error or record.id not in finished]

    def put(self, records: "list[Record]", rows: "np.ndarray") -> None:
        import json

        numbers = ", ".join(["%.9g"] * rows.shape[1])
        plain = numbers.replace(",", "")
        lines = [
            plain % tuple(row)
            if self._plain
            else f'{{"id": {json.dumps(record.id, ensure_ascii=False)}, "embedding": [{numbers % tuple(row)}]}}'
            for record, row in zip(records, rows.tolist(), strict=True)
        ]
        self._write("".join(f"{line}\n" for line in lines))

    def fail(self, record: "Record", error: Exception) -> None:
        import json

        if self._plain:
            raise UsageError(f"{error}; the plain format cannot store errors: use --format jsonl")
        self._write(json.dumps({"id": record.id, "error": str(error)}, ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        if self._file is None:
            write(text)
        elif text:
            self._file.write(text.encode(errors="replace"))


class VectorArray:
    """Collects all vectors, to be written as one NumPy array."""

    def __init__(self) -> None:
        self.all: list[np.ndarray] = []

    def find_remaining(self, records: "list[Record]") -> "list[Record]":
        return records

    def put(self, records: "list[Record]", rows: "np.ndarray") -> None:
        self.all.append(rows)

    def fail(self, record: "Record", error: Exception) -> None:
        raise UsageError(f"{error}; an .npy file cannot store errors: use --format jsonl")


def write_npy(path: str | None, model: str) -> "Iterator[VectorOutput]":
    """Write a NumPy file, which appears when it is complete. Raises UsageError."""
    from io import BytesIO

    import numpy as np

    from localllm.files.safe_file import SafeFile, resolve_target

    if path is None and is_terminal(sys.stdout):
        raise UsageError("a NumPy file cannot be printed to a terminal: give -o FILE.npy, or pipe the output")
    rows = VectorArray()
    yield rows
    data = BytesIO()
    np.save(data, np.concatenate(rows.all) if rows.all else np.zeros((0, 0), np.float32))
    if path is None:
        sys.stdout.buffer.write(data.getbuffer())
        sys.stdout.buffer.flush()
    else:
        with SafeFile(resolve_target(path, (model,))) as file:
            file.write(data.getbuffer())
