"""Read the prompt from options, files and pipes, and start the answer."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple

from localllm.cli.parameters import option
from localllm.cli.terminal.output import is_terminal, open_stdin, say
from localllm.errors import ContextError, UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.options import GenerationOptions
    from localllm.generation.scheduler import Generation
    from localllm.text.messages import Message

Encoding = Annotated[
    str | None,
    option(
        "--encoding",
        "Decode files and stdin with this encoding.  [default: UTF-8 with invalid bytes replaced, or UTF-16 with a "
        "byte order mark]",
        "NAME",
    ),
]
Prompt = Annotated[
    list[str] | None,
    option("-p --prompt", "Set the prompt; several are joined with blank lines.  [repeatable]", "TEXT"),
]
MIN_CHECKED_BYTES = 1 << 20  # bytes of a prompt to read before computing the maximum that fits the context


def read_prompt(
    prompts: Sequence[str],
    files: Sequence[str] = (),
    use_stdin: bool = True,
    encoding: str | None = None,
    most_bytes: Callable[[], int] = lambda: sys.maxsize,
    exact: str | None = None,
    ways: str = "-p TEXT, -f FILE or through a pipe",
    with_names: bool = True,
) -> "PromptInputs":
    """Join the files of -f, stdin and then the texts of -p with blank lines; "-" stands for stdin.

    The question comes last, so that a second one about the same text finds it in the prefix cache.

    encoding: of the files and stdin, see files.text_file.  most_bytes: returns the maximum bytes in UTF-8 that fit the
    context; only called for prompts above ALWAYS.  exact: a file whose final line break is kept.  ways: to give a
    prompt, for the error message without one.  with_names: put its name before each of several files. Raises
    UsageError, and ContextError as soon as more was read than can fit.
    """
    if encoding is not None:
        from localllm.files.text_file import require_encoding

        require_encoding(encoding)
    questions = [require_decodable(prompt, "-p") for prompt in prompts]
    named = with_names and len(files) > 1
    parts = [
        prepend_name(decode_file(read_file(file, most_bytes, encoding), file, encoding), file if named else "")
        for file in files
        if file != "-"
    ]
    if exact is not None:
        parts.append(decode_file(read_file(exact, most_bytes, encoding), exact, encoding, whole=True))
    if "-" in files and sys.stdin is None:
        raise UsageError("-f -: stdin is closed; pipe the text, as in `cat FILE | localllm run ...`")
    if "-" in files or (use_stdin and sys.stdin is not None and not is_terminal(sys.stdin)):
        data = read_bounded(open_stdin(), most_bytes, encoding)
        piped = decode_file(data, "stdin", encoding) if data else ""
        parts.append(prepend_name(piped, "stdin" if named and piped else ""))
    inputs = PromptInputs("\n\n".join(filter(None, parts)), "\n\n".join(filter(None, questions)))
    if not inputs.text:
        raise UsageError(f"the prompt is missing: give one with {ways}")
    return inputs


def sort_arguments(arguments: Sequence[str], files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into the prompt, if there is one, and files; folders are replaced by their files.

    files: of -f. If there are any, arguments that exist are files, too, since a shell expands `-f *.txt` like that.
    Raises UsageError for two prompts.
    """
    more_files = [each for each in arguments if files and os.path.exists(each)]
    texts = [each for each in arguments if each not in more_files]
    if len(texts) > 1:
        raise UsageError(f"unexpected argument {texts[1]!r}: put quotes around a prompt of several words")
    if texts and not files and os.path.isfile(texts[0]):
        say(f"localllm: the prompt is the text {texts[0]!r}; to read the file with this name, use -f {texts[0]}")
    return texts, [
        path for each in (*files, *more_files) for path in (list_text_files(each) if os.path.isdir(each) else [each])
    ]


def list_text_files(folder: str) -> list[str]:
    """Return a folder's text files, found as `localllm search` does. Raises UsageError without any."""
    from localllm.services.search.files import FileFilter, iter_text_files, read_text

    paths = [path for path in iter_text_files([folder], FileFilter()) if read_text(path) is not None]
    if not paths:
        raise UsageError(f"{folder}: the folder contains no text files; give a file, or another folder")
    return paths


class PromptInputs(NamedTuple):
    """The texts that make up a prompt.

    Attributes:
        material: the text of files and stdin.  question: the prompt about them.
        prompt_first: whether the question comes before the material.
    """

    material: str
    question: str
    prompt_first: bool = False

    @property
    def text(self) -> str:
        both = (self.question, self.material) if self.prompt_first else (self.material, self.question)
        return "\n\n".join(filter(None, both))


def prepend_name(text: str, name: str) -> str:
    """Return a file's content below its name, in the format of `head` and `tail`; unchanged without a name."""
    return f"==> {name} <==\n{text}" if name else text


def read_file(file: str, most_bytes: Callable[[], int], encoding: str | None) -> bytes:
    """Read a file's bytes; of a PDF, Word or EPUB file its text, with lines that number its pages.

    HTML is read as it is: questions are often about the source. Raises the errors of read_bounded, and UsageError if
    the file cannot be read.
    """
    if file.lower().endswith((".pdf", ".docx", ".epub")):
        from localllm.files.documents import mark_pages, read_document  # 20 ms

        text = mark_pages(read_document(file))
        return read_bounded(io.BytesIO(text.encode(encoding or "utf-8", errors="replace")), most_bytes, encoding)
    try:
        with open(file, "rb") as source:
            return read_bounded(source, most_bytes, encoding)
    except (OSError, ValueError) as error:  # a name with a NUL in it is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the prompt from {file}: {reason}; -f needs an existing, readable file") from None


