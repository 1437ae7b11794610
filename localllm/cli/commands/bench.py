"""localllm bench: measure how fast a model is on this computer."""

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.parameters import option
from localllm.cli.terminal.output import ProgressLine, is_terminal, to_json_line, write
from localllm.cli.terminal.render import (
    format_count,
    format_size,
    format_table,
    get_file_stem,
    get_terminal_width,
    to_one_line,
    wrap_hanging,
)
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.services.bench import BenchResult, ModelFacts

COLUMNS = ("test", "threads", "tokens/s", "arithmetic", "weights read")
NARROW = 70  # a terminal of fewer columns gets a table without a frame


class IntegerList:
    """A parser of comma-separated integers, each at least `least`.

    length: their exact count, if given.
    """

    def __init__(self, least: int = 0, length: int | None = None):
        self._least, self._length = least, length

    def __call__(self, text: str) -> tuple[int, ...]:
        match = re.fullmatch("[0-9]{1,7}(,[0-9]{1,7})*", text)
        numbers = tuple(map(int, text.split(","))) if match else ()
        if not numbers or min(numbers) < self._least or len(numbers) != (self._length or len(numbers)):
            kind = "integers" if self._length is None else f"{self._length} integers"
            raise ValueError(f"{text!r} must be {kind} from {self._least} to 9999999, separated by commas.")
        return numbers


PAIR = IntegerList(1, 2)


def declare_integers_option(names: str, help: str, default: Sequence[int] | None = None, least: int = 0) -> Any:
    """Declare an option with a list of integers."""
    return option(names, help, "N[,N...]", default=default, parser=IntegerList(least))


def bench(
    model: options.ModelName,
    *,
    prompt: Sequence[int] = declare_integers_option(
        "-p --n-prompt --prompt", "Prompt length of the prefill test (pp); 0: no test.  [default: 512]", (512,)
    ),
    generate: Sequence[int] = declare_integers_option(
        "-n --n-gen --generate", "Tokens of the generation test (tg); 0: no test.  [default: 128]", (128,)
    ),
    combined: list[Any] | None = option(
        "-pg", "Combined test: prefill P tokens, then generate N.  [repeatable]", "P,N", parser=PAIR
    ),
    depth: Sequence[int] = declare_integers_option(
        "-d --depth --n-depth", "Tokens in the KV cache before each test.  [default: 0]", (0,)
    ),
    repetitions: int = option("-r --repetitions", "Repetitions of each test.  [default: 5]", "N", default=5),
    threads: Sequence[int] | None = declare_integers_option(
        "-t --threads", "Number of CPU threads.  [default: the physical cores that this process may use]", least=1
    ),
    device: options.Device = "auto",
    gpu_layers: options.GpuLayers = "auto",
    cache: options.CacheGroup,
    rope: options.RopeGroup,
    memory: options.Memory = None,
    as_markdown: bool = option("--md", "Print a Markdown table (the default if stdout is not a terminal)."),
    as_json: options.AsJson = False,
) -> None:
    """Measure how fast a model is, as llama-bench does.

    Each test runs once to warm up and then -r times; the table shows the mean and the standard deviation. For prefill
    it also shows billions of operations per second and their share of the peak of the instructions named above; for
    generation, the rate at which weights are read, next to the memory bandwidth, or from the disk if they do not fit.
    An option with a list of values makes one test for each combination. For an embedding model, the test is embedding
    texts of -p tokens, by default of 16, 64 and 512. Ctrl-C prints the results so far.

    Examples:
      localllm bench model.gguf
      localllm bench model.gguf -p 128,512 -n 0 -t 1,2,4
      localllm bench model.gguf -pg 512,64 -d 0,4096 --json
    """
    if as_markdown and as_json:
        raise UsageError("give either --md or --json, not both")
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.services import bench as service
    from localllm.services.bench import is_embedding_only

    tests, line = service.plan_tests(prompt, generate, combined or (), depth), ProgressLine()
    results: list[BenchResult] = []
    path = resolve_model_path(model)
    end_on_bus_error(path)
    if is_embedding_only(path):
        if rope.make_scaling():
            raise UsageError("RoPE scaling cannot be changed for embedding models: leave out the --rope options")
        bench_embedding(path, prompt, None if threads is None else threads[0], repetitions, device, as_json)
        return
    bench_run = service.Bench(path, lambda step: line.show(f"measuring {step}"), opening.make_compile_progress(line))
    try:
        layers = options.convert_layer_count(gpu_layers)
        # Keep the results obtained before Ctrl-C.
        results.extend(
            bench_run.run(
                tests, threads, repetitions, cache.format_types(), device, layers, rope.make_scaling(), memory
            )
        )
    finally:
        line.clear()
        if as_json and results:
            write(to_json_line(bench_run.report(results)))
        elif results:
            print_results(bench_run.model, results, bench_run.lane, pretty=is_terminal(sys.stdout) and not as_markdown)


