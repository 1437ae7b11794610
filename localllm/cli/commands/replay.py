"""localllm replay: check whether an answer can be reproduced."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli import open_model as opening
from localllm.cli.options import shared as options
from localllm.cli.options.endpoint import KEY
from localllm.cli.options.offers import offer_models
from localllm.cli.parameters import TYPED_ONLY
from localllm.cli.receipt import hashing
from localllm.cli.terminal.output import ProgressLine, say, write
from localllm.errors import UsageError

ROPE = {"kind": str, "factor": int | float, "base": int | float, "original_context": int}  # a receipt's, or null

if TYPE_CHECKING:
    from localllm.generation.generate import GenerationOptions
    from localllm.services.receipts import Receipt


def replay(
    receipt: Annotated[str, typer.Argument(metavar="FILE", help="Receipt written by `run --receipt FILE`.")],
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            autocompletion=offer_models,
            help="Model to use.  [default: the receipt's]",
        ),
        TYPED_ONLY,
    ] = None,
) -> None:
    """Generate an answer again from its receipt, and compare the texts.

    The exit code is 0 if the text is the same, and 1 if not; then `replay` prints where it first differs. Changes
    since the receipt was written go to stderr: the model file, versions, the CPU.

    Examples:
      localllm run model.gguf -p "Name a color." --receipt color.json
      localllm replay color.json
      localllm replay color.json -m elsewhere/model.gguf
    """
    from localllm.services import receipts
    from localllm.services.remote import receipts as remote

    kept = receipts.read(receipt)
    chosen, line = receipts.options_of(kept), ProgressLine()
    if remote.is_remote(kept):
        now = again_there(kept, chosen, model)
        return tell(receipts.difference(kept["result"], now))
    held, path = kept["opening"], kept["model"]["files"][0]["path"] if model is None else model
    cache = options.Cache(kv_type=held["kv_type"])
    engine = options.EngineGroup(context=held["context"], threads=held["threads"], cache=cache, rope=rope_of(held))
    with opening.open_model(path, engine, held["chat_template"], no_cache=True) as opened:
        chosen = opening.with_draft_model(opened, chosen, kept["options"]["speculate"])
        try:
            now = receipts.regenerate(opened, kept, chosen, lambda count: line.show(f"answering again: {count} tokens"))
            changed = receipts.changes(kept, opened, hashing(line))
        finally:
            line.clear()
    for change in changed:
        say(f"localllm: {change}")
    tell(receipts.difference(kept["result"], now))


def rope_of(held: dict[str, object]) -> options.Rope:
    """Return the RoPE options of a receipt. Raises UsageError."""
    given = held.get("rope", {})
    if not isinstance(given, dict) or not all(isinstance(given.get(name), kind | None) for name, kind in ROPE.items()):
        raise UsageError("the receipt's RoPE options are invalid")
    scale, base, original = given.get("factor"), given.get("base"), given.get("original_context")
    return options.Rope(rope_scaling=given.get("kind"), rope_scale=scale, rope_freq_base=base, yarn_orig_ctx=original)


def again_there(kept: "Receipt", chosen: "GenerationOptions", model: str | None) -> "Receipt":
    """Send the request again to the receipt's server, and return the response. Raises EndpointError."""
    from localllm.services.remote import receipts
    from localllm.services.remote.http import Endpoint
    from localllm.services.remote.model import RemoteModel

    place = Endpoint.of(kept["model"]["endpoint"], os.environ.get(KEY) or None)
    there = RemoteModel(place, model or kept["model"]["name"], receipts.form_of(kept))
    return receipts.regenerate(there, kept, chosen)


def tell(place: str | None) -> None:
    """Print that the texts are equal, or where they differ, and then raise typer.Exit."""
    if place:
        write(f"another text, from {place}\n")
        raise typer.Exit(1)
    write("the same text\n")
