"""localllm create: create a name for a model with settings of its own."""

import os

from localllm.cli.open_model import warn
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import say_dim


def create(
    name: str = argument("NAME", "New name, such as mario or mario:v2."),
    *,
    file: str = option("-f --file", "Modelfile to read.  [default: Modelfile]", "FILE", default="Modelfile"),
) -> None:
    """Create a name with settings from a Modelfile.

    FROM is a model's name or a GGUF file; PARAMETER, SYSTEM, MESSAGE, ADAPTER and LICENSE are as in Ollama. A TEMPLATE
    in Go's syntax is replaced by the model's own or a built-in template if it writes the same marks, and refused
    otherwise. Every command accepts the name as MODEL; the model's own name keeps its settings. The result is a text
    file in the models folder; an earlier one of that name is replaced.

    Examples:
      localllm create mario -f Modelfile
      localllm run mario "Who are you?"
    """
    from localllm.files.models_folder import get_created_path
    from localllm.services.hub.create_model import create_model
    from localllm.services.hub.modelfile import read_modelfile

    content = read_modelfile(file)
    warn(create_model(name, content, os.path.dirname(os.path.abspath(file)), file))
    say_dim(f"created {name}: {get_created_path(name)}")
