"""Formats the tables, for a terminal and for docs/performance.md, and writes the JSON file."""

import json
import pathlib

from .bars import BARS, Verdict
from .tools import BUBBLEWRAP, Tool

BEGIN, END = "<!-- bench: begin, written by bench/run -->", "<!-- bench: end -->"


def format_number(value: float | None, digits: int = 3) -> str:
    """Formats a number with three significant digits and without an exponent."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else digits - 1}f}"


def format_spread(ratio: dict | None) -> str:
    return "-" if ratio is None else f"{format_number(ratio['p50'])} ({format_number(ratio['p10'])}-{format_number(ratio['p90'])})"


def main_table(parts: dict, tools: list[Tool]) -> list[list[str]]:
    head = ["", "true / bwrap", "p50 ms", "p95 ms", "CPU ms", "python / bwrap", "p50 ms", "p95 ms", "2 par. / bwrap",
            "runs/s", "8 par. / bwrap", "runs/s", "PSS kB"]
    rows = [head]
    launch, parallel, memory = (parts.get(name, {}) for name in ("launch", "parallel", "memory"))
    for tool in tools:
        cells = [tool.name]
        for program in ("true", "python"):
            it = launch.get(program, {}).get("rows", {}).get(tool.name, {})
            cells += [format_spread(it.get("ratio")), format_number(it.get("p50_ms")), format_number(it.get("p95_ms"))]
            if program == "true":
                cells.append(format_number(it.get("cpu_ms")))
        for many in ("2", "8"):
            it = parallel.get(many, {}).get(tool.name, {})
            cells += [format_spread(it.get("ratio")), format_number(it.get("per_second"))]
        rows.append([*cells, format_number(memory.get(tool.name))])
    for kind, it in parts.get("queue", {}).items():
        each = 1000 / it["ms"]
        peer = parallel.get("8", {}).get(BUBBLEWRAP, {}).get("per_second")
        ratio = format_number(each / peer) if peer else "-"
        rows.append([f"fumehood, {kind}, queue, 8 slots", *["-"] * 9, ratio, format_number(each), "-"])
    return rows


def scale_table(parts: dict) -> list[list[str]]:
    rows = [["what", "ratio", "ours", "compared with", "theirs"]]

    def add(what: str, it: dict | None, peer: str, ours: str = "ms", theirs: str = "peer_ms") -> None:
        if it:
            ratio = it["ratio"] if isinstance(it["ratio"], dict) else {"p50": it["ratio"], "p10": it["ratio"], "p90": it["ratio"]}
            rows.append([what, format_spread(ratio), f"{format_number(it[ours])} ms", peer, f"{format_number(it[theirs])} ms"])

    if age := parts.get("age"):
        ours, peer = "p50_ms", "bubblewrap_p50_ms"
        add(f"the first {age['block']} runs", age["first"], "bubblewrap, in turn", ours, peer)
        add(f"the last {age['block']} of {age['runs']:,} runs", age["last"], "bubblewrap, in turn", ours, peer)
        rows.append(["the last over the first", format_number(age["growth"]), "", "", ""])
        rows.append(["cgroups the kernel holds, dying ones included", "", f"{age['cgroups_after']} after", "before",
                     str(age["cgroups_before"])])
    if it := parts.get("collect"):
        size = f"{it['mib']} MiB"
        add(f"collect one file of {size}, which its program synced", it.get("one"), "b3sum")
        add(f"collect one file of {size}, still to be written", it.get("one_dirty"), "sync FILE, b3sum")
        add(f"collect {size} across file systems (memory to disk)", it.get("across"), "cp, b3sum")
        add("the same", it.get("across_durable"), "cp, sync FILE, b3sum")
        add(f"collect {it['many']:,} files of 10 kB", it.get("many_files"), "cp -r, sync")
        add("the same with --inline-max 0", it.get("many_not_inline"), "cp -r, sync")
        add(f"collect {it['empty']:,} empty files", it.get("empty_files"), "cp -r, sync")
    if it := parts.get("remove"):
        add(f"remove {it['files']:,} files", it, "rm -rf")
    for kind, it in parts.get("queue", {}).items():
        add(f"an analysis through the queue, 8 slots, {kind}", it, "direct runs, 8 in parallel", "ms", "direct_ms")
    for kind, it in parts.get("claims", {}).items():
        for length, at in it["lengths"].items():
            if "ms" in at:
                rows.append([f"an analysis taken from {int(length):,} queued, {kind}", "", f"{format_number(at['ms'])} ms",
                             "submitting it", f"{format_number(at['submit_ms_each'])} ms"])
            else:
                rows.append([f"from submitted to claimed by an idle worker, {kind}", "",
                             f"{format_number(at['submitted_to_claimed_ms'])} ms", "", ""])
        rows.append([f"the longest queue over the shorter, {kind}", format_number(it["growth"]), "", "", ""])
    return rows


def bars_table(parts: dict, verdicts: list[Verdict | None]) -> list[list[str]]:
    rows = [["bar", "must be", "limit", "figure", "", "measured again"]]
    for bar, verdict in zip(BARS, verdicts):
        if bar.part not in parts:
            continue
        if verdict is None:
            rows.append([bar.name, bar.formula, "", "", "not measured", ""])
        else:
            unit = "" if bar.unit == "x" else f" {bar.unit}"
            rows.append([bar.name, bar.formula, format_number(verdict.limit) + unit, format_number(verdict.figure) + unit, verdict.label,
                         ", ".join(format_number(figure) for figure in verdict.all_figures)])
    return rows


def format_aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) if n == 0 else cell.rjust(width)
                               for n, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


def format_markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def format_section(machine: dict, tables: list[tuple[str, list[list[str]]]], tools: list[Tool], left_out: list[str]) -> str:
    versions = ", ".join(dict.fromkeys(tool.version for tool in tools if tool.version))
    text = [
        BEGIN,
        f"Measured {machine['date']} on Linux {machine['kernel']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_mib']:,} MiB, governor {machine['governor']}, load before {machine['load_before']:.2f}, "
        f"{machine['file_system']}, {'as root' if machine['root'] else 'as a plain user'}; {machine['fumehood']} "
        f"at {machine['commit']}. Peers: {versions}.",
    ]
    for title, rows in tables:
        text += [f"### {title}", format_markdown(rows)]
    if left_out:
        text += ["Left out: " + "; ".join(left_out) + "."]
    return "\n\n".join([*text, END]) + "\n"


def replace_section(path: pathlib.Path, text: str) -> None:
    """Replaces the text between the markers. The text around them is written by hand."""
    page = path.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    if not rest:
        raise SystemExit(f"bench: {path} has no line {BEGIN}")
    path.write_text(before + text.rstrip("\n") + rest.partition(END)[2], encoding="utf-8")


def write_json(path: pathlib.Path, machine: dict, parts: dict, verdicts: list[Verdict | None], extra: dict) -> None:
    bars = [{"bar": bar.name, "must_be": bar.formula, "part": bar.part, "unit": bar.unit,
             "limit": v and v.limit, "figure": v and v.figure, "verdict": v.label if v else "not measured",
             "all": v.all_figures if v else []} for bar, v in zip(BARS, verdicts)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **extra, "bars": bars, "parts": parts}, indent=1) + "\n", encoding="utf-8")
