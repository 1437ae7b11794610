"""A conversation in the terminal: ask questions, print answers, and save both in a session."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from localllm.cli.command import get_values_for
from localllm.cli.interactive.dropped_files import find_images
from localllm.cli.interactive.settings import apply_settings, get_changed_settings
from localllm.cli.options import shared as options
from localllm.cli.options.shared import warn_cut
from localllm.cli.parameters import build_group
from localllm.cli.terminal.output import ProgressLine, is_plain, is_terminal, say, say_dim
from localllm.cli.terminal.render import EMPTY, count_noun, is_only_reasoning, note_overflow
from localllm.cli.terminal.stream_renderer import make_page
from localllm.cli.terminal.type_ahead import hold_keys
from localllm.errors import LocalllmError, UsageError
from localllm.generation.conversation import UNSET_VALUES
from localllm.services import sessions
from localllm.services.last_answer import AT_ENDPOINT
from localllm.services.sessions import SessionFile, SessionLine, SessionModel
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.terminal.tool_calls import ToolCallRunner
    from localllm.generation.options import GenerationOptions
    from localllm.generation.scheduler import Generation


class TerminalConversation:
    """A conversation in the terminal, with one model at a time.

    Attributes:
        model: the current model.  options: options of its answers.  lines: the messages, as sessions store them.
        markdown, stats, shows_reasoning: how answers are shown.  tools: tools that answers may call.
        file: the session's file; None if the conversation is not saved.
        folder: the folder whose passages are attached to every question, or None.
        texts, images: contents of files and paths of images to attach to the next question.
        branches: the other branches by name; None for one that is saved as a session.  name: this branch's.
        unsaved: whether a session was left that could not be saved.
    """

    options: "GenerationOptions"

    def __init__(
        self,
        model: "Model",
        options: "GenerationOptions",
        line: ProgressLine,
        markdown: bool = False,
        stats: bool = False,
    ):
        self.model, self.options, self._line = model, options, line
        self.markdown, self.stats, self.shows_reasoning = markdown, stats, True
        self.tools: ToolCallRunner | None = None
        self.file: SessionFile | None = None
        self.lines: list[SessionLine] = []
        self.texts: list[str] = []
        self.images: list[str] = []
        self.folder: str | None = None
        self.branches: dict[str, list[SessionLine] | None] = {}
        self.name, self.unsaved = "main", False

    # ---- asking ----

    def ask(self, question: str) -> None:
        """Ask a question with the attached files and images, and print the answer."""
        passages = ""
        if self.folder is not None and question:
            from localllm.services.search.answers import search_folder

            passages = search_folder(self.folder, question)
        text, images = "\n\n".join(part for part in (passages, question, *self.texts) if part), self.images
        if self._answer(lambda options: self._ask(text, images, options), self.options, question=(text, images)):
            self.texts, self.images = [], []

    def _ask(self, text: str, images: list[str], options: "GenerationOptions") -> "Generation":
        session = self.model.session
        result: Generation = session.ask(text, options, images) if images else session.ask(text, options)
        return result

    def attach_image(self, path: str) -> None:
        """Attach an image to the next question. Raises UsageError, ModelError for an unreadable image."""
        if self.model.file is None:
            from localllm.images.opened import load_image  # seldom needed

            load_image(path)  # whether a server's model supports images is unknown
        else:
            self.model.vision.encode(path)
        self.images.append(os.path.abspath(path))  # a session may be resumed in another folder

    def attach_dropped(self, text: str) -> str:
        """Attach the images whose paths a question contains; return the question without these paths.

        A model that cannot read images gets the question unchanged.

        Raises UsageError, ModelError for an unreadable image.
        """
        rest, paths = find_images(text)
        if not paths or (self.model.file is not None and not self.model.vision.nbytes):
            return text
        for path in paths:
            self.attach_image(path)
            say_dim(f"{os.path.basename(path)} is attached")
        return rest

    def read(self, text: str, name: str) -> None:
        """Attach a file's content to the next question. Raises UsageError if it exceeds the context."""
        model, length = self.model, self.model.session.count
        if not model.context:
            self.texts.append(text)
            return
        context_texts = [*self.texts, model.session.system or ""]
        used_tokens = sum(length(each) for each in context_texts)
        used_tokens += self.used if self.options.on_overflow == "error" else 0
        count, room = length(text), model.context - model.context // 8 - used_tokens
        if count > room:
            raise UsageError(
                f"{name} has {format_tokens(count)}, but only {max(0, room)} of the context of {model.context} are "
                "free; attach a shorter file, or use /clear or /context N first"
            )
        self.texts.append(text)

    def ask_again(self, question: str | None = None) -> None:
        """Replace the last answer by a new one, to the same or an edited question."""
        lines, messages, answered = list(self.lines), self.model.session.messages, False
        images: list[str] = next((line.get("images", []) for line in reversed(lines) if line["role"] == "user"), [])
        message = self.undo()
        if message is None:
            return say_dim("there is no question to repeat yet; ask one first")
        text, options = message if question is None else question, self.options
        if question is None:
            options = replace(options, sampling=replace(options.sampling, seed=None))
        try:
            answered = self._answer(lambda options: self._ask(text, images, options), options, (text, images))
        finally:
            if not answered:
                self.lines, self.model.session.messages = lines, messages

    def resume(self) -> None:
        """Continue the last answer."""
        self._answer(self.model.session.resume, self.options)

    def _answer(
        self,
        begin: "Callable[[GenerationOptions], Generation]",
        options: "GenerationOptions",
        question: tuple[str, list[str]] | None = None,
    ) -> bool:
        """Print an answer and save it; return False if nothing was generated.

        question: its text and images; None: continue the last answer.
        """
        session, answer = self.model.session, None
        tool_lines: list[SessionLine] = []
        try:
            answer = begin(self.tools.refresh(options) if self.tools else options)
            if session.forgotten:
                turns = "turn was" if session.forgotten == 1 else f"{session.forgotten} turns were"
                say(f"localllm: the conversation exceeds the context: its first {turns} dropped")
            self._show(answer)
            if self.tools:
                answer, tool_lines = self._run_tools(self.tools, answer, options, question and question[0])
        except LocalllmError as error:
            say(f"localllm: error: {error}")
        finally:
            self._line.clear()
        is_silent = answer is not None and not answer.text and answer.finish_reason == "interrupted"
        if answer is None or (question is not None and is_silent and not tool_lines):
            return False
        token_count = answer.prompt_tokens + answer.completion_tokens
        *between, last = tool_lines if tool_lines and is_silent else [*tool_lines, session.messages[-1]]
        answer_lines = [*between, {**last, "finish": answer.finish_reason, "tokens": token_count}]
        if question is None:
            self.lines[-1:] = answer_lines
        else:
            text, images = question
            self.lines += [{"role": "user", "content": text, **({"images": images} if images else {})}, *answer_lines]
        self.keep()
        return True

    def _run_tools(
        self, tools: "ToolCallRunner", answer: "Generation", options: "GenerationOptions", question: str | None
    ) -> "tuple[Generation, list[SessionLine]]":
        """Run tool calls until an answer has none; return that answer, and the calls and results before it."""
        tools.log_question([{"role": "user", "content": question}] if question is not None else [])
        tools.note(answer.message(), finish=answer.finish_reason)
        lines: list[SessionLine] = []
        try:
            while answer.calls and answer.finish_reason != "interrupted":
                results = tools.run_calls(answer.calls)
                message, options = answer.message(), tools.refresh(options)
                answer = self.model.session.continue_with(results, options)
                lines += [message, *results]
                self._show(answer)
                tools.note(answer.message(), finish=answer.finish_reason)
        except LocalllmError as error:  # keep the partial answer
            say(f"localllm: error: {error}")
        return answer, lines

    def _show(self, answer: "Generation") -> None:
        from localllm.generation.reasoning import ANSWER, REASONING

        page_shown, interrupted = make_page(self.markdown, names_answer=is_plain()), False
        with hold_keys():
            say_dim("")
            try:
                for kind, text in answer.parts:
                    self._line.clear()
                    if kind == ANSWER or self.shows_reasoning:
                        page_shown.push(text, kind == REASONING)
                    else:
                        self._line.show(f"thinking: {answer.completion_tokens} tokens")
            except KeyboardInterrupt:
                interrupted = True
            finally:
                self._line.clear()
            if answer.text or answer.thinking or not interrupted:
                page_shown.end()
        self._print_notes(answer)

    def _print_notes(self, answer: "Generation") -> None:
        """Print the notes about an answer, and an empty line."""
        note_overflow(answer)
        warn_cut(self.options, [answer.finish_reason])
        if is_only_reasoning(answer):
            say(EMPTY)
        if answer.finish_reason == "length" and not answer.is_full and not self.options.constraint:
            tokens = answer.completion_tokens
            say(f"localllm: the answer reached {tokens} tokens, the limit of -n; /continue resumes it")
        if answer.finish_reason == "interrupted" and answer.text:
            say_dim("interrupted; /continue continues the answer")
        if self.stats:
            say_dim(format_statistics(answer, self.model.context))
        say_dim("")

    # ---- messages ----

    def undo(self) -> str | None:
        question = self.model.session.undo()
        if question is not None:
            place = max(number for number, line in enumerate(self.lines) if line["role"] == "user")
            del self.lines[place:]
        return question

    def clear(self) -> None:
        """Start a new conversation with the same system message; a session's file stays unchanged."""
        self.leave()
        self.model.session.clear()
        self.lines, self.texts, self.images = self.lines[: self._has_system], [], []
        self.branches, self.name = {}, "main"

    @property
    def _has_system(self) -> bool:
        return bool(self.lines) and self.lines[0]["role"] == "system"

    def set_system(self, text: str | None) -> None:
        self.model.session.system = text
        front = [] if text is None else [{"role": "system", "content": text}]
        self.lines = [*front, *self.lines[self._has_system :]]
        self.keep()

    def set(self, options: "GenerationOptions") -> None:
        self.options = options
        if self.file:
            self.file.chat.settings = get_changed_settings(options)
            self._write_or_report(self.file.rewrite)

    @property
    def used(self) -> int:
        """Count of tokens that the conversation takes of the context; 0 if a server does not report it."""
        return self.lines[-1].get("tokens", 0) if self.lines else 0

    def branch(self, name: str) -> None:
        """Branch off a copy of this conversation, or switch to a branch. Raises UsageError, LocalllmError."""
        if name == self.name:
            return
        is_new, branch_lines, earlier_name = name not in self.branches, self.branches.get(name), self.name
        lines = None if self.file else list(self.lines)
        if is_new:
            self.model.session.park()
            if self.file:
                self.keep()  # else a branch without messages would be lost
                return self.save(name, trunk=self.file.chat.trunk or earlier_name)
        elif branch_lines is None:
            self.load(name)
        else:
            self.leave()
            self.switch_to(branch_lines)
        self.branches[earlier_name], self.name = lines, name

    def switch_to(self, lines: Sequence[SessionLine]) -> None:
        """Switch to another conversation; keep the KV cache of this one for a while."""
        self.model.session.park()
        self.lines, self.texts, self.images = list(lines), [], []
        self.model.session.messages = sessions.select_visible_fields(lines)
        self.model.session.earlier = self.used

    def switch_model(self, model: "Model") -> None:
        previous, self.model = self.model, model
        model.session.messages = sessions.select_visible_fields(self.lines)
        if self.file:
            self.file.chat.model = describe_model(model)
            self._write_or_report(self.file.rewrite)
        previous.close()

    # ---- sessions ----

    def keep(self) -> None:
        if self.file:
            file = self.file
            self._write_or_report(lambda: file.write(self.lines))

    def _write_or_report(self, write: Callable[[], None]) -> None:
        try:
            write()
        except LocalllmError as error:
            say(f"localllm: error: {error}")

    def save(self, name: str, trunk: str = "") -> None:
        """Save the conversation as a new session; trunk: the session that it branches off.

        Raises UsageError if the session exists, LocalllmError if writing fails. On failure, a conversation that belongs
        to a session stays in it; another one is saved again after each answer.
        """
        file, failure = SessionFile(name), None
        try:
            if not file.is_new:
                raise UsageError(f"session {name!r} already exists; resume it with /load {name}")
            file.chat.model, file.chat.settings = describe_model(self.model), get_changed_settings(self.options)
            file.chat.trunk = trunk
            if self.lines or trunk:
                file.write(self.lines)
        except LocalllmError as error:
            if self.file or not file.is_new:
                file.close()
                raise
            failure = LocalllmError(f"{error}; saving is tried again after every answer")
        self.leave()
        self.file, self.name = file, name
        self._find_branches()
        if failure:
            raise failure

    def _find_branches(self) -> None:
        """List the branches: those on disk, and unsaved ones."""
        unkept = {name: lines for name, lines in self.branches.items() if lines is not None}
        self.branches = {**dict.fromkeys(sessions.list_branches(self.name)), **unkept}

    def load(self, name: str) -> None:
        """Resume a session. Raises UsageError, LocalllmError."""
        if self.file and name == self.name:
            return
        file = SessionFile(name)
        if file.is_new:
            file.close()
            raise UsageError(f"unknown session {name!r}; /sessions lists the sessions, /model switches to a model")
        self.leave()
        self.file, self.name = file, name
        self._find_branches()
        self.switch_to(file.chat.messages)
        self.options = apply_settings(self.options, file.chat.settings)
        if file.lost:
            say(f"localllm: warning: the last turn of session {name!r} was incomplete and has been removed")
        saved, current = file.chat.model, describe_model(self.model)
        if not saved.is_same(current):
            say(
                f"localllm: warning: session {name!r} was started with another model, "
                f"{saved.name or saved.path}; it continues with {current.name or current.path}"
            )

    def leave(self) -> None:
        """Release the session's lock, and write the conversation's KV cache to the prefix cache.

        Messages that could not be saved before are saved again.
        """
        if self.file:
            self.model.session.leave()
            if not self.file.is_written:
                self._write_or_report(self.file.rewrite)
            if not self.file.is_written:
                self.unsaved = True
                say(
                    f"localllm: error: session {self.file.name!r} lacks the last messages, which could not be saved; "
                    "copy them from the terminal"
                )
            self.file.close()
        self.file = None


