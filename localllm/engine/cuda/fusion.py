"""Fuse steps for a GPU: for one token, launching a kernel takes as long as the work of most steps.

A sum before a norm becomes `add_rms_norm`, a norm of heads before RoPE `rms_norm_rope`, and the norm or activation
function before a quantization also quantizes.
"""

from localllm.engine.lower.tape import Buffer, Step

WITH_INTEGERS = {"rms_norm": "norm_quantize", "swiglu": "swiglu_quantize"}  # kernels that also quantize


def with_integers(steps: list[Step]) -> list[Step]:
    """Merge each quantization into the step that makes its input, if that step's kernel can quantize."""
    result: list[Step] = []
    for step in steps:
        place = maker(result, step) if step.kernel == "quantize_planes" else None
        if place is None:
            result.append(step)
        else:
            step_before, integers = result[place], {name: step.arguments[name] for name in ("codes", "scales", "sums")}
            writes = [*step_before.writes, *step.writes]
            kernel = WITH_INTEGERS[step_before.kernel]
            result[place] = Step(
                kernel,
                step_before.arguments | integers,
                step_before.parts,
                step_before.count,
                step_before.reads,
                writes,
            )
    return result


def maker(earlier_steps: list[Step], step: Step) -> int | None:
    """Return the index of the earlier step that makes the input of quantization `step`, if it can quantize itself."""
    x, columns = step.arguments["x"], step.arguments["columns"]
    place = next((place for place in reversed(range(len(earlier_steps))) if x in earlier_steps[place].writes), None)
    if place is None or earlier_steps[place].kernel not in WITH_INTEGERS:
        return None
    return place if earlier_steps[place].arguments.get("group", columns) == columns else None


def fuse(steps: list[Step]) -> list[Step]:
    """Fuse sums with norms, and norms with RoPE."""
    result: list[Step] = []
    for step in steps:
        place = fusion_place(result, step)
        if place is not None:
            step = fuse_steps(result.pop(place), step)
        result.append(step)
    return result


def fusion_place(earlier_steps: list[Step], step: Step) -> int | None:
    """Return the index of the earlier step that `step` can be fused with; None if there is none."""
    x = step.arguments.get("x")
    if not isinstance(x, Buffer):
        return None
    for place in reversed(range(len(earlier_steps))):
        if x in earlier_steps[place].reads + earlier_steps[place].writes:  # no step between touches x
            return place if can_fuse(earlier_steps[place], step, earlier_steps[place + 1 :]) else None
    return None


def can_fuse(first: Step, step: Step, between: list[Step]) -> bool:
    """Return whether `first` can be fused into `step`, which reads its output, across the steps between them."""
    a, b = first.arguments, step.arguments
    if a.get("count") is not b.get("count") or a.get("y") is not b["x"]:
        return False
    if (first.kernel, step.kernel) == ("add", "rms_norm"):
        return not between and a["z_stride"] == a["stride"] and b["group"] == b["columns"]
    if (first.kernel, step.kernel) == ("rms_norm", "rope"):
        is_by_head = a["group"] == b["head_dim"] and b["y"] is b["x"]
        return is_by_head and not any(a["x"] in between_step.writes for between_step in between)
    return False


def fuse_steps(first: Step, step: Step) -> Step:
    """Return one step that does the work of both."""
    a, b = first.arguments, step.arguments
    if step.kernel == "rms_norm":
        arguments = {"count": a["count"], "x": a["x"], "z": a["z"], "total": a["y"]}
        arguments |= {name: b[name] for name in ("weight", "y", "stride", "columns", "epsilon")}
        return Step("add_rms_norm", arguments, step.parts, step.count, first.reads, [*first.writes, *step.writes])
    reads: list[Buffer] = [*first.reads, *(buffer for buffer in step.reads if buffer is not b["x"])]
    arguments = b | {"x": a["x"], "weight": a["weight"], "epsilon": a["epsilon"]}
    return Step("rms_norm_rope", arguments, step.parts, step.count, reads, step.writes)
