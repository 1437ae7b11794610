"""Rendering that several commands share: streamed answers, tables, numbers and names."""

import sys
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from localllm.cli.terminal.output import (
    ProgressLine,
    format_heading,
    get_width,
    is_terminal,
    join_lines,
    make_printable,
    print_dim_inline,
    say,
)
from localllm.errors import CutError

if TYPE_CHECKING:
    from localllm.cli.terminal.stream_renderer import AnswerPage
    from localllm.generation.beam_search import Answer
    from localllm.generation.scheduler import Generation

NARROWEST = 10  # minimum columns of a truncated cell
EMPTY = "localllm: the answer is empty: the model wrote only reasoning"
LABEL = 14  # columns of a fact's label
TITLE = 40  # maximum characters of the first question


def print_stream(
    answer: "Generation",
    line: ProgressLine,
    silent: bool = False,
    thoughts: bool = True,
    out: "AnswerPage | None" = None,
) -> bool:
    """Print an answer while it is generated, then a line break; return whether Ctrl-C interrupted it.

    thoughts: show reasoning, on a terminal.  out: renders the answer; None: on stdout.
    """
    from localllm.generation.reasoning import ANSWER, REASONING  # here, because every command imports this module

    interrupted, last_kind, out = False, "", out or make_stdout_page()
    try:
        for kind, piece in answer.parts:
            line.clear()
            if kind == REASONING and thoughts:
                print_dim_inline(piece if last_kind == REASONING else format_heading("thinking") + piece)
            elif kind == ANSWER and last_kind == REASONING and thoughts:
                print_dim_inline("\n\n" + (format_heading("answer") if is_terminal(sys.stdout) and not silent else ""))
            if kind == ANSWER and not silent:
                out.push(piece)
            last_kind = kind
    except KeyboardInterrupt:
        interrupted = True
    finally:
        line.clear()
    if last_kind == REASONING and thoughts:
        print_dim_inline("\n")
    if not silent and (answer.text or not (interrupted or answer.calls)):
        out.end()
    note_overflow(answer)
    return interrupted


def make_stdout_page() -> "AnswerPage":
    """Create the renderer of an answer on stdout; on a terminal, it wraps lines between words."""
    from localllm.cli.terminal.stream_renderer import make_page

    return make_page()


def count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def is_only_reasoning(answer: "Generation | Answer") -> bool:
    """Return whether an answer has ended during or after its reasoning without any text."""
    calls: object = getattr(answer, "calls", None)  # a beam search's answer has none
    return bool(answer.thinking and not (answer.text or calls or answer.finish_reason == "interrupted"))


def require_answers(answers: "Sequence[Generation | Answer]") -> None:
    """Print a note if no answer has text after its reasoning. Raises CutError if one was cut off in its reasoning."""
    if not all(map(is_only_reasoning, answers)):
        return
    if any(answer.finish_reason == "length" for answer in answers):
        raise CutError("the answer is empty: its reasoning was cut off; raise -n or the context, or set --think-budget")
    say(EMPTY)


def note_overflow(answer: "Generation") -> None:
    """Print a note if tokens were dropped, or the answer ended, because the context is full."""
    if answer.dropped:
        dropped = f"{answer.dropped} tokens after the first {answer.kept} were dropped"
        say(f"localllm: the context is full: {dropped}; raise -c to keep more")
    elif answer.is_full:
        say("localllm: the answer ended because the context is full; raise -c or use --on-overflow shift")


def format_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return format_columns(header, rows, "<" + ">" * (len(header) - 1), get_terminal_width())


def format_facts(facts: Iterable[tuple[str, str]], label: int = LABEL) -> list[str]:
    """Format labelled facts, one per line, wrapped between words on a terminal."""
    width = get_terminal_width()
    return [line for name, text in facts for line in wrap_hanging(f"{name:<{label}}{to_one_line(text)}", width, label)]


