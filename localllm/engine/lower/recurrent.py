"""The verbs of recurrent layers as steps.

The sequences of a run are treated by every part of a step, one after the other; parts share columns or heads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from localllm.engine.lower.steps import Steps, Target, vector_of
from localllm.engine.trace.operations import Operation


def convolve(steps: Steps, operation: Operation, target: Target) -> None:
    given = operation.given
    weights = vector_of(given["taps"].T)
    arguments = {"taps": len(weights), "weights": weights, "bias": vector_of(given["bias"]), "silu": given["silu"]}
    arguments["columns"] = operation.output.columns
    scan(steps, "convolve", operation, ("x",), -(-operation.inputs[0].columns // 16), arguments)


def gated_mean(steps: Steps, operation: Operation, target: Target) -> None:
    x, places = operation.inputs[0], vector_of(operation.given["places"])
    arguments = {"taps": len(places), "places": places, "columns": operation.output.columns}
    arguments |= {"x_stride": steps.buffers[x].stride, "stretches": operation.given["stretches"]}
    scan(steps, "gated_mean", operation, ("x",), -(-operation.output.columns // 16), arguments)


def selective_scan(steps: Steps, operation: Operation, target: Target) -> None:
    given, blocks = operation.given, -(-operation.inputs[0].columns // 16)
    rates = given["rates"]
    of_block = np.ascontiguousarray(vector_of(rates.T).reshape(-1, blocks, 16).swapaxes(0, 1))
    arguments = {"rates": of_block, "skip": vector_of(given["skip"]), "state_size": rates.shape[1]}
    arguments |= {"state_stride": steps.buffers[operation.inputs[2]].stride, "columns": operation.output.columns}
    scan(steps, "selective_scan", operation, ("x", "dt", "b", "c"), blocks, arguments)


def state_space(steps: Steps, operation: Operation, target: Target) -> None:
    arguments = {"strength": steps.buffers[operation.inputs[1]], "skip": operation.given["skip"]}
    scan_heads(steps, "plain", operation, ("v", "dt", "k", "q"), arguments)


def delta_rule(steps: Steps, operation: Operation, target: Target) -> None:
    scan_heads(steps, "delta", operation, ("q", "k", "v", "dt", "strength"), {"skip": 0})


def lightning_attention(steps: Steps, operation: Operation, target: Target) -> None:
    """Mamba's sums, with the same step and strength for all tokens: 1."""
    heads = operation.given["state"].shapes[operation.given["number"]][0]
    ones = np.ones(heads, np.float32)
    same = {"dt": ones, "strength": ones, "skip": np.zeros(heads, np.float32), "head_stride": 0}
    scan_heads(steps, "plain", operation, ("q", "k", "v"), same)


def gated_linear_attention(steps: Steps, operation: Operation, target: Target) -> None:
    wkv(steps, "gated", operation, ("r", "k", "v", "w"), {"a": 0, "b": 0, "first": 0})


def wkv6(steps: Steps, operation: Operation, target: Target) -> None:
    given = {"a": 0, "b": 0, "first": vector_of(operation.given["first"])}
    wkv(steps, "first", operation, ("r", "k", "v", "w"), given)


def wkv7(steps: Steps, operation: Operation, target: Target) -> None:
    wkv(steps, "delta", operation, ("r", "w", "k", "v", "a", "b"), {"first": 0})


def wkv(steps: Steps, rule: str, operation: Operation, names: Sequence[str], arguments: dict[str, Any]) -> None:
    """What recurrences with a decay for every row have in common."""
    heads, key_dim, value_dim = operation.given["state"].shapes[operation.given["number"]]
    arguments |= {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    arguments["key_stride"] = steps.buffers[operation.inputs[0]].stride
    scan(steps, f"wkv-{rule}", operation, names, heads * -(-value_dim // 16), arguments)


def scan_heads(steps: Steps, rule: str, operation: Operation, names: Sequence[str], arguments: dict[str, Any]) -> None:
    """What both rules have in common."""
    given = operation.given
    heads, key_dim, value_dim = given["state"].shapes[given["number"]]
    inputs = dict(zip(names, operation.inputs, strict=True))
    if "dt" in inputs:
        arguments["head_stride"] = steps.buffers[inputs["dt"]].stride
    arguments["key_stride"] = steps.buffers[inputs["k"]].stride
    arguments |= {name: given[name] for name in ("rates", "key_heads", "repeat")}
    arguments |= {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    scan(steps, f"head_scan-{rule}", operation, names, heads * -(-value_dim // 16), arguments)


def scan(
    steps: Steps, kernel: str, operation: Operation, names: Sequence[str], parts: int, arguments: dict[str, Any]
) -> None:
    """A step that reads and changes one of a layer's states."""
    assert steps.layout is not None
    inputs, y = [steps.buffers[x] for x in operation.inputs], steps.new(operation.output)
    arguments |= dict(zip(names, inputs, strict=True)) | {"y": y, "stride": y.stride}
    arguments |= {"sequences": steps.header.sequences, "sequence_count": steps.header.sequence_count}
    arguments["offset"] = steps.layout.offset(operation.given["state"].layer, operation.given.get("number", 1))
    steps.append(kernel, arguments, min(parts, 8 * steps.target.threads), inputs, [y])


RECURRENT = {
    "convolve": convolve, "gated_mean": gated_mean, "selective_scan": selective_scan, "state_space": state_space,
    "delta_rule": delta_rule, "lightning_attention": lightning_attention,
    "gated_linear_attention": gated_linear_attention, "wkv6": wkv6, "wkv7": wkv7,
}  # fmt: skip
