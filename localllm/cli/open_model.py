"""Find the MODEL of a command, or pull it, and open it, with progress and warnings on stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import localllm
from localllm.cli.options.shared import DRAFT, EngineFlags, is_draft_model
from localllm.cli.terminal import output as terminal
from localllm.cli.terminal.output import ProgressLine, is_terminal, say, say_dim, wrap_line
from localllm.cli.terminal.render import format_size, to_one_line
from localllm.errors import UsageError
from localllm.files.models_folder import is_path
from localllm.system.terminal import use_normal_keys

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.options.search import FileFilterFlags, SearchModelFlags
    from localllm.generation.options import GenerationOptions
    from localllm.services.hub.catalogue import HubReference, MissingError
    from localllm.services.search.ranking import PassageSearch
    from localllm.text.messages import Message

UPDATE_SECONDS = 0.1  # minimum seconds between two updates of the progress line


# ---- the model's file


def resolve_model_path(model: str) -> str:
    """Resolve MODEL to the path of its file; an existing path stays as it is.

    On a terminal, offers to pull a missing model. Raises the errors of catalogue.resolve_model and pull.pull_model.
    """
    if is_path(model):
        return model
    from localllm.services.hub.catalogue import MissingError, resolve_model

    try:
        return resolve_model(model)
    except MissingError as error:
        if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
            raise
        return offer_pull(error)


def offer_pull(missing: "MissingError") -> str:
    """Offer to pull a missing model; return its file. Raises MissingError if the user declines."""
    reference = missing.reference
    size_note = f" ({reference.size})" if reference.size else ""
    if not confirm(f"{reference.text} is not on this computer. Download it{size_note}?"):
        raise missing
    return pull_with_progress(reference)


def confirm(question: str) -> bool:
    """Ask a yes-or-no question on the terminal; the end of input means no."""
    with use_normal_keys():
        print(f"{wrap_line(f'{to_one_line(question)} [y/N]', sys.stderr)} ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def pull_with_progress(reference: "HubReference") -> str:
    from localllm.services.hub.pull import PullProgress, pull_model

    class LineProgress(PullProgress):
        """Shows the progress of a pull on one line."""

        def __init__(self) -> None:
            self.line, self.start, self.last, self.first = ProgressLine(), monotonic(), 0.0, -1

        def show(self, text: str, last: bool = False) -> None:
            if last or monotonic() - self.last >= UPDATE_SECONDS:
                self.last = monotonic()
                self.line.show(to_one_line(text))

        def report_lookup(self, subject: str) -> None:
            self.show(f"{reference.text}: requesting {subject}", last=True)

        def report_check(self, file: str, done: int, total: int) -> None:
            self.show(f"checking {format_size(done)} of {format_size(total)}: {file}", last=done == total)

        def report_download(self, file: str, done: int, total: int) -> None:
            if self.first < 0:
                self.first, self.start = done, monotonic()
            speed = (done - self.first) / max(1e-3, monotonic() - self.start)
            rate = f", {format_size(int(speed))}/s, {format_duration((total - done) / speed)} to go" if speed else ""
            self.show(f"{format_size(done)} of {format_size(total)}{rate}: {file}", last=done == total)

        def report_interruption(self, reason: str) -> None:
            self.show(f"trying again: {reason}", last=True)

    display = LineProgress()
    try:
        pulled = pull_model(reference, display)
    except KeyboardInterrupt:
        display.line.clear()
        say_dim("the partial download is kept; run the same command again to resume")
        raise
    finally:
        display.line.clear()
    say_dim(
        f"{reference.text}: {format_size(pulled.size)}"
        + ("" if pulled.received else ", already downloaded and verified")
    )
    return str(pulled.path)


def format_duration(seconds: float) -> str:
    minutes, seconds_left = divmod(round(min(seconds, 359_999)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def default_to_builtin(model: str | None) -> str:
    return str(localllm.builtin_model()) if model is None else model


def warn_builtin_model(model: str | None) -> None:
    """Print a notice if no model was named."""
    if model is None:
        say("localllm: no model given; using the tiny built-in model, which only knows localllm")


def get_first_messages(model: str | None, is_remote: bool) -> "list[Message]":
    """Return the messages that begin conversations with a model of this name. Raises ModelError."""
    from localllm.services.hub.name_settings import read_messages

    return [] if model is None or is_remote else read_messages(model)


def compute_max_bytes(model: str, engine: EngineFlags, on_overflow: str | None) -> int:
    """Return how many bytes of UTF-8 a prompt may have; sys.maxsize if --on-overflow shortens longer ones.

    Raises the errors of resolve_model_path, and ModelError.
    """
    from localllm.api import get_max_prompt_bytes

    if on_overflow not in (None, "error", "drop-turns"):
        return get_unlimited()
    return get_max_prompt_bytes(resolve_model_path(model), engine.context, engine.rope.make_scaling())


def get_unlimited() -> int:
    """Return sys.maxsize, which stands for an unknown limit."""
    return sys.maxsize


# ---- opening the model


def open_model(
    model: str,
    engine: EngineFlags,
    chat_template: str | None = None,
    no_cache: bool = False,
    mmproj: str | None = None,
    pan_and_scan: bool = False,
    name: str | None = None,
) -> "Model":
    """Open a model by path or name; print progress and warnings to stderr.

    name: the name that was resolved to the path `model`, if any.
    """
    path = resolve_model_path(model)
    from localllm.api import open_with_options

    line = ProgressLine()
    with line:
        options = engine.to_options(make_compile_progress(line), make_upload_progress(line))
        opened = open_with_options(path, options, chat_template, not no_cache, mmproj, pan_and_scan)
    from localllm.kernels.build.faults import end_on_bus_error

    end_on_bus_error(path)
    warn(opened.warnings)
    warn_unused(name or model, opened, chat_template)
    return opened


def warn_unused(name: str, model: "Model", chat_template: str | None) -> None:
    """Warn of files and settings of a model's name that are not used."""
    if not is_path(name):
        from localllm.services.hub.name_settings import describe_unused_parts

        warn(describe_unused_parts(name, model.path, model.tokenizer.chat_template, chat_template is not None))


