"""Tables of options that exclude each other, and of options that override others' defaults."""

from collections.abc import Mapping
from typing import NamedTuple

from localllm.errors import UsageError

FORM, STEPS = "a schema, grammar or regex", "the options of diffusion models"
THOUGHTS = "the options for thinking and template variables"
DIFFUSION = "a diffusion model"  # known only after opening the model


class OptionConflict(NamedTuple):
    """An option, and the options that it cannot be combined with.

    Attributes:
        message: of the error; {0} is the option, {1} the other one.
    """

    option: str
    others: tuple[str, ...]
    message: str = "{0} cannot be combined with {1}: leave out one of them"


_EITHER = "give either {1} or {0}, not both"
_NO_TEMPLATE = "{0} turns off the chat template: leave out {1}"
_PLAIN = "diffusion models give a single answer as plain text: leave out {1}"
_OF_TEMPLATES = ("-sys", "--chat-template", THOUGHTS)
CONFLICTS = (
    OptionConflict("--continue", ("--session",), _EITHER),
    OptionConflict("--continue", ("--raw", "--suffix", "--n", "--beams", "--choices")),
    OptionConflict("--session", ("--raw", "--suffix", "--n", "--beams", "--choices")),
    OptionConflict("--raw", _OF_TEMPLATES, _NO_TEMPLATE),
    OptionConflict("--suffix", _OF_TEMPLATES, _NO_TEMPLATE),
    OptionConflict(
        "--suffix", ("--raw", "--image", "--tools", "--choices", "--endpoint", "--receipt", STEPS, DIFFUSION)
    ),
    OptionConflict("--image", ("--receipt", STEPS, DIFFUSION)),
    OptionConflict("--tools", ("--raw", "--n", "--beams", "--receipt")),
    OptionConflict(
        "--choices", ("--n", "--beams", "--tools", "--ray", "--endpoint", "--receipt", "--stats", STEPS, FORM)
    ),
    OptionConflict("--extract", ("--json", "--tools")),
    OptionConflict(DIFFUSION, ("--n", "--beams", "--json", "--stats", "--receipt", "--tools"), _PLAIN),
    OptionConflict("--redo-errors", ("--redo",), _EITHER),
)
# Groups of parameters: a typed one disables the defaults of the others.
ALTERNATIVES = (("system", "system_file"), ("json_schema", "grammar", "regex"), ("samplers", "letters"),
                ("kv_type", "keys"), ("kv_type", "values"), ("as_json", "as_markdown"))  # fmt: skip
DISABLED_BY_RAW = ("system", "system_file", "chat_template", "think", "think_budget", "template_var")


def require_compatible(flags: Mapping[str, object]) -> None:
    """Raise UsageError for the first two options that exclude each other; flags: whether each option is set."""
    for option, others, message in CONFLICTS:
        for other in others:
            if flags.get(option) and flags.get(other):
                raise UsageError(message.format(option, other))
