"""The command line of `bench/run`: measures the parts, judges the bars and writes the report."""

import argparse
import os
import pathlib
import signal
import sys
import time

from . import age, bars, files, host, launch, plot, queue_cost, report, result_checks, runs, tools
from .host import log

PARTS = {
    "launch": runs.measure_launch,
    "parallel": runs.measure_parallel,
    "memory": runs.measure_memory,
    "queue": queue_cost.measure_queue,
    "age": age.measure_age,
    "collect": files.measure_collect,
    "remove": files.measure_remove,
    "claims": queue_cost.measure_claims,
}
HELP = """\
Measures Fumehood and its peers, interleaved in one run, and judges the bars of docs/performance.md.

parts (--only):
  launch    /bin/true and python3 -c pass: p50, p95, CPU, as multiples of bubblewrap
  parallel  runs per second, 2 and 8 at once
  memory    memory of the supervisor while the program sleeps (PSS)
  queue     submitting and processing a batch, one worker with 8 slots, against direct runs
  age       the 10,000th run against the first, and the number of cgroups
  collect   collecting one file of 1 GiB, 10,000 files of 10 kB, 100,000 empty files
  remove    removing 1,000,000 files
  claims    claiming analyses from queues of length 1, 1,000 and 100,000

As root on Debian, bench/run installs missing peers, and they stay installed. As a plain user, it measures the installed
peers and prints what it left out. All other files are in one temporary directory under /var/tmp and one under /dev/shm.
bench/run removes both at the end, also after Ctrl-C. It needs about 8 GiB of free disk and 4 GiB of free memory.

A full run takes less than 15 minutes after the build. --quick takes less than 3 minutes, with fewer rounds and smaller
sizes, which the table shows. A full run of all parts also rewrites the generated part of docs/performance.md and the plot.

exit codes:
  0    every bar is met, or missed by less than 10 %
  1    a bar was missed by more each time it was measured: three times, or fewer if no time was left
  2    something could not be measured, or a run was not isolated, limited or recorded as promised
  130  interrupted
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench/run", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--only", metavar="PART", action="append", choices=PARTS, help="measure only this part; repeatable")
    parser.add_argument("--binary", metavar="PATH", help="measure this fumehood binary instead of building one")
    parser.add_argument("--output", metavar="DIR",
                        help="write JSON, tables and plot here [default: bench/results and, for a full run, docs]")
    parser.add_argument("--no-install", action="store_true", help="install no packages")
    return parser.parse_args()


def measure(bench: host.Bench, tool_rows: list[tools.Tool], wanted: list[str], deadline: float) -> dict[str, list[dict]]:
    """Measures every part once, then repeats, at most twice, the parts that miss a bar by more than 10 %."""
    measured: dict[str, list[dict]] = {}
    for repetition in range(3):
        for part in list(wanted):
            if repetition and time.monotonic() > deadline:
                log(f"no time is left to measure {part} again")
                continue
            begin = time.monotonic()
            try:
                measured.setdefault(part, []).append(PARTS[part](bench, tool_rows, repetition > 0))
            except launch.MeasurementError as error:
                # Measure the other parts all the same; the exit code reports the failure.
                bench.failed.append(part)
                bench.leave_out(f"the part {part}", str(error))
            log(f"{part}{' again' if repetition else ''}: {time.monotonic() - begin:.0f} s")
        verdicts = (bars.judge(bar, measured.get(bar.part, [])) for bar in bars.BARS)
        wanted = list(dict.fromkeys(v.bar.part for v in verdicts if v and v.label == "MISSED"))
    for tool in tool_rows:
        if tool.url:
            result_checks.check_record(tool.url, tool.run_count, tool.name, tool.killed_count)
    return measured


def publish(args, bench, machine, tool_rows, measured) -> list:
    verdicts = [bars.judge(bar, measured.get(bar.part, [])) for bar in bars.BARS]
    parts = {name: results[0] for name, results in measured.items() if results}
    tables = [("One run", report.main_table(parts, tool_rows)), ("At scale", report.scale_table(parts)),
              ("Bars", report.bars_table(parts, verdicts))]
    # With --only, omit the tables that have no figures.
    tables = [(title, table) for title, table in tables if any(set(row[1:]) - {"-"} for row in table[1:])]
    for title, table in tables:
        print(f"\n{title}\n\n{report.format_aligned(table)}")
    name = f"{machine['date'][:10]}-{machine['kernel']}{'-quick' if args.quick else ''}"
    out = pathlib.Path(args.output) if args.output else host.ROOT / "bench" / "results"
    extra = {"quick": args.quick, "left_out": bench.left_out, "versions": {t.name: t.version for t in tool_rows if t.version},
             "again": {part: results[1:] for part, results in measured.items() if len(results) > 1}}
    report.write_json(out / f"{name}.json", machine, parts, verdicts, extra)
    log(f"wrote {out / name}.json")
    section = report.format_section(machine, tables, tool_rows, bench.left_out)
    where = f"{machine['date'][:10]}, Linux {machine['kernel']}, {machine['cores']} cores"
    caption = f"Medians over interleaved rounds; whiskers p10 to p90. {where}."
    if args.output:
        (out / "performance.md").write_text(section, encoding="utf-8")
    elif not args.quick and not args.only and not bench.failed:
        report.replace_section(host.ROOT / "docs" / "performance.md", section)
        out = host.ROOT / "docs"
    else:
        return verdicts
    if "launch" in parts:
        (out / "performance.svg").write_text(plot.draw(parts["launch"], caption), encoding="utf-8")
    return verdicts


def main() -> int:
    args = arguments()
    args.output = args.output and os.path.abspath(args.output)
    # SIGTERM and SIGHUP clean up as Ctrl-C does.
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    if not args.no_install:
        host.install_packages()
    binary = os.path.abspath(args.binary) if args.binary else host.build()
    deadline = time.monotonic() + (150 if args.quick else 780)
    bench = host.Bench(binary, args.quick)
    try:
        machine = host.machine_facts(binary)
        if machine["load_before"] > 0.5 * machine["cores"]:
            log(f"this machine is busy (load {machine['load_before']:.1f}): the figures are not reliable")
        bench.start_postgres()
        tool_rows = tools.installed_peers(bench)
        if not any(tool.name == tools.BUBBLEWRAP for tool in tool_rows):
            raise launch.MeasurementError("bubblewrap does not run here, and every figure is a multiple of bubblewrap's")
        tool_rows += tools.fumehood_tools(bench)
        wanted = args.only or list(PARTS)
        if not any(tool.is_fumehood for tool in tool_rows):
            bench.leave_out("every part that needs Fumehood", "none of its rows can be measured")
            wanted = [part for part in wanted if part in ("launch", "parallel", "memory")]
        measured = measure(bench, tool_rows, wanted, deadline)
        verdicts = publish(args, bench, machine, tool_rows, measured)
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    except (launch.MeasurementError, result_checks.GuaranteeError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    finally:
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sign, signal.SIG_IGN)
        bench.close()
    missed = [v.bar.name for v in verdicts if v and v.label == "MISSED"]
    if missed:
        print(f"bench: missed: {'; '.join(missed)}", file=sys.stderr)
    return 2 if bench.failed else 1 if missed else 0
