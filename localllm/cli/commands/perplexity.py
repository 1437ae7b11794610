"""localllm perplexity: measure how well a model predicts a text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.parameters import argument, option, option_group
from localllm.cli.terminal.output import ProgressLine, to_json_line, write
from localllm.cli.terminal.render import RemainingTime, count_noun, format_table, to_one_line
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.arch.rope_scaling import RopeScaling
    from localllm.services.evaluation.choice_scores import ChoiceScore
    from localllm.services.evaluation.perplexity import PerplexityRunner
    from localllm.services.evaluation.scores import Prediction

PERCENTILES = ("99.9", "99", "95", "90", "75", "50", "25", "10", "5", "1", "0.1")
NAMES = {"hellaswag": "HellaSwag", "winogrande": "Winogrande", "multiple-choice": "multiple choice"}


@option_group
class ChoiceTaskGroup:
    """Multiple-choice tasks instead of perplexity."""

    hellaswag: bool = option("--hellaswag", "Score the HellaSwag tasks in TEXT: 6 lines each, as in llama.cpp.")
    hellaswag_tasks: int | None = option(
        "--hellaswag-tasks", "Number of tasks, drawn at random; 0: all.  [default: 400]", "N"
    )
    winogrande: bool = option("--winogrande", "Score the Winogrande tasks in TEXT: CSV, as in llama.cpp.")
    winogrande_tasks: int | None = option(
        "--winogrande-tasks", "Number of tasks, drawn at random.  [default: all]", "N"
    )
    multiple_choice: bool = option(
        "--multiple-choice", "Score the multiple-choice tasks in TEXT, llama.cpp's binary file (ARC, MMLU, TruthfulQA)."
    )
    multiple_choice_tasks: int | None = option(
        "--multiple-choice-tasks", "Number of tasks, drawn at random.  [default: all]", "N"
    )

    def select(self) -> tuple[str, int] | None:
        """Return the task type and the maximum count (0: all), or None for perplexity. Raises UsageError."""
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
                raise UsageError(f"--{kind}-tasks must be 0 or greater, not {count}")
        return next(((k, usual if n is None else n) for k, (is_on, n, usual) in switches.items() if is_on), None)


def perplexity(
    model: options.ModelName,
    text: str | None = argument("[TEXT]", "Text file.", also=("-f", "--file", "-bf", "--binary-file")),
    *,
    context: int | None = option(
        "-c --context --ctx-size", "Tokens per chunk; the second half of each chunk is scored.  [default: 512]", "N"
    ),
    chunks: int | None = option("--chunks", "Maximum number of chunks.  [default: all]", "N"),
    save_logits: str | None = option(
        "--save-logits --save-all-logits", "Save the logits to FILE, for --kl-divergence.", "FILE"
    ),
    kl_divergence: bool = option("--kl-divergence", "Compare with the logits of --base instead of scoring TEXT."),
    base: str | None = option(
        "--base --kl-divergence-base", "Logits saved by another model with --save-logits.", "FILE"
    ),
    per_token: str | None = option(
        "--per-token", "Write each scored token with its log probability, in nats, to FILE as CSV.", "FILE"
    ),
    threads: options.Threads = None,
    tasks: ChoiceTaskGroup,
    cache: options.CacheGroup,
    rope: options.RopeGroup,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Measure perplexity on a text, as llama-perplexity does.

    TEXT is a file. Perplexity is the exponential of the mean negative log probability of its tokens: lower is better,
    and only models with the same vocabulary can be compared. To measure what a quantized file has lost, save the
    logits of the original (0.1 MB per token with a vocabulary of 50000), then compare with them. The logits files are
    those of llama-perplexity. Ctrl-C prints the results so far.

    With --hellaswag, --winogrande or --multiple-choice TEXT contains tasks: for each, the answer whose tokens have the
    highest mean log probability is chosen, and the accuracy is printed.

    Examples:
      localllm perplexity model.gguf text.txt
      localllm perplexity big.gguf text.txt --save-logits big.logits
      localllm perplexity small.gguf --kl-divergence --base big.logits
      localllm perplexity model.gguf hellaswag_val_full.txt --hellaswag
    """
    if selected := tasks.select():
        if chunks is not None or save_logits is not None or kl_divergence or base is not None or per_token is not None:
            raise UsageError(
                f"--{selected[0]} scores tasks, so it cannot be combined with options for chunks, logits or tokens"
            )
        score_file(
            model, text, selected, context=context, threads=threads, kv_type=cache.format_types(),
            rope=rope.make_scaling(),
            as_json=as_json,
        )  # fmt: skip
        return
    validate_options(text, context, save_logits, kl_divergence, base)
    from localllm.files.logits_file import LogitsFile
    from localllm.files.text_file import read_text
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.services.evaluation.perplexity import PerplexityRunner
    from localllm.services.evaluation.scores import split_chunks
    from localllm.services.evaluation.token_scores import write_token_scores

    require_outputs(save_logits, per_token, [name for name in (model, text, base) if name is not None], force)
    line = ProgressLine()
    logits = LogitsFile.open(base) if base else None
    content = read_text(text) if text else ""
    size = logits.chunks.shape[1] if logits else 512 if context is None else context
    prediction = None
    path = resolve_model_path(model)
    with PerplexityRunner(
        path, size, threads, opening.make_compile_progress(line), cache.format_types(), rope.make_scaling()
    ) as reader:
        line.clear()
        end_on_bus_error(path)
        opening.warn(reader.warnings)
        if logits:
            chunk_tokens = logits.chunks[:chunks]
            results: Iterator[Prediction] = reader.compare(logits, chunks)
        else:
            chunk_tokens = split_chunks(reader.tokenizer.encode(content, bos=True), size, chunks)
            results = reader.predict(chunk_tokens, save_logits)
        try:
            remaining = RemainingTime(len(chunk_tokens))
            line.show(remaining.format_first())
            for prediction in results:
                value, error = prediction.perplexity
                line.show(f"{remaining.describe(prediction.chunks)}: PPL = {value:.4f} ± {error:.4f}")
        finally:
            line.clear()
            if prediction and per_token is not None:
                write_token_scores(per_token, chunk_tokens, prediction, reader.tokenizer)
            if prediction and as_json:
                write(to_json_line(describe_run(reader, size) | prediction.to_dict()))
            elif prediction:
                write("".join(f"{row}\n" for row in format_report(prediction, size)))
                if logits and reader.made_with:
                    write(f"made with: {to_one_line(reader.made_with)}\n")


