"""localllm chat: a conversation in the terminal."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import localllm
from localllm.cli import options
from localllm.cli.command import option
from localllm.cli.conversation import Conversation
from localllm.cli.prompt import Encoding, begin, request, warn_of_template, whole_prompt
from localllm.cli.render import file_stem, stream
from localllm.cli.terminal import ProgressLine, dim, exit_on_sigterm, is_terminal, say
from localllm.errors import LocalllmError, UsageError
from localllm.services import sessions

if TYPE_CHECKING:
    from localllm.api import Model


@dataclass(frozen=True)
class Look:
    """What is kept of a conversation, and how it looks."""

    session: Annotated[
        str | None,
        option(
            "--session",
            metavar="NAME",
            help="Go on with this session, or begin it: what is said is written after every answer.",
        ),
    ] = None
    latest: Annotated[bool, option("--continue", help="Go on with the session that was used last.")] = False
    markdown: Annotated[bool, option("--markdown", help="Render headings, lists and code.")] = False
    stats: Annotated[bool, option("--stats", help="A line about every answer: tokens per second, context in use.")] = (
        False
    )

    def name(self) -> str | None:
        """Of the session. Raises UsageError."""
        if self.session is not None and self.latest:
            raise UsageError("--session names a session and --continue means another one: leave one out")
        name = sessions.latest() if self.latest else self.session
        if name is not None:
            sessions.path_of(name)
            if not is_terminal(sys.stdin):
                raise UsageError("a session needs a terminal: what is piped in is answered as by `run`")
        return name


def chat(
    model: options.OptionalModelName = None,
    *,
    system: options.System = None,
    system_file: options.SystemFile = None,
    chat_template: options.ChatTemplate = None,
    encoding: Encoding = None,
    look: Look,
    engine: options.Engine,
    no_cache: options.NoCache = False,
    choices: options.Generation,
) -> None:
    """Talk with a model, or with the built-in one.

    When stdin is not a terminal, it is the prompt, and one answer is given as by `run`.

    Examples:
      localllm chat
      localllm chat model.gguf -sys "You are a patient teacher."
      localllm chat model.gguf --session trip --markdown
      localllm chat --continue
      localllm chat model.gguf -c 8192 -ctk q8_0 -ctv q8_0
    """
    session = look.name()
    interactive = is_terminal(sys.stdin)
    own = model_of(session) if session and model is None else model
    path = str(localllm.builtin_model()) if own is None else own
    most_bytes = partial(options.most_bytes, path, engine, choices.on_overflow)
    text = "" if interactive else whole_prompt(None, None, encoding=encoding, most_bytes=most_bytes)
    system = options.system_message(system, system_file)
    line = ProgressLine()
    chosen = options.generation_options(options.reading(line), choices)

    def opened(path: str) -> "Model":
        found = options.open_model(path, engine, chat_template, no_cache)
        if chosen.on_overflow == "shift":
            found.engine.require_shift()
        return found

    first = opened(path)
    with ExitStack() as leaving:
        conversation = Conversation(first, chosen, line, look.markdown, look.stats)
        leaving.push(lambda *error: conversation.model.__exit__(*error))
        chosen = conversation.options = options.with_draft_model(first, chosen, choices.speculate)
        if not interactive:
            if stream(begin(first, request(first, text, system, False), chosen), line):
                raise KeyboardInterrupt
            return options.settle(first)
        exit_on_sigterm()
        warn_of_template(first)
        tell_model(first)
        start(conversation, session, system)
        try:
            hold(conversation, opened)
        finally:
            conversation.leave()
        options.settle(conversation.model)


def model_of(session: str) -> str | None:
    """The file that a session was last held with, None for a new one. Raises UsageError if it is not there."""
    if not sessions.exists(session):
        return None
    about = sessions.read(session).model
    if about.path and not os.path.exists(about.path):
        raise UsageError(f"the model of the session {session!r} is not there any more: {about.path}; name another one")
    return about.path or None


def tell_model(model: "Model") -> None:
    name = model.name or file_stem(model.path)
    dim(f"{name} · {model.format} · {model.context} tokens of context · /help")


def start(conversation: Conversation, session: str | None, system: str | None) -> None:
    """Go on with the session, or begin it; a system message of the command line is newer than the session's."""
    if session is not None and sessions.exists(session):
        conversation.load(session)
        dim(f"session {session} · {len(conversation.lines)} messages")
    elif session is not None:
        conversation.save(session)
    if system is not None:
        conversation.set_system(system)


def hold(conversation: Conversation, open_other: "Callable[[str], Model]") -> None:
    """Answer until the user leaves."""
    from localllm.cli.chat_commands import Leaving, Tools, execute, offered
    from localllm.cli.line_editor import editor

    keyboard = editor(lambda line: offered(conversation, line))

    def edit(text: str) -> str | None:
        try:
            return keyboard.read(text)
        except (KeyboardInterrupt, EOFError):
            return None

    tools = Tools(open_other, edit)
    while True:
        try:
            text = keyboard.read()
        except KeyboardInterrupt:
            dim("Ctrl-D or /exit leaves")
            continue
        except EOFError:
            return
        try:
            if not execute(conversation, text, tools) and text.strip():
                conversation.ask(text)
        except Leaving:
            return
        except KeyboardInterrupt:
            dim("interrupted")
        except LocalllmError as error:
            say(f"localllm: error: {error}")
