"""localllm chat: a conversation in the terminal."""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import localllm
from localllm.cli import options
from localllm.cli.prompt import Encoding, begin, request, warn_of_template, whole_prompt
from localllm.cli.render import file_stem, stream
from localllm.cli.terminal import ProgressLine, dim, dim_text, exit_on_sigterm, is_terminal, say
from localllm.errors import LocalllmError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.generate import GenerationOptions

HELP = """\
/help            show this
/clear           begin a new conversation
/system TEXT     set the system message; without a text, remove it
/exit            leave, as Ctrl-D does
Ctrl-C           stop the answer; what was said stays
Alt-Enter        a new line, as a backslash at the end of a line"""


def chat(
    model: options.OptionalModelName = None,
    *,
    system: options.System = None,
    system_file: options.SystemFile = None,
    chat_template: options.ChatTemplate = None,
    encoding: Encoding = None,
    engine: options.Engine,
    no_cache: options.NoCache = False,
    choices: options.Generation,
) -> None:
    """Talk with a model, or with the built-in one.

    When stdin is not a terminal, it is the prompt, and one answer is given as by `run`.

    Examples:
      localllm chat
      localllm chat model.gguf -sys "You are a patient teacher."
      localllm chat model.gguf -c 8192 -ctk q8_0 -ctv q8_0
    """
    interactive = is_terminal(sys.stdin)
    path = str(localllm.builtin_model()) if model is None else model
    most_bytes = partial(options.most_bytes, path, engine, choices.on_overflow)
    text = "" if interactive else whole_prompt(None, None, encoding=encoding, most_bytes=most_bytes)
    system = options.system_message(system, system_file)
    line = ProgressLine()
    chosen = options.generation_options(options.reading(line), choices)
    with options.open_model(path, engine, chat_template, no_cache) as opened:
        if chosen.on_overflow == "shift":
            opened.engine.require_shift()
        chosen = options.with_draft_model(opened, chosen, choices.speculate)
        if interactive:
            exit_on_sigterm()
            warn_of_template(opened)
            Conversation(opened, system, chosen, line).hold()
        elif stream(begin(opened, request(opened, text, system, False), chosen), line):
            raise KeyboardInterrupt
        options.settle(opened)


class Conversation:
    """What the user types, and what happens then."""

    def __init__(self, model: "Model", system: str | None, chosen: "GenerationOptions", line: ProgressLine):
        self._model, self._session, self._options, self._line = model, model.session, chosen, line
        self._session.system = system
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: dim_text(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
        }

    def hold(self) -> None:
        """Answer until the user leaves."""
        from localllm.cli.line_editor import LineEditor

        editor = LineEditor()
        model = self._model
        name = model.name or file_stem(model.path)
        dim(f"{name} · {model.format} · {model.context} tokens of context · /help")
        while True:
            try:
                text = editor.read()
            except KeyboardInterrupt:
                dim("Ctrl-D or /exit leaves")
                continue
            except EOFError:
                return
            command, _, argument = text.strip().partition(" ")
            if command == "/exit":
                return
            if text.startswith("/"):
                self._commands.get(command, self._unknown)(argument.strip())
            elif text.strip():
                self._answer(text)

    def _answer(self, text: str) -> None:
        try:
            answer = self._session.ask(text, self._options)
            if self._session.forgotten:
                say(f"localllm: the conversation is too long: its first {turns(self._session.forgotten)} forgotten")
            stream(answer, self._line)
        except LocalllmError as error:
            say(f"localllm: error: {error}")

    def _clear(self, _: str) -> None:
        self._session.clear()
        dim("a new conversation")

    def _set_system(self, text: str) -> None:
        self._session.system = text or None
        dim("the system message is set" if text else "there is no system message now")

    def _unknown(self, _: str) -> None:
        dim("no such command: /help shows all; a text that begins with a slash needs a space before it")


def turns(count: int) -> str:
    return "turn was" if count == 1 else f"{count} turns were"
