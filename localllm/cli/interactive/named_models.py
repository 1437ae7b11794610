"""Opens the models that a chat switches to, each with the settings of its name."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from localllm.cli.command import values_for
from localllm.cli.options import shared as options
from localllm.cli.parameters import build_group
from localllm.generation.answer_defaults import UNSET

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.interactive.conversation import TerminalConversation
    from localllm.generation.generate import GenerationOptions

# Options of answers that a name may set.
OF_NAMES = ("sampling", *UNSET, "template_variables")


class NameSettings(NamedTuple):
    """What belongs to a model's name in a chat, with the options of the command line."""

    engine: options.EngineGroup
    template: str | None
    system: str | None
    generation: "GenerationOptions"

    @classmethod
    def of(cls, name: str) -> "NameSettings":
        """Return the settings of a name. Raises UsageError, ModelError."""
        values = values_for(name)
        generation = options.generation_options(None, build_group(options.GenerationGroup, values))
        system = options.system_message(values["system"], values["system_file"])
        return cls(build_group(options.EngineGroup, values), values["chat_template"], system, generation)


def opener(
    conversation: "TerminalConversation", name: str, open_model: "Callable[..., Model]"
) -> "Callable[[str], Model]":
    """Return a function that opens a model by its name for a conversation, whose settings become those of that name.

    What the user has changed in the conversation stays. name: of the conversation's model.  open_model: opens a name
    with an engine and a template.
    """
    current = NameSettings.of(name)

    def open_named(name: str) -> "Model":
        nonlocal current
        new = NameSettings.of(name)
        model = open_model(name, engine=new.engine, template=new.template)
        old, chosen = current.generation, conversation.options
        changes = {
            name: value
            for name in OF_NAMES
            if getattr(chosen, name) == getattr(old, name) != (value := getattr(new.generation, name))
        }
        if changes:
            conversation.set(replace(chosen, **changes))
        if conversation.model.session.system == current.system != new.system:
            conversation.set_system(new.system)
        current = new
        return model

    return open_named
