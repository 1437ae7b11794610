"""Defaults that belong to the name by which a model is called: a system message, first messages, options."""

from collections.abc import Sequence
from dataclasses import field, replace

from localllm.frozen import frozen
from localllm.generation.options import OPTIONS, GenerationOptions
from localllm.generation.sampling.declaration import names_for
from localllm.text.messages import Message

# Options that a name may set, besides sampling and template variables, with the value that leaves each unset.
UNSET = {name: OPTIONS[name].default for name in names_for("name", OPTIONS)}
INSTRUCTION = ("system", "developer")  # roles of a message that replaces the default system message


@frozen
class AnswerDefaults:
    """Defaults of a model's answers.

    Attributes:
        system: system message of conversations without one.  messages: put before the first turn.
        options: replace options that have their default.
    """

    system: str | None = None
    messages: Sequence[Message] = ()
    options: GenerationOptions = field(default_factory=GenerationOptions)

    def head(self, system: Sequence[Message]) -> list[Message]:
        """Return the messages before the first turn; system: the conversation's own system message, or none."""
        default = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*(system or default), *self.messages]

    def conversation(self, messages: Sequence[Message]) -> list[Message]:
        first = sum(map(is_instruction, messages[:1]))
        return [*self.head(messages[:first]), *messages[first:]]

    def over(self, defaults: "AnswerDefaults") -> "AnswerDefaults":
        """Return these defaults, with those of another's options that are not set here."""
        return replace(self, options=defaults.complete(self.options))

    def complete(self, options: GenerationOptions | None) -> GenerationOptions:
        if options is None:
            return self.options
        changes = {
            name: getattr(self.options, name) for name, unset in UNSET.items() if getattr(options, name) in (unset, [])
        }
        variables = {**self.options.template_variables, **options.template_variables}
        sampling = options.sampling.over(self.options.sampling)
        return replace(options, **{**changes, "template_variables": variables, "sampling": sampling})


def is_instruction(message: Message) -> bool:
    return isinstance(message, dict) and message.get("role") in INSTRUCTION