def bench_embedding(
    path: str, lengths: Sequence[int], threads: int | None, repetitions: int, device: str, as_json: bool
) -> None:
    """Measure an embedding model on documents of these lengths in tokens; 512 means the default lengths."""
    from localllm.services.bench import measure_embedding

    line = ProgressLine()
    lengths = (16, 64, 512) if lengths == (512,) else lengths
    with line:
        compiling = opening.make_compile_progress(line)
        tell = lambda test: line.show(f"measuring {test}")  # noqa: E731
        results = measure_embedding(path, lengths, threads, repetitions, tell, compiling, device)
    if as_json:
        write(to_json_line({"model": path, "results": results}))
        return
    rows = [
        (f"{result['length']} tokens", f"{result['tokens_per_second']:.0f} ± {result['deviation']:.0f}",
         f"{result['texts_per_second']:.1f}") for result in results
    ]  # fmt: skip
    write("\n".join(format_table(("texts of", "tokens/s", "texts/s"), rows)) + "\n")


def print_results(model: "ModelFacts", results: Sequence["BenchResult"], lane: str, pretty: bool) -> None:
    """Print the results as a table for a terminal or in Markdown; lane: the instruction set of the prefill."""
    columns = [f"{name}, {lane}" if name == "arithmetic" else name for name in COLUMNS]
    rows, name = [format_cells(result) for result in results], to_one_line(get_file_stem(model["path"]))
    if not pretty:
        marked = [
            ("model", *columns),
            ("---", "---", *["--:"] * 4),
            *((name.replace("|", "\\|"), *row) for row in rows),
        ]
        write("".join("| " + " | ".join(row) + " |\n" for row in marked))
        return
    weights = f"{format_count(model['parameters'])} weights in {format_size(model['size'])}"
    facts = f"{model['arch']} {model['format']}, {weights}"
    facts += "" if model["device"] == "CPU" else f", {model['device']}"
    if 0 < get_terminal_width() < NARROW:
        write(
            "\n".join([*wrap_hanging(f"{name}: {facts}", get_terminal_width(), 0), *format_table(tuple(columns), rows)])
            + "\n"
        )
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows_table = Table(*columns, title=Text(f"{name}: {facts}"))
    for column in rows_table.columns[1:]:
        column.justify = "right"
    for row in rows:
        rows_table.add_row(*row)
    Console().print(rows_table)


def format_cells(result: "BenchResult") -> tuple[str, ...]:
    read = ""
    if result.gb_per_s and result.bandwidth and result.share:
        read = f"{result.gb_per_s:.1f} of {result.bandwidth / 1e9:.1f} GB/s, {result.share:.0%}"
    if result.disk:
        read = f"{result.disk / 1e9:.1f} GB/s from the disk"
    speed, arithmetic = f"{result.speed:.2f} ± {result.deviation:.2f}", f"{result.gops:.0f} GOPS" if result.gops else ""
    arithmetic += f", {result.share_of_peak:.0%}" if result.share_of_peak else ""
    return result.test.name, str(result.threads), speed, arithmetic, read
