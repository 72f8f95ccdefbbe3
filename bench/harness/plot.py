"""Draws the plot: the cost of a run as a multiple of bubblewrap's, with the spread between rounds."""

from html import escape

WIDTH, LEFT, RIGHT, ROW, TOP = 780, 200, 125, 24, 44
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 } .small { font-size: 11px; fill: #57606a }
.page { fill: #ffffff } .value { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round }
.peer { fill: #9aa4b0 } .ours { fill: #2a78c8 }
.whisker { stroke: #24292f; stroke-width: 1.5 } .grid { stroke: #d0d7de } .one { stroke: #57606a; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b1 }
  .page { fill: #0d1117 } .value { stroke: #0d1117 }
  .peer { fill: #6b7683 } .ours { fill: #58a6ff }
  .whisker { stroke: #e6edf3 } .grid { stroke: #30363d } .one { stroke: #9da7b1 }
}
"""


def panel(title: str, rows: dict, top: int) -> tuple[list[str], int]:
    end = max(row["ratio"]["p90"] for row in rows.values()) * 1.02
    scale = (WIDTH - LEFT - RIGHT) / end
    bottom = top + TOP + ROW * len(rows)
    out = [f'<text class="title" x="8" y="{top + 18}">{escape(title)}</text>']
    step = next(step for step in (0.25, 0.5, 1, 2, 5, 10, 50, 1000) if end / step <= 9)
    for n in range(int(end / step) + 1):
        x = LEFT + n * step * scale
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top + TOP - 6}" y2="{bottom}"/>')
        out.append(f'<text class="small" x="{x:.1f}" y="{top + TOP - 10}" text-anchor="middle">{n * step:g}</text>')
    x = LEFT + scale
    out.append(f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{top + TOP - 6}" y2="{bottom}"/>')
    for n, (name, row) in enumerate(rows.items()):
        y, ratio = top + TOP + n * ROW, row["ratio"]
        kind = "ours" if name.startswith("fumehood") else "peer"
        low, high = LEFT + ratio["p10"] * scale, LEFT + ratio["p90"] * scale
        mid = y + ROW / 2
        out += [
            f'<text x="{LEFT - 8}" y="{mid + 4:.1f}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y + 4}" width="{ratio["p50"] * scale:.1f}" height="{ROW - 8}"/>',
            f'<path class="whisker" fill="none" d="M{low:.1f} {mid - 4}v8M{low:.1f} {mid}H{high:.1f}M{high:.1f} {mid - 4}v8"/>',
            f'<text class="small value" x="{max(high, LEFT + ratio["p50"] * scale) + 6:.1f}" y="{mid + 4:.1f}">'
            f'{ratio["p50"]:.2f} x, {row["p50_ms"]:.1f} ms</text>',
        ]
    return out, bottom + 16


def draw(launch: dict, caption: str) -> str:
    body, at = [], 0
    for key, title in (("true", "/bin/true"), ("python", "python3 -c pass")):
        if key in launch:
            lines, at = panel(f"One run of {title}, as a multiple of bubblewrap's", launch[key]["rows"], at)
            body += lines
    body.append(f'<text class="small" x="8" y="{at + 8}">{escape(caption)}</text>')
    label = "The cost of one run under each tool, as a multiple of bubblewrap's"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at + 20}" width="{WIDTH}" height="{at + 20}" '
            f'role="img" aria-label="{label}">\n<style>{STYLE}</style>\n<rect class="page" width="100%" height="100%"/>\n' + "\n".join(body) + "\n</svg>\n")
