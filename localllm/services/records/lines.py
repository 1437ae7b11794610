"""Read the lines of an input as records, and build prompts from them.

An input is plain lines or JSON Lines, with an object in every line. It is JSON Lines if its name ends with .jsonl or
.ndjson, or if its first line begins like an object. Empty lines are skipped.
"""

import json
import re
from collections.abc import Callable, Sequence

from localllm.errors import LocalllmError, UsageError
from localllm.files.text_file import UTF16_MARKS, decode_text
from localllm.frozen import frozen
from localllm.text.messages import Message

PromptInput = str | list[Message]
IMAGE = "image"  # the field
FIELD = re.compile(r"\{([\w-]+)\}")
BRACES = re.compile(r"\{([^{}\n]+)\}")  # a field if the record has it, such as a table's column whose name has spaces
DOCUMENT = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\{\s*\n|\[\s*[\[{"\]])')  # JSON that spans several lines
BLANKS = re.compile(r"\s*")
JINJA = "{{", "{%"  # every Jinja template has one of these


@frozen
class Record:
    """A line of the input.

    Attributes:
        id: a string or an integer, by default the line number, from 1.
        input: a JSON object, or the string of a plain line.  error: why the record is invalid, or "".
    """

    id: str | int
    input: object
    error: str = ""


def read_records(data: bytes, name: str = "") -> list[Record]:
    """Parse the records of an input; name: its file name. Raises UsageError for invalid UTF-16."""
    if data.startswith(UTF16_MARKS):
        data = decode_text(data, name or "stdin").encode()
    lines = [(number, line.removesuffix(b"\r")) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if lines and lines[0][0] == 1:
        lines[0] = 1, lines[0][1].removeprefix(b"\xef\xbb\xbf")
    if (document := convert_document(data)) is not None:
        return read_records(document, ".jsonl")
    is_jsonl = name.endswith((".jsonl", ".ndjson")) or bool(lines and is_json_line(lines[0][1]))
    records = [parse_json_line(number, line) if is_jsonl else parse_plain_line(number, line) for number, line in lines]
    first_lines = dict[str | int, int]()
    numbered = zip(records, (number for number, _ in lines), strict=True)
    return [record if record.error else check_unique_id(record, number, first_lines) for record, number in numbered]


def convert_document(data: bytes) -> bytes | None:
    """Convert a JSON array, or objects over several lines (as from jq), to JSON Lines; None for other data.

    A string in an array becomes an object with the field "line".
    """
    if not DOCUMENT.match(data):
        return None
    text, values, at = data.decode("utf-8-sig", errors="replace").strip(), list[object](), 0
    try:
        while at < len(text):
            value, at = json.JSONDecoder().raw_decode(text, at)
            values.append(value)
            at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return None
    if any(isinstance(each, list) for each in values):
        if len(values) > 1:
            return None  # lines that are arrays
        (array,) = values
        values = array if isinstance(array, list) else []
    objects = [{"line": each} if isinstance(each, str) else each for each in values]
    return "".join(f"{json.dumps(each)}\n" for each in objects).encode()


def is_document_start(line: bytes) -> bool:
    """Return whether the first line may begin JSON over several lines; see convert_document."""
    return line.strip() in (b"[", b"{", b"[{") or (line.startswith(b"[") and convert_document(line) is not None)


def is_json_line(line: bytes) -> bool:
    """Return whether a line begins like a JSON object."""
    return bool(re.match(rb'\s*\{\s*["}]', line))


def parse_plain_line(number: int, line: bytes) -> Record:
    try:
        return Record(number, line.decode())
    except UnicodeDecodeError as error:
        return Record(number, line.decode(errors="replace"), f"line {number} is not UTF-8 at byte {error.start}")


def parse_json_line(number: int, line: bytes) -> Record:
    try:
        value = json.loads(line)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        return Record(number, line.decode(errors="replace"), f"line {number} is not JSON: {error}")
    if not isinstance(value, dict):
        return Record(number, value, f"line {number} is not a JSON object")
    record_id = value.get("id", number)
    if isinstance(record_id, bool) or not isinstance(record_id, str | int):
        return Record(number, value, f"line {number}: an id must be a string or an integer, not {record_id!r}")
    return Record(record_id, value)


def check_unique_id(record: Record, number: int, first_lines: dict[str | int, int]) -> Record:
    """Return the record, with an error if an earlier line has its id; first_lines: line numbers by id."""
    first = first_lines.setdefault(record.id, number)
    error = "" if first == number else f"line {number}: the id {record.id!r} was already used in line {first}"
    return Record(record.id, record.input, error)


class PromptBuilder:
    def __init__(
        self,
        prompt: str | None = None,
        template: str | None = None,
        system: str | None = None,
        raw: bool = False,
        columns: Sequence[str] = (),
        first: Sequence[Message] = (),
    ):
        """Prepare a template for the prompts.

        prompt, template: a string with {field} in it, or a Jinja template if it has {{ or {%; from an argument, or from
        a file.
        If both are None, each record has its own prompt. A plain line's only field is `line`.  raw: continue the prompt
        without a chat template.  columns: columns of a table.  first: messages before each prompt, after the system
        message. Raises UsageError.
        """
        if raw and system is not None:
            raise UsageError("a system message cannot be combined with raw: raw prompts use no chat template")
        if prompt is not None and template is not None:
            raise UsageError("give either a prompt or a template file, not both")
        text = template if prompt is None else prompt
        is_jinja = text is not None and any(mark in text for mark in JINJA)
        is_named = text is None or is_jinja or FIELD.search(text) or any(f"{{{name}}}" in text for name in columns)
        if not is_named and columns:
            raise UsageError(f"the prompt must name a column: {format_fields(columns)}")
        unknown = [name for name in FIELD.findall(text or "") if name not in columns]
        if unknown and columns and not is_jinja:
            raise UsageError(f"unknown column {format_fields(unknown)}: the columns are {format_fields(columns)}")
        if not is_named:
            raise UsageError('the prompt must name a field: {line} for a plain line, {text} for the field "text"')
        if text is None and columns and not {"prompt", "messages"} & {*columns}:
            raise UsageError(f"-p TEXT is missing: the columns are {format_fields(columns)}")
        self._arguments = prompt, template, system, raw, columns, first
        self._raw, self._source = raw, text or ""
        self._head = [*([] if system is None else [{"role": "system", "content": system}]), *first]
        self._prompt = text if prompt is not None or text is None else text.removesuffix("\n")
        self._render = compile_jinja(text) if is_jinja and text is not None else None

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle without the compiled template."""
        return PromptBuilder, self._arguments

    def __repr__(self) -> str:
        first = self._arguments[-1]
        return f"Prompts{self._arguments[:4]!r}" + (f" after {first!r}" if first else "")

    def has_field(self, name: str) -> bool:
        """Return whether the prompt's template names a field."""
        return bool(re.search(rf"\b{name}\b", self._source)) if self._render else f"{{{name}}}" in self._source

    def __call__(self, record: Record) -> PromptInput:
        """Build the prompt of a record: messages, or a string if raw. Raises LocalllmError for missing fields.

        Images in the record's field `image` (a path, a data URL or a list of them) are placed before the prompt, unless
        the prompt names that field.
        """
        if record.error:
            raise UsageError(record.error)
        fields = record.input if isinstance(record.input, dict) else {"line": record.input}
        if self._render:
            return self._make_prompt(self._render(fields), get_images(fields))
        if self._prompt is not None:
            images = [] if IMAGE in FIELD.findall(self._prompt) else get_images(fields)

            def fill(match: "re.Match[str]") -> str:
                is_field = match[1] in fields or FIELD.fullmatch(match[0])
                return get_field(fields, match[1]) if is_field else match[0]

            return self._make_prompt(BRACES.sub(fill, self._prompt), images)
        if "messages" in fields and not self._raw:
            if get_images(fields):
                raise UsageError('"image" needs a prompt; in "messages", put images into the content')
            if not isinstance(fields["messages"], list):
                raise UsageError('"messages" must be a list of messages: [{"role": "user", "content": ...}]')
            return [*self._head, *fields["messages"]]
        field = next((name for name in ("prompt", "question", "line") if name in fields), None)
        if field is None:
            raise UsageError('the record has no field "messages" or "prompt"; add one or give a prompt')
        return self._make_prompt(get_field(fields, field), get_images(fields))

    def _make_prompt(self, text: str, images: list[str]) -> PromptInput:
        if self._raw and images:
            raise UsageError("images cannot be combined with raw: raw prompts use no chat template")
        if self._raw:
            return text
        return [*self._head, {"role": "user", "content": text, **({"images": images} if images else {})}]


def require_line_field(text: str | None, records: Sequence[Record]) -> None:
    """Raise UsageError for a prompt with a field other than {line} if all records are plain lines."""
    if text is None or any(mark in text for mark in JINJA):
        return
    unknown = [name for name in FIELD.findall(text) if name != "line"]
    if unknown and records and all(isinstance(each.input, str) for each in records):
        raise UsageError(
            f"unknown field {format_fields(unknown)}: the input has plain lines, whose only field is {{line}};"
            " for {file} and {text}, give a folder, whose files are the records"
        )


def format_fields(columns: Sequence[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in columns)


def get_images(fields: dict[str, object]) -> list[str]:
    """Return a record's images: paths and data URLs. Raises UsageError."""
    value = fields.get(IMAGE)
    values = [] if value is None else value if isinstance(value, list) else [value]
    images = [image for image in values if isinstance(image, str) and image]
    if len(images) < len(values):
        raise UsageError(f'"{IMAGE}" must be the path of an image, or a list of them')
    return images


def get_field(fields: dict[str, object], name: str) -> str:
    """Return a field's string, or its value as JSON. Raises UsageError for an unknown field."""
    if name not in fields:
        raise UsageError(f"the record has no field {name!r}")
    value = fields[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def compile_jinja(source: str) -> Callable[[dict[str, object]], str]:
    """Compile a Jinja template to a function from fields to a string. Raises UsageError if it is invalid."""
    from localllm.text.sandbox import compile_template, render_template  # Jinja takes 40 ms to import

    def describe_error(error: Exception) -> str:
        return " ".join(str(error).split())[:200] or type(error).__name__

    try:
        template = compile_template(source, strict=True)
    except MemoryError:
        raise
    except Exception as error:  # Jinja's parser and Python's compiler raise many errors
        raise UsageError(f"the prompt's Jinja template is invalid: {describe_error(error)}") from None

    def render(fields: dict[str, object]) -> str:
        try:
            return render_template(template, fields)
        except MemoryError:
            raise
        except Exception as error:  # a template's code can raise any error
            raise LocalllmError(f"the prompt's Jinja template failed: {describe_error(error)}") from None

    return render
