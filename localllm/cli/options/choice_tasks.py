"""Options of `localllm perplexity` for multiple-choice tasks."""

from typing import Annotated

import typer

from localllm.cli.options.sampling import number
from localllm.cli.parameters import group
from localllm.errors import UsageError


@group
class ChoiceTaskGroup:
    """Multiple-choice tasks instead of perplexity."""

    hellaswag: Annotated[
        bool, typer.Option("--hellaswag", help="Score the HellaSwag tasks in TEXT: 6 lines each, as in llama.cpp.")
    ] = False
    hellaswag_tasks: Annotated[
        int | None,
        number("--hellaswag-tasks", help="Number of tasks, drawn at random; 0: all.  [default: 400]"),
    ] = None
    winogrande: Annotated[
        bool, typer.Option("--winogrande", help="Score the Winogrande tasks in TEXT: CSV, as in llama.cpp.")
    ] = False
    winogrande_tasks: Annotated[
        int | None, number("--winogrande-tasks", help="Number of tasks, drawn at random.  [default: all]")
    ] = None
    multiple_choice: Annotated[
        bool,
        typer.Option(
            "--multiple-choice",
            help="Score the multiple-choice tasks in TEXT, llama.cpp's binary file (ARC, MMLU, TruthfulQA).",
        ),
    ] = False
    multiple_choice_tasks: Annotated[
        int | None,
        number("--multiple-choice-tasks", help="Number of tasks, drawn at random.  [default: all]"),
    ] = None

    def select(self) -> tuple[str, int] | None:
        """Return the kind of tasks and how many (0: all), None for perplexity. Raises UsageError."""
        switches = {
            "hellaswag": (self.hellaswag, self.hellaswag_tasks, 400),
            "winogrande": (self.winogrande, self.winogrande_tasks, 0),
            "multiple-choice": (self.multiple_choice, self.multiple_choice_tasks, 0),
        }
        kinds = [kind for kind, (is_on, _, _) in switches.items() if is_on]
        if len(kinds) > 1:
            raise UsageError(f"give either {' or '.join(f'--{kind}' for kind in kinds)}, not both")
        for kind, (is_on, count, _) in switches.items():
            if count is not None and not is_on:
                raise UsageError(f"--{kind}-tasks needs --{kind}")
            if count is not None and count < 0:
                raise UsageError(f"--{kind}-tasks should be 0 or greater, not {count}")
        return next(((k, usual if n is None else n) for k, (is_on, n, usual) in switches.items() if is_on), None)
