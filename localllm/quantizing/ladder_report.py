"""Tables of a ladder's files: as records, and in Markdown."""

import os
from collections.abc import Sequence

from localllm.quantizing.ladder import Result


def report_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """Describe each type: name, size, bits per weight, seconds, files with their SHA-256."""
    return [
        {
            "type": result.recipe.name,
            "size": sum(file.nbytes for file in result.files),
            "bits_per_weight": round(result.plan.bits_per_weight, 4),
            "seconds": round(result.seconds, 2),
            "files": [{"name": os.path.basename(f.path), "size": f.nbytes, "sha256": f.sha256} for f in result.files],
        }
        for result in results
    ]


def markdown(results: Sequence[Result]) -> str:
    """Format a table for a model card."""
    lines = ["| file | type | size | bits per weight | SHA-256 |", "|---|---|--:|--:|---|"]
    for result in results:
        for file in result.files:
            name, size = os.path.basename(file.path), f"{file.nbytes / 1e9:.2f} GB"
            size = size if file.nbytes >= 1e9 else f"{file.nbytes / 1e6:.1f} MB"
            lines.append(
                f"| {name} | {result.recipe.name} | {size} | {result.plan.bits_per_weight:.2f} | `{file.sha256}` |"
            )
    return "\n".join(lines) + "\n"
