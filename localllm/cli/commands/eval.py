"""localllm eval: measure how many questions models answer correctly."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from localllm.cli import open_model as opening
from localllm.cli.command import get_values_for
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import argument, build_group, option, option_group
from localllm.cli.terminal.output import say, to_json_line, write
from localllm.cli.terminal.render import count_noun, format_table, to_one_line
from localllm.errors import RecordsError, UsageError

if TYPE_CHECKING:
    from localllm.services.evaluation.questions import Comparison, Evaluation


@option_group
class PromptGroup:
    """Prompts."""

    prompt: str | None = option(
        "-p --prompt",
        'Prompt template, as in `map`: {question} is the field "question".  [default: the record\'s prompt]',
        "TEXT",
    )
    system: options.System = None
    system_file: options.SystemFile = None
    chat_template: options.ChatTemplate = None


def eval(
    paths: list[str] = argument(
        "MODEL... QUESTIONS", "One or more models, and a file of questions: JSONL, an object per line.", offer_models
    ),
    *,
    grader: Literal[
        "exact", "number", "choice", "regex", "json", "program", "likelihood", "likelihood_per_byte"
    ] = option("--grader", "Grader of questions that name none.  [default: exact]", "NAME", default="exact"),
    output: str | None = option(
        "-o --output",
        "JSONL file for the answers; questions that it already answers are skipped. With several models, each "
        "has its own: FILE a.jsonl becomes a-MODEL.jsonl.",
        "FILE",
    ),
    redo: bool = option("--redo", "Answer all questions again, and replace the answers in FILE."),
    prompts: PromptGroup,
    engine: options.EngineGroup,
    choices: options.AnswerGroup,
    as_json: options.AsJson = False,
    as_csv: bool = option("--csv", "Print the table as CSV: model, group, right, of, share, low, high."),
) -> None:
    """Measure how many questions models answer correctly.

    Each line of QUESTIONS is a JSON object: "prompt", "question" or "messages", the right "answer", and "grader" if it
    is not --grader's: exact (the same text), number (the last number), choice (of "choices", by default A, B, C, D),
    regex (found in the answer), json ("schema", "answer" or both), program ("test", Python that is run after the
    answer's code in a confined process, as in HumanEval), likelihood and likelihood_per_byte ("choices" are scored by
    their log probability after the prompt, as in lm-evaluation-harness). Prints how many are right, with 95% Wilson
    intervals, and McNemar's test for each pair of models. Questions with a "group" are also counted by group. Answers
    are greedy unless --temp is given.

    Examples:
      localllm eval model.gguf questions.jsonl
      localllm eval big.gguf small.gguf questions.jsonl -o answers.jsonl --json
      localllm eval model.gguf HumanEval.jsonl --grader program -n 512 -p "Complete this function: {prompt}"
    """
    from localllm.cli.map_run import answer_questions, read_file
    from localllm.files.text_file import decode_text
    from localllm.services.evaluation.questions import Evaluation, QuestionSet, compare_models, warn_missing_template
    from localllm.services.records.lines import PromptBuilder, read_records
    from localllm.services.records.map import MapJob

    if len(paths) < 2:
        raise UsageError("give MODEL and QUESTIONS: localllm eval MODEL QUESTIONS.jsonl")
    if redo and output is None:
        raise UsageError("--redo replaces the answers in the output file: add -o FILE")
    if as_csv and as_json:
        raise UsageError("give either --csv or --json, not both")
    *models, file = paths
    outputs = get_output_names(output, models)
    data = decode_text(read_file(file), file).encode()
    questions = QuestionSet(read_records(data, ".jsonl"), grader, file)
    evaluations, failed = list[Evaluation](), 0
    for model, output_file in zip(models, outputs, strict=True):
        path = os.path.abspath(resolve_model_path(model))
        values = get_values_for(model)
        values["temperature"] = 0.0 if values["temperature"] is None else values["temperature"]
        own, ask = build_group(options.AnswerGroup, values), build_group(PromptGroup, values)
        engine = build_group(options.EngineGroup, values)
        system = options.read_system_message(ask.system, ask.system_file)
        job = MapJob(
            path, PromptBuilder(ask.prompt, None, system, first=opening.get_first_messages(model, is_remote=False)),
            options.build_generation_options(None, own), 1, True, engine.context, engine.threads,
            engine.cache.format_types(), ask.chat_template, json_as_text=True, scored=questions.scored,
            **engine.adapters.absolute_fields(),
        )  # fmt: skip
        is_generating = len(questions.scored) < len(questions.records)
        if warning := warn_missing_template(path, ask.chat_template) if is_generating else None:
            say(f"localllm: warning: {model}: {warning}; choose one with --chat-template")
        results = answer_questions(model, job, engine, questions.records, (data, file), output_file, redo)
        failed += sum("error" in result for result in results)
        evaluations.append(Evaluation(model, questions.grade(results), [warning] if warning else [], questions.groups))
    if as_csv:
        write(format_csv(evaluations))
    else:
        print_report(evaluations, compare_models(evaluations), as_json)
    if failed:
        raise RecordsError(
            f"{count_noun(failed, 'question')} had no answer and counted as wrong; --json lists the reasons"
        )


def get_output_names(output: str | None, models: list[str]) -> list[str | None]:
    if output is None or len(models) == 1:
        return [output] * len(models)
    start, end = os.path.splitext(output)
    names = [f"{start}-{os.path.basename(model).removesuffix('.gguf').replace(':', '-')}{end}" for model in models]
    if len({*names}) < len(names):
        raise UsageError(
            "two models have the same name, so their output files would too: evaluate them one by one, "
            "each with its own -o FILE"
        )
    return [*names]


def print_report(evaluations: "list[Evaluation]", comparisons: "list[Comparison]", as_json: bool) -> None:
    if as_json:
        facts = {
            "models": [evaluation.to_dict() for evaluation in evaluations],
            "comparisons": [asdict(comparison) for comparison in comparisons],
        }
        write(to_json_line(facts))
        return
    rows = list[tuple[str, ...]]()
    for evaluation in evaluations:
        groups = {f"  {to_one_line(name)}": each for name, each in evaluation.split().items()}
        for label, each in {to_one_line(evaluation.model): evaluation, **groups}.items():
            low, high = each.interval
            share = f"{100 * each.correct / each.total:.1f}%"
            interval = f"{100 * low:.1f}% to {100 * high:.1f}%"
            rows.append((label, str(each.correct), str(each.total), share, interval))
    lines = format_table(("model", "right", "of", "share", "95% interval"), rows)
    lines += [""] if comparisons else []
    lines += [
        f"{to_one_line(each.first)} against {to_one_line(each.second)}: {each.only_first} right only by the first, "
        f"{each.only_second} only by the second, p = {each.p:.3g} (McNemar)"
        for each in comparisons
    ]
    write("".join(f"{line}\n" for line in lines))


def format_csv(evaluations: "list[Evaluation]") -> str:
    """Format the evaluations as CSV: for each model a row without a group, then one for each group."""
    import csv
    import io

    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("model", "group", "right", "of", "share", "low", "high"))
    for evaluation in evaluations:
        for group, each in {"": evaluation, **evaluation.split()}.items():
            counts = each.correct, each.total, each.correct / each.total
            table.writerow((each.model, group, *counts, *each.interval))
    return text.getvalue()
