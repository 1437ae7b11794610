"""localllm chat: a conversation in the terminal."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import localllm
from localllm.cli import options
from localllm.cli.command import option
from localllm.cli.prompt import Encoding, begin, request, warn_of_template, whole_prompt
from localllm.cli.render import file_stem, stream
from localllm.cli.terminal import ProgressLine, dim, exit_on_sigterm, is_terminal, say
from localllm.errors import LocalllmError
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.conversation import Conversation


@frozen
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
    from localllm.cli.chat_session import model_of, session_name, start  # here, because `localllm --help` imports chat
    from localllm.cli.conversation import Conversation

    session = session_name(look.session, look.latest)
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


def tell_model(model: "Model") -> None:
    name = model.name or file_stem(model.path)
    device = "" if model.engine.device == "CPU" else f"{model.engine.device} · "
    dim(f"{name} · {model.format} · {device}{model.context} tokens of context · /help")


def hold(conversation: "Conversation", open_other: "Callable[[str], Model]") -> None:
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