def describe_model(model: "Model") -> SessionModel:
    if model.file is None:  # on a server
        return SessionModel(model.name, model.path, f"{AT_ENDPOINT}{model.name}")
    return sessions.describe_model(model.file)


def format_statistics(answer: "Generation", context: int) -> str:
    """Format an answer's statistics in one line."""
    completion = answer.completion_tokens
    speed = f" · {(completion - 1) / answer.decode_s:.1f} tokens/s" if answer.decode_s and completion > 1 else ""
    total = answer.prompt_tokens + completion
    read = f"{format_tokens(answer.prompt_tokens - answer.cached_tokens)} read in {answer.prefill_s:.2f} s"
    return (
        f"{read} · {format_tokens(completion)} generated{speed} · context {total}{f' of {context}' if context else ''}"
    )


def format_tokens(count: int) -> str:
    return count_noun(count, "token")


def select_session(session: str | None, latest: bool) -> str | None:
    """Return the session that --session or --continue names, or None. Raises UsageError."""
    if session is not None and latest:
        raise UsageError("give either --session or --continue, not both")
    name = sessions.find_latest_name() if latest else session
    if name is not None:
        sessions.get_path(name)
        if not is_terminal(sys.stdin):
            raise UsageError("sessions need a terminal: leave out --session and --continue for piped input")
    return name


