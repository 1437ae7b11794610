"""localllm chat: hold a conversation in the terminal."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import typer

from localllm.cli import open_model as opening
from localllm.cli.options import shared as options
from localllm.cli.options.one_shot import EndpointFlags, ImageFlags, ToolFlags, open_remote
from localllm.cli.options.shared import require_complete
from localllm.cli.parameters import option, option_group
from localllm.cli.prompt_input import (
    Encoding,
    Prompt,
    build_prompt,
    read_prompt,
    require_decodable,
    start_answer,
    warn_missing_template,
)
from localllm.cli.terminal.output import ProgressLine, exit_on_signals, is_terminal, say, say_dim, set_plain
from localllm.cli.terminal.render import get_file_stem, print_stream, require_answers
from localllm.cli.terminal.type_ahead import hold_keys
from localllm.errors import LocalllmError, UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.interactive.conversation import TerminalConversation
    from localllm.cli.terminal.tool_calls import ToolCallRunner
    from localllm.generation.options import GenerationOptions
    from localllm.services.remote.http import Endpoint
    from localllm.text.messages import Message


@option_group("Session and display")
class ChatView:
    """The session that `chat` resumes, and the display of answers."""

    session: str | None = option(
        "--session", "Resume this session, or start it; it is saved after every answer.", "NAME"
    )
    latest: bool = option("--continue", "Resume the session that was used last.")
    markdown: bool = option("--markdown", "Render Markdown: headings, lists and code.")
    stats: bool = option("--stats", "After every answer, print tokens per second and context in use.")
    plain: options.Plain = False


def chat(
    model: options.OptionalModelName = None,
    *,
    prompt: Prompt = None,
    system: options.System = None,
    system_file: options.SystemFile = None,
    chat_template: options.ChatTemplate = None,
    encoding: Encoding = None,
    look: ChatView,
    engine: options.EngineFlags,
    no_cache: options.NoCache = False,
    choices: options.GenerationFlags,
    tools: ToolFlags,
    images: ImageFlags,
    endpoint: EndpointFlags,
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
        get_session_model,
        make_opener,
        select_session,
        start_session,
    )

    set_plain(look.plain)
    images.require_files()
    session = select_session(look.session, look.latest)
    interactive = is_terminal(sys.stdin)
    place = endpoint.parse_endpoint()
    model_name = get_session_model(session) if session and model is None and place is None else model
    path = opening.default_to_builtin(model_name) if place is None else model_name
    most_bytes = (
        opening.get_unlimited if path is None else partial(opening.compute_max_bytes, path, engine, choices.on_overflow)
    )
    ways = "-p TEXT or through a pipe"
    text = "" if interactive else read_prompt(prompt or (), encoding=encoding, most_bytes=most_bytes, ways=ways).text
    system = options.read_system_message(system, system_file)
    line = ProgressLine()
    require_no_shortening(choices.on_overflow)
    generation = options.build_generation_options(opening.make_prefill_progress(line), choices)

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
            typing.enter_context(hold_keys())
        first = open_here(path)
        conversation = TerminalConversation(first, generation, line, look.markdown, look.stats)
        leaving.push(lambda *error: conversation.model.__exit__(*error))
        generation = conversation.options = opening.open_draft_model(first, generation, choices.speculate)
        if calls:
            generation = conversation.options = calls.begin(first, generation, leaving)
            conversation.tools = calls
        if not interactive:
            messages = build_prompt(first, text, system, False, opening.get_first_messages(model, place is not None))
            return answer_once(first, images.add_images(messages), generation, calls, line)
        warn_missing_template(first)
        show_model(first)
        start_session(conversation, session, system, opening.get_first_messages(model, place is not None))
        for image_file in images.image_files or ():
            conversation.attach_image(image_file)
        try:
            if prompt:
                conversation.ask("\n\n".join(require_decodable(text, "-p") for text in prompt))
            run_loop(conversation, open_here if place else make_opener(conversation, path or "", open_here), typing)
        finally:
            conversation.leave()
        opening.finish_writes(conversation.model)
        if conversation.unsaved:
            raise typer.Exit(1)


def require_no_shortening(on_overflow: str | None) -> None:
    """Raise UsageError for a method that shortens a single prompt."""
    if on_overflow in options.SHORTENING_METHODS:
        raise UsageError(f"--on-overflow {on_overflow} is available with `localllm run` only; use drop-turns or shift")


def open_for_chat(
    path: str | None,
    place: "Endpoint | None",
    engine: options.EngineFlags,
    choices: options.GenerationFlags,
    template: str | None,
    no_cache: bool,
    images: ImageFlags,
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
    calls: "ToolCallRunner | None",
    line: ProgressLine,
) -> None:
    """Print one answer, as `run` does."""
    if calls:
        from localllm.cli.terminal.tool_calls import answer_with_tools

        assert not isinstance(prompt, str)
        answer, _, interrupted = answer_with_tools(model, prompt, generation, calls, line)
    else:
        answer = start_answer(model, prompt, generation)
        interrupted = print_stream(answer, line)
    if interrupted:
        raise KeyboardInterrupt
    opening.finish_writes(model)
    require_complete(generation, [answer.finish_reason])
    require_answers([answer])


def show_model(model: "Model") -> None:
    name = model.name or get_file_stem(model.path)
    device = "" if model.device in ("CPU", "") else f"{model.device} · "
    context = f"{model.context} tokens of context · " if model.context else ""
    say_dim(f"{name} · {model.file_type} · {device}{context}/help")


def run_loop(conversation: "TerminalConversation", open_other: "Callable[..., Model]", typing: ExitStack) -> None:
    """Answer until the user leaves; typing: buffers keys until the first prompt."""
    from localllm.cli.interactive.slash_commands import CommandTools, ExitChat, complete_line, execute
    from localllm.cli.terminal.line_editor import make_editor

    keyboard = make_editor(lambda line: complete_line(conversation, line))

    def edit_text(text: str) -> str | None:
        try:
            return keyboard.read(text)
        except (KeyboardInterrupt, EOFError):
            return None

    def open_quietly(path: str, **options: int) -> "Model":
        with hold_keys():
            return open_other(path, **options)

    tools = CommandTools(open_quietly, edit_text)
    typing.close()
    while True:
        try:
            text = keyboard.read()
        except KeyboardInterrupt:
            say_dim("to leave, press Ctrl-D or type /exit")
            continue
        except EOFError:
            return
        try:
            if not execute(conversation, text, tools) and text.strip() and (rest := conversation.attach_dropped(text)):
                conversation.ask(rest)
        except ExitChat:
            return
        except KeyboardInterrupt:
            say_dim("interrupted")
        except LocalllmError as error:
            say(f"localllm: error: {error}")