def read_bounded(source: BinaryIO, most_bytes: Callable[[], int], encoding: str | None = None) -> bytes:
    """Read a source to its end. Raises ContextError if it exceeds the context."""
    data = source.read(MIN_CHECKED_BYTES)
    if len(data) < MIN_CHECKED_BYTES:
        return data
    pieces, size, limit = [data], len(data), most_bytes()
    widest = 1 if encoding is None and not data.startswith((b"\xff\xfe", b"\xfe\xff")) else 4  # bytes per UTF-8 byte
    while size <= limit * widest and (data := source.read(MIN_CHECKED_BYTES)):
        pieces.append(data)
        size += len(data)
    if size > limit * widest:
        raise ContextError(
            f"the prompt is too long: its first {size} bytes alone exceed the context; shorten it, or use `run "
            "--on-overflow chunks` to read it in chunks, or relevant, head, tail or middle to read some of it"
        )
    return b"".join(pieces)


def decode_file(data: bytes, name: str, encoding: str | None = None, whole: bool = False) -> str:
    """Decode a text file, without its final line break unless `whole`.

    encoding: None replaces bytes that are not UTF-8, with a warning; other encodings raise UsageError for invalid
    bytes.
    """
    from localllm.files.text_file import decode_text, decode_with_replacement, strip_line_break

    try:
        text, warning = (
            decode_with_replacement(data, name) if encoding is None else (decode_text(data, name, encoding), "")
        )
    except UsageError as error:
        if b"\0" in data and encoding is None:
            raise UsageError(
                f"{name}: expected text, found a binary file; if it is text, set its --encoding NAME"
            ) from None
        raise UsageError(f"{error}; set another encoding with --encoding NAME") from None
    if warning:
        say(f"localllm: warning: {warning}; set another encoding with --encoding NAME")
    return text if whole else strip_line_break(text)


def require_decodable(text: str, name: str) -> str:
    """Return a text from the command line. Raises UsageError if it is neither in the locale's encoding nor UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        with suppress(UnicodeError):  # a locale without UTF-8, such as C, on a terminal with it
            return text.encode(errors="surrogateescape").decode()
        wrong = ord(text[error.start]) & 0xFF  # Python's surrogate of an invalid UTF-8 byte
        hint = "put the text into a file, and use -f with --encoding"
        raise UsageError(
            f"{name} must be UTF-8 (found byte 0x{wrong:02x} at character {error.start}): {hint}"
        ) from None
    return text


def build_prompt(
    model: "Model", text: str, system: str | None, raw: bool, first: "Sequence[Message]" = ()
) -> "str | list[Message]":
    """Return the prompt as messages; unchanged if `raw`, or for models that cannot chat.

    first: messages before it. Warns if the file has no chat template. Raises UsageError for a system message with a
    model that cannot chat.
    """
    if raw:
        return text
    if model.session.is_single_turn:
        if system is not None:
            raise UsageError(f"{model.arch} models take a single text without a system message: leave out -sys")
        return text
    warn_missing_template(model)
    instruction = [] if system is None else [{"role": "system", "content": system}]
    return [*instruction, *first, {"role": "user", "content": text}]


def warn_missing_template(model: "Model") -> None:
    if warning := model.session.warning:
        say(f"localllm: warning: {warning}; choose one with --chat-template, or continue plain text with `run --raw`")


@contextmanager
def explain_overflow(model: "Model", can_shift: bool, can_ask_parts: bool = False) -> Iterator[None]:
    """Add the excess, and the remedies, to an error about a prompt that is too long.

    can_shift: whether the command supports context shift.  can_ask_parts: whether it supports --on-overflow chunks and
    relevant.
    """
    try:
        yield
    except ContextError as error:
        if error.excess is None:
            raise
        ways, needed_tokens = ["shorten it"], model.context + error.excess
        if needed_tokens <= model.trained_context:
            ways.append(f"set -c {needed_tokens} or more (the model was trained for {model.trained_context})")
        cuts = [*(["relevant"] if can_ask_parts else ()), "head", "tail", "middle"]
        if can_shift:
            with suppress(UsageError):  # the model does not support it
                model.engine.require_shift()
                cuts.append("shift")
        if can_ask_parts:
            ways.append("read all of it in chunks with --on-overflow chunks")
        ways.append(f"read some of it with --on-overflow {', '.join(cuts[:-1])} or {cuts[-1]}")
        last = ways.pop()
        listed = f"{', '.join(ways)}, or {last}"
        raise ContextError(f"{error}, {error.excess} too many: {listed}") from None


def start_answer(
    model: "Model", prompt: "str | list[int] | list[Message]", options: "GenerationOptions"
) -> "Generation":
    """Start the answer to messages, or the continuation of a text or token ids."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return model.session.complete(prompt, options)
    return model.session.chat(prompt, options)
