"""The option --choices, which ranks answers instead of generating one."""

import csv
from typing import TYPE_CHECKING, Annotated

from localllm.cli.parameters import option
from localllm.cli.terminal.output import to_json_line, write

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.text.messages import Message

Choices = Annotated[
    str | None,
    option(
        "--choices", "Answer with the most likely of these texts; JSON output has the probabilities of all.", "A,B,..."
    ),
]


def split_choices(argument: str) -> list[str]:
    """Split at commas; a comma in quotes belongs to the text, as in CSV. Raises UsageError."""
    from localllm.generation.choices import require_choices

    (texts,) = csv.reader([argument], skipinitialspace=True) if argument.strip() else ([""],)
    return require_choices([text.strip() for text in texts])


def print_choice(model: "Model", prompt: "str | list[Message]", texts: list[str], as_json: bool) -> None:
    """Print the likeliest of several answers, or all with their probabilities."""
    choices = model.choose(prompt, texts)
    if not as_json:
        write(f"{choices[0].text}\n")
        return
    all_of_them = [choice._asdict() for choice in choices]
    write(to_json_line({"text": choices[0].text, "choices": all_of_them}))
