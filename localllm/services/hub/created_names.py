"""Names that the user created: a Modelfile in the models folder for each, NAME.modelfile.

Such a name stands for the model after FROM, with settings of its own, as an alias with a table in config.toml does.
"""

import os

from localllm.errors import ModelError, UsageError
from localllm.files.models_folder import LATEST, get_created_path
from localllm.frozen import frozen
from localllm.services.hub.modelfile import Modelfile, read_modelfile
from localllm.text.messages import Message

MAX_DEPTH = 8  # of names that stand for names


@frozen
class CreatedModel:
    """A name that the user created; content: its Modelfile's."""

    name: str
    content: Modelfile

    @property
    def shown_name(self) -> str:
        return self.name

    @property
    def base(self) -> str:
        return self.content.base

    @property
    def source(self) -> str:
        """Where its settings come from, for messages."""
        return f"{get_created_path(self.name).name}"

    def read_options(self) -> dict[str, object]:
        """Return option values by their long names. Raises ModelError for a template in Go's syntax."""
        from localllm.text.builtin_templates import BUILTIN_TEMPLATES

        if self.content.template is not None and self.content.template not in BUILTIN_TEMPLATES:
            raise ModelError(
                f"{self.source}: TEMPLATE must be the name of a built-in template: "
                f"use `localllm create {self.name} -f {get_created_path(self.name)}`"
            )
        return self.content.to_options()

    def describe_unused(self, template: str | None, is_chosen: bool) -> list[str]:
        """List what is not used, which its creation has told: nothing."""
        return []

    def read_messages(self) -> list[Message]:
        return [{**message} for message in self.content.messages]


def find_created(name: str, depth: int = 0) -> CreatedModel | None:
    """Return what the user created under a name, or None. Raises ModelError for an invalid file."""
    path = get_created_path(name)
    if not os.path.isfile(path):
        return None
    if depth > MAX_DEPTH:
        raise ModelError(f"{name}: names stand for names more than {MAX_DEPTH} deep: create it from a model")
    try:
        return CreatedModel(name.removesuffix(LATEST).lower(), read_modelfile(path))
    except UsageError as error:
        raise ModelError(str(error)) from None
