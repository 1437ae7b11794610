"""HunYuan and Maincoder."""

from collections.abc import Callable

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.rope_scaling import rope_parameters

LONGEST = 1 << 18  # HunYuan's training context, where config.json says less


def maincoder(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Maincoder, whose files say how long a head is only if config.json does."""
    h = declared(config)
    return h.updated(rope__dimension_count=h.sizes["head_dim"] if config.get("head_dim") is not None else None)


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read HunYuan: head norms after RoPE."""
    rope = config.section("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if rope.get("type", rope.get("rope_type")) != "dynamic":
        return declared(config)
    base = {"rope_theta": rope_parameters(config).number("rope_theta", 10000.0)}
    h = declared(config.updated(rope_parameters=base, rope_scaling=None))
    alpha, dims = rope.number("alpha"), h.sizes["head_dim"]
    if rope.number("factor", 1.0) != 1:
        raise config.refusal("rope scaling dynamic by a factor is not supported")
    return h.updated(
        rope__freq_base=h.metadata["rope.freq_base"] * alpha ** (dims / (dims - 2)),
        rope__scaling__type="none",
        rope__scaling__factor=1.0,
        rope__scaling__original_context_length=LONGEST,
        context_length=LONGEST,
    )


def vl(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read HunYuan VL: four positions; GGUF's readers compute the base from alpha themselves."""
    rope = rope_parameters(config)
    if rope.get("rope_type", rope.get("type")) not in ("dynamic", "xdrope"):
        raise config.refusal("rope_parameters: only those with alpha and sections are supported")
    counts = rope.get("xdrope_section", rope.get("mrope_section"))
    plain = {"rope_type": "default", "rope_theta": rope.number("rope_theta", 10000.0)}
    h = declared(config.updated(rope_parameters=plain, rope_scaling=None))
    of_counts = (
        isinstance(counts, list) and len(counts) == 4 and all(isinstance(count, int) and count > 0 for count in counts)
    )
    if not of_counts or 2 * sum(counts) != h.sizes["head_dim"]:
        raise config.refusal(f"mrope_section should be four numbers, {h.sizes['head_dim'] // 2} in all")
    return h.updated(
        rope__scaling__alpha=rope.number("alpha"),
        rope__scaling__type="none",
        rope__scaling__factor=rope.number("factor", 1.0),
        rope__scaling__original_context_length=h.metadata["context_length"],
        rope__dimension_sections=counts,
    )


def moe(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read HunYuan MoE: some values are given per layer."""
    layers = config.count("num_hidden_layers")
    names = ("moe_topk", "moe_intermediate_size", "num_shared_expert")
    values = {name: one_for_all(config, name, layers) for name in names}
    values["moe_intermediate_size"] = values["moe_intermediate_size"] or config.count("intermediate_size")
    return read(config.updated(**values), declared)


def one_for_all(config: Config, name: str, layers: int) -> object:
    """Read a value that may be given per layer. Raises ModelError if layers differ."""
    value = config.get(name)
    if isinstance(value, list) and (len(value) != layers or len({*map(str, value)}) != 1):
        raise config.refusal(f"{name} should be the same for all layers")
    return value[0] if isinstance(value, list) else value
