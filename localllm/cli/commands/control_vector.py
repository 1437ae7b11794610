"""localllm control-vector: make a control vector from positive and negative prompts."""

from typing import TYPE_CHECKING, Literal

from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.parameters import REQUIRED, argument, option
from localllm.cli.terminal.output import ProgressLine, say_dim
from localllm.cli.terminal.render import RemainingTime, count_noun, format_size

if TYPE_CHECKING:
    import numpy as np

    from localllm.services.control_vectors import Prompt, StateReader


def control_vector(
    model: options.ModelName,
    out: str = argument("OUT", "Output file.", also=("-o", "--output", "--output-file")),
    *,
    positive: str = option(
        "--positive --positive-file", "File of prompts with the wanted quality.", "FILE", default=REQUIRED
    ),
    negative: str = option(
        "--negative --negative-file", "File of as many prompts without it.", "FILE", default=REQUIRED
    ),
    method: Literal["mean", "pca"] = option(
        "--method",
        "mean: the mean difference of each pair's hidden states; pca: the differences' first principal component.  "
        "[default: mean]",
        "NAME",
        default="mean",
    ),
    context: int | None = option(
        "-c --context --ctx-size", "Context length, in tokens.  [default: the model's training context]", "N"
    ),
    threads: options.Threads = None,
    force: options.Force = False,
) -> None:
    """Make a control vector from pairs of prompts.

    `control-vector` runs MODEL on pairs of prompts, one from each file in order, and writes the direction in which the
    hidden states after the last token differ, for each layer. --control-vector OUT:SCALE of other commands, and of
    llama.cpp, adds it to the outputs of layers. It is added in every layer, so begin with a scale of 0.1 or 0.2; a
    negative one reverses it.

    A prompt is a line of its file, without a chat template; control tokens such as <|im_start|> are parsed. JSON Lines
    have an object per line with "prompt", or "messages", which get the chat template.

    Examples:
      localllm control-vector model.gguf happy.gguf --positive happy.txt --negative sad.txt
      localllm run model.gguf -p "How are you?" --control-vector happy.gguf:0.2
    """
    from localllm.cli.map_run import read_file
    from localllm.engine.options import EngineOptions
    from localllm.files.safe_file import resolve_target
    from localllm.kernels.build.faults import end_on_bus_error
    from localllm.services import control_vectors as service
    from localllm.services.outputs import is_control_vector, require_replaceable

    path = resolve_model_path(model)
    resolve_target(out, (path, positive, negative))
    require_replaceable(out, is_control_vector, "a control vector", force)
    pairs = [service.read_prompts(read_file(name), name) for name in (positive, negative)]
    service.require_pairs(*pairs)
    line = ProgressLine()
    engine = EngineOptions(threads, context or None, progress=opening.make_compile_progress(line))
    with service.StateReader(path, engine) as reader:
        line.clear()
        end_on_bus_error(path)
        opening.warn(reader.warnings)
        resolve_target(out, (*reader.files, positive, negative))
        states = read_states(reader, [*pairs[0], *pairs[1]], line)
        directions = service.compute_directions(states[0], states[1], method)
        nbytes = service.write_control_vector(out, reader.arch, directions)
    say_dim(f"{out}: {format_size(nbytes)}, {len(directions)} layers, {count_noun(len(pairs[0]), 'pair')} of prompts")


def read_states(reader: "StateReader", prompts: "list[Prompt]", line: ProgressLine) -> "np.ndarray":
    """Return the layers' outputs after positive and negative prompts, float32 [2, pairs, layers, width]."""
    import numpy as np

    remaining, states = RemainingTime(len(prompts), step="prompt"), list[np.ndarray]()
    line.show(f"reading: {remaining.format_first()}")
    try:
        for outputs in reader.read(prompts):
            states.append(outputs)
            line.show(f"reading: {remaining.describe(len(states))}")
    finally:
        line.clear()
    stacked = np.stack(states)
    return stacked.reshape(2, -1, *stacked.shape[1:])
