"""Report the answers of `localllm run`, for --json, --stats and receipts."""

from typing import TYPE_CHECKING, Any, cast

from localllm.cli.terminal.output import say

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.beam_search import Answer
    from localllm.generation.scheduler import Generation


def build_report(
    model: "Model", answers: "list[Generation] | list[Answer]", are_several: bool, load_s: float, total_s: float
) -> dict[str, object]:
    """Build the object that --json prints, for one Generation or several Answers."""
    if are_several:
        return build_multiple_report(model, cast("list[Answer]", answers), load_s, total_s)
    return build_single_report(model, cast("Generation", answers[0]), load_s, total_s)


def build_single_report(model: "Model", answer: "Generation", load_s: float, total_s: float) -> dict[str, object]:
    """Report an answer; times in seconds.

    ttft_s: from the end of loading to the first token.
    """
    read, completion = answer.prompt_tokens - answer.cached_tokens - answer.skipped, answer.completion_tokens
    times = {
        "load_s": load_s, "prefill_s": answer.prefill_s, "ttft_s": answer.ttft_s, "decode_s": answer.decode_s,
        "total_s": total_s, "prefill_tps": read / answer.prefill_s if answer.prefill_s else 0.0,
        "decode_tps": (completion - 1) / answer.decode_s if answer.decode_s else 0.0,
    }  # fmt: skip
    return {
        "text": answer.text, "thinking": answer.thinking, **get_tokens(answer), "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens, "cached_tokens": answer.cached_tokens, "completion_tokens": completion,
        "dropped_tokens": answer.dropped, "seed": answer.seed,
        "speculation": {"drafted": answer.drafted, "accepted": answer.accepted, "steps_saved": answer.accepted},
        **describe_run(model, times),
    }  # fmt: skip


def get_tokens(answer: object) -> dict[str, object]:
    return {"tokens": answer.tokens} if hasattr(answer, "tokens") else {}


def build_multiple_report(model: "Model", answers: "list[Answer]", load_s: float, total_s: float) -> dict[str, object]:
    """Report several answers, the likeliest first; a beam search's answers have no seed."""
    reports = [
        {
            "text": answer.text,
            "thinking": answer.thinking,
            "logprob": answer.logprob,
            **get_tokens(answer),
            "finish_reason": answer.finish_reason,
            **({} if getattr(answer, "seed", None) is None else {"seed": answer.seed}),
        }
        for answer in answers
    ]
    return {"answers": reports, **describe_run(model, {"load_s": load_s, "total_s": total_s})}


def describe_run(model: "Model", times: dict[str, float]) -> dict[str, object]:
    """Return the model and the timings, rounded to microseconds."""
    disk = {} if model.file is None else model.engine.get_disk_statistics()
    timings = {name: round(value, 6) for name, value in times.items()}
    return {"model": describe_model(model), "timings": timings, **({"disk": disk} if disk else {})}


def describe_model(model: "Model") -> dict[str, str]:
    if model.file is None:
        return {"endpoint": model.path, "name": model.name}
    return {"path": model.path, "arch": model.arch, "format": model.format, "device": model.device}


def print_stats(result: dict[str, Any]) -> None:
    """Print the lines of --stats for a report."""
    if disk := result.get("disk"):
        experts = disk.get("expert_hits", 0) + disk.get("expert_misses", 0)
        hits = f", {disk['expert_hits'] / experts:.0%} of the experts in memory" if experts else ""
        rows = f", {disk['table_bytes'] / 1e6:.1f} MB of embeddings in memory" if disk.get("table_bytes") else ""
        say(f"disk: {disk['read_bytes'] / 1e9:.2f} GB read, waited {disk['waited_s']:.2f} s for it{hits}{rows}")
    times = result["timings"]
    if "answers" in result:
        tokens = sum(len(answer.get("tokens", ())) for answer in result["answers"])
        seconds = times["total_s"] - times["load_s"]
        say(
            f"answers: {len(result['answers'])} with {tokens} tokens in {seconds:.2f} s, "
            f"model loaded in {times['load_s']:.2f} s"
        )
        return
    speed = f" ({times['prefill_tps']:.1f} per second)" if times["prefill_tps"] else ""
    prefill = f"{times['prefill_s']:.2f} s{speed}"
    decode = f"{times['decode_s']:.2f} s ({times['decode_tps']:.1f} per second)"
    cached = f", {result['cached_tokens']} cached," if result["cached_tokens"] else ""
    device = "" if result["model"].get("device", "CPU") == "CPU" else f" on {result['model']['device']}"
    loaded = f"model loaded in {times['load_s']:.2f} s{device}"
    say(f"prompt: {result['prompt_tokens']} tokens{cached} in {prefill}, {loaded}")
    say(
        f"answer: {result['completion_tokens']} tokens in {decode}, first after {times['ttft_s']:.2f} s, "
        f"finish: {result['finish_reason']}, seed: {result['seed']}"
    )
    guesses = result["speculation"]
    if guesses["drafted"]:
        say(f"drafted: {guesses['drafted']} tokens, {guesses['accepted']} accepted, each of which saves a step")
