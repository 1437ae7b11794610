"""localllm templates: list, show or edit prompt templates for `run --template`."""

import os
import shlex
import subprocess
from typing import Literal

from localllm.cli.options.offers import offer_prompts
from localllm.cli.parameters import argument
from localllm.cli.terminal.output import say_dim, write
from localllm.errors import LocalllmError, UsageError

NEW = "---\ndescription: {name}\ntemp: 0.2\n---\nWhat to do with the text that is piped or given by -f.\n"


def templates(
    action: Literal["list", "show", "edit", "path"] | None = argument(
        "[list|show|edit|path]",
        "List all, show one, edit one in $EDITOR, or print the path of one or of the folder.  [default: list]",
    ),
    name: str | None = argument("[NAME]", "Template to show or edit.", offer_prompts),
) -> None:
    """List, show or edit the named prompts of `run --template`.

    A template is a Markdown file in ~/.config/localllm/templates. The prompt may come after lines with options of
    `run`, between two lines of three dashes. `edit` makes a new template, or your own version of a built-in one.

    Examples:
      localllm templates
      localllm templates show commit
      localllm templates edit haiku
      git diff | localllm run model.gguf --template commit
    """
    from localllm.services import prompt_templates as kept

    if action in (None, "list"):
        loaded = [kept.load_template(each) for each in kept.list_names()]
        width = max(len(each.name) for each in loaded)
        return write("".join(f"{each.name:<{width}}  {each.description}\n" for each in loaded))
    if name is None and action == "path":
        return write(f"{kept.get_own_folder()}\n")
    if name is None:
        raise UsageError(f"NAME is missing: localllm templates {action} NAME")
    if action == "edit":
        return edit(name)
    write(f"{kept.find_path(name)}\n" if action == "path" else kept.find_path(name).read_text(encoding="utf-8"))


def edit(name: str) -> None:
    """Open a template in the editor, after creating it or copying the built-in one. Raises LocalllmError."""
    from localllm.services import prompt_templates as kept

    if not kept.NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid template name: use letters, digits and . _ -")
    path = kept.get_own_folder() / f"{name}{kept.ENDING}"
    text = kept.find_path(name).read_text(encoding="utf-8") if name in kept.list_names() else NEW.format(name=name)
    editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    if not editor:
        raise UsageError(f"EDITOR is not set: set it to your editor's command, or write {path} yourself")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text, encoding="utf-8")
        subprocess.run([*editor, str(path)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LocalllmError(f"cannot edit {path} with EDITOR={shlex.join(editor)}: {reason}") from None
    kept.load_template(name)
    say_dim(f"localllm run --template {name}")
