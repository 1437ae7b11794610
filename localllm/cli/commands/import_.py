"""localllm import: bring a GGUF file into the models folder."""

from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import ProgressLine, write
from localllm.cli.terminal.render import format_size


def import_(
    file: str = argument("FILE", "GGUF file; of a split model, the first file."),
    name: str | None = argument("[NAME]", "Its name from now on.  [default: the file's]"),
    *,
    move: bool = option("--move", "Move the file instead of copying it."),
) -> None:
    """Bring a GGUF file into the models folder, under a name.

    All files of a split model are brought, and their headers checked before. `localllm list` shows the name, and every
    command accepts it as MODEL. The path goes to stdout.

    Examples:
      localllm import ~/Downloads/model-Q4_K_M.gguf
      localllm import ~/Downloads/model-Q4_K_M.gguf small --move
    """
    from localllm.services.hub.import_model import import_model

    with ProgressLine() as line:
        path = import_model(
            file, name, move, lambda done, total: line.show(f"{format_size(done)} of {format_size(total)}")
        )
    write(f"{path}\n")
