"""Slash commands about a chat's state: what the model and the conversation have, the context, and export to a file."""

import os
from typing import TYPE_CHECKING

from localllm.cli.interactive.settings import get_changed_settings
from localllm.cli.terminal.output import print_dim, say_dim
from localllm.cli.terminal.render import count_noun, format_facts, get_file_stem
from localllm.errors import UsageError
from localllm.services import sessions

if TYPE_CHECKING:
    from collections.abc import Callable

    from localllm.api import Model
    from localllm.cli.interactive.conversation import TerminalConversation

PARTS = ("info", "license", "modelfile", "parameters", "system", "template")  # of /show
CONTEXT_NAMES = ("num_ctx", "context", "ctx_size", "c")
MAX_SHOWN = 100  # options in a Modelfile


def show_fact(name: str, text: str) -> None:
    print_dim("\n".join(format_facts([(name, text)], label=10)))


def show_part(conversation: "TerminalConversation", part: str) -> None:
    """Show one part of what the model and the conversation have. Raises UsageError for an unknown one."""
    model = conversation.model
    if part == "system":
        print_dim(model.session.system or model.session.defaults.system or "no system message; /system TEXT sets one")
    elif part == "template":
        print_dim(model.session.template.source or "the server writes messages with its own template")
    elif part == "license":
        print_dim(read_license(model))
    elif part == "modelfile":
        print_dim(format_modelfile(conversation).rstrip("\n"))
    elif part == "info":
        show_info(model)
    else:
        raise UsageError(f"usage: /show, or /show {'|'.join(PARTS)}")


def read_license(model: "Model") -> str:
    """Return what the model's file says about its license."""
    metadata = {} if model.file is None else model.file.metadata
    values = [metadata.get(f"general.license{part}") for part in ("", ".name", ".link")]
    return "\n".join(str(value) for value in values if value) or "the model's file names no license"


def show_info(model: "Model") -> None:
    facts = [("model", model.name or get_file_stem(model.path)), ("path", model.path), ("format", model.file_type)]
    if model.file is not None:
        facts += [("family", model.arch), ("weights", f"{model.file.parameters:,}"), ("device", model.device)]
        facts.append(("context", f"{model.context} tokens, trained for {model.trained_context}"))
        facts.append(("images", "yes" if model.vision.nbytes else "no"))
    print_dim("\n".join(format_facts(facts, label=10)))


def format_modelfile(conversation: "TerminalConversation") -> str:
    """Format a Modelfile of the conversation's model, system message and options."""
    from localllm.generation.options import OPTIONS
    from localllm.generation.sampling.options import OPTIONS as SAMPLING
    from localllm.generation.sampling.options import map_names
    from localllm.services.hub.modelfile import Modelfile

    model = conversation.model
    theirs = {name: there for declared in (OPTIONS, SAMPLING) for there, name in map_names("ollama", declared).items()}
    changed = get_changed_settings(conversation.options)
    parameters = {theirs[name]: value for name, value in changed.items() if name in theirs and value is not None}
    if model.file is not None and model.context != model.trained_context:
        parameters["num_ctx"] = model.context
    system = model.session.system or model.session.defaults.system
    return Modelfile(os.path.abspath(model.path), parameters=parameters, system=system).format()


def change_context(conversation: "TerminalConversation", text: str, open_again: "Callable[[int], Model]") -> None:
    """Open the conversation's model again with another context; without a number, show what is used of it.

    open_again: opens the model with a context of so many tokens. Raises UsageError.
    """
    model = conversation.model
    if not text:
        of = f" of {model.context}" if model.context else ""
        messages = count_noun(len(conversation.lines), "message")
        return show_fact("context", f"{conversation.used}{of} tokens, in {messages}")
    if not (text.isdecimal() and 0 < int(text) < 10**9):
        raise UsageError(f"/context N sets the context in tokens; N must be an integer of 1 or more (found {text!r})")
    if model.file is None:
        raise UsageError("the server decides the context of its models: set it there")
    if int(text) <= conversation.used:
        raise UsageError(f"the conversation has {conversation.used} tokens already; use /clear, or a longer context")
    conversation.switch_model(open_again(int(text)))
    say_dim(f"the context is {conversation.model.context} tokens; the next question reads the conversation again")


def export_conversation(conversation: "TerminalConversation", path: str) -> None:
    """Write the conversation to a new Markdown file. Raises UsageError, LocalllmError."""
    from localllm.files.safe_file import SafeFile, resolve_target

    if not conversation.lines:
        raise UsageError("there is nothing to export yet")
    path = os.path.expanduser(path)
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; give another name")
    text = sessions.format_markdown(conversation.lines, conversation.name if conversation.file else "Conversation")
    with SafeFile(resolve_target(path)) as file:
        file.write(text.encode(errors="replace"))
    say_dim(f"{path}: {count_noun(len(conversation.lines), 'message')}")