def wrap_hanging(line: str, width: int, indent: int) -> list[str]:
    """Wrap a line between words if it is wider than `width`; 0 means no limit."""
    if not width or len(line) <= width:
        return [line]
    from textwrap import wrap

    return wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def format_columns(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], sides: str, wide: int = 0) -> list[str]:
    """Format rows as columns, each aligned to the left (<) or the right (>), at most `wide` columns wide.

    wide: 0 means no limit. Without enough room, right-aligned columns are omitted, and long cells of left-aligned
    columns other than the first are truncated.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    if wide:
        widths = fit_columns(widths, [index > 0 and side == "<" for index, side in enumerate(sides)], wide)
    layout = [*zip(sides, widths, strict=False)]
    return [
        "  ".join(
            f"{shorten(cell, width):{side}{width}}" for cell, (side, width) in zip(row, layout, strict=False)
        ).rstrip(" ")
        for row in (header, *rows)
    ]


def fit_columns(widths: Sequence[int], may_be_cut: Sequence[bool], wide: int) -> list[int]:
    """Return the widths of as many columns as fit, with two spaces between them."""
    least = [
        min(width, NARROWEST) if may_shrink else width for width, may_shrink in zip(widths, may_be_cut, strict=True)
    ]
    count = next((end for end in range(len(least), 1, -1) if sum(least[:end]) + 2 * (end - 1) <= wide), 1)
    fitted = [*widths[:count]]
    while count > 1 and sum(fitted) + 2 * (count - 1) > wide:
        fitted[max(range(count), key=lambda index: fitted[index] - least[index])] -= 1
    return fitted


def get_terminal_width() -> int:
    """Return the width of stdout's terminal; 0, which means no limit, without a terminal."""
    return get_width(sys.stdout) if is_terminal(sys.stdout) else 0


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def to_one_line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return make_printable(join_lines(text))


def format_checksum(checksum: str, path: str) -> str:
    """Format a file's checksum as sha256sum does, which escapes names with line breaks or backslashes."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{chr(92) if escaped != path else ''}{checksum}  {escaped}"


def format_count(number: int, units: Sequence[str] = ("B", "M", "k", "")) -> str:
    for unit, name in zip((1e9, 1e6, 1e3), units, strict=False):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number} {units[-1]}".rstrip()


def format_size(number: int) -> str:
    return format_count(number, ("GB", "MB", "kB", "B"))


def get_file_stem(path: str) -> str:
    """Return a name for a model whose file has none."""
    return path.replace("\\", "/").rpartition("/")[2].removesuffix(".gguf")


class RemainingTime:
    """Estimates the remaining time of a job in equal steps; the clock starts on creation."""

    def __init__(self, total: int, done: int = 0, step: str = "chunk"):
        """Start the clock.

        done: count of steps finished by an earlier run.  step: what a step is called.
        """
        self._step, self._total, self._before, self._start = step, total, done, perf_counter()

    def format_first(self) -> str:
        return f"{self._step} {self._before + 1} of {self._total}"

    def describe(self, done: int) -> str:
        """Describe the state after `done` steps, such as "chunk 3 of 40, 2 min 10 s left"."""
        per_step = (perf_counter() - self._start) / max(done - self._before, 1)
        return f"{self._step} {done} of {self._total}, {format_duration(per_step * (self._total - done))} left"


def format_duration(seconds: float) -> str:
    total = round(seconds)
    if total >= 3600:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 60} min {total % 60} s" if total >= 60 else f"{total} s"


def format_sessions() -> list[str]:
    """Format the sessions below a header, latest first; [] without sessions."""
    from time import localtime, strftime

    from localllm.services import sessions

    rows: list[tuple[str, ...]] = []
    for listed in sessions.list_sessions():
        messages = listed.chat.messages
        question = next((message["content"] for message in messages if message["role"] == "user"), "")
        title = shorten(to_one_line(question), TITLE)
        when = strftime("%Y-%m-%d %H:%M", localtime(listed.used))
        name = listed.chat.model.name or listed.chat.model.path
        about = (title, to_one_line(name)) if not listed.damage else ("damaged", "")
        rows.append((listed.name, when, str(len(messages)), *about))
    header = ("session", "last used", "messages", "first question", "model")
    return format_columns(header, rows, "<<><<", get_terminal_width()) if rows else []
