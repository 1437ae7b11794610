#!/usr/bin/env python3
"""Draw docs/assets/architecture.svg, from a GGUF file to text, which a test compares.

The picture loads nothing and follows the reader's light or dark theme.
"""

from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "assets" / "architecture.svg"
TITLE = "From a GGUF file to text"
# Each box: its name, what happens there, the folders that do it.
ROWS = [
    [
        ("GGUF file", "mapped, header checked", "files/ quant/"),
        ("Operations", "20 lines of verbs", "arch/ engine/trace/"),
        ("Steps", "kernels, stages, buffers", "engine/lower/"),
        ("Tape", "one array, run by threads", "engine/cpu/ kernels/"),
    ],
    [
        ("Prompt", "chat template, tokenizer", "text/"),
        ("Scheduler", "prefill, decode, drafts", "generation/"),
        ("Logits", "one row for each token", "engine/ generation/"),
        ("Text", "sampler, tokenizer", "sampling/ cli/"),
    ],
]
BOX, TALL, GAP, LEFT, TOP = 186, 84, 36, 14, 14
WIDTH, HEIGHT = 2 * LEFT + 4 * BOX + 3 * GAP, 2 * TOP + 2 * TALL + GAP + 14
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
.name { font-size: 16px; font-weight: 600 }
.folder { font: 12px ui-monospace, Menlo, monospace; fill: #57606a }
.page { fill: #ffffff }
.box { fill: #ddf4ff; stroke: #0969da }
.second { fill: #fff1e5; stroke: #d4761a }
.arrow { fill: none; stroke: #57606a; stroke-width: 1.5; marker-end: url(#end) }
.end { fill: #57606a }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .folder { fill: #9198a1 } .page { fill: #161b22 }
 .box { fill: #0d2d4d; stroke: #58a6ff } .second { fill: #3d2510; stroke: #f0a04b }
 .arrow { stroke: #9198a1 } .end { fill: #9198a1 } }"""


def document() -> str:
    """Return the picture."""
    lines = []
    for row, boxes in enumerate(ROWS):
        y = TOP + row * (TALL + GAP + 14)
        for column, (name, what, folders) in enumerate(boxes):
            x = LEFT + column * (BOX + GAP)
            style = "box second" if row else "box"
            lines.append(f'<rect class="{style}" x="{x}" y="{y}" width="{BOX}" height="{TALL}" rx="8"/>')
            for offset, kind, text in ((27, "name", name), (48, "what", what), (69, "folder", folders)):
                lines.append(f'<text class="{kind}" x="{x + BOX / 2:g}" y="{y + offset}">{escape(text)}</text>')
            if column:
                lines.append(f'<path class="arrow" d="M{x - GAP + 3} {y + TALL / 2:g}H{x - 5}"/>')
    tape_x, logits_x, lower = (LEFT + column * (BOX + GAP) + BOX / 2 for column in (3, 2, 1))
    above, below = TOP + TALL + 3, TOP + TALL + GAP + 14 - 5
    middle = (above + below) / 2
    lines.append(f'<path class="arrow" d="M{lower:g} {below + 2:g}V{middle + 6:g}H{tape_x - 12:g}V{above + 3:g}"/>')
    lines.append(f'<path class="arrow" d="M{tape_x + 12:g} {above - 2:g}V{middle + 16:g}H{logits_x:g}V{below:g}"/>')
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{escape(TITLE)}</title>\n<style>\n{STYLE}\n</style>\n"
        '<defs><marker id="end" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="end" d="M0 0L8 4L0 8z"/></marker></defs>\n'
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
