"""localllm replay: check whether an answer can be reproduced."""

import os
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import open_model as opening
from localllm.cli.options import shared as options
from localllm.cli.options.offers import offer_models
from localllm.cli.options.one_shot import KEY
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import ProgressLine, say, write
from localllm.errors import UsageError

ROPE = {
    "kind": str,
    "factor": int | float,
    "base": int | float,
    "original_context": int,
}  # types of a receipt's fields, or null

if TYPE_CHECKING:
    from localllm.generation.options import GenerationOptions
    from localllm.services.receipts import Receipt


def replay(
    receipt: str = argument("FILE", "Receipt written by `run --receipt FILE`."),
    model: str | None = option(
        "-m --model", "Use this model instead of the receipt's.", "MODEL", autocompletion=offer_models, typed_only=True
    ),
) -> None:
    """Generate an answer again from its receipt, and compare.

    The exit code is 0 if the text is the same, and 1 if not; then `replay` prints where it first differs. Changes
    since the receipt was written go to stderr: the model file, versions, the CPU.

    Examples:
      localllm run model.gguf -p "Name a color." --receipt color.json
      localllm replay color.json
      localllm replay color.json -m elsewhere/model.gguf
    """
    from localllm.services import receipts
    from localllm.services import remote_receipts as remote

    record = receipts.read_receipt(receipt)
    generation, line = receipts.restore_options(record), ProgressLine()
    if remote.is_remote(record):
        result = repeat_remotely(record, generation, model)
        return print_verdict(receipts.find_difference(record["result"], result))
    opening_options, path = record["opening"], record["model"]["files"][0]["path"] if model is None else model
    cache = options.CacheFlags(kv_type=opening_options["kv_type"])
    engine = options.EngineFlags(
        context=opening_options["context"],
        threads=opening_options["threads"],
        cache=cache,
        rope=parse_rope(opening_options),
        adapters=read_adapters(opening_options),
    )
    with opening.open_model(path, engine, opening_options["chat_template"], no_cache=True) as model_opened:
        generation = opening.open_draft_model(model_opened, generation, record["options"]["speculate"])
        with line:
            result = receipts.regenerate(
                model_opened, record, generation, lambda count: line.show(f"answering again: {count} tokens")
            )
            changed = receipts.list_changes(record, model_opened, opening.make_hash_progress(line))
    for change in changed:
        say(f"localllm: {change}")
    print_verdict(receipts.find_difference(record["result"], result))


def read_adapters(opening_options: dict[str, object]) -> options.AdapterFlags:
    """Parse the adapters of a receipt into options. Raises UsageError for an invalid path or scale."""
    recorded: list[Any] = [opening_options.get(name, []) for name in ("lora", "control_vectors")]
    layers: Any = opening_options.get("control_layers")
    try:
        lora, vectors = ([(str(each["path"]), float(each["scale"])) for each in rows] for rows in recorded)
        layers = layers and (int(layers[0]), int(layers[1]))
    except (TypeError, ValueError, KeyError, IndexError):
        raise UsageError(
            "the receipt's adapters must have a path and a scale each; write it again with `localllm run --receipt`"
        ) from None
    both: Any = [lora], [vectors]
    return options.AdapterFlags(lora=both[0], control_vector=both[1], control_vector_layer_range=layers)


def parse_rope(opening_options: dict[str, object]) -> options.RopeFlags:
    """Parse the RoPE scaling of a receipt into options. Raises UsageError for invalid values."""
    rope = opening_options.get("rope", {})
    if not isinstance(rope, dict) or not all(isinstance(rope.get(name), kind | None) for name, kind in ROPE.items()):
        raise UsageError(
            f"the receipt's RoPE options must be an object of {', '.join(ROPE)}, not {str(rope)[:80]}; "
            "write it again with `localllm run --receipt`"
        )
    scale, base, original = rope.get("factor"), rope.get("base"), rope.get("original_context")
    return options.RopeFlags(
        rope_scaling=rope.get("kind"), rope_scale=scale, rope_freq_base=base, yarn_orig_ctx=original
    )


def repeat_remotely(record: "Receipt", generation: "GenerationOptions", model: str | None) -> "Receipt":
    """Send the request to the receipt's server again; return the response. Raises EndpointError."""
    from localllm.services import remote_receipts
    from localllm.services.remote.http import Endpoint
    from localllm.services.remote.model import RemoteModel

    place = Endpoint.parse(record["model"]["endpoint"], os.environ.get(KEY) or None)
    remote_model = RemoteModel(place, model or record["model"]["name"], remote_receipts.restore_output_format(record))
    return remote_receipts.regenerate(remote_model, record, generation)


def print_verdict(place: str | None) -> None:
    """Print whether the text is the same or where it differs; raise typer.Exit if it differs."""
    if place:
        write(f"the text differs from {place}\n")
        raise typer.Exit(1)
    write("the same text\n")
