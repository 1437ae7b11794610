"""localllm imatrix: compute an importance matrix for quantize."""

from typing import TYPE_CHECKING

from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import REQUIRED, argument, option
from localllm.cli.terminal.output import ProgressLine, say_dim
from localllm.cli.terminal.render import RemainingTime
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.quantizing.imatrix import ImportanceCollector


def imatrix(
    model: str | None = argument(
        "[MODEL]", "GGUF file or model name (see `localllm list`).", offer_models, also=options.NAMED
    ),
    texts: list[str] | None = argument("[TEXT...]", "Text files to run the model on.", also=("-f", "--file")),
    *,
    output: str = option("-o --output", "Write the importance matrix to this file.", "FILE", default=REQUIRED),
    in_files: list[str] | None = option("--in-file", "Merge an existing importance matrix.  [repeatable]", "FILE"),
    context: int | None = option("-c --context --ctx-size", "Run chunks of N tokens.  [default: 512]", "N"),
    chunks: int | None = option("--chunks", "Run at most N chunks.  [default: all]", "N"),
    parse_special: bool = option("--parse-special", "Parse special tokens like <|im_end|> in the text."),
    process_output: bool = option("--process-output", "Also collect data for the output tensor."),
    threads: options.Threads = None,
    force: options.Force = False,
) -> None:
    """Compute a model's importance matrix, as llama-imatrix does.

    `imatrix` runs MODEL on the TEXT files and writes the mean squared activations of each matrix to FILE, in
    llama.cpp's GGUF layout; embedding models and rerankers work, too. `quantize --imatrix FILE` then encodes columns
    with larger activations more precisely. To resume an interrupted command, run it again. With --in-file and no MODEL,
    importance matrices are merged.

    Examples:
      localllm imatrix big.gguf texts.txt -o big.imatrix
      localllm imatrix --in-file one.imatrix --in-file two.imatrix -o both.imatrix
    """
    if model is None and not in_files:
        raise UsageError(
            "MODEL is missing: give a model and text files, or importance matrices to merge with --in-file"
        )
    if model is not None and not texts:
        raise UsageError("TEXT is missing: give a text file")
    from localllm.files.imatrix_file import write_imatrix
    from localllm.files.safe_file import resolve_target
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.quantizing import imatrix as service
    from localllm.services.outputs import is_imatrix, require_replaceable

    resolve_target(output, (*([model] if model else ()), *(texts or ()), *(in_files or ())))
    require_replaceable(output, is_imatrix, "an importance matrix", force)
    merged = service.merge_files(in_files) if in_files else None
    if model is None:
        assert merged is not None
        write_imatrix(output, merged)
        return
    line = ProgressLine()
    path = resolve_model_path(model)
    size = service.get_default_chunk_size(path) if context is None else context
    choices = (size, chunks, parse_special, process_output, threads)
    with service.ImportanceCollector(
        path, tuple(texts or ()), output, *choices, progress=opening.make_compile_progress(line)
    ) as collector:
        line.clear()
        end_on_bus_error(path)
        opening.warn(collector.warnings)
        collect_with_progress(collector, line)
        matrix = collector.compute_matrix()
        write_imatrix(output, merged.merge(matrix) if merged else matrix)
        collector.remove_part()
    say_dim(f"{len(matrix.squares)} matrices, {matrix.chunks} chunks of {matrix.chunk_size} tokens")


def collect_with_progress(collector: "ImportanceCollector", line: ProgressLine) -> None:
    remaining = RemainingTime(collector.total, collector.done)
    line.show(f"reading: {remaining.format_first()}")
    try:
        for done in collector.read():
            line.show(f"reading: {remaining.describe(done)}")
    except KeyboardInterrupt:
        line.clear()
        say_dim(f"{collector.done} of {collector.total} chunks are done; run the same command again to resume")
        raise
    finally:
        line.clear()
