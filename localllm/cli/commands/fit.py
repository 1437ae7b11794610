"""localllm fit: estimate whether a model fits into memory, before downloading it."""

import sys
from typing import TYPE_CHECKING

import typer

from localllm.cli.options import shared as options
from localllm.cli.options.offers import make_offer
from localllm.cli.parameters import option
from localllm.cli.terminal.output import ProgressLine, to_json_line, wrap_line, write
from localllm.cli.terminal.render import format_count, format_facts, format_size, format_table, to_one_line
from localllm.errors import MemoryLimitError, UsageError
from localllm.values import parse_scaled_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localllm.services.inspection.fit import FitRanking, FitRow, MemoryFit, ModelFit


def fit(
    model: options.KnownModelOrNone = None,
    *,
    every: bool = option("--all", "Rank the models on this computer and those that can be pulled, instead of MODEL."),
    order: str | None = option(
        "--sort",
        "With --all: sort by size (largest first), speed (fastest) or memory (least).  [default: size]",
        "ORDER",
        autocompletion=make_offer(("size", "speed", "memory")),
    ),
    context: int | None = option(
        "-c --context --ctx-size", "Estimate for this context length, in tokens.  [default: several lengths]", "N"
    ),
    kv_type: str | None = option(
        "--kv-type",
        "Show only this type of KV cache; see `run --kv-type`.  [default: f16, q8_0 and q4_0]",
        "TYPE",
        autocompletion=make_offer(options.KV_TYPES),
    ),
    lora: list[str] = option(
        "--lora --lora-scaled",
        "Include low-rank adapters (LoRA), GGUF files or PEFT folders.  [repeatable]",
        "FILE[:SCALE],...",
        parser=parse_scaled_files,
        typed_only=True,
    ),
    as_json: options.AsJson = False,
) -> None:
    """Estimate the memory that a model needs, and its speed.

    Only the model's header is read: for a model that is not on this computer, such as qwen3-8b or
    hf:OWNER/REPOSITORY:Q4_K_M, `fit` downloads a few megabytes. For each context length and each type of KV cache (see
    `run --kv-type`), the table shows the total memory of weights, cache and program, and the tokens per second with a
    full context, estimated from the measured memory bandwidth.

    With --all, the table has a line for every model on this computer and every one that `localllm pull NAME` can
    download, those that fit first. Nothing is downloaded, so memory and speed of models that are not here do not
    include the KV cache.

    Exit code 5 says that the model does not fit, with the context of -c if it is given.

    Examples:
      localllm fit qwen3-8b
      localllm fit hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q5_K_M
      localllm fit model.gguf --kv-type q5_1 -c 16384
      localllm fit model.gguf --lora poet.gguf
      localllm fit --all --sort speed
      localllm fit --json model.gguf | jq .longest
    """
    from localllm.services.inspection.fit import describe_fit as facts_of

    if lora and model is None:
        raise UsageError("--lora needs MODEL, which the adapters are for")
    if every or order:
        print_ranking(model, every, order or "size", context, kv_type, as_json)
        return
    if model is None:
        raise UsageError("MODEL is missing: give one, or --all for all models")
    with ProgressLine() as line:
        facts = facts_of(model, line.show, context, kv_type, [path for path, _ in options.resolve_files(lora or ())])
    if as_json:
        write(to_json_line(facts))
    else:
        write(
            "\n".join(
                [*format_summary(facts), "", *format_needs(facts), "", wrap_line(format_conclusion(facts), sys.stdout)]
            )
            + "\n"
        )
    if not (any(row["fits"] for row in facts["rows"]) or (context is None and any(facts["longest"].values()))):
        raise typer.Exit(MemoryLimitError.exit_code)


def print_ranking(
    model: str | None, every: bool, order: str, context: int | None, kv_type: str | None, as_json: bool
) -> None:
    """Print the ranking for --all. Raises UsageError."""
    from localllm.arch.layer_state import KVType
    from localllm.services.inspection.fit import CONTEXT, ORDERS, rank_models

    if model is not None:
        raise UsageError("give either MODEL or --all, not both")
    if not every:
        raise UsageError("--sort needs --all")
    if order not in ORDERS:
        raise UsageError(f"--sort must be {', '.join(ORDERS)}, not {order}")
    if context is not None and context < 1:
        raise UsageError(f"context must be at least 1 token, not {context}")
    KVType.parse(kv_type or "f16")
    with ProgressLine() as line:
        facts = rank_models(order, context or CONTEXT, kv_type or "f16", line.show)
    write(to_json_line(facts) if as_json else "\n".join(format_ranking(facts)) + "\n")


