"""localllm chat: a conversation in the terminal."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

import localllm
from localllm.cli import options
from localllm.cli.conversation import Conversation
from localllm.cli.prompt import begin, warn_of_template, whole_prompt
from localllm.cli.render import file_stem, stream
from localllm.cli.terminal import ProgressLine, dim, exit_on_sigterm, is_terminal, say
from localllm.errors import LocalllmError, UsageError
from localllm.services import sessions

if TYPE_CHECKING:
    from localllm.api import Model

@click.command()
@options.optional_model
@options.system
@options.chat_template
@options.engine
@options.no_cache
@options.generation
@click.option("--session", metavar="NAME", help="Go on with this session, or begin it: it is written after every answer.")
@click.option("--continue", "latest", is_flag=True, help="Go on with the session that was used last.")
@click.option("--markdown", is_flag=True, help="Render headings, lists and code.")
@click.option("--stats", is_flag=True, help="A line about every answer: tokens per second, context in use.")
def chat(
    model: str | None,
    system: str | None,
    chat_template: str | None,
    context: int | None,
    threads: int | None,
    kv_type: str,
    no_cache: bool,
    session: str | None,
    latest: bool,
    markdown: bool,
    stats: bool,
    **choices: Any,
) -> None:
    """Talk with a model, or with the built-in one.

    When stdin is not a terminal, it is the prompt, and one answer is given as by `run`.
    """
    if session is not None and latest:
        raise UsageError("--session and --continue are one too many")
    interactive = is_terminal(sys.stdin)
    if (session is not None or latest) and not interactive:
        raise UsageError("a session needs a terminal: what is piped in is answered as by `run`")
    name = sessions.latest() if latest else session
    if name is not None:
        sessions.path_of(name)  # refused before the model is opened
    text = "" if interactive else whole_prompt(None, None)
    line = ProgressLine()
    chosen = options.generation_options(options.reading(line), **choices)

    def opened(path: str) -> "Model":
        found = options.open_model(path, context, threads, kv_type, chat_template, no_cache)
        if chosen.on_overflow == "shift":
            found.engine.require_shift()
        return found

    first = opened(model or str(localllm.builtin_model()))
    with ExitStack() as open_models:
        open_models.enter_context(first)
        chosen = options.with_draft_model(first, chosen, choices["speculate"])
        if not interactive:
            if stream(begin(first, text, system, False, chosen), line):
                raise KeyboardInterrupt
            return options.settle(first)
        exit_on_sigterm()
        warn_of_template(first)
        conversation = Conversation(first, chosen, line, markdown, stats)
        open_models.callback(conversation.leave)
        if system is not None:
            conversation.set_system(system)
        tell_model(first)
        if name is not None:
            begin_session(conversation, name)
        hold(conversation, opened)
        options.settle(conversation.model)


def tell_model(model: "Model") -> None:
    name = model.name or file_stem(model.path)
    dim(f"{name} · {model.format} · {model.context} tokens of context · /help")


def begin_session(conversation: Conversation, name: str) -> None:
    """Go on with the session, if there is one; a system message of the command line is the newer one."""
    system = conversation.model.session.system
    if not sessions.exists(name):
        return conversation.save(name)
    conversation.load(name)
    if system is not None:
        conversation.set_system(system)
    dim(f"session {name} · {len(conversation.lines)} messages")


def hold(conversation: Conversation, open_other: "Callable[[str], Model]") -> None:
    """Answer until the user leaves."""
    from localllm.cli.chat_commands import Left, Tools, execute, offered
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
        except Left:
            return
        except KeyboardInterrupt:
            dim("interrupted")
        except LocalllmError as error:
            say(f"localllm: error: {error}")
