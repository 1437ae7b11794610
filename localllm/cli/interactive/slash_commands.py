"""Slash commands of `chat`: a table of commands with help, action and completion."""

import base64
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.cli.argv import suggest_name
from localllm.cli.interactive.dropped_files import find_images
from localllm.cli.interactive.settings import change_option, list_names, list_settings
from localllm.cli.interactive.state_commands import (
    CONTEXT_NAMES,
    PARTS,
    change_context,
    export_conversation,
    show_fact,
    show_part,
)
from localllm.cli.open_model import check_thinking
from localllm.cli.terminal.output import is_terminal, print_dim, say, say_dim
from localllm.cli.terminal.render import format_sessions, get_file_stem
from localllm.cli.terminal.stream_renderer import get_width
from localllm.errors import UsageError
from localllm.files.text_file import decode_with_replacement, strip_line_break
from localllm.frozen import frozen
from localllm.generation.options import THINK
from localllm.services import sessions
from localllm.services.search.code_blocks import extract_code

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.interactive.conversation import TerminalConversation

EXIT_WORDS = ("bye", "quit", "exit")  # as whole lines, with or without a slash
COUNTERPARTS = {  # of other programs' commands
    "/list": "/sessions lists the conversations, `localllm list` the models",
    "/regen": "/retry generates another answer",
}
SAME = {"/?": "/help"}  # other names of commands
KEYS = {
    "Ctrl-C": "stop the answer; the text so far is kept",
    "Ctrl-Z": "suspend; fg resumes",
    "Ctrl-R": "search the input history",
    "Tab": "complete commands, names and files",
    "Alt-Enter": "start a new line; so does a backslash at the end of a line",
    '"""': "start and end input of several lines; pasted text may have several lines",
    "Ctrl-X Ctrl-E": "edit the text in $EDITOR",
    "Ctrl-D": "leave",
}
CODE = "code"
SWITCHES = {  # of Ollama's /set: the command that does it, and its argument
    "verbose": ("/stats", "on"), "quiet": ("/stats", "off"), "think": ("/think", "on"), "nothink": ("/think", "off"),
}  # fmt: skip
# Programs that copy stdin to the clipboard, with the environment variable that each needs.
CLIPBOARDS = (
    ("", ["pbcopy"]), ("WAYLAND_DISPLAY", ["wl-copy"]), ("DISPLAY", ["xclip", "-selection", "clipboard"]),
    ("DISPLAY", ["xsel", "--clipboard", "--input"]), ("", ["clip.exe"]),
)  # fmt: skip
MAX_CLIPBOARD = 74_994  # maximum bytes of base64 that terminals accept in one sequence


class ExitChat(Exception):  # noqa: N818 - no error
    """Raised when the user ends the chat."""


@frozen
class CommandTools:
    """The functions that slash commands use, in addition to the conversation.

    Attributes:
        open: opens a model by name, "" for the current one, with a context if one is given.
        edit: lets the user change a text; returns None if cancelled.
    """

    open: "Callable[..., Model]"
    edit: Callable[[str], str | None]


@frozen
class ChatCommand:
    """A slash command.

    Attributes:
        argument: placeholder after its name, for the help.  help: one line.
        run: the action, called with the conversation, the argument and tools. It may raise LocalllmError.
        offers: completions of the argument; None: file names.
    """

    argument: str
    help: str
    run: "Callable[[TerminalConversation, str, CommandTools], None]"
    completions: "Callable[[TerminalConversation], Iterable[str]] | None" = lambda conversation: ()