def get_session_model(session: str) -> str | None:
    """Return the path of a session's model; None for a new session. Raises UsageError for a missing file."""
    if not sessions.has_session(session):
        return None
    about = sessions.read_session(session).model
    if about.fingerprint.startswith(AT_ENDPOINT):
        raise UsageError(f"session {session!r} was started with a server; resume it with --endpoint {about.path}")
    if about.path and not os.path.exists(about.path):
        raise UsageError(f"the model of session {session!r} no longer exists: {about.path}; give another MODEL")
    return about.path or None


def start_session(
    conversation: TerminalConversation, session: str | None, system: str | None, first: Sequence[Message] = ()
) -> None:
    """Resume or start the session; a system message from the command line replaces the session's.

    first: messages that begin a new conversation.
    """
    if session is not None and sessions.has_session(session):
        conversation.load(session)
        say_dim(f"session {session} · {len(conversation.lines)} messages")
    else:
        if first:
            conversation.switch_to(first)
        if session is not None:
            conversation.save(session)
    if system is not None:
        conversation.set_system(system)


# Options of answers that a name may set.
NAME_OPTIONS = ("sampling", *UNSET_VALUES, "template_variables")


class NameSettings(NamedTuple):
    """The options of a chat with a model: those of the command line, then the settings of the model's name."""

    engine: options.EngineFlags
    template: str | None
    system: str | None
    generation: "GenerationOptions"

    @classmethod
    def load(cls, name: str) -> "NameSettings":
        """Return the settings of a name. Raises UsageError, ModelError."""
        values = get_values_for(name)
        generation = options.build_generation_options(None, build_group(options.GenerationFlags, values))
        system = options.read_system_message(values["system"], values["system_file"])
        return cls(build_group(options.EngineFlags, values), values["chat_template"], system, generation)


def make_opener(
    conversation: "TerminalConversation", name: str, open_model: "Callable[..., Model]"
) -> "Callable[[str], Model]":
    """Return a function of a model's name, "" for the current model, and optionally a context length in tokens.

    The function opens the model, and applies that name's settings to the conversation, except to options that the user
    has changed.
    name: of the current model.  open_model: opens a name with an engine and a template.
    """
    current, current_name = NameSettings.load(name), name

    def open_named(name: str, context: int | None = None) -> "Model":
        nonlocal current, current_name
        new = NameSettings.load(name := name or current_name)
        engine = new.engine if context is None else replace(new.engine, context=context)
        model = open_model(name, engine=engine, template=new.template)
        old, chosen = current.generation, conversation.options
        changes = {
            name: value
            for name in NAME_OPTIONS
            if getattr(chosen, name) == getattr(old, name) != (value := getattr(new.generation, name))
        }
        if changes:
            conversation.set(replace(chosen, **changes))
        if conversation.model.session.system == current.system != new.system:
            conversation.set_system(new.system)
        current, current_name = new, name
        return model

    return open_named
