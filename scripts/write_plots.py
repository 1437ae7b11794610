#!/usr/bin/env python3
"""Draw the tables of docs/decisions/measurements.md as SVG in docs/assets, which a test compares.

The numbers are read from the page itself, so that a new measurement is written once. The pictures load nothing and
follow the reader's light or dark theme.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, ASSETS = ROOT / "docs" / "decisions" / "measurements.md", ROOT / "docs" / "assets"
WIDTH, HEIGHT = 880, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 58, 48
MANY = 8  # more labels than this are small, and bars have no values
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f }
.page { fill: #ffffff }
.title { font-size: 15px; font-weight: 600 }
.small { font-size: 11px }
.grid { stroke: #8884; stroke-width: 1 }
.s0 { fill: #0969da; stroke: #0969da }
.s1 { fill: #d4761a; stroke: #d4761a }
.line { fill: none !important; stroke-width: 2.5 }
.bar { stroke: none }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .page { fill: #161b22 }
 .s0 { fill: #58a6ff; stroke: #58a6ff } .s1 { fill: #f0a04b; stroke: #f0a04b } }"""


@dataclass
class Plot:
    """A picture: a value of each series per label. is_line joins the points, for labels that have an order."""

    name: str
    title: str
    labels: Sequence[str]
    series: dict[str, Sequence[float]]
    is_line: bool = False


def table(after: str) -> list[list[str]]:
    """Return the rows of the first table after a text of the page, without markup. Raises ValueError."""
    found = re.search(rf"{re.escape(after)}(?:.*\n)+?((?:\|.*\n)+)", PAGE.read_text("utf-8"))
    if not found:
        raise ValueError(f"docs/decisions/measurements.md: no table after {after!r}")
    rows = [[cell.strip(" `") for cell in line.strip().strip("|").split("|")] for line in found[1].splitlines()]
    return [row for row in rows if set("".join(row)) - set("-: ")]


def numbers(rows: Sequence[Sequence[str]], column: int) -> list[float]:
    """Return a column's numbers."""
    return [float(row[column]) for row in rows]


def context_plot() -> Plot:
    """Decode speed over the tokens that are in the context, of the 1.2b model."""
    rows = table("Decode of the 1.2b in Q4_K_M by the tokens in the context")[1:]
    series = {"localllm": numbers(rows, 1), "llama.cpp": numbers(rows, 2)}
    title = "Decode by tokens in the context, tokens/s (1.2b Q4_K_M, 2 cores of a Xeon)"
    return Plot("context", title, [row[0] for row in rows], series, is_line=True)


def format_plot(name: str, what: str, column: int) -> Plot:
    """Speed of every format."""
    rows = table("## Speed by format")[2:]
    series = {"localllm": numbers(rows, column), "llama.cpp": numbers(rows, column + 1)}
    return Plot(name, f"{what} by format, tokens/s (1.2b, 2 cores of a Zen 4)", [row[0] for row in rows], series)


def cpu_plot() -> Plot:
    """Speed relative to llama.cpp by CPU: the geometric mean of the model families that all tables have."""
    cpus = {
        "AVX2": "Other families on the Zen 3",
        "AVX-512, Intel": "**AVX-512**:",
        "AVX-512, Zen 4": "**AVX-512 on Zen 4**",
        "AMX": "**AMX**:",
    }
    tables = {cpu: {row[0]: row for row in table(text)[1:]} for cpu, text in cpus.items()}
    families = set.intersection(*(set(rows) for rows in tables.values()))

    def mean(rows: dict[str, list[str]], column: int) -> float:
        return math.exp(sum(math.log(float(rows[family][column])) for family in families) / len(families))

    series = {what: [mean(rows, at) for rows in tables.values()] for what, at in (("prefill", 3), ("decode", -1))}
    return Plot("cpus", f"Speed relative to llama.cpp, geometric mean of {len(families)} models", list(cpus), series)


def divergence_plot() -> Plot:
    """Quality of quantized files of equal size."""
    rows = table("## Quantizing")[1:]
    series = {"localllm quantize": numbers(rows, 3), "llama-quantize": numbers(rows, 4)}
    title = "KL divergence from F32, same imatrix and sizes (SmolLM2, lower is better)"
    return Plot("divergence", title, [row[0] for row in rows], series)


