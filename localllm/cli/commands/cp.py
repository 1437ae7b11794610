"""localllm cp: give a model a second name."""

from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import argument
from localllm.cli.terminal.output import say_dim


def cp(
    source: str = argument("MODEL", "Model name or GGUF file.", offer_models),
    name: str = argument("NAME", "New name."),
) -> None:
    """Give a model a second name.

    The weights are not copied. The new name begins with the settings of the old one; a name made by `create` is
    independent of it afterwards.

    Examples:
      localllm cp qwen3-4b small
      localllm cp mario luigi
    """
    from localllm.services.hub.create_model import copy_name

    copy_name(source, name)
    say_dim(f"created {name}")
