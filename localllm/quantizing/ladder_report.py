"""Tables of a ladder's files: as records, and in Markdown."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from localllm.quantizing.ladder import Result


class Divergence(NamedTuple):
    """The divergence of a file's predictions from those of the original.

    Attributes:
        mean: Kullback-Leibler divergence, in nats.  error: its standard error. same_top: share of tokens with the same
        likeliest token, 0 to 1.
    """

    mean: float
    error: float
    same_top: float

    @property
    def cells(self) -> tuple[str, str]:
        """Format the divergence and the share of tokens with the same most likely prediction."""
        return f"{self.mean:.4f} ± {self.error:.4f}", f"{100 * self.same_top:.1f} %"


def report_rows(results: Sequence[Result], measured: Mapping[str, Divergence]) -> list[dict[str, object]]:
    """Describe each type: name, size, bits per weight, seconds, divergence if measured, files with their SHA-256."""
    return [
        {
            "type": result.recipe.name,
            "size": sum(file.nbytes for file in result.files),
            "bits_per_weight": round(result.plan.bits_per_weight, 4),
            "seconds": round(result.seconds, 2),
            **({"divergence": measured[result.recipe.name]._asdict()} if measured else {}),
            "files": [{"name": os.path.basename(f.path), "size": f.nbytes, "sha256": f.sha256} for f in result.files],
        }
        for result in results
    ]


def markdown(results: Sequence[Result], measured: Mapping[str, Divergence]) -> str:
    """Format a table for a model card."""
    titles = ["file", "type", "size", "bits per weight", *(["KL divergence", "same top token"] if measured else [])]
    lines = [table_line([*titles, "SHA-256"]), f"|---|---|{'--:|' * (len(titles) - 2)}---|"]
    for result in results:
        of_model = measured[result.recipe.name].cells if measured else ()
        for file in result.files:
            name, size = os.path.basename(file.path), f"{file.nbytes / 1e9:.2f} GB"
            size = size if file.nbytes >= 1e9 else f"{file.nbytes / 1e6:.1f} MB"
            bits = f"{result.plan.bits_per_weight:.2f}"
            lines.append(table_line([name, result.recipe.name, size, bits, *of_model, f"`{file.sha256}`"]))
    return "\n".join(lines) + "\n"


def table_line(cells: Sequence[str]) -> str:
    """Join the cells of a line."""
    return f"| {' | '.join(cells)} |"