def cache_plot() -> Plot:
    """Divergence over the size of the KV cache."""
    rows = [row for row in reversed(table("## The KV cache")[1:]) if float(row[3]) > 0 and row[0] != "f32"]
    labels = [f"{row[0].replace('k=q8_0,v=q4_0', 'k q8_0, v q4_0')}\n{int(row[2]) / 1000:.1f} kB" for row in rows]
    title = "KL divergence by KV cache type and bytes per token (SmolLM2, lower is better)"
    return Plot("cache", title, labels, {"localllm": numbers(rows, 3)})


PLOTS: list[Callable[[], Plot]] = [
    context_plot,
    lambda: format_plot("prefill", "Prefill of 512 tokens", 1),
    lambda: format_plot("decode", "Decode of 128 tokens", 4),
    cpu_plot,
    divergence_plot,
    cache_plot,
]


def ticks(plot: Plot) -> list[float]:
    """Return the axis' values: about five round steps from 0."""
    highest = max(value for series in plot.series.values() for value in series)
    step = 10 ** math.floor(math.log10(highest / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if highest / (step * factor) <= 6)
    return [step * index for index in range(math.ceil(highest / step) + 1)]


def svg(plot: Plot) -> str:
    """Draw a plot: a bar for each series and label, or a line for each series."""
    marks = ticks(plot)
    step = (WIDTH - LEFT - RIGHT) / len(plot.labels)

    def height(value: float) -> float:
        return round(HEIGHT - BOTTOM - value / marks[-1] * (HEIGHT - TOP - BOTTOM), 1)

    lines = [f'<text class="title" x="{LEFT}" y="22">{escape(plot.title)}</text>']
    for mark in marks:
        lines.append(f'<path class="grid" d="M{LEFT} {height(mark)}H{WIDTH - RIGHT}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{height(mark) + 4}" text-anchor="end">{mark:g}</text>')
    for index, label in enumerate(plot.labels):
        for row, part in enumerate(label.split("\n")):
            x, y = round(LEFT + step * (index + 0.5), 1), HEIGHT - BOTTOM + 18 + 16 * row
            size = ' class="small"' if len(plot.labels) > MANY else ""
            lines.append(f'<text{size} x="{x}" y="{y}" text-anchor="middle">{escape(part)}</text>')
    for number, (name, values) in enumerate(plot.series.items()):
        x = LEFT + 160 * number
        lines.append(f'<rect class="bar s{number}" x="{x}" y="33" width="12" height="12"/>')
        lines.append(f'<text x="{x + 18}" y="44">{escape(name)}</text>')
        points = [(round(LEFT + step * (index + 0.5), 1), height(value)) for index, value in enumerate(values)]
        if plot.is_line:
            path = "L".join(f"{x} {y}" for x, y in points)
            lines.append(f'<path class="line s{number}" d="M{path}"/>')
            lines += [f'<circle class="s{number}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in points]
            for (x, y), value, *others in zip(points, values, *plot.series.values(), strict=True):
                beside = -8 if value == max(others) else 18
                lines.append(f'<text x="{x}" y="{round(y + beside, 1)}" text-anchor="middle">{value:g}</text>')
            continue
        wide = round(step * 0.8 / len(plot.series), 1)
        for x, y in points:
            start = round(x + wide * (number - len(plot.series) / 2), 1)
            tall = round(HEIGHT - BOTTOM - y, 1)
            lines.append(f'<rect class="bar s{number}" x="{start}" y="{y}" width="{wide}" height="{tall}"/>')
        if len(plot.labels) <= MANY:
            for (x, y), value in zip(points, values, strict=True):
                middle = round(x + wide * (number + 0.5 - len(plot.series) / 2), 1)
                lines.append(
                    f'<text class="small" x="{middle}" y="{round(y - 5, 1)}" text-anchor="middle">{value:.3g}</text>'
                )
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{escape(plot.title)}</title>\n<style>\n{STYLE}\n</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n{body}\n</svg>\n'
    )


def documents() -> dict[Path, str]:
    """Return every picture by its path."""
    plots = [make() for make in PLOTS]
    return {ASSETS / f"{plot.name}.svg": svg(plot) for plot in plots}


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