def require_outputs(save_logits: str | None, per_token: str | None, inputs: list[str], force: bool) -> None:
    """Raise UsageError for an output that would replace an input, or a file of another type unless forced."""
    from localllm.files.safe_file import resolve_target
    from localllm.services.evaluation.token_scores import is_token_table
    from localllm.services.outputs import is_logits_file, require_replaceable

    if save_logits is not None:
        resolve_target(save_logits, tuple(inputs))
        require_replaceable(save_logits, is_logits_file, "a file of logits", force)
    if per_token is not None:
        resolve_target(per_token, (*inputs, *([] if save_logits is None else [save_logits])))
        require_replaceable(per_token, is_token_table, "a table of tokens", force)


def describe_run(reader: "PerplexityRunner", size: int) -> dict[str, object]:
    origin = {"made_with": reader.made_with} if reader.made_with else {}
    return {"model": reader.path, "context": size} | origin


def validate_options(
    text: str | None, context: int | None, save_logits: str | None, kl_divergence: bool, base: str | None
) -> None:
    if kl_divergence != (base is not None):
        raise UsageError("--kl-divergence and --base FILE must be given together; --save-logits FILE writes that file")
    if base is None and text is None:
        raise UsageError("TEXT is missing: give a text file")
    if base is not None and (text is not None or context is not None or save_logits is not None):
        raise UsageError("--base FILE determines the text and the chunks: leave out TEXT, -c and --save-logits")


def format_report(prediction: "Prediction", size: int) -> list[str]:
    """Format the results as lines."""
    value, error = prediction.perplexity
    chunks = f"{prediction.chunks} chunk{'s' * (prediction.chunks > 1)} of {size} tokens"
    lines = [f"PPL = {value:.4f} ± {error:.4f} ({chunks})"]
    facts = prediction.to_dict()
    return lines if "kld" not in facts else lines + format_comparison(facts)


def format_comparison(facts: dict[str, Any]) -> list[str]:
    """Format the comparison with the base's logits."""
    base, ratio, kld, change, top = (facts[name] for name in ("base", "ratio", "kld", "change", "same_top"))
    shares = [("same top token", top["mean"], top["error"]), ("change of p, rms", change["rms"], change["rms_error"])]
    names = {"mean": "mean", "maximum": "maximum", **{name: f"{name}%" for name in PERCENTILES}, "minimum": "minimum"}
    rows = [(label, f"{kld[name]:.6f}", f"{100 * change[name]:.3f}%") for name, label in names.items()]
    return [
        f"PPL of the base = {base['perplexity']:.4f} ± {base['error']:.4f}",
        f"PPL / PPL of the base = {ratio['mean']:.6f} ± {ratio['error']:.6f}",
        f"mean KL divergence = {kld['mean']:.6f} ± {kld['error']:.6f}",
        *(f"{name} = {100 * value:.3f}% ± {100 * error:.3f}%" for name, value, error in shares),
        "",
        *format_table(("", "KL divergence", "change of p"), rows),
    ]


# ---- multiple-choice tasks


def score_file(
    model: str, path: str | None, selection: tuple[str, int], *, context: int | None, threads: int | None, kv_type: str,
    rope: "RopeScaling | None", as_json: bool,
) -> None:  # fmt: skip
    """Print a model's accuracy on a file's tasks; on Ctrl-C, on those finished so far. Raises UsageError.

    selection: the task type, and the maximum count.
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
    compiling = opening.make_compile_progress(line)
    with open_model(model_path, threads, context, kv_type, progress=compiling, cache=False, rope=rope) as model_opened:
        line.clear()
        end_on_bus_error(model_path)
        opening.warn(model_opened.warnings)
        try:
            remaining = RemainingTime(len(tasks))
            line.show(remaining.format_first())
            for result in score_tasks(model_opened, tasks):
                score = ChoiceScore(kind, (*score.results, result))
                line.show(f"{remaining.describe(score.tasks)}: {100 * score.accuracy:.2f}%")
        finally:
            line.clear()
            if score.tasks and as_json:
                write(to_json_line({"model": model_opened.path} | score.to_dict()))
            elif score.tasks:
                write("".join(f"{row}\n" for row in format_score(score)))


def read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:  # a name with a NUL in it is a ValueError
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def format_score(score: "ChoiceScore") -> list[str]:
    """Format a score, rounded as llama-perplexity does."""
    percent, tasks = 100 * score.accuracy, count_noun(score.tasks, "task")
    if score.kind == "hellaswag":
        low, high = score.interval
        return [f"HellaSwag = {percent:.8f}% [{100 * low:.4f}%, {100 * high:.4f}%] ({tasks})"]
    lines = [f"{NAMES[score.kind]} = {percent:.4f} ± {100 * score.estimate_error(score.accuracy):.4f} ({tasks})"]
    if score.kind == "multiple-choice":
        lines.append(f"random chance = {100 * score.chance:.4f} ± {100 * score.estimate_error(score.chance):.4f}")
    return lines