def open_draft_model(model: "Model", options: "GenerationOptions", speculate: str) -> "GenerationOptions":
    """Open the draft model of --speculate, if any; return the options with it.

    Raises the errors of Model.resolve_drafter.
    """
    if not is_draft_model(speculate):
        return options
    if model.file is None:
        raise UsageError("speculate must not name a draft model with --endpoint: give the server a draft model instead")
    from dataclasses import replace

    with ProgressLine() as line:
        draft = resolve_model_path(speculate.removeprefix(DRAFT))
        return replace(options, speculate=model.resolve_drafter(f"{DRAFT}{draft}", make_compile_progress(line)))


def check_thinking(model: "Model", think: str) -> bool:
    """Return whether a thinking mode has an effect, and warn if not; `off` always has one."""
    if think in ("auto", "off") or model.file is None or model.session.is_single_turn:
        return True
    from localllm.generation.conversation import ChatFormat

    has_choice = ChatFormat(model.session.template, model.tokenizer).has_thinking_choice
    if not has_choice:
        say(f"localllm: --think {think} is ignored: the model's chat template has no thinking option")
    return has_choice


def finish_writes(model: "Model") -> None:
    """Finish writing the prefix cache after the answer was printed; Ctrl-C skips that."""
    if model.prefixes is None:
        return
    try:
        model.session.cache.collect()
        if model.prefixes.is_writing:
            terminal.end_output()
        model.prefixes.close()
    except KeyboardInterrupt:
        model.prefixes.close(wait=False)
    if model.prefixes.warning:
        warn([model.prefixes.warning])


def warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        say(f"localllm: warning: {warning}")


def make_compile_progress(line: ProgressLine) -> Callable[[int, int], None]:
    """Create a callback for api.open_model that shows the progress of compiling on the line.

    If stderr is not a terminal, it prints a single line when compiling begins.
    """
    has_said = False

    def show(done: int, total: int) -> None:
        nonlocal has_said
        if done < total and not has_said and not terminal.is_terminal(sys.stderr):
            has_said = True
            kernels = "a kernel" if total == 1 else f"{total} kernels"
            say(f"localllm: compiling {kernels} for this computer, once; this may take a minute")
        if done < total:
            line.show(f"compiling kernels for this computer, once: {done} of {total}")
        else:
            line.clear()

    return show


def make_upload_progress(line: ProgressLine) -> Callable[[int, int], None]:
    """Create a callback for api.open_model that shows how much of the weights is on the GPU."""

    def show(done: int, total: int) -> None:
        line.show(f"copying weights to the GPU: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    return show


def make_prefill_progress(line: ProgressLine) -> Callable[[int, int], None]:
    """Create a callback that shows the progress of the prefill on the line."""

    def show(done: int, total: int) -> None:
        if done:
            line.show(f"read {done:,} of {total:,} tokens")

    return show


def make_hash_progress(line: ProgressLine) -> Callable[[int, int], None]:
    """Create a callback that shows the progress of hashing the model's files on the line."""
    return lambda done, total: line.show(f"hashing the model, once: {100 * done // total} %")


@contextmanager
def open_search(
    places: Sequence[str],
    files: "FileFilterFlags",
    models: "SearchModelFlags",
    threads: int | None,
    device: str,
    lines: Sequence[str] | None = None,
) -> "Iterator[PassageSearch]":
    """Open a search; progress and warnings go to stderr."""
    from localllm.engine.options import EngineOptions
    from localllm.services.search.ranking import PassageSearch, SearchModels

    line = ProgressLine()
    engine = EngineOptions(threads, None, backend=device, progress=make_compile_progress(line))
    model_options = SearchModels(
        engine, *(None if each is None else resolve_model_path(each) for each in (models.embedder, models.reranker))
    )
    with line:
        search = PassageSearch(places, files.create_filter(), model_options, line.show, lines)
    with search:
        warn(search.warnings)
        yield search
