"""Describe adapters and control vectors for `localllm inspect`."""

from collections import Counter
from typing import Any

from localllm.engine.adapter_file import ALPHA, parse_adapter, parse_control_vector
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.kinds import ADAPTER, CONTROL_VECTOR, get_kind


def describe_adapter(file: GGUFFile) -> dict[str, Any] | None:
    """Describe an adapter or a control vector for JSON; None for other files. Raises ModelError for an invalid one."""
    kind = get_kind(file.metadata)
    if kind == CONTROL_VECTOR:
        directions, hint = parse_control_vector(file), file.metadata.get("controlvector.model_hint")
        return {
            "type": CONTROL_VECTOR, "architecture": hint if isinstance(hint, str) else "",
            "layers": sorted(directions), "widths": sorted({len(direction) for direction in directions.values()}),
        }  # fmt: skip
    if kind != ADAPTER:
        return None
    adapter = parse_adapter(file)
    names = Counter(name.removesuffix(".weight").split(".", 2)[-1] for name in adapter.low_ranks)
    return {
        "type": "lora", "architecture": adapter.arch, "ranks": sorted({e.rank for e in adapter.low_ranks.values()}),
        "alpha": file.metadata.get(ALPHA, 0.0), "matrices": dict(sorted(names.items())),
        "invocation_tokens": list(adapter.invocation), "memory_bytes": adapter.nbytes,
    }  # fmt: skip
