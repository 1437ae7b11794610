"""Scores a model on a file of multiple-choice tasks, for `localllm perplexity --hellaswag` and similar options."""

import json
from typing import TYPE_CHECKING

from localllm.cli import open_model as opening
from localllm.cli.resolve_model import resolve_model_path
from localllm.cli.terminal.eta import Remaining
from localllm.cli.terminal.output import ProgressLine, write
from localllm.cli.terminal.render import count_noun
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.arch.rope_scaling import RopeScaling
    from localllm.services.evaluation.choice_scores import ChoiceScore

NAMES = {"hellaswag": "HellaSwag", "winogrande": "Winogrande", "multiple-choice": "multiple choice"}


def score_file(
    model: str, path: str | None, selection: tuple[str, int], *, context: int | None, threads: int | None, kv_type: str,
    rope: "RopeScaling | None", as_json: bool,
) -> None:  # fmt: skip
    """Print a model's accuracy on the tasks of a file; on Ctrl-C, on the tasks so far. Raises UsageError.

    selection: the kind of tasks, and the maximum number of them.
    """
    from localllm.api import open_model
    from localllm.files.choice_tasks import PARSERS
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.services.evaluation.choice_scores import ChoiceScore, score_tasks, select_tasks

    kind, maximum = selection
    if path is None:
        raise UsageError(f"TEXT is missing: give a file of {NAMES[kind]} tasks")
    tasks = select_tasks(kind, PARSERS[kind](read_bytes(path), path), maximum)
    line, model_path, score = ProgressLine(), resolve_model_path(model), ChoiceScore(kind)
    compiling = opening.compiling(line)
    with open_model(model_path, threads, context, kv_type, progress=compiling, cache=False, rope=rope) as model_opened:
        line.clear()
        end_on_bus_error(model_path)
        opening.warn(model_opened.warnings)
        try:
            remaining = Remaining(len(tasks))
            line.show(remaining.at_first())
            for result in score_tasks(model_opened, tasks):
                score = ChoiceScore(kind, (*score.results, result))
                line.show(f"{remaining.after(score.tasks)}: {100 * score.accuracy:.2f}%")
        finally:
            line.clear()
            if score.tasks and as_json:
                write(json.dumps({"model": model_opened.path} | score.facts(), ensure_ascii=False) + "\n")
            elif score.tasks:
                write("".join(f"{row}\n" for row in report(score)))


def read_bytes(path: str) -> bytes:
    """Read a file. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:  # a name with a NUL in it is a ValueError
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def report(score: "ChoiceScore") -> list[str]:
    """Format a score as llama-perplexity rounds it."""
    percent, tasks = 100 * score.accuracy, count_noun(score.tasks, "task")
    if score.kind == "hellaswag":
        low, high = score.interval
        return [f"HellaSwag = {percent:.8f}% [{100 * low:.4f}%, {100 * high:.4f}%] ({tasks})"]
    lines = [f"{NAMES[score.kind]} = {percent:.4f} ± {100 * score.error(score.accuracy):.4f} ({tasks})"]
    if score.kind == "multiple-choice":
        lines.append(f"random chance = {100 * score.chance:.4f} ± {100 * score.error(score.chance):.4f}")
    return lines