def execute(conversation: "TerminalConversation", text: str, tools: CommandTools) -> bool:
    """Run a slash command; return False for other text. Raises ExitChat, and UsageError for an unknown command."""
    if text.strip().removeprefix("/") in EXIT_WORDS:
        raise ExitChat
    if not text.startswith("/"):
        return False
    name, _, argument = text.strip().partition(" ")
    name = SAME.get(name, name)
    if name not in COMMANDS:
        if find_images(text).paths:
            return False
        hint = COUNTERPARTS.get(name) or suggest_name(name, [each for each in COMMANDS if each != "/clear"])
        general_hint = "/help lists the commands; put a space before a text that begins with a slash"
        raise UsageError(f"unknown command {name}; {hint or general_hint}")
    COMMANDS[name].run(conversation, argument.strip(), tools)
    return True


def show_help(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    entries = {**{f"{name} {command.argument}".strip(): command.help for name, command in COMMANDS.items()}, **KEYS}
    indent, width = max(map(len, entries)) + 2, get_width()
    if indent > width // 2:
        below = (line for name, help in entries.items() for line in (name, *wrap_lines(help, width, 4)))
        return print_dim("\n".join(below))
    lines = [(name, *wrap_lines(help, width, indent)) for name, help in entries.items()]
    print_dim("\n".join(line for name, first, *more in lines for line in (name.ljust(indent) + first.lstrip(), *more)))


def wrap_lines(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)


def start_new(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    note = f"; session {conversation.name} is unchanged" if conversation.file else ""
    conversation.clear()
    say_dim(f"new conversation{note}")


def set_system(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    conversation.set_system(argument or None)
    say_dim("system message set" if argument else "system message removed")


def undo_questions(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    if argument and not (argument.isdecimal() and 0 < int(argument) < 10**9):
        raise UsageError("/undo N removes the last N questions; N must be an integer of 1 or more")
    for number in range(int(argument or 1)):
        if conversation.images:
            say_dim(f"removed: the image {os.path.basename(conversation.images.pop())}")
            continue
        if conversation.texts:
            say_dim(f"removed: a file of {len(conversation.texts.pop())} characters")
            continue
        question = conversation.undo()
        if question is None:
            if not number:
                say_dim("nothing to undo")
            break
        say_dim(f"removed: {shorten(question)}")
    conversation.keep()


def retry_answer(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    conversation.ask_again()


def edit_question(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    """Edit the last question; sending it replaces the old one."""
    question = next((line["content"] for line in reversed(conversation.lines) if line["role"] == "user"), None)
    if question is None:
        return say_dim("there is no question yet")
    text = tools.edit(question)
    if text is None or not text.strip():
        return say_dim("nothing changed")
    conversation.ask_again(text)


def continue_answer(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    conversation.resume()


def attach_file(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    path = os.path.expanduser(require_argument(argument, "/read FILE"))
    max_bytes = 64 * (conversation.model.context or 1 << 17)  # no token has more than 64 bytes
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > max_bytes:
        raise UsageError(f"{path} exceeds the context of {conversation.model.context} tokens")
    text, warning = decode_with_replacement(data, path)
    if warning:
        say(f"localllm: warning: {warning}")
    text, name = strip_line_break(text), os.path.basename(path)
    conversation.read(text, name)
    say_dim(f"{len(text)} characters of {name} will be sent with the next question; /undo removes them")


def attach_image(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    path = os.path.abspath(os.path.expanduser(require_argument(argument, "/image FILE")))
    conversation.attach_image(path)
    say_dim(f"{os.path.basename(path)} will be sent with the next question; /undo removes it")


def save_session(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    conversation.save(require_argument(argument, "/save NAME"))
    if conversation.lines:
        say_dim(f"saved as session {argument}; it is updated after every answer")
    else:
        say_dim(f"the conversation will be saved as session {argument} after every answer")


def load_session(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    conversation.load(require_argument(argument, "/load NAME"))
    show_session(conversation)


def list_sessions(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    lines = format_sessions()
    print_dim("\n".join(lines) if lines else "no sessions yet; start one with /save NAME")


def switch_branch(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    if not argument:
        names = list_branches(conversation)
        return print_dim("\n".join(f"{'*' if name == conversation.name else ' '} {name}" for name in names))
    is_there = argument in list_branches(conversation)
    conversation.branch(argument)
    say_dim(f"switched to branch {argument}" if is_there else f"new branch {argument}: further messages belong to it")


def list_branches(conversation: "TerminalConversation") -> list[str]:
    return sorted({*conversation.branches, conversation.name})


def set_option(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    name, _, value = require_argument(argument, "/set OPTION VALUE").partition(" ")
    if name == "parameter":  # of Ollama, as are those below
        name, _, value = require_argument(value.strip(), "/set parameter NAME VALUE").partition(" ")
    if name == "system":
        return set_system(conversation, value.strip().strip('"').strip(), tools)
    if name in SWITCHES and (name != "think" or not value.strip()):
        command, choice = SWITCHES[name]
        return COMMANDS[command].run(conversation, value.strip() or choice, tools)
    if name.lstrip("-").replace("-", "_") in CONTEXT_NAMES:
        return set_context(conversation, require_argument(value.strip(), f"/set {name} VALUE"), tools)
    before = conversation.options.think
    conversation.set(change_option(conversation.options, name, value.strip()))
    if conversation.options.think != before:
        check_thinking(conversation.model, conversation.options.think)
    show_options(conversation)


def lora(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    """Set the scale of an adapter for the following answers, or list the adapters."""
    engine = conversation.model.engine
    if not engine.adapters:
        raise UsageError("the model was opened without adapters: start the chat with --lora FILE")
    names, options = [adapter.name for adapter in engine.adapters], conversation.options
    default = dict(zip(names, [*engine.adapter_scales, *[0.0] * len(names)], strict=False))
    scales = default if options.lora is None else {name: options.lora.get(name, 0.0) for name in names}
    if argument:
        name, _, text = argument.rpartition(" ") if " " in argument else (argument, "", "1")
        try:
            scales = {**scales, name.strip(): float(text)}
        except ValueError:
            raise UsageError("/lora NAME SCALE, such as /lora poet 0.5") from None
        from localllm.generation.adapters import order_scales

        order_scales(engine, scales)
        conversation.set(replace(options, lora=scales))
    show_fact("adapters", ", ".join(f"{name} {scale:g}" for name, scale in scales.items()))


def set_context(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    change_context(conversation, argument, lambda count: tools.open("", context=count))


def export(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    export_conversation(conversation, require_argument(argument, "/export FILE.md"))


def show_state(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    if argument == "parameters":
        return show_options(conversation)
    if argument:
        return show_part(conversation, argument)
    model = conversation.model
    show_session(conversation)
    show_fact("model", f"{model.name or get_file_stem(model.path)} · {model.file_type} · {model.path}")
    set_context(conversation, "", tools)
    if model.session.system is not None:
        show_fact("system", shorten(model.session.system))
    if conversation.images:
        show_fact("images", f"{len(conversation.images)} for the next question")
    if conversation.texts:
        show_fact("files", f"{sum(map(len, conversation.texts))} characters for the next question")
    show_options(conversation)


def show_options(conversation: "TerminalConversation") -> None:
    changed = [f"{name} = {value}" for name, value, is_usual in list_settings(conversation.options) if not is_usual]
    show_fact("options", ", ".join(changed) or "defaults")


def show_session(conversation: "TerminalConversation") -> None:
    if conversation.file:
        show_fact("session", f"{conversation.name} · {len(conversation.lines)} messages")


def set_stats(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    conversation.stats = parse_switch(argument, conversation.stats, "/stats on|off")
    say_dim(f"statistics are {'on' if conversation.stats else 'off'}")


def set_thinking(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    """Set whether the model reasons, as far as the template allows, and whether reasoning is shown."""
    if argument in THINK:
        conversation.set(replace(conversation.options, think=argument))
    elif argument not in ("hide", "show"):
        raise UsageError(f"usage: /think {'|'.join(THINK)}|hide|show")
    if argument != "off":
        conversation.shows_reasoning = argument != "hide"
    if argument in THINK and not check_thinking(conversation.model, argument):
        return
    visibility = "shown" if conversation.shows_reasoning else "hidden"
    say_dim(f"thinking is {conversation.options.think}; reasoning is {visibility}")


def switch_model(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    if argument:
        conversation.switch_model(tools.open(argument))
    current = conversation.model
    context = f" · {current.context} tokens of context" if current.context else ""  # some servers do not report it
    say_dim(f"{current.name or get_file_stem(current.path)} · {current.file_type}{context}")


def get_last_answer(conversation: "TerminalConversation", only_code: bool) -> str:
    """Return the last answer, or its last code block. Raises UsageError without one."""
    text = next((line["content"] for line in reversed(conversation.lines) if line["role"] == "assistant"), None)
    if text is None:
        raise UsageError("there is no answer yet")
    code = extract_code(text, last=True) if only_code else text
    if code is None:
        raise UsageError("the last answer has no code block")
    return str(code)


def copy_answer(conversation: "TerminalConversation", argument: str, tools: object) -> None:
    if argument not in ("", CODE):
        raise UsageError("usage: /copy, or /copy code for the last code block")
    text = get_last_answer(conversation, argument == CODE)
    copy_to_clipboard(text)
    say_dim(f"copied {len(text)} characters")


def copy_to_clipboard(text: str) -> None:
    for variable, command in CLIPBOARDS:
        if not variable or os.environ.get(variable):
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    command, input=text.encode(errors="replace"), check=True, timeout=5, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
                return
    data = base64.b64encode(text.encode(errors="replace"))
    if not is_terminal(sys.stderr) or len(data) > MAX_CLIPBOARD:
        raise UsageError("no clipboard program found (pbcopy, wl-copy, xclip or xsel); use /write FILE")
    sys.stderr.write(f"\x1b]52;c;{data.decode()}\x07")  # OSC 52, which also works over ssh
    sys.stderr.flush()


def write_answer(conversation: "TerminalConversation", argument: str, tools: object) -> None:
    """Write the last answer to a new file, or its last code block if the argument begins with `code`."""
    from localllm.files.safe_file import SafeFile, resolve_target

    word, _, rest = argument.partition(" ")
    only_code, path = (True, rest.strip()) if word == CODE and rest.strip() else (False, argument)
    if not path:
        raise UsageError("usage: /write FILE, or /write code FILE")
    text, path = get_last_answer(conversation, only_code), os.path.expanduser(path)
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; give another name")
    with SafeFile(resolve_target(path)) as file:
        file.write(f"{text.removesuffix(chr(10))}\n".encode(errors="replace"))
    say_dim(f"{path}: {len(text)} characters")


def set_folder(conversation: "TerminalConversation", argument: str, tools: object) -> None:
    """Attach a folder's matching passages to each question from now on; without a name, stop."""
    path = os.path.expanduser(argument)
    if path and not os.path.exists(path):
        raise UsageError(f"{path}: no such file or folder")
    conversation.folder = path or None
    say_dim(
        f"matching passages of {path} are added to each question; /files alone stops that"
        if path
        else "no passages are added"
    )


def exit_chat(conversation: "TerminalConversation", argument: str, tools: CommandTools) -> None:
    raise ExitChat


COMMANDS = {
    "/help": ChatCommand("", "show this help", show_help),
    "/clear": ChatCommand("", "start a new conversation", start_new),
    "/system": ChatCommand("TEXT", "set the system message; without TEXT, remove it", set_system),
    "/undo": ChatCommand("N", "remove an attached file, or the last N questions with their answers (default 1)",
    undo_questions),
    "/retry": ChatCommand("", "generate another answer to the last question", retry_answer),
    "/edit": ChatCommand("", "edit the last question and ask it again", edit_question),
    "/continue": ChatCommand("", "continue the last answer", continue_answer),
    "/read": ChatCommand("FILE", "send a file's text with the next question", attach_file, None),
    "/files": ChatCommand("FOLDER", "send the folder's matching passages with each question; without a name, stop",
                      set_folder, None),
    "/copy": ChatCommand("code", "copy the last answer, or its last code block, to the clipboard", copy_answer,
                     lambda conversation: ("code",)),
    "/write": ChatCommand("FILE", "write the last answer to a new file; /write code FILE: its last code block",
    write_answer,
                      None),
    "/image": ChatCommand("FILE", "send an image with the next question", attach_image, None),
    "/save": ChatCommand("NAME", "save the conversation as a session, after every answer", save_session),
    "/load": ChatCommand("NAME", "resume a session", load_session, lambda conversation: sessions.list_names()),
    "/sessions": ChatCommand("", "list the sessions", list_sessions),
    "/branch": ChatCommand("NAME", "start a branch of the conversation, or switch to one; without a name, list them",
                       switch_branch, list_branches),
    "/set": ChatCommand("NAME VALUE", "change an option: /set temperature 0.2, /set seed default", set_option,
                    lambda conversation: list_names(conversation.options)),
    "/show": ChatCommand("PART", "show the model, context, session and options; PART: " + ", ".join(PARTS), show_state,
                     lambda conversation: PARTS),
    "/context": ChatCommand("N", "set the context, in tokens, which opens the model again; without N, show its use",
                        set_context),
    "/export": ChatCommand("FILE", "write the conversation to a new Markdown file", export, None),
    "/stats": ChatCommand("on|off", "show tokens per second and context in use after every answer", set_stats,
                      lambda conversation: ("on", "off")),
    "/think": ChatCommand("CHOICE", "on, off, auto: whether the model thinks; hide, show: whether thinking is shown",
                      set_thinking,
                      lambda conversation: ("on", "off", "auto", "low", "medium", "high", "hide", "show")),
    "/lora": ChatCommand("NAME SCALE", "use an adapter at this scale; without a name, list the adapters", lora,
                     lambda conversation: [adapter.name for adapter in conversation.model.engine.adapters]),
    "/model": ChatCommand("PATH", "switch to another model", switch_model, None),
    "/exit": ChatCommand("", "leave the chat, as do bye, quit, exit and Ctrl-D", exit_chat),
}  # fmt: skip


def complete_line(conversation: "TerminalConversation", line: str) -> Iterator[tuple[str, int]]:
    """Yield the completions of a line up to the cursor: (text, its start in the line)."""
    if not line.startswith("/") or "\n" in line:
        return
    name, space, argument = line.partition(" ")
    if not space:
        yield from ((command, 0) for command in COMMANDS if command.startswith(name))
    elif name in COMMANDS:
        offers, begin = COMMANDS[name].completions, len(line) - len(argument)
        if offers is None:
            yield from ((path, begin) for path in list_paths(argument))
        else:
            yield from ((offer, begin) for offer in offers(conversation) if offer.startswith(argument))


def list_paths(prefix: str) -> list[str]:
    """List files and folders with a prefix; folders end with a slash, hidden ones need a leading dot."""
    stem = os.path.basename(prefix)
    folder = prefix.removesuffix(stem)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda item: item.name)
    except OSError:
        return []
    matches = [item for item in entries if item.name.startswith(stem) and (stem or not item.name.startswith("."))]
    return [f"{folder}{item.name}{'/' if item.is_dir() else ''}" for item in matches]


def require_argument(argument: str, usage: str) -> str:
    if not argument:
        raise UsageError(f"usage: {usage}")
    return argument


def parse_switch(argument: str, current: bool, usage: str) -> bool:
    """Parse "on" or "off"; without an argument, toggle. Raises UsageError."""
    if argument not in ("", "on", "off"):
        raise UsageError(f"usage: {usage}")
    return not current if not argument else argument == "on"


def shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:59]}…"