def format_ranking(facts: "FitRanking") -> "Sequence[str]":
    """Build the table of --all, with one line for each model."""
    header = ("name", "memory", "tokens/s", "fits", "weights", "file", "here")
    memory = f"{format_size(facts['available_bytes'])} available, read at {facts['bandwidth_gbs']:.1f} GB/s"
    note = f"Local models: with a KV cache of {facts['context']} tokens ({facts['kv_type']}); others (+): without it."
    return [*format_table(header, [*map(format_row, facts["models"])]), "", f"Memory: {memory}. {note}"]


def format_row(row: "FitRow") -> tuple[str, ...]:
    if "problem" in row:
        return (to_one_line(row["name"]), "", "", "cannot run", "", "", "yes")
    plus = "" if row["here"] else "+"
    speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
    fits, on_disk = ("yes" if row[key] else "no" for key in ("fits", "here"))
    sizes = format_count(row["parameters"]), format_size(row["weight_bytes"])
    return (to_one_line(row["name"]), format_size(row["needed_bytes"]) + plus, speed, fits, *sizes, on_disk)


def format_summary(facts: "ModelFit") -> "Sequence[str]":
    """Describe the model and the memory, one fact per line."""
    each = format_size(facts["weight_bytes_per_token"])
    share = f", of which each token reads {each}" if can_generate_text(facts) else ""
    tables = facts["table_bytes"]
    lines = [
        ("model", facts["path"]),
        ("architecture", facts["architecture"]),
        ("parameters", format_count(facts["parameters"])),
        ("weights", format_size(facts["weight_bytes"]) + share),
        *([("embeddings", f"{format_size(tables)} of the weights; only rows in use take memory")] if tables else []),
        *([("projector", format_size(facts["projector_bytes"]))] if facts["projector_bytes"] else []),
        *([("adapters", format_size(facts["adapter_bytes"]))] if facts["adapter_bytes"] else []),
        ("memory", f"{format_size(facts['available_bytes'])} available, read at {facts['bandwidth_gbs']:.1f} GB/s"),
    ]
    return format_facts(lines)


def format_needs(facts: "ModelFit") -> "Sequence[str]":
    """Build the table: a row per context length, with memory and speed for each KV cache type."""
    kinds, rows = [*facts["longest"]], facts["rows"]
    if not can_generate_text(facts):
        return format_table(
            ("texts of", "needed"), [(str(row["context"]), format_size(row["needed_bytes"])) for row in rows]
        )
    header = ("context", *(f"{kind}  tokens/s" for kind in kinds))
    by_key = {(row["context"], row["kv_type"]): row for row in rows}
    contexts = sorted({row["context"] for row in rows})
    return format_table(
        header, [(str(context), *(format_cell(by_key[context, kind]) for kind in kinds)) for context in contexts]
    )


def can_generate_text(facts: "ModelFit") -> bool:
    return all(row["tokens_per_s"] is not None for row in facts["rows"])


def format_cell(row: "MemoryFit") -> str:
    """Format the memory needed and the speed; "too much" replaces the speed if it does not fit."""
    speed = f"{row['tokens_per_s']:.1f}" if row["fits"] else "too much"
    return f"{format_size(row['needed_bytes'])}  {speed:>8}"


def format_conclusion(facts: "ModelFit") -> str:
    """Describe in a sentence whether the model fits."""
    longest = facts["longest"]
    if not can_generate_text(facts) and all(row["fits"] for row in facts["rows"]):
        return f"It fits, with texts of up to {facts['context']} tokens; measure its speed with `localllm bench`."
    if not any(longest.values()) and (disk := facts["disk"]):
        experts = " of experts (equally popular ones)" if disk["held_bytes"] > facts["weight_bytes_per_token"] else ""
        return (
            f"This model is larger than memory. It runs: {format_size(disk['held_bytes'])} stay in memory, each token "
            f"reads {format_size(disk['read_bytes'])}{experts} from the disk, which gives {disk['disk_gbs']:.1f} GB/s: "
            f"about {disk['tokens_per_s']:.1f} tokens/s."
        )
    if not any(longest.values()):
        return "This model does not fit into memory: choose a smaller file, such as one of type Q4_K_M or Q2_K."
    if all(length == facts["context"] for length in longest.values()):
        return f"It fits, with its whole context of {facts['context']} tokens."
    return "It fits with " + ", ".join(f"{length} tokens ({kind})" for kind, length in longest.items() if length) + "."
