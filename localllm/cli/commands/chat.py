"""localllm chat: hold a conversation in the terminal."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import typer

from localllm.cli import open_model as opening
from localllm.cli.options import shared as options
from localllm.cli.options.one_shot import EndpointGroup, ImageGroup, ToolGroup, open_remote
from localllm.cli.options.shared import require_whole
from localllm.cli.parameters import group, option
from localllm.cli.prompt_input import Encoding, Prompt, begin, read_prompt, request, require_decodable, warn_of_template
from localllm.cli.terminal.output import ProgressLine, dim, exit_on_signals, is_terminal, say
from localllm.cli.terminal.render import file_stem, require_answers, stream
from localllm.cli.terminal.type_ahead import type_ahead
from localllm.errors import LocalllmError, UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.interactive.conversation import TerminalConversation
    from localllm.cli.terminal.tool_calls import ToolCalls
    from localllm.generation.options import GenerationOptions
    from localllm.services.remote.http import Endpoint
    from localllm.text.messages import Message


@group
class ChatView:
    """Session and display."""

    session: str | None = option(
        "--session", "Resume this session, or start it; it is saved after every answer.", "NAME"
    )
    latest: bool = option("--continue", "Resume the session that was used last.")
    markdown: bool = option("--markdown", "Render Markdown: headings, lists and code.")
    stats: bool = option("--stats", "After every answer, print tokens per second and context in use.")


def chat(
    model: options.OptionalModelName = None,
    *,
    prompt: Prompt = None,
    system: options.System = None,
    system_file: options.SystemFile = None,
    chat_template: options.ChatTemplate = None,
    encoding: Encoding = None,
    look: ChatView,
    engine: options.EngineGroup,
    no_cache: options.NoCache = False,
    choices: options.GenerationGroup,
    tools: ToolGroup,
    images: ImageGroup,
    endpoint: EndpointGroup,
) -> None:
    """Chat with a model.

    Without MODEL, the tiny built-in model answers. With -p, the conversation starts with that prompt. If stdin is not
    a terminal, it is the prompt, and `chat` prints one answer, like `run`.

    Examples:
      localllm chat
      localllm chat model.gguf -sys "You are a patient teacher."
      localllm chat model.gguf --session trip --markdown
      localllm chat --continue
      localllm chat model.gguf --image photo.jpg -p "What is this?"
      localllm chat model.gguf --tools read_file,list,search --allow ~/notes
      localllm chat --endpoint http://127.0.0.1:8000
      localllm chat model.gguf -c 8192 -ctk q8_0 -ctv q8_0
    """
    from localllm.cli.interactive.conversation import (  # here, because `localllm --help` imports chat
        TerminalConversation,
        model_of,
        opener,
        session_name,
        start,
    )

    images.require_files()
    session = session_name(look.session, look.latest)
    interactive = is_terminal(sys.stdin)
    place = endpoint.place()
    model_name = model_of(session) if session and model is None and place is None else model
    path = opening.model_or_builtin(model_name) if place is None else model_name
    most_bytes = opening.unknown if path is None else partial(opening.most_bytes, path, engine, choices.on_overflow)
    ways = "-p TEXT or through a pipe"
    text = "" if interactive else read_prompt(prompt or (), encoding=encoding, most_bytes=most_bytes, ways=ways).text
    system = options.system_message(system, system_file)
    line = ProgressLine()
    if choices.on_overflow in options.CUTS:
        raise UsageError(
            f"--on-overflow {choices.on_overflow} is available with `localllm run` only; use drop-turns or shift"
        )
    generation = options.generation_options(opening.reading(line), choices)

    open_here = partial(
        open_for_chat, place=place, engine=engine, choices=choices, template=chat_template, no_cache=no_cache,
        images=images,
    )  # fmt: skip
    if place is None:
        opening.warn_builtin_model(model_name)
    with ExitStack() as leaving:
        calls, typing = tools.open_tools(leaving), leaving.enter_context(ExitStack())
        if interactive:
            exit_on_signals()
            typing.enter_context(type_ahead())
        first = open_here(path)
        conversation = TerminalConversation(first, generation, line, look.markdown, look.stats)
        leaving.push(lambda *error: conversation.model.__exit__(*error))
        generation = conversation.options = opening.with_draft_model(first, generation, choices.speculate)
        if calls:
            generation = conversation.options = calls.begin(first, generation, leaving)
            conversation.tools = calls
        if not interactive:
            messages = request(first, text, system, False, opening.first_messages(model, place is not None))
            return answer_once(first, images.with_images(messages), generation, calls, line)
        warn_of_template(first)
        tell_model(first)
        start(conversation, session, system, opening.first_messages(model, place is not None))
        for image_file in images.image_files or ():
            conversation.look(image_file)
        try:
            if prompt:
                conversation.ask("\n\n".join(require_decodable(text, "-p") for text in prompt))
            hold(conversation, open_here if place else opener(conversation, path or "", open_here), typing)
        finally:
            conversation.leave()
        opening.finish_writes(conversation.model)
        if conversation.unsaved:
            raise typer.Exit(1)


def open_for_chat(
    path: str | None,
    place: "Endpoint | None",
    engine: options.EngineGroup,
    choices: options.GenerationGroup,
    template: str | None,
    no_cache: bool,
    images: ImageGroup,
) -> "Model":
    """Open a model that can hold a conversation.

    place: the endpoint that serves the model named `path`; None: `path` is a file.
    """
    if place is not None:
        remote: Model = open_remote(
            place, path, choices, engine, chat_template=template, mmproj=images.mmproj, pan_and_scan=images.pan_and_scan
        )
        return remote
    assert path is not None
    model = opening.open_model(path, engine, template, no_cache, mmproj=images.mmproj, pan_and_scan=images.pan_and_scan)
    model.session.require_conversation()
    if choices.on_overflow == "shift":
        model.engine.prepare_shift()
    return model


def answer_once(
    model: "Model",
    prompt: "str | list[Message]",
    generation: "GenerationOptions",
    calls: "ToolCalls | None",
    line: ProgressLine,
) -> None:
    """Print one answer, as `run` does."""
    if calls:
        from localllm.cli.terminal.tool_calls import answer_with_tools

        assert not isinstance(prompt, str)
        answer, _, interrupted = answer_with_tools(model, prompt, generation, calls, line)
    else:
        answer = begin(model, prompt, generation)
        interrupted = stream(answer, line)
    if interrupted:
        raise KeyboardInterrupt
    opening.finish_writes(model)
    require_whole(generation, [answer.finish_reason])
    require_answers([answer])


def tell_model(model: "Model") -> None:
    name = model.name or file_stem(model.path)
    device = "" if model.device in ("CPU", "") else f"{model.device} · "
    context = f"{model.context} tokens of context · " if model.context else ""
    dim(f"{name} · {model.file_type} · {device}{context}/help")


def hold(conversation: "TerminalConversation", open_other: "Callable[[str], Model]", typing: ExitStack) -> None:
    """Answer until the user leaves; typing: buffers keys until the first prompt."""
    from localllm.cli.interactive.slash_commands import ExitChat, Tools, complete_line, execute
    from localllm.cli.terminal.line_editor import editor

    keyboard = editor(lambda line: complete_line(conversation, line))

    def edit(text: str) -> str | None:
        try:
            return keyboard.read(text)
        except (KeyboardInterrupt, EOFError):
            return None

    def open_quietly(path: str) -> "Model":
        with type_ahead():
            return open_other(path)

    tools = Tools(open_quietly, edit)
    typing.close()
    while True:
        try:
            text = keyboard.read()
        except KeyboardInterrupt:
            dim("to leave, press Ctrl-D or type /exit")
            continue
        except EOFError:
            return
        try:
            if not execute(conversation, text, tools) and text.strip():
                conversation.ask(text)
        except ExitChat:
            return
        except KeyboardInterrupt:
            dim("interrupted")
        except LocalllmError as error:
            say(f"localllm: error: {error}")
