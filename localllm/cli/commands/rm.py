"""localllm rm: remove pulled models."""

import sys
from typing import TYPE_CHECKING

from localllm.cli.open_model import confirm
from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import is_terminal, say, say_dim
from localllm.cli.terminal.render import format_size
from localllm.errors import LocalllmError, UsageError

if TYPE_CHECKING:
    from localllm.services.hub.catalogue import ModelOnDisk


def rm(
    models: list[str] = argument("MODEL...", "Model names, as `localllm list` shows them, or paths.", offer_models),
    *,
    force: bool = option("-f --force", "Do not ask for confirmation."),
) -> None:
    """Remove models from the models folder.

    Removes all files of a model, including an incomplete download; of a name that `create` or `cp` made, only the
    name. `rm` never removes files outside that folder.

    Examples:
      localllm rm qwen3-4b
      localllm rm --force qwen3-4b:Q8_0 mario
    """
    from localllm.services.hub.catalogue import find_removable

    for removable in [find_removable(name) for name in dict.fromkeys(models)]:
        remove(removable, force)


def remove(removable: "ModelOnDisk", force: bool) -> None:
    """Remove a model or a name, after a question unless it is forced. Raises LocalllmError."""
    from localllm.files.models_folder import remove_empty_folders
    from localllm.services.hub.create_model import list_dependents

    dependents = list_dependents(removable.path)
    if not force:
        if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
            raise UsageError(
                f"{removable.name}: cannot ask for confirmation without a terminal; remove it with --force"
            )
        users = f" {', '.join(dependents)} would be left without a model." if dependents else ""
        if not confirm(f"Remove {removable.name} ({format_size(removable.size)}, {removable.path})?{users}"):
            return
    for path in removable.files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise LocalllmError(f"{path}: cannot be removed: {error.strerror or error}") from None
    remove_empty_folders(removable.path.parent)
    say_dim(f"{format_size(removable.size)} removed")
    if dependents:
        names = ", ".join(dependents)
        say(f"localllm: warning: the model of these names is removed: {names}; remove them with `localllm rm NAME`")
