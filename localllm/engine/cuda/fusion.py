"""Steps that a card does in one launch: for one token, a launch takes as long as what most of them do.

A sum that a norm follows at once becomes `add_rms_norm`, and a norm of heads that are rotated next `rms_norm_rope`.
What becomes integers is made as integers, too, by the norm or the activation function that makes it.
"""

from localllm.engine.lower.tape import Buffer, Step

WITH_INTEGERS = {"rms_norm": "norm_quantize", "swiglu": "swiglu_quantize"}  # kernels that make them on the way


def with_integers(steps: list[Step]) -> list[Step]:
    """The same without steps that make integers of what a step could make as integers."""
    result: list[Step] = []
    for step in steps:
        place = maker(result, step) if step.kernel == "quantize_planes" else None
        if place is None:
            result.append(step)
        else:
            made, integers = result[place], {name: step.arguments[name] for name in ("codes", "scales", "sums")}
            writes = [*made.writes, *step.writes]
            kernel = WITH_INTEGERS[made.kernel]
            result[place] = Step(kernel, made.arguments | integers, made.parts, made.count, made.reads, writes)
    return result


def maker(done: list[Step], step: Step) -> int | None:
    """The place among those done of the step that makes what `step` quantizes, if it can do that itself."""
    x, columns = step.arguments["x"], step.arguments["columns"]
    place = next((place for place in reversed(range(len(done))) if x in done[place].writes), None)
    if place is None or done[place].kernel not in WITH_INTEGERS:
        return None
    return place if done[place].arguments.get("group", columns) == columns else None


def fused(steps: list[Step]) -> list[Step]:
    """The same in fewer steps."""
    result: list[Step] = []
    for step in steps:
        place = before(result, step)
        if place is not None:
            step = together(result.pop(place), step)
        result.append(step)
    return result


def before(done: list[Step], step: Step) -> int | None:
    """The place among those done of the step that this one can be done together with."""
    x = step.arguments.get("x")
    if not isinstance(x, Buffer):
        return None
    for place in reversed(range(len(done))):
        if x in done[place].reads + done[place].writes:  # nothing between knows x
            return place if goes_with(done[place], step, done[place + 1 :]) else None
    return None


def goes_with(first: Step, step: Step, between: list[Step]) -> bool:
    """Whether two steps, of which the second one takes what the first makes, can be one, where the second is."""
    a, b = first.arguments, step.arguments
    if a.get("count") is not b.get("count") or a.get("y") is not b["x"]:
        return False
    if (first.kernel, step.kernel) == ("add", "rms_norm"):
        return not between and a["z_stride"] == a["stride"] and b["group"] == b["columns"]
    if (first.kernel, step.kernel) == ("rms_norm", "rope"):
        is_by_head = a["group"] == b["head_dim"] and b["y"] is b["x"]
        return is_by_head and not any(a["x"] in other.writes for other in between)
    return False


def together(first: Step, step: Step) -> Step:
    """Both as one."""
    a, b = first.arguments, step.arguments
    if step.kernel == "rms_norm":
        given = {"count": a["count"], "x": a["x"], "z": a["z"], "total": a["y"]}
        given |= {name: b[name] for name in ("weight", "y", "stride", "columns", "epsilon")}
        return Step("add_rms_norm", given, step.parts, step.count, first.reads, [*first.writes, *step.writes])
    reads: list[Buffer] = [*first.reads, *(buffer for buffer in step.reads if buffer is not b["x"])]
    given = b | {"x": a["x"], "weight": a["weight"], "epsilon": a["epsilon"]}
    return Step("rms_norm_rope", given, step.parts, step.count, reads, step.writes)
